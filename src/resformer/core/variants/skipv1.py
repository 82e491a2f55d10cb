"""SkipV1Former: some of the value heads are the first layer's; W_v and the cache shrink by as much."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..plan import Plan, Read, Row, link
from ..policy import Policy, Shape
from ..registry import register_variant
from ..residual import SourceForm


class SplitHeads(Policy):
    """The layer's own heads first, then the source's heads of the same numbers, all tokens of both."""

    def mix(
        self, own: Tensor | None, reads: Sequence[Tensor], hidden: Tensor, coefficients: Sequence[Tensor]
    ) -> Tensor:
        assert own is not None
        return torch.cat((own, reads[0][:, :, own.shape[2] :]), dim=2)


@register_variant("skipv1")
@dataclass(frozen=True, kw_only=True)
class SkipV1(SourceForm):
    """In layers n >= 2 the last `share` of the value heads are V_1's heads; the layer computes and stores the others.

    Options:
        share: of the KV heads that come from V_1; times their number it must be whole.
        source: the layer that is read in place of layer 1.
        layers: which layers do so: "all" (those after the source), "last:k", "last_third" or a list.
    """

    equation = "V_n <- [V_n^(own heads); V_1^(h > H/2)], n >= 2"
    reference = "SkipV1Former, arXiv 2510.16807"
    when = "For a quarter less cache and a smaller W_v at once; a milder trade than SVFormer."
    uncertain = "Whether the paper's uptraining recipe carries over to shares other than one half."

    # "previous" is left out: only a layer that owns all its value heads can be read.
    source: int = 1
    share: float = 0.5

    def skipped_heads(self, shape: Shape) -> int:
        """Number of KV heads that come from the source.

        Raises:
            ValueError: if `share` leaves no head on one side, or cuts one in two.
        """
        heads = round(self.share * shape.kv_heads)
        if shape.kv_heads == 1:
            raise ValueError("the model has one KV head, which cannot be split between two layers; use more KV heads")
        cuts_one = abs(heads - self.share * shape.kv_heads) > 1e-3  # 0.3333 of 3 heads is one head
        if cuts_one or not 0 < heads < shape.kv_heads:
            valid = ", ".join(f"{k / shape.kv_heads:g}" for k in range(1, shape.kv_heads))
            raise ValueError(f"share is {self.share:g} of {shape.kv_heads} KV heads; expected one of {valid}")
        return heads

    def plan(self, shape: Shape) -> Plan:
        layers = self.mixing_layers(shape)
        own_share = 1 - self.skipped_heads(shape) / shape.kv_heads if layers else 1.0
        return link(
            Row(layer=n, value_share=own_share, stores="own", reads=(Read(layer=self.source_of(n), state="stored"),))
            if n in layers
            else Row(layer=n)
            for n in range(1, shape.layers + 1)
        )

    def policy(self, row: Row, shape: Shape) -> Policy | None:
        return SplitHeads() if row.mixes else None

    def formula(self, shape: Shape) -> str:
        layers = self.mixing_layers(shape)
        heads = self.skipped_heads(shape) if layers else 0
        return f"the last {heads} of {shape.kv_heads} value heads are {self.source_name()}'s for {self.where(shape)}"
