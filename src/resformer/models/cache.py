"""Caches built from the plan.

A layer that reads its values from another one stores keys only: it hands the cache a values tensor of width 0, `[B,
H_kv, T, 0]`. Every cache operation of transformers (concatenate, reorder, crop, repeat, select, static index copy)
holds for width 0, so a plain `DynamicCache` or `StaticCache` is right and small as well. The one exception is
allocation ahead of time, where a stock static layer would guess the width from the keys; `KeysOnlyStaticLayer` mends
that.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, StaticCache, StaticLayer

from ..core.plan import Plan
from ..errors import UserError, did_you_mean
from .configuration import ResFormerConfig

Kind = Literal["dynamic", "static"]
KINDS: tuple[Kind, ...] = ("dynamic", "static")


class KeysOnlyStaticLayer(StaticLayer):
    """A static layer that holds keys; its values have width 0 also when it is allocated ahead of time."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states[..., :0])


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
    lay_out(cache, config.build_variant().plan(config.shape()))
    return cache


def lay_out(cache: Cache, plan: Plan) -> None:
    """Give a fresh static cache a keys-only layer wherever the plan stores no value (in place)."""
    for index, row in enumerate(plan):
        layer = cache.layers[index]
        if row.stores == "none" and type(layer) is StaticLayer:
            cache.layers[index] = KeysOnlyStaticLayer(max_cache_len=layer.max_cache_len)


def cache_bytes(cache: Cache) -> int:
    """Bytes of the distinct storages behind a cache's real tensors, each counted once."""
    storages: dict[int, int] = {}
    for layer in cache.layers:
        for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None)):
            if isinstance(tensor, torch.Tensor) and tensor.numel():
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
