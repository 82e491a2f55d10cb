"""Caches built from the plan.

A layer that reads its values from another one stores keys only: it hands the cache a values tensor of width 0, `[B,
H_kv, T, 0]`. A layer that reads its keys stores its values only, as the slot's first tensor, and one that reads both
never touches its slot. Every cache operation of transformers (concatenate, reorder, crop, repeat, select, static index
copy) holds for such slots, so a plain `DynamicCache` or `StaticCache` is right and small as well. The one exception is
static allocation, where a stock layer guesses both tensors from the model's sizes or from the first one; the planned
layers mend that. Which slots keep only a window transformers reads from the config's `layer_types`.
"""

from __future__ import annotations

import warnings
from typing import Literal

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, StaticCache, StaticLayer, StaticSlidingWindowLayer

from ..core.plan import Plan, Row
from ..core.policy import Shape
from ..errors import UserError, did_you_mean
from .configuration import ResFormerConfig

Kind = Literal["dynamic", "static"]
Slot = tuple[int, int]
KINDS: tuple[Kind, ...] = ("dynamic", "static")


class _Planned(StaticLayer):
    """A static layer whose tensors have the heads and widths that the plan says, also when it is allocated ahead of
    time.
    """

    first: Slot
    second: Slot

    @classmethod
    def like(cls, layer: StaticLayer, *, first: Slot, second: Slot) -> StaticLayer:
        """A fresh layer as it is, but for the heads and widths of the slot's two tensors."""
        planned = cls.__new__(cls)
        planned.__dict__.update(layer.__dict__, first=first, second=second)
        return planned

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        (heads, width), (second_heads, second_width) = self.first, self.second
        rows = key_states.shape[0]
        super().lazy_initialization(
            key_states.new_empty(rows, heads, 0, width), value_states.new_empty(rows, heads, 0, second_width)
        )
        if second_heads != heads:
            assert self.values is not None
            self.values = self.values[:, :second_heads].clone()  # a slice of one row would keep the whole storage


class PlannedStaticLayer(_Planned):
    """For slots that keep all tokens."""


class PlannedSlidingLayer(_Planned, StaticSlidingWindowLayer):
    """For slots that keep the last tokens of a window."""


PLANNED: dict[type, type[_Planned]] = {
    StaticLayer: PlannedStaticLayer,
    StaticSlidingWindowLayer: PlannedSlidingLayer,
}


def build_cache(model_or_config: object, kind: Kind = "dynamic", max_length: int | None = None) -> Cache:
    """A cache laid out by the plan of a model.

    Args:
        model_or_config: one of our models or its config.
        kind: "dynamic" (grows) or "static" (allocated once for `max_length` tokens, for `torch.compile`).
        max_length: tokens that a static cache holds; its default is the model's `max_position_embeddings`.

    Raises:
        UserError: for an unknown kind, or a `max_length` below 1.
    """
    config = getattr(model_or_config, "config", model_or_config)
    if not isinstance(config, ResFormerConfig):
        raise UserError(
            f"build_cache got {type(model_or_config).__name__}; expected a ResFormer model or ResFormerConfig"
        )
    if kind not in KINDS:
        raise UserError(f"cache kind is {kind!r}; expected one of {', '.join(KINDS)}{did_you_mean(str(kind), KINDS)}")
    if kind == "dynamic":
        return DynamicCache(config=config)
    length = config.max_position_embeddings if max_length is None else max_length
    if length < 1:
        raise UserError(f"max_length is {length}; a static cache holds at least 1 token")
    cache = StaticCache(config=config, max_cache_len=length)
    lay_out(cache, config.plan(), config.shape())
    return cache


def lay_out(cache: Cache, plan: Plan, shape: Shape) -> None:
    """Give a fresh static cache a layer of the plan's sizes wherever these are not a key and a value of all heads (in
    place). Any other cache stays as it is.
    """
    full = (shape.kv_heads, shape.head_dim)
    for index, row in enumerate(plan):
        layer = cache.layers[index]
        first, second = slots(row, shape)
        if not isinstance(layer, StaticLayer) or layer.is_initialized or type(layer) not in PLANNED:
            continue
        if (first, second) != (full, full):
            cache.layers[index] = PLANNED[type(layer)].like(layer, first=first, second=second)


def prepare(cache: Cache | None, plan: Plan, shape: Shape) -> None:
    """Make a user's own cache fit the plan before its first tokens (in place), or say what it costs."""
    if isinstance(cache, StaticCache):
        lay_out(cache, plan, shape)
    elif isinstance(cache, DynamicCache) and not cache.layers and any(row.slot_window for row in plan):
        warnings.warn(
            "this cache was made without the model's config, so that sliding layers keep all tokens in it; results are "
            "the same, and resformer.build_cache(model) makes a smaller one",
            stacklevel=3,
        )


def slots(row: Row, shape: Shape) -> tuple[Slot, Slot]:
    """Heads and width of the two tensors of a layer's slot."""
    key = (shape.kv_heads, shape.head_dim if row.owns_key else 0)
    value = (round(row.value_share * shape.kv_heads), 0 if row.stores == "none" else shape.head_dim)
    if row.owns_key or row.stores == "none":
        return key, value
    return value, (value[0], 0)


def cache_bytes(cache: Cache) -> int:
    """Bytes of the distinct storages behind a cache's real tensors, each counted once."""
    storages: dict[int, int] = {}
    for layer in cache.layers:
        for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None)):
            if isinstance(tensor, torch.Tensor) and tensor.numel():
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
