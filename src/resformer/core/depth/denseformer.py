"""DenseFormer: a trained average of all blocks' outputs after each block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..mixing import upcast
from ..plan import Plan, Read, Row, link
from ..policy import DepthAverage, Shape, declare_parameters
from ..registry import Variant, register_variant


class WeightedAverage(DepthAverage):
    """`sum_j alpha_j X_j` over earlier outputs and the block's own, which comes last. Parameter: `alpha` `[terms]`."""

    alpha: Tensor

    def __init__(self, *, terms: int) -> None:
        super().__init__()
        self.terms = terms
        declare_parameters(self)

    def initial_values(self) -> dict[str, Tensor]:
        alpha = torch.zeros(self.terms)
        alpha[-1] = 1.0
        return {"alpha": alpha}

    def forward(self, hidden: Tensor, reads: Sequence[Tensor]) -> Tensor:
        *weights, own = self.alpha.unbind()
        total = upcast(hidden) * own
        for state, weight in zip(reads, weights, strict=True):
            total = total + state * weight
        return total.to(hidden.dtype)


@register_variant("denseformer")
@dataclass(frozen=True, kw_only=True)
class DenseFormer(Variant):
    """Y_i = sum_j alpha_ij X_j after block i, X_0 the embeddings and X_j the output of block j, whose input is Y_{j-1}.

    Starts as the Transformer: alpha_ii = 1, all others 0. The weights are lambdas: no weight decay (the original decays
    them, being weights of linear layers), their own learning-rate scale.

    Options:
        dilation: k; only outputs j with j = i (mod k) are averaged.
        period: p; only after blocks i that p divides.
    """

    equation = "Y_i = sum_(j<=i) alpha_ij X_j after block i"
    reference = "Pagliardini et al., DenseFormer, arXiv 2402.02622 and its public package"
    when = "As the baseline that mixes whole hidden states over depth."
    uncertain = "Which dilation and period the paper's comparison used is not stated."

    dilation: int = 1
    period: int = 1

    def plan(self, shape: Shape) -> Plan:
        for name, value in (("dilation", self.dilation), ("period", self.period)):
            if not 1 <= value <= shape.layers:
                raise ValueError(f"{name} is {value}; expected 1 to {shape.layers}, the number of layers")
        return link(Row(layer=n, reads=self._reads(n)) for n in range(1, shape.layers + 1))

    def _reads(self, layer: int) -> tuple[Read, ...]:
        if layer % self.period:
            return ()
        return tuple(Read(layer=j, what="hidden") for j in range(layer % self.dilation, layer, self.dilation))

    def depth(self, row: Row, shape: Shape) -> DepthAverage | None:
        # A block whose dilation leaves it nothing to read keeps its weight of 1, as in the original package.
        return WeightedAverage(terms=len(row.averaged) + 1) if row.layer % self.period == 0 else None

    def neutral(self, shape: Shape) -> dict[str, Any] | None:
        return {}

    def formula(self, shape: Shape) -> str:
        every = "" if self.dilation == 1 else f" with j = i mod {self.dilation}"
        after = "every block" if self.period == 1 else f"every {self.period} blocks"
        return f"Y_i = sum_(j<=i) alpha_ij X_j{every} after {after}; alpha_ii from 1, others from 0, trained"
