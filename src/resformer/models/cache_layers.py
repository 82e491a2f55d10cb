"""Cache layers of the plan's sizes, in place of transformers' own where these would guess them: static ones, which are
allocated ahead of time, and quantized ones, which cannot quantize an empty tensor.

Shapes: B batch, H_kv key/value heads, S tokens, D head dimension.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, QuantizedCache, StaticCache, StaticLayer, StaticSlidingWindowLayer

from ..core.plan import Plan, Row
from ..core.policy import Shape
from ..errors import UserError

Slot = tuple[int, int]
# transformers scales 8-bit floats by the largest number of the first tokens and cuts off what is larger later. A float
# is as precise at any scale, so room above costs nothing: with a first read of one token the largest error of the
# logits fell from 0.11 to 0.40 of the largest logit to 0.03 to 0.05 (4 layers, 48 tokens, sharp attention).
HEADROOM = 16.0


def slots(row: Row, shape: Shape) -> tuple[Slot, Slot]:
    """Heads and width of the two tensors of a layer's slot."""
    key = (shape.kv_heads, shape.head_dim if row.owns_key else 0)
    value = (round(row.value_share * shape.kv_heads), 0 if row.stores == "none" else shape.head_dim)
    if row.owns_key or row.stores == "none":
        return key, value
    return value, (value[0], 0)


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

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove and not self.is_croppable:  # transformers would go on with tokens that it has overwritten
            raise UserError(
                "tokens cannot be taken back (crop) from a static cache of sliding layers that was made for more "
                "tokens than their window; use the kind 'dynamic' and call activate_past_recording() first"
            )
        super().crop(tokens_to_remove)


PLANNED: dict[type, type[_Planned]] = {
    StaticLayer: PlannedStaticLayer,
    StaticSlidingWindowLayer: PlannedSlidingLayer,
}


class _Quantized:
    """What a quantized layer of any backend needs beside it: tensors of width 0, which no backend takes, stay as they
    are; and what transformers would do to the full-precision part alone is refused.
    """

    def _quantize(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        fp8 = getattr(self, "fp8_dtype", None)  # this backend keeps pairs of a tensor and its scale
        if not tensor.shape[-1]:
            return tensor if fp8 is None else (tensor.to(fp8), torch.empty(0, device=tensor.device))
        quantized = super()._quantize(tensor, *args, **kwargs)  # type: ignore[misc]
        if fp8 is not None and not args and not kwargs:  # the first tokens, which set the scale of all
            return super()._quantize(tensor, scale=quantized[1] * HEADROOM)  # type: ignore[misc]
        return quantized

    def _dequantize(self, quantized: Any) -> Tensor:
        if isinstance(quantized, Tensor) and not quantized.shape[-1]:
            return quantized
        return super()._dequantize(quantized)  # type: ignore[misc]

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise _refusal("removed (crop), as assisted and prompt-lookup decoding do")

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise _refusal("repeated; repeat the prompt before it is read")

    def batch_select_indices(self, indices: Tensor) -> None:
        raise _refusal("selected")


def _refusal(what: str) -> UserError:
    return UserError(f"rows or tokens of a quantized cache cannot be {what}; use the kind 'dynamic' or 'static'")


@functools.cache
def _quantized_class(stock: Any) -> Any:
    return type(f"Planned{stock.__name__}", (_Quantized, stock), {})


def _quantized_like(layer: Any) -> Any:
    planned_class = _quantized_class(layer.__class__)
    planned = planned_class.__new__(planned_class)
    planned.__dict__.update(layer.__dict__)
    return planned


def fit(cache: Cache, plan: Plan, shape: Shape) -> None:
    """Give a fresh static or quantized cache layers of the plan's sizes (in place). Any other cache stays as it is."""
    if not isinstance(cache, StaticCache | QuantizedCache) or cache.layers[0].is_initialized:  # type: ignore[union-attr]
        return
    full = (shape.kv_heads, shape.head_dim)
    for index, row in enumerate(plan):
        layer: Any = cache.layers[index]
        if isinstance(cache, QuantizedCache):
            if not isinstance(layer, _Quantized):
                cache.layers[index] = _quantized_like(layer)
            continue
        first, second = slots(row, shape)
        if type(layer) in PLANNED and ((first, second) != (full, full) or row.slot_window):
            cache.layers[index] = PLANNED[type(layer)].like(layer, first=first, second=second)
