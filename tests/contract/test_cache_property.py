"""Whatever the plan, the heads, the window, the padding, the pieces and the kind of cache: logits are those without a
cache, also after a crop, a reorder, a fork, a reset, and when a cache goes on with a second text.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass

import pytest
import torch
from cases import CROPS_EMPTY_SLOTS, SIZES, Case, make
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from resformer import build_cache
from resformer.core.registry import names
from resformer.errors import UserError
from resformer.models.compat import CACHE

ROOM = 40
LAYOUTS = [
    *(Case(name) for name in names()),
    Case("svformer", {"anchors": [1, 3]}),
    Case("svformer", {"layers": "last:2"}),
    Case("svformer", {"key_group": 2}),
    Case("svformer", {"key_group": 5}),
    *(Case("cla", {"share": share}) for share in ("k", "v", "q")),
    Case("cla", {"group": 5}),
    Case("skipv1", {"source": 2}),
    Case("value_embeddings", {"layers": "all", "tied": True}),
]
WINDOWS = {"no window": {}, "all layers slide": "all", "odd layers slide": [1, 3, 5], "the first slides": [1]}
KINDS = {
    "dynamic": lambda model: build_cache(model),
    "static": lambda model: build_cache(model, "static", max_length=ROOM),
    "tokens": lambda model: build_cache(model, "tokens"),
    "plain dynamic": lambda model: DynamicCache(),
    "plain static": lambda model: StaticCache(config=model.config, max_cache_len=ROOM),
}
AFTER = ("crop", "reorder", "fork", "reset", "second text", "repeat")


@functools.cache
def model_of(layout: int, kv_heads: int, window: str):
    """A tiny model, or None where a layout cannot have these heads or windows."""
    case, sliding = LAYOUTS[layout], {}
    if window != "no window":
        sliding = {"sliding_window": 4, "sliding_layers": WINDOWS[window]}
    try:
        return make(case.variant, kv_heads, variant_options=case.options, **sliding)
    except (UserError, ValueError):
        return None


@dataclass
class Text:
    """Tokens `[B, S]` and their mask; grows."""

    ids: torch.Tensor
    mask: torch.Tensor

    def plus(self, ids: torch.Tensor) -> Text:
        return Text(torch.cat([self.ids, ids], 1), torch.cat([self.mask, torch.ones_like(ids)], 1))

    def rows(self, index: torch.Tensor) -> Text:
        return Text(self.ids[index], self.mask[index])

    def cut(self, count: int) -> Text:
        return Text(self.ids[:, :-count], self.mask[:, :-count])


def random_ids(rows: int, length: int, seed: int) -> torch.Tensor:
    return torch.randint(1, SIZES["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(seed))


def padded(lengths: list[int], seed: int) -> Text:
    """Prompts of these lengths, padded on the left."""
    ids, longest = random_ids(len(lengths), max(lengths), seed), max(lengths)
    mask = torch.stack([(torch.arange(longest) >= longest - length).long() for length in lengths])
    return Text(ids * mask, mask)


def check(model, cache, before: Text | None, new: Text, pieces: list[int]) -> None:
    """Read the rest of `new` into a cache that holds `before`, in pieces, and compare its logits."""
    start = 0 if before is None else before.ids.shape[1]
    want = model(new.ids, attention_mask=new.mask, use_cache=False).logits
    while start < new.ids.shape[1]:
        end = min(start + pieces[0], new.ids.shape[1])
        pieces = pieces[1:] or pieces  # the last goes on until the end
        got = model(new.ids[:, start:end], attention_mask=new.mask[:, :end], **{CACHE: cache}).logits
        kept = new.mask[:, start:end].bool()
        difference = (got - want[:, start:end])[kept].abs().max() if kept.any() else 0.0
        assert difference <= 1e-5 * want.abs().max(), (start, end, difference)
        start = end


def can(action: str, cache) -> bool:
    """Whether transformers has this for the kind of cache: static ones cannot be repeated, and in older versions not
    cropped either; growing ones that slid cannot go back, and see `CROPS_EMPTY_SLOTS`.
    """
    if action == "repeat":
        return hasattr(cache.layers[0], "batch_repeat_interleave")
    if action != "crop":
        return True
    slid = (isinstance(x, DynamicSlidingWindowLayer) and x.get_seq_length() >= x.sliding_window for x in cache.layers)
    filled = all(layer.is_initialized for layer in cache.layers)
    return cache.is_croppable and not any(slid) and (filled or CROPS_EMPTY_SLOTS)


def change(action: str, model, cache, text: Text, seed: int):
    """Do something to a cache; returns what it then holds, None when it is empty again."""
    if action == "crop":
        cache.crop(-2)
        return text.cut(2)
    if action == "reorder":
        index = torch.randperm(text.ids.shape[0], generator=torch.Generator().manual_seed(seed))
        cache.reorder_cache(index)
        return text.rows(index)
    if action == "fork":
        fork = copy.deepcopy(cache)
        check(model, fork, text, text.plus(random_ids(text.ids.shape[0], 3, seed + 7)), [1])
        return text
    if action == "reset":
        cache.reset()
        return None
    if action == "repeat":
        cache.batch_repeat_interleave(2)
        return text.rows(torch.arange(text.ids.shape[0]).repeat_interleave(2))
    return text


@settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)
@given(
    layout=st.integers(0, len(LAYOUTS) - 1),
    kv_heads=st.sampled_from([4, 2, 1]),
    window=st.sampled_from(list(WINDOWS)),
    kind=st.sampled_from(list(KINDS)),
    lengths=st.lists(st.integers(1, 11), min_size=1, max_size=3),
    pieces=st.lists(st.sampled_from([1, 1, 2, 3, 5, 8]), min_size=1, max_size=4),
    after=st.sampled_from(AFTER),
    seed=st.integers(0, 99),
)
def test_a_cache_changes_nothing(layout, kv_heads, window, kind, lengths, pieces, after, seed):
    model = model_of(layout, kv_heads, window)
    assume(model is not None)
    assume(max(lengths) > 2)  # the crop takes two
    text = padded(lengths, seed)
    with torch.no_grad():
        cache = KINDS[kind](model)
        check(model, cache, None, text, pieces)
        held = change(after if can(after, cache) else "second text", model, cache, text, seed)
        rows = len(lengths) if held is None else held.ids.shape[0]
        tail = random_ids(rows, 6, seed + 1)
        new = Text(tail, torch.ones_like(tail)) if held is None else held.plus(tail)
        check(model, cache, held, new, pieces)


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        *(("svformer", kind) for kind in ("dynamic", "static", "tokens")),
        *(("skipv1", kind) for kind in ("tokens", "plain dynamic", "plain static")),
    ],
)
@pytest.mark.parametrize("after", AFTER)
def test_each_kind_and_change_at_least_once(layout, kind, after):
    """What chance might leave out above."""
    model, text = model_of([case.variant for case in LAYOUTS].index(layout), 2, "no window"), padded([5, 9], 3)
    with torch.no_grad():
        cache = KINDS[kind](model)
        check(model, cache, None, text, [4, 3])
        if not can(after, cache):
            pytest.skip(f"transformers has no {after} for this kind")
        held = change(after, model, cache, text, 1)
        tail = random_ids(2 if held is None else held.ids.shape[0], 4, 2)
        check(model, cache, held, Text(tail, torch.ones_like(tail)) if held is None else held.plus(tail), [2])
