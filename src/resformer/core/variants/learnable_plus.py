"""Learnable-ResFormer-Plus: the layers share a budget of V_1 through a softmax over depth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..mixing import Weight, upcast, weighted_sum
from ..plan import Plan, Row
from ..policy import Coefficients, Policy, Shape, declare_parameters
from ..registry import register_variant
from ..residual import Granularity, SourceForm, Tie, check_own, mean, own_name, per_name, tied, weight_size


class SharedBudget(Coefficients):
    """l1_n = scale * softmax(logits)_n over the mixing layers, in fp32; with a finer granularity a softmax over depth
    for each head or channel.

    Parameters: `logits` `[mixing layers]`, `[mixing layers, H_kv, 1]` or `[mixing layers, H_kv, D]`; `scale` `[1]`.
    """

    logits: Tensor
    scale: Tensor

    def __init__(self, *, plan: Plan, logits: Sequence[float], scale: float, size: tuple[int, ...]) -> None:
        super().__init__()
        self.mixes = tuple(row.mixes for row in plan)
        self.init_logits, self.init_scale, self.size = tuple(map(float, logits)), float(scale), size
        declare_parameters(self)

    def forward(self) -> tuple[tuple[Tensor, ...], ...]:
        first = upcast(self.scale) * torch.softmax(upcast(self.logits), dim=0)
        weights = iter(first.split(1) if first.dim() == 1 else first.unbind())
        return tuple((next(weights),) if mixes else () for mixes in self.mixes)

    def initial_values(self) -> dict[str, Tensor]:
        logits = torch.tensor(self.init_logits)
        if len(self.size) > 1:
            logits = logits.view(-1, 1, 1).expand(-1, *self.size).contiguous()
        return {"logits": logits, "scale": torch.tensor([self.init_scale])}


class BudgetedResidual(Policy):
    """`l1 * V_1 + l2 * V_n`; l1 comes from the shared budget. Parameter: `own` (l2), when `tie` is "free"."""

    own: Tensor

    def __init__(self, *, init_own: float, size: tuple[int, ...], tie: Tie) -> None:
        super().__init__()
        self.init_own, self.size, self.tie = float(init_own), size, tie
        declare_parameters(self)

    def initial_values(self) -> dict[str, Tensor]:
        return {"own": torch.full(self.size, self.init_own)} if self.tie == "free" else {}

    def own_weight(self, first: Tensor) -> Weight:
        """The weight on V_n."""
        return self.own if self.tie == "free" else tied(first, self.tie)

    def mix(
        self, own: Tensor | None, reads: Sequence[Tensor], hidden: Tensor, coefficients: Sequence[Tensor]
    ) -> Tensor:
        assert own is not None
        return weighted_sum(coefficients[0], reads[0], self.own_weight(coefficients[0]), own)

    def coefficient_map(self, coefficients: Sequence[Tensor]) -> dict[str, float]:
        return {"first": mean(coefficients[0]), "own": mean(self.own_weight(coefficients[0]))}


@register_variant("learnable_plus")
@dataclass(frozen=True, kw_only=True)
class LearnablePlus(SourceForm):
    """V_n <- l1_n V_1 + l2_n V_n with l1_n = scale softmax(logits)_n; logits, scale and l2_n are trained.

    Known: the form, scale from N (number of layers) and l2 from 0.5. Not known: how the paper starts the logits, and
    whether its softmax covers layer 1. "linear" (logit n for layer n) nearly gives the hand-found Sparse optimum at 8
    layers (5.06 on the last layer); "zeros" gives N / (N - 1) everywhere. We take the softmax over the mixing layers
    only, so that layer 1 has no parameter without gradient.

    Options:
        logit_init: "linear" or "zeros".
        scale_init: initial scale, null for the number of layers.
        init_own: initial l2 (used when `tie` is "free").
        granularity: one softmax over depth and one l2 per layer ("scalar", the paper), the same for each KV head
            ("head") or channel ("channel").
        tie: "free" (the paper), "lerp" (l2 = 1 - l1) or "own_one" (l2 = 1).
        source: the layer that is read in place of layer 1, or "previous" for the layer before.
        layers: which layers mix: "all" (those after the source), "last:k", "last_third" or a list.
    """

    equation = "V_n <- s softmax(z)_n V_1 + l2_n V_n, n >= 2, all trained"
    reference = (
        "Zhou et al., Value Residual Learning, ACL 2025 (arXiv 2410.17897v5), Learnable-ResFormer-Plus; "
        "the initial logits are our choice"
    )
    when = (
        "For the lowest loss of the paper's forms: 2.681 in its 82M table, against 2.705 of `learnable` and 2.739 of "
        "the Transformer, as readers of v5 report."
    )
    uncertain = (
        "How the paper starts the logits and whether its softmax covers layer 1: its code is not published, and "
        "an author's snippet differs from the formula. With three seeds of a small model neither start was surely "
        "better: zeros 0.030 nats above linear, 95 % interval -0.052 to 0.112 (docs/results)."
    )

    logit_init: Literal["linear", "zeros"] = "linear"
    scale_init: float | None = None
    init_own: float = 0.5
    granularity: Granularity = "scalar"
    tie: Tie = "free"

    def check(self, shape: Shape) -> None:
        check_own(self.tie, self.init_own)
        super().check(shape)

    def plan(self, shape: Shape) -> Plan:
        return self.source_plan(shape, coefficients=1)

    def policy(self, row: Row, shape: Shape) -> Policy | None:
        if not row.mixes:
            return None
        return BudgetedResidual(init_own=self.init_own, size=weight_size(self.granularity, shape), tie=self.tie)

    def scale(self, shape: Shape) -> float:
        """The initial scale."""
        return float(shape.layers if self.scale_init is None else self.scale_init)

    def coefficients(self, plan: Plan, shape: Shape) -> Coefficients | None:
        mixing = [row.layer for row in plan if row.mixes]
        if not mixing:
            return None
        logits = mixing if self.logit_init == "linear" else [0] * len(mixing)
        size = weight_size(self.granularity, shape)
        return SharedBudget(plan=plan, logits=logits, scale=self.scale(shape), size=size)

    def neutral(self, shape: Shape) -> dict[str, Any] | None:
        return {"scale_init": 0.0, "init_own": 1.0}

    def formula(self, shape: Shape) -> str:
        start = "z_n = n" if self.logit_init == "linear" else "z_n = 0"
        own = own_name(self.tie, self.init_own)
        return (
            f"V_n <- s softmax(z)_n {self.source_name()} + {own} for {self.where(shape)}; "
            f"s from {self.scale(shape):g}, {start}{per_name(self.granularity)}, trained"
        )
