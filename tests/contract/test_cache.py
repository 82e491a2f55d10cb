"""The cache is storage only: on or off, whole or in pieces, padded or not, the numbers stay."""

from __future__ import annotations

import functools

import pytest
import torch
from cases import CACHED, CROPS_EMPTY_SLOTS, Case, ids, make
from transformers import DynamicCache, StaticCache

from resformer import ResFormerForCausalLM, build_cache
from resformer.models.accounting import account
from resformer.models.cache import cache_bytes
from resformer.models.compat import CACHE


def left_padded() -> tuple[torch.Tensor, torch.Tensor]:
    """Three prompts of 3, 7 and 12 tokens, padded on the left with token 0."""
    x, mask = ids(3, 12), torch.ones(3, 12, dtype=torch.long)
    for row, length in enumerate((3, 7, 12)):
        x[row, : 12 - length], mask[row, : 12 - length] = 0, 0
    return x, mask


@functools.cache
def model_of(case: str) -> ResFormerForCausalLM:
    """Tests here only read a case's model, so they share one."""
    return next(c for c in CACHED if str(c) == case).make()


def generate(model: ResFormerForCausalLM, x: torch.Tensor, tokens: int, **settings) -> torch.Tensor:
    return model.generate(x, max_new_tokens=tokens, do_sample=False, pad_token_id=0, **settings)


def test_generation_does_not_depend_on_cache_or_padding(cached_case):
    """Greedy: with and without a cache, with a static one, and each prompt of a left-padded batch alone."""
    model, (x, mask) = model_of(str(cached_case)), left_padded()
    batch = generate(model, x, 8, attention_mask=mask)
    assert torch.equal(batch, generate(model, x, 8, attention_mask=mask, use_cache=False))
    assert torch.equal(batch[:, :16], generate(model, x, 4, attention_mask=mask, cache_implementation="static"))
    for row, length in enumerate((3, 7)):
        assert torch.equal(batch[row, 12 - length :], generate(model, x[row : row + 1, 12 - length :], 8)[0])


def test_beam_search_reorders_the_cache(cached_case):
    model, (x, mask) = model_of(str(cached_case)), left_padded()
    settings = {"attention_mask": mask, "num_beams": 3}
    assert torch.equal(generate(model, x, 5, **settings), generate(model, x, 5, **settings, use_cache=False))


CACHES = {
    "dynamic": lambda model: build_cache(model),
    "static": lambda model: build_cache(model.config, kind="static", max_length=16),
    "plain dynamic": lambda model: DynamicCache(),
    "plain static": lambda model: StaticCache(config=model.config, max_cache_len=16),
}


def logits(model, x: torch.Tensor, cache=None) -> torch.Tensor:
    with torch.no_grad():
        return model(x, use_cache=False).logits if cache is None else model(x, **{CACHE: cache}).logits


@pytest.mark.parametrize("kind", CACHES)
def test_chunked_prefill_gives_the_same_logits(cached_case, kind):
    model = model_of(str(cached_case))
    want, cache = logits(model, ids()), CACHES[kind](model)
    got = torch.cat([logits(model, part, cache) for part in ids().split((6, 1, 1, 4), dim=1)], dim=1)
    assert (got - want).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_cache_is_taken_under_both_names(variant, name):
    """transformers 5.24 renamed the argument; swallowing the other name would silently give wrong tokens."""
    model, cache = make(variant), DynamicCache()
    with torch.no_grad():
        model(ids()[:, :8], **{name: cache})
        got = model(ids()[:, 8:], **{name: cache}).logits
    assert (got - logits(model, ids())[:, 8:]).abs().max() < 1e-5


def test_cache_after_crop_and_reorder(cached_case):
    model = model_of(str(cached_case))
    cache = build_cache(model)
    logits(model, ids(), cache)
    if any(row.layer not in row.slots for row in model.model.plan) and not CROPS_EMPTY_SLOTS:
        pytest.skip("this transformers cannot crop a cache in which a slot was never filled (docs/footguns.md)")
    cache.crop(-4)
    cache.reorder_cache(torch.tensor([1, 0]))
    got = logits(model, ids()[[1, 0]][:, 8:], cache)
    assert (got - logits(model, ids()[[1, 0]])[:, 8:]).abs().max() < 1e-5


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_cache_bytes_are_those_of_the_account(cached_case, kind):
    model = model_of(str(cached_case))
    cache = build_cache(model, kind=kind, max_length=50 if kind == "static" else None)
    logits(model, ids(1, 50), cache)
    assert cache_bytes(cache) == 50 * account(model.config).kv_bytes_per_token


PLANES = [  # (case, planes of keys, planes of values), of 5 and 5
    (Case("learnable"), 5, 5),
    (Case("svformer"), 5, 1),
    (Case("svformer", {"anchors": [1, 3]}), 5, 2),
    (Case("svformer", {"layers": "last:2"}), 5, 3),
    (Case("svformer", {"key_group": 2}), 3, 1),
    (Case("svformer", {"key_group": 5}), 1, 1),
    (Case("cla"), 3, 3),
    (Case("cla", {"group": 3}), 2, 2),
    (Case("cla", {"group": 5}), 1, 1),
    (Case("cla", {"share": "k"}), 3, 5),
    (Case("cla", {"share": "v"}), 5, 3),
    (Case("cla", {"share": "q"}), 5, 5),
    (Case("skipv1"), 5, 3),
    (Case("skipv1", {"share": 0.25}, 4), 5, 4),
    (Case("skipv1", {"share": 0.75}, 4), 5, 2),
    (Case("cross_attention"), 5, 5),
]


@pytest.mark.parametrize(("case", "keys", "values"), PLANES, ids=lambda x: str(x))
def test_bytes_per_token_by_hand(case, keys, values):
    """A plane is H_kv * 8 numbers of 4 bytes a token; the ratio is to 10 planes."""
    costs = account(case.config())
    assert costs.kv_bytes_per_token == (keys + values) * case.kv_heads * 8 * 4
    assert costs.kv_ratio == (keys + values) / 10


def test_training_returns_no_cache(variant):
    model = make(variant).train()
    assert getattr(model(ids()), CACHE) is None
    assert getattr(model.eval()(ids()), CACHE) is not None
