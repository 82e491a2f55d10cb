"""The cache is storage only: on or off, whole or in pieces, padded or not, the numbers stay."""

from __future__ import annotations

import pytest
import torch
from conftest import ids, make
from transformers import DynamicCache, StaticCache

from resformer import build_cache
from resformer.models.accounting import account
from resformer.models.cache import cache_bytes
from resformer.models.compat import CACHE


def left_padded() -> tuple[torch.Tensor, torch.Tensor]:
    """Three prompts of 3, 7 and 12 tokens, padded on the left with token 0."""
    x, mask = ids(3, 12), torch.ones(3, 12, dtype=torch.long)
    for row, length in enumerate((3, 7, 12)):
        x[row, : 12 - length], mask[row, : 12 - length] = 0, 0
    return x, mask


@pytest.mark.parametrize(
    "settings", [{}, {"num_beams": 3}, {"cache_implementation": "static"}], ids=["greedy", "beam3", "static"]
)
def test_generation_with_cache_equals_without(variant, kv_heads, settings):
    model = make(variant, kv_heads)
    x, mask = left_padded()
    common = {"attention_mask": mask, "max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
    beams = {k: v for k, v in settings.items() if k == "num_beams"}
    with_cache = model.generate(x, **common, **settings)
    assert torch.equal(with_cache, model.generate(x, **common, **beams, use_cache=False))


def test_padding_does_not_leak(variant, kv_heads):
    model = make(variant, kv_heads)
    x, mask = left_padded()
    batch = model.generate(x, attention_mask=mask, max_new_tokens=20, do_sample=False, pad_token_id=0)
    for row, length in enumerate((3, 7, 12)):
        alone = model.generate(x[row : row + 1, 12 - length :], max_new_tokens=20, do_sample=False, pad_token_id=0)
        assert torch.equal(batch[row, 12 - length :], alone[0])


@pytest.mark.parametrize("chunks", [(12,), (5, 7), (1,) * 12, (7, 1, 1, 3)], ids=str)
@pytest.mark.parametrize("kind", ["dynamic", "static", "plain dynamic", "plain static"])
def test_chunked_prefill_gives_the_same_logits(variant, kv_heads, chunks, kind):
    model = make(variant, kv_heads)
    cache = {
        "dynamic": lambda: build_cache(model),
        "static": lambda: build_cache(model.config, kind="static", max_length=16),
        "plain dynamic": lambda: DynamicCache(),
        "plain static": lambda: StaticCache(config=model.config, max_cache_len=16),
    }[kind]()
    with torch.no_grad():
        want = model(ids(), use_cache=False).logits
        got = torch.cat([model(part, **{CACHE: cache}).logits for part in ids().split(chunks, dim=1)], dim=1)
    assert (got - want).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_cache_is_taken_under_both_names(variant, name):
    """transformers 5.24 renamed the argument; swallowing the other name would silently give wrong tokens."""
    model, cache = make(variant), DynamicCache()
    with torch.no_grad():
        model(ids()[:, :8], **{name: cache})
        got = model(ids()[:, 8:], **{name: cache}).logits
        assert (got - model(ids()).logits[:, 8:]).abs().max() < 1e-5


def test_cache_after_crop_and_reorder(variant, kv_heads):
    model, cache = make(variant, kv_heads), build_cache(make(variant, kv_heads))
    with torch.no_grad():
        model(ids(), **{CACHE: cache})
        cache.crop(-4)
        cache.reorder_cache(torch.tensor([1, 0]))
        got = model(ids()[[1, 0]][:, 8:], **{CACHE: cache}).logits
        assert (got - model(ids()[[1, 0]]).logits[:, 8:]).abs().max() < 1e-5


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_cache_bytes_are_those_of_the_account(variant, kv_heads, kind):
    model = make(variant, kv_heads)
    cache = build_cache(model, kind=kind, max_length=50 if kind == "static" else None)
    with torch.no_grad():
        model(ids(1, 50), **{CACHE: cache})
    assert cache_bytes(cache) == 50 * account(model.config).kv_bytes_per_token


def test_training_returns_no_cache(variant):
    model = make(variant).train()
    assert getattr(model(ids()), CACHE) is None
    assert getattr(model.eval()(ids()), CACHE) is not None
