"""Sliding windows: against plain masked attention, across cache kinds, and what each slot keeps."""

from __future__ import annotations

import warnings

import pytest
import torch
from form_models import SIZES, ids, left_padded, make
from transformers import DynamicCache, StaticCache

from resformer import ResFormerConfig, build_cache
from resformer.core.plan import kv_ratio
from resformer.errors import UserError
from resformer.models.accounting import account, kv_bytes, plan_rows
from resformer.models.cache import cache_bytes
from resformer.models.compat import CACHE
from resformer.models.masks import views

WINDOW = 5
PLACES = {
    "all": "all",
    "first": [1],
    "all but the first": [2, 3, 4, 5],
    "odd": [1, 3, 5],
    "even": [2, 4],
}
FAMILIES = ["transformer", "learnable", "svformer", "cla", "skipv1"]
OPTIONS = {"svformer, keys in groups": ("svformer", {"key_group": 2}), "cla, keys": ("cla", {"share": "k"})}
OPTIONS["cla, values"] = ("cla", {"share": "v"})


def sliding(name: str, layers, **changes):
    variant, options = OPTIONS.get(name, (name, {}))
    changes = {"sliding_window": WINDOW, **changes}
    return make(variant, variant_options=options, sliding_layers=layers, **changes)


def caches(model) -> dict:
    """The cache that belongs to the model, and those that users make themselves."""
    return {
        "ours": build_cache(model),
        "ours, static": build_cache(model, kind="static", max_length=24),
        "ours, static, allocated": allocated(model),
        "all full": DynamicCache(),
        "stock": DynamicCache(config=model.config),
        "stock static": StaticCache(config=model.config, max_cache_len=24),
    }


def allocated(model):
    cache, shape = build_cache(model, kind="static", max_length=24), model.config.shape()
    cache.early_initialization(2, shape.kv_heads, shape.head_dim, dtype=model.dtype, device=model.device)
    return cache


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", [*FAMILIES, *OPTIONS])
def test_cached_equals_uncached_beyond_the_window(name, place):
    model, x = sliding(name, PLACES[place]), ids(2, 20)
    with torch.no_grad():
        want = model(x, use_cache=False).logits
        for chunks in ((20,), (3, 1, 1, 9, 6)):
            for kind, cache in caches(model).items():
                got = torch.cat([model(part, **{CACHE: cache}).logits for part in x.split(chunks, dim=1)], dim=1)
                assert (got - want).abs().max() < 1e-4, (kind, chunks)


@pytest.mark.parametrize("place", ["all", "first", "odd"])
@pytest.mark.parametrize("name", ["learnable", "svformer", "cla", "skipv1"])
def test_generation_beyond_the_window(name, place):
    model = sliding(name, PLACES[place])
    x, mask = left_padded()
    common = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    for settings in ({}, {"num_beams": 3}):
        want = model.generate(x, **common, **settings, use_cache=False)
        assert torch.equal(model.generate(x, **common, **settings), want)
        assert torch.equal(model.generate(x, **common, **settings, **{CACHE: DynamicCache()}), want)
        if not settings:
            assert torch.equal(model.generate(x, **common, cache_implementation="static"), want)
            assert torch.equal(model.generate(x, **common, prefill_chunk_size=4), want)


@pytest.mark.parametrize("variant", ["cross_attention", "attention_residual", "svformer"])
def test_all_layers_slide_with_what_ties_them(variant):
    model, x = sliding(variant, "all"), ids(2, 20)
    with torch.no_grad():
        want = model(x, use_cache=False).logits
        for kind, cache in caches(model).items():
            got = torch.cat([model(part, **{CACHE: cache}).logits for part in x.split((11, 1, 8), dim=1)], dim=1)
            assert (got - want).abs().max() < 1e-4, kind


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_window_is_a_band_of_the_attention_matrix(attention):
    """Layer 2 alone slides: its output against softmax with a band, written out."""
    model = make("transformer", sliding_window=WINDOW, sliding_layers=[2], num_key_value_heads=4)
    model.set_attn_implementation(attention)
    layer, x, seen = model.model.layers[1].self_attn, ids(2, 16), {}
    layer.register_forward_hook(lambda module, args, kwargs, out: seen.update(h=args[0], out=out[0]), with_kwargs=True)
    plain = {}
    model.model.layers[0].self_attn.register_forward_hook(lambda module, args, out: plain.update(h=args[0], out=out[0]))
    with torch.no_grad():
        model(x, use_cache=False)
        cos, sin = (x[:, 0] for x in model.model.rotary_emb(seen["h"], torch.arange(16)[None]))
        for attn, state, width in ((layer, seen, WINDOW), (model.model.layers[0].self_attn, plain, 16)):
            q, k, v = (p(state["h"]).view(2, 16, 4, 8) for p in (attn.q_proj, attn.k_proj, attn.v_proj))
            angle = torch.cat((sin[..., :4].neg(), sin[..., 4:]), dim=-1)[:, :, None]

            def turn(x, angle=angle):
                a, b = x[..., :4], x[..., 4:]
                c = cos[:, :, None]
                return torch.cat((a * c[..., :4] - b * angle[..., :4], b * c[..., 4:] + a * angle[..., 4:]), dim=-1)

            out = torch.zeros(2, 16, 4, 8)
            q, k = turn(q), turn(k)
            for t in range(16):
                first = max(0, t - width + 1)
                scores = torch.einsum("bhd,bshd->bhs", q[:, t], k[:, first : t + 1]) / 8**0.5
                out[:, t] = torch.einsum("bhs,bshd->bhd", scores.softmax(-1), v[:, first : t + 1])
            assert torch.allclose(attn.o_proj(out.flatten(2)), state["out"], atol=1e-5)


@pytest.mark.parametrize(
    ("variant", "layers", "slots"),
    [
        ("transformer", "all", "sssss"),
        ("transformer", [2, 4], "fsfsf"),
        ("transformer", "none", "fffff"),
        ("learnable", [1], "sffff"),  # what later layers read of V_1 is the new tokens' alone
        ("svformer", "all", "sssss"),
        ("svformer", [1], "fffff"),  # V_1 lives as long as its longest reader's window
        ("svformer", [1, 3, 5], "ffsfs"),
        ("svformer", [2, 3], "fssff"),
        ("skipv1", [1, 2], "fsfff"),
        ("cla", "all", "sfsfs"),  # layers without a slot of their own count as full
        ("cla", [1, 3, 4], "ffsff"),
    ],
)
def test_slots_live_as_long_as_their_longest_reader(variant, layers, slots):
    config = ResFormerConfig(variant=variant, sliding_window=WINDOW, sliding_layers=layers, **SIZES)
    assert "".join(kind[0] for kind in config.layer_types) == slots
    again = ResFormerConfig.from_dict(config.to_dict())
    assert again.layer_types == config.layer_types and again.sliding_layers == config.sliding_layers


def test_masks_are_as_many_as_differ():
    def count(variant, layers, window=WINDOW):
        config = ResFormerConfig(variant=variant, sliding_window=window, sliding_layers=layers, **SIZES)
        return len({view.mask for view in views(config.plan())}), sum(view.aligns for view in views(config.plan()))

    assert count("learnable", "all", None) == (1, 0)
    assert count("learnable", "all") == (1, 0)
    assert count("learnable", [2]) == (2, 0)
    assert count("svformer", [1, 3]) == (3, 1)  # window on a full slot, none on a full slot, window on a sliding slot


def test_windows_have_no_mark_on_configs_without():
    config = ResFormerConfig(variant="svformer", **SIZES)
    assert not hasattr(config, "layer_types")
    assert all(row.window is None and row.slot_window is None for row in config.plan())
    assert "window" not in plan_rows(config)[0]
    rows = plan_rows(ResFormerConfig(variant="svformer", sliding_window=8, sliding_layers=[1, 3], **SIZES))
    assert [(row["window"], row["slot_window"]) for row in rows[:3]] == [(8, None), (None, None), (8, 8)]


@pytest.mark.parametrize("layers", ["all", [1], [2, 4]])
@pytest.mark.parametrize("variant", ["transformer", "svformer", "skipv1", "cla"])
def test_kv_bytes_are_those_of_live_caches(variant, layers):
    model = sliding(variant, layers)
    for tokens in (2, WINDOW, WINDOW + 1, 19):
        cache = build_cache(model)
        with torch.no_grad():
            for part in ids(1, tokens).split((tokens - 1, 1), dim=1):
                model(part, **{CACHE: cache})
        assert cache_bytes(cache) == kv_bytes(model.config, tokens), tokens
    static = build_cache(model, kind="static", max_length=19)
    with torch.no_grad():
        model(ids(1, 7), **{CACHE: static})
    assert cache_bytes(static) == kv_bytes(model.config, 19)
    growth = kv_bytes(model.config, 1000) - kv_bytes(model.config, 999)
    assert growth == account(model.config).kv_bytes_per_token


def test_ratio_and_flops_with_windows():
    plain, full = (ResFormerConfig(variant=v, **SIZES) for v in ("svformer", "transformer"))
    same = ResFormerConfig(variant="svformer", sliding_window=WINDOW, **SIZES)
    assert account(plain).kv_ratio == account(same).kv_ratio == kv_ratio(plain.plan()) == 0.6
    assert account(full).kv_ratio == 1.0
    # V_1 stays whole for the layers without a window, K_1 with it: more than its part of the Transformer's cache.
    part = ResFormerConfig(variant="svformer", sliding_window=WINDOW, sliding_layers=[1], **SIZES)
    assert account(part, sequence_length=20).kv_ratio == (2 * 20 + 4 * 20) / (2 * WINDOW + 8 * 20)
    cut = (
        account(full, sequence_length=40).flops_per_token - account(same_form(full), sequence_length=40).flops_per_token
    )
    assert cut == 5 * 2 * 2 * 4 * 8 * (40 - WINDOW)


def same_form(config: ResFormerConfig) -> ResFormerConfig:
    return ResFormerConfig(variant=config.variant, sliding_window=WINDOW, **SIZES)


def test_a_cache_without_config_is_named_as_larger():
    model = sliding("learnable", [2])
    with pytest.warns(UserWarning, match="build_cache"):
        model(ids(), **{CACHE: DynamicCache()})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(ids(), **{CACHE: build_cache(model)})
        make("svformer")(ids(), **{CACHE: DynamicCache()})


def test_ties_between_different_windows_are_refused():
    for variant in ("cross_attention", "attention_residual"):
        with pytest.raises(UserError, match="both must see the same window; let all layers slide, or none"):
            sliding(variant, [2])


@pytest.mark.parametrize("variant", ["svformer", "skipv1"])
def test_crop_and_reorder_before_the_window_is_full(variant):
    model = sliding(variant, "all", sliding_window=16)
    cache = build_cache(model)
    with torch.no_grad():
        model(ids(), **{CACHE: cache})
        cache.crop(-4)
        cache.reorder_cache(torch.tensor([1, 0]))
        got = model(ids()[[1, 0]][:, 8:], **{CACHE: cache}).logits
        assert (got - model(ids()[[1, 0]]).logits[:, 8:]).abs().max() < 1e-5


def test_packed_documents_keep_apart_within_windows():
    model = sliding("learnable", [1, 2, 3]).train()
    a, b = ids(1, 9), ids(1, 11, seed=6)
    positions = torch.cat([torch.arange(9), torch.arange(11)])[None]
    packed = model(torch.cat([a, b], dim=1), position_ids=positions).logits
    assert (packed - torch.cat([model(a).logits, model(b).logits], dim=1)).abs().max() < 1e-5
