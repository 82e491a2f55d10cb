"""Which tokens a layer's queries may see, and where these stand in what its cache slots return.

With a cache a slot returns all tokens so far, or, when it slides, the last ones. So masks differ by the layer's window
and by the kind of slot that it attends to, and a layer that reads from slots of both kinds takes of the longer ones
what the shorter one still has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache

from ..core.plan import Plan
from .compat import CACHE, create_causal_mask, create_sliding_window_causal_mask
from .configuration import ResFormerConfig

Span = tuple[int, int]  # length and offset of what is attended to, in tokens


@dataclass(frozen=True, kw_only=True)
class View:
    """What one layer attends to.

    Attributes:
        window: tokens that a query sees, None for all.
        slot: index of a cache layer whose slot spans what this layer attends to.
        aligns: the layer reads slots of different spans.
    """

    window: int | None
    slot: int
    aligns: bool

    @property
    def mask(self) -> str:
        """Name of the layer's mask; layers with equal names share one."""
        return f"window {self.window}, slot {self.slot}"


def views(plan: Plan) -> tuple[View, ...]:
    """The view of each layer; layers that see the same name the same slot, so that they share masks."""
    first: dict[int | None, int] = {}
    for row in plan:
        if row.layer in row.slots:
            first.setdefault(row.slot_window, row.layer - 1)
    found = []
    for row in plan:
        windows = {plan[n - 1].slot_window for n in row.slots}
        shortest = min((window for window in windows if window is not None), default=None)
        found.append(View(window=row.window, slot=first[shortest], aligns=len(windows) > 1))
    return tuple(found)


def attention_masks(
    config: ResFormerConfig,
    wanted: Iterable[View],
    inputs_embeds: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    cache: Cache | None,
    *,
    materialise: bool = False,
) -> dict[str, Any]:
    """The masks of all views by name, each as the attention implementation wants it.

    Args:
        config, inputs_embeds, attention_mask, position_ids, cache: as transformers' mask functions take them.
        wanted: the views.
        materialise: never leave a mask to the implementation's causal flag, since somebody will change it.
    """
    masks: dict[str, Any] = {}
    made: dict[tuple[int | None, int], Any] = {}
    for view in wanted:
        kind = (view.window, view.slot if cache is not None else 0)
        if kind not in made:
            create = create_causal_mask if view.window is None else create_sliding_window_causal_mask
            made[kind] = create(
                config=config,
                inputs_embeds=inputs_embeds,
                attention_mask=attention_mask,
                position_ids=position_ids,
                layer_idx=view.slot,
                allow_is_causal_skip=not materialise,
                **{CACHE: cache},
            )
        masks[view.mask] = made[kind]
    return masks


def layer_type(window: int | None) -> str:
    """transformers' word for a layer, or a slot, of such a window."""
    return "full_attention" if window is None else "sliding_attention"


def by_view(wanted: Iterable[View], masks: Mapping[str, Any]) -> dict[str, Any]:
    """Ready masks by name of the views, from masks by those names or by transformers' layer types."""
    return {view.mask: masks[view.mask if view.mask in masks else layer_type(view.window)] for view in wanted}


def choose_lengths(kwargs: dict[str, Any], window: int | None) -> None:
    """Choose by layer type, in place, what a batching manager says of the tokens that a layer attends to. For layers
    that have a slot the cache does it.
    """
    for name in ("cu_seq_lens_k", "max_length_k"):
        if isinstance(kwargs.get(name), dict):
            kwargs[name] = kwargs[name][layer_type(window)]


def spans(wanted: Sequence[View], cache: Cache | None, new: int) -> list[Span | None]:
    """Per layer the span that it attends to after `new` tokens, before the cache takes them; None where its slots all
    return that anyway.
    """
    if cache is None or not any(view.aligns for view in wanted):
        return [None] * len(wanted)
    return [cache.get_mask_sizes(new, view.slot) if view.aligns else None for view in wanted]


def aligned(tensor: Tensor, span: Span | None, dim: int) -> Tensor:
    """The tokens of `span`, along `dim`, of what a slot returned."""
    if span is None or tensor.shape[dim] == span[0]:
        return tensor
    length, offset = span
    return tensor.narrow(dim, offset, length)
