"""The kinds of `build_cache` beside the growing one: bytes from real tensors, `generate` in all its modes, and what is
refused.
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import transformers.cache_utils
from form_models import SIZES, ids, left_padded, make
from transformers import DynamicCache, QuantizedCache, StaticCache

from resformer import ResFormerConfig, ResFormerForCausalLM, build_cache
from resformer.errors import UserError
from resformer.models.accounting import account, kv_bytes
from resformer.models.cache import cache_bytes, cache_parts, peak_bytes
from resformer.models.compat import CACHE

DEEP = {"num_hidden_layers": 24, "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 64}
FP8 = pytest.mark.skipif(
    not hasattr(transformers.cache_utils, "Fp8QuantizedLayer"), reason="this transformers has no fp8 cache"
)
# fp8 has a mantissa of 3 bits: up to 6 % of rounding on each key and value, of which attention averages a part. The
# most that random models with sharp attention showed was 0.07 of the largest logit (docs/serving.md).
FP8_TOLERANCE = 0.1


def read(model, x: torch.Tensor, cache, pieces=(8, 1, 1)) -> torch.Tensor:
    """Logits of `x` read in pieces, the last of them until the end."""
    with torch.no_grad():
        sizes = [*pieces, *[1] * (x.shape[1] - sum(pieces))]
        return torch.cat([model(part, **{CACHE: cache}).logits for part in x.split(sizes, dim=1)], dim=1)


def uncached(model, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(x, use_cache=False).logits


RATIOS = [  # (variant, options, KV heads of 4, planes of 48)
    ("svformer", {}, 4, 25),
    ("svformer", {}, 1, 25),
    ("svformer", {"anchors": [1, 13]}, 4, 26),
    ("cla", {}, 4, 24),
    ("skipv1", {"share": 0.5}, 4, 36.5),
    ("learnable", {}, 2, 48),
]


@pytest.mark.parametrize(("variant", "options", "kv_heads", "planes"), RATIOS)
def test_bytes_of_24_layers(variant, options, kv_heads, planes):
    """From real tensors, equal to the account that `resformer plan` prints."""
    config = ResFormerConfig(
        variant=variant, variant_options=options, **{**SIZES, **DEEP, "num_key_value_heads": kv_heads}
    )
    model, tokens = ResFormerForCausalLM(config).eval(), 40
    full = 48 * kv_heads * 8 * 4 * tokens
    for cache in (build_cache(model), build_cache(model, "static", max_length=tokens)):
        read(model, ids(1, tokens), cache, (tokens,))
        assert cache_bytes(cache) * 48 == full * planes
        assert cache_bytes(cache) == kv_bytes(config, tokens) == tokens * account(config).kv_bytes_per_token
    assert account(config).kv_ratio == planes / 48


def test_tokens_store_half_of_the_transformers_cache():
    """24 planes of keys and 4 bytes a token; the table and the gathered plane are counted beside."""
    model = ResFormerForCausalLM(ResFormerConfig(variant="svformer", **{**SIZES, **DEEP, "num_key_value_heads": 2}))
    cache = build_cache(model.eval(), "tokens")
    x = ids(2, 40)
    assert (read(model, x, cache, (30,)) - uncached(model, x)).abs().max() < 1e-5
    plane = 2 * 40 * 2 * 8 * 4
    parts = cache_parts(cache)
    assert parts.stored == 24 * plane + 2 * 40 * 4
    costs = account(model.config, sequence_length=40)
    assert (parts.stored, parts.table) == (2 * costs.token_kv_bytes, costs.token_table_bytes)
    assert parts.gathered == plane and parts.table == SIZES["vocab_size"] * 2 * 8 * 4
    assert cache_bytes(cache) == parts.stored


MODES = {
    "greedy": {},
    "chunked": {"prefill_chunk_size": 4},
    "beam": {"num_beams": 3, "num_return_sequences": 2},
    "sampling": {"do_sample": True, "num_return_sequences": 3},
    "beam sampling": {"do_sample": True, "num_beams": 2},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "assisted": {"assistant_model": ("transformer", 1)},
}
PLANS = [
    ("svformer", {}),
    ("svformer", {"anchors": [1, 3]}),
    ("cla", {"share": "v"}),
    ("skipv1", {}),
    ("learnable", {}),
]


def written(model, mode: str, **cache) -> torch.Tensor:
    """The text that `generate` writes; modes that crop take one prompt."""
    options, single = dict(MODES[mode]), mode in ("prompt lookup", "assisted")
    x, mask = (ids(1, 12), torch.ones(1, 12, dtype=torch.long)) if single else left_padded()
    if "assistant_model" in options:
        options["assistant_model"] = make(options["assistant_model"][0], seed=4, num_hidden_layers=1)
    torch.manual_seed(11)
    common = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    return model.generate(x, attention_mask=mask, **{**common, **options}, **cache)


# One mode of each kind for every plan: rows that are only read, reordered, cropped; all of them for two.
FAST = ("greedy", "beam sampling", "assisted")
MODES_OF_PLANS = [
    pytest.param(*plan, mode, marks=[] if mode in FAST or plan in PLANS[::3] else pytest.mark.slow)
    for plan in PLANS
    for mode in MODES
]


@pytest.mark.parametrize(("variant", "options", "mode"), MODES_OF_PLANS)
def test_all_modes_of_generate(variant, options, mode):
    """Against the same mode without a cache; where that is impossible, against greedy text."""
    model = make(variant, variant_options=options)
    needs_cache = mode in ("prompt lookup", "assisted", "chunked")
    want = written(model, "greedy" if mode == "chunked" else mode, use_cache=False) if not needs_cache else None
    if want is None:
        single = mode != "chunked"
        x, mask = (ids(1, 12), torch.ones(1, 12, dtype=torch.long)) if single else left_padded()
        want = model.generate(
            x, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0, use_cache=False
        )
    assert torch.equal(written(model, mode), want)
    if mode != "chunked":
        assert torch.equal(written(model, mode, **{CACHE: build_cache(model, "tokens")}), want)
    if mode not in ("prompt lookup", "assisted"):
        assert torch.equal(written(model, mode, cache_implementation="static"), want)


def test_a_prefix_is_read_once_and_forked():
    """What a server does with a shared system prompt; copies of a 'tokens' cache share its table."""
    model, prefix = make("svformer"), ids(1, 8)
    for kind in ("dynamic", "tokens"):
        cache = build_cache(model, kind)
        read(model, prefix, cache, (8,))
        for seed in (1, 2):
            x = torch.cat([prefix, ids(1, 4, seed=seed)], dim=1)
            fork = copy.deepcopy(cache)
            got = model.generate(x, **{CACHE: fork}, max_new_tokens=5, do_sample=False, pad_token_id=0)
            want = model.generate(x, use_cache=False, max_new_tokens=5, do_sample=False, pad_token_id=0)
            assert torch.equal(got, want)
            assert kind == "dynamic" or fork.table is cache.table
        assert cache.get_seq_length() == 8


def test_auto_takes_the_lower_peak():
    """One cache: "dynamic", since what is not stored is gathered. Many that wait: "tokens"."""
    model = make("svformer")
    assert type(build_cache(model, "auto", max_length=1000)) is DynamicCache
    assert type(build_cache(model, "auto", max_length=1000, held=8)).__name__ == "TokenCache"
    assert type(build_cache(model, "auto", max_length=1, held=2)) is DynamicCache  # the table outweighs it
    assert type(build_cache(make("svformer", position_embedding="learned"), "auto", held=8)) is DynamicCache
    plane, table, layers = 1000 * 2 * 8 * 4, SIZES["vocab_size"] * 2 * 8 * 4, SIZES["num_hidden_layers"]
    assert peak_bytes(model, "dynamic", 1000, held=8) == 8 * (layers + 1) * plane
    assert peak_bytes(model, "tokens", 1000, held=8) == 8 * (layers * plane + 1000 * 4) + plane + table


@FP8
@pytest.mark.parametrize(("variant", "options"), [*PLANS, ("transformer", {}), ("cla", {}), ("cla", {"share": "k"})])
def test_quantized(variant, options):
    """Within its tolerance, and a quarter of the bytes of fp32; also a user's own cache and beams."""
    model, x = make(variant, variant_options=options), ids(2, 24)
    want = uncached(model, x)
    for cache in (build_cache(model, "quantized"), QuantizedCache(backend="fp8", config=model.config)):
        got = read(model, x, cache)
        assert 0 < (got - want).abs().max() < FP8_TOLERANCE * want.abs().max()
        tensors = sum(cache_slots(cache))
        assert cache_bytes(cache) == 2 * 24 * account(model.config, dtype_bytes=1).kv_bytes_per_token + 4 * tensors
    options = {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}
    text = model.generate(x, max_new_tokens=6, num_beams=2, do_sample=False, pad_token_id=0, **options)
    assert text.shape == (2, 30)


def cache_slots(cache) -> list[int]:
    """Per slot the number of its tensors that hold something, each with a scale of 4 bytes."""
    pairs = [(layer._quantized_keys, layer._quantized_values) for layer in cache.layers if layer.is_initialized]
    return [sum(pair is not None and pair[0].numel() > 0 for pair in two) for two in pairs]


@FP8
def test_a_quantized_cache_refuses_what_it_cannot_do():
    model = make("svformer")
    cache = build_cache(model, "quantized")
    read(model, ids(1, 12), cache)
    for action in (lambda: cache.crop(-1), lambda: cache.batch_repeat_interleave(2)):
        with pytest.raises(UserError, match="use the kind 'dynamic'"):
            action()
    cache.crop(0)
    cache.reset()
    assert cache.get_seq_length() == 0
    window = {"sliding_window": 4, "sliding_layers": "all"}
    with pytest.raises(UserError, match="full attention"):
        build_cache(make("svformer", **window), "quantized")


def test_a_transformers_without_an_fp8_cache_is_named(monkeypatch):
    monkeypatch.delattr(transformers.cache_utils, "Fp8QuantizedLayer", raising=False)
    with pytest.raises(UserError, match="has no fp8 cache; use a newer one"):
        build_cache(make("svformer"), "quantized")


REFUSED = [
    (lambda: build_cache(make("svformer"), "statik"), "did you mean 'static'"),
    (lambda: build_cache(make("svformer"), "static", max_length=0), "max_length is 0"),
    (lambda: build_cache(make("svformer"), "static", max_length="9"), "max_length is '9'"),
    (lambda: build_cache(make("svformer"), "auto", held=0), "held is 0"),
    (lambda: build_cache(make("svformer").config, "auto"), "kind 'auto' depends"),
    (lambda: build_cache(make("svformer"), "quantized", backend="fp9"), "did you mean 'fp8'"),
    (lambda: build_cache(make("svformer"), "quantized", backend="hqq", nbits=99), "hqq"),
    (lambda: build_cache(make("svformer"), "auto", hold=2), "did you mean 'held'"),
    (lambda: build_cache(make("svformer"), "dynamic", backend="fp8"), "takes no option 'backend'"),
    (lambda: build_cache(make("svformer"), "offloaded"), "'cpu'"),
    (lambda: build_cache(make("svformer").config, "tokens"), "kind 'tokens' depends"),
    (lambda: build_cache(make("svformer", position_embedding="learned"), "tokens"), "position_embedding"),
    (lambda: build_cache("runs/mine"), "expected a ResFormer model"),
]


@pytest.mark.parametrize(("action", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_refused_with_one_line(action, message):
    with pytest.raises(UserError, match=message) as caught:
        action()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["offloaded", "offloaded_static"])
def test_generate_refuses_offloading_on_the_cpu_before_the_first_token(kind):
    model, calls = make("svformer"), []
    model.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    with pytest.raises(UserError, match="offloaded cache"):
        model.generate(ids(1, 4), cache_implementation=kind, max_new_tokens=3)
    with pytest.raises(UserError, match="offloaded cache"):
        model(ids(1, 4), **{CACHE: DynamicCache(config=model.config, offloading=True)})
    assert not calls


def test_a_tokens_cache_needs_ids():
    model, x = make("svformer"), ids(1, 6)
    with pytest.raises(UserError, match="inputs_embeds"):
        model(inputs_embeds=model.model.embed_tokens(x), **{CACHE: build_cache(model, "tokens")})
    with pytest.raises(UserError, match="cannot be pickled"):
        pickle.dumps(build_cache(model, "tokens"))


def in_place(model) -> None:
    model.model.layers[0].self_attn.v_proj.weight.mul_(2)


def through_data(model) -> None:
    model.model.layers[0].self_attn.v_proj.weight.data.mul_(2)


def loaded(model) -> None:
    model.load_state_dict(make("svformer", seed=3).state_dict(), assign=True)


def new_embedding(model) -> None:
    model.set_input_embeddings(torch.nn.Embedding(SIZES["vocab_size"], SIZES["hidden_size"]))


def wrapped(model) -> None:
    class Wrapper(torch.nn.Module):
        def __init__(self, inner) -> None:
            super().__init__()
            self.inner, self.more = inner, torch.nn.Linear(32, 16, bias=False)

        def forward(self, x):
            return self.inner(x) + self.more(x)

    model.model.layers[0].self_attn.v_proj = Wrapper(model.model.layers[0].self_attn.v_proj)


def other_type(model) -> None:
    model.to(torch.bfloat16)


CHANGES = [in_place, through_data, loaded, new_embedding, wrapped, other_type]


@torch.no_grad()
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_table_of_other_weights_is_refused(change):
    model, x = make("svformer"), ids(1, 6)
    cache = build_cache(model, "tokens")
    change(model)
    with pytest.raises(UserError, match="other weights"):
        model(x, **{CACHE: cache})
    tolerance = 1e-5 if model.dtype == torch.float32 else 0.1
    difference = (read(model, x, build_cache(model, "tokens"), (3,)) - uncached(model, x)).abs().max()
    assert difference < tolerance * uncached(model, x).abs().max()


def test_a_table_of_another_model_is_refused():
    model, x = make("svformer"), ids(1, 6)
    cache = build_cache(model, "tokens")
    for other in (copy.deepcopy(model), make("learnable")):
        with pytest.raises(UserError, match="other weights"):
            other(x, **{CACHE: cache})
    with torch.inference_mode():
        inferred = make("svformer")
        assert (read(inferred, x, build_cache(inferred, "tokens"), (3,)) - uncached(inferred, x)).abs().max() < 1e-5


def test_a_cache_that_is_too_small_is_refused_before_the_first_token():
    model, calls = make("svformer"), []
    model.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    with pytest.raises(UserError, match="max_length=16"):
        model.generate(ids(1, 9), **{CACHE: build_cache(model, "static", max_length=10)}, max_new_tokens=8)
    with pytest.raises(UserError, match="cannot hold 12"):
        model(ids(1, 12), **{CACHE: StaticCache(config=model.config, max_cache_len=10)})
    assert not calls
    full = build_cache(model, "static", max_length=16)
    assert model.generate(ids(1, 9), **{CACHE: full}, max_new_tokens=8, eos_token_id=None).shape == (1, 17)
    for kind in ("static", "dynamic", "tokens"):
        cache = build_cache(model, kind)
        read(model, ids(2, 4), cache, (4,))
        with pytest.raises(UserError, match=r"made for 2 sequence\(s\), but the input has 1"):
            model(ids(1, 2), **{CACHE: cache})


@torch.no_grad()
def test_a_static_window_cannot_be_cropped_once_it_has_moved():
    for variant in ("svformer", "transformer"):
        model = make(variant, sliding_window=4)
        for cache in (build_cache(model, "static", max_length=30), StaticCache(config=model.config, max_cache_len=30)):
            model(ids(1, 9), **{CACHE: cache})
            with pytest.raises(UserError, match="taken back"):
                cache.crop(-2)


@pytest.mark.parametrize("variant", ["svformer", "learnable"])
def test_bf16_cached_against_uncached(variant):
    """In bf16 sums of other lengths round differently: 0.05 of the largest logit, at these sizes and sharp weights."""
    model, x = make(variant).to(torch.bfloat16), ids(2, 24)
    want = uncached(model, x).float()
    for kind in ("dynamic", "static", "tokens"):
        difference = (read(model, x, build_cache(model, kind)).float() - want).abs().max()
        assert difference < 0.05 * want.abs().max(), kind
