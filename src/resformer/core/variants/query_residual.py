"""The residual on queries in place of values. An ablation of the paper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..mixing import weighted_sum
from ..plan import Plan, Row
from ..policy import Policy, Shape
from ..registry import register_variant
from ..residual import SourceForm


class QueryResidualPolicy(Policy):
    """`first Q_1 + own Q_n` with constants."""

    def __init__(self, *, first: float, own: float) -> None:
        super().__init__()
        self.first, self.own = float(first), float(own)

    def mix_query(self, own: Tensor | None, reads: Sequence[Tensor]) -> Tensor:
        assert own is not None
        return weighted_sum(self.first, reads[0], self.own, own)


@register_variant("query_residual")
@dataclass(frozen=True, kw_only=True)
class QueryResidual(SourceForm):
    """Q_n <- first Q_1 + own Q_n, n >= 2, after QK-norm and before positions.

    Options:
        first: weight of Q_1.
        own: weight of the layer's own queries.
        source: the layer that is read in place of layer 1, or "previous" for the layer before.
        layers: which layers mix: "all" (those after the source), "last:k", "last_third" or a list.
    """

    equation = "Q_n <- 0.5 Q_1 + 0.5 Q_n, n >= 2"
    reference = "Zhou et al., Value Residual Learning, ACL 2025 (arXiv 2410.17897v5), ablation"
    when = (
        "As an ablation: it hurts (2.742 against the Transformer's 2.739 and the value residual's 2.712 in the paper's "
        "82M table)."
    )
    uncertain = "The paper does not say where exactly the residual enters; the place is this library's choice."

    first: float = 0.5
    own: float = 0.5

    def plan(self, shape: Shape) -> Plan:
        return self.source_plan(shape, what="query")

    def policy(self, row: Row, shape: Shape) -> Policy | None:
        return QueryResidualPolicy(first=self.first, own=self.own) if row.reads else None

    def neutral(self, shape: Shape) -> dict[str, Any] | None:
        return {"first": 0.0, "own": 1.0}

    def formula(self, shape: Shape) -> str:
        return f"Q_n <- {self.first:g} {self.source_name('Q')} + {self.own:g} Q_n for {self.where(shape)}"
