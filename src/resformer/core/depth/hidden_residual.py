"""An extra residual from the embeddings to every block's input. An ablation of the paper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..mixing import weighted_sum
from ..plan import Plan, Read, Row, link, select_layers
from ..policy import DepthAverage, Shape
from ..registry import Variant, register_variant
from ..residual import layer_names


class WithEmbeddings(DepthAverage):
    """`first H_0 + own X_n` with constants."""

    def __init__(self, *, first: float, own: float) -> None:
        super().__init__()
        self.first, self.own = float(first), float(own)

    def forward(self, hidden: Tensor, reads: Sequence[Tensor]) -> Tensor:
        return weighted_sum(self.first, reads[0], self.own, hidden)


@register_variant("hidden_residual")
@dataclass(frozen=True, kw_only=True)
class HiddenResidual(Variant):
    """The input of block n is first H_0 + own H_{n-1}, n >= 2, on the residual stream.

    It is a residual on queries, keys and values at once. The final norm sees the last block's output as it is.

    Options:
        first: weight of the embeddings H_0.
        own: weight of the stream H_{n-1}.
        layers: which blocks' inputs are averaged: "all" (2..N), "last:k", "last_third" or a list from 2.
    """

    equation = "input of block n: 0.5 H_0 + 0.5 H_(n-1), n >= 2"
    reference = "Zhou et al., Value Residual Learning, ACL 2025 (arXiv 2410.17897v5), ablation"
    when = "As an ablation: it hurts (2.781 against the Transformer's 2.739 in the paper's 82M table)."
    uncertain = "The paper does not give the form; weights and place on the stream are this library's choice."

    first: float = 0.5
    own: float = 0.5
    layers: str | tuple[int, ...] = "all"

    def plan(self, shape: Shape) -> Plan:
        layers = select_layers(self.layers, shape.layers)
        embeddings = (Read(layer=0, what="hidden"),)
        return link(Row(layer=n, reads=embeddings if n + 1 in layers else ()) for n in range(1, shape.layers + 1))

    def depth(self, row: Row, shape: Shape) -> DepthAverage | None:
        return WithEmbeddings(first=self.first, own=self.own) if row.averaged else None

    def neutral(self, shape: Shape) -> dict[str, Any] | None:
        return {"first": 0.0, "own": 1.0}

    def formula(self, shape: Shape) -> str:
        layers = layer_names(select_layers(self.layers, shape.layers))
        return f"input of block n: {self.first:g} H_0 + {self.own:g} H_(n-1) for n in {layers}"
