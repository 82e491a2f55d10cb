"""Learnable-ResFormer-Plus: the layers share a budget of V_1 through a softmax over depth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..mixing import upcast, weighted_sum
from ..plan import Plan, Row
from ..policy import Coefficients, Policy, Shape, declare_parameters
from ..registry import Variant, register_variant
from ..residual import layer_names, residual_plan


class SharedBudget(Coefficients):
    """l1_n = scale * softmax(logits)_n over the mixing layers, in fp32.

    Parameters: `logits` `[mixing layers]`, `scale` `[1]`.
    """

    logits: Tensor
    scale: Tensor

    def __init__(self, *, plan: Plan, logits: Sequence[float], scale: float) -> None:
        super().__init__()
        self.mixes = tuple(row.mixes for row in plan)
        self.init_logits, self.init_scale = tuple(map(float, logits)), float(scale)
        declare_parameters(self)

    def forward(self) -> tuple[tuple[Tensor, ...], ...]:
        first = upcast(self.scale) * torch.softmax(upcast(self.logits), dim=0)
        weights = iter(first.split(1))
        return tuple((next(weights),) if mixes else () for mixes in self.mixes)

    def initial_values(self) -> dict[str, Tensor]:
        return {"logits": torch.tensor(self.init_logits), "scale": torch.tensor([self.init_scale])}


class BudgetedResidual(Policy):
    """`l1 * V_1 + own * V_n`; l1 comes from the shared budget. Parameter: `own` `[1]`."""

    own: Tensor

    def __init__(self, *, init_own: float) -> None:
        super().__init__()
        self.init_own = float(init_own)
        declare_parameters(self)

    def initial_values(self) -> dict[str, Tensor]:
        return {"own": torch.tensor([self.init_own])}

    def mix(
        self, own: Tensor | None, reads: Sequence[Tensor], hidden: Tensor, coefficients: Sequence[Tensor]
    ) -> Tensor:
        assert own is not None
        return weighted_sum(coefficients[0], reads[0], self.own, own)

    def coefficient_map(self, coefficients: Sequence[Tensor]) -> dict[str, float]:
        return {"first": float(coefficients[0]), "own": float(self.own)}


@register_variant("learnable_plus")
@dataclass(frozen=True, kw_only=True)
class LearnablePlus(Variant):
    """V_n <- l1_n V_1 + l2_n V_n with l1_n = scale softmax(logits)_n; logits, scale and l2_n are trained.

    Known: the form, scale from N (number of layers) and l2 from 0.5. Not known: how the paper starts the logits, and
    whether its softmax covers layer 1. "linear" (logit n for layer n) nearly gives the hand-found Sparse optimum at 8
    layers (5.06 on the last layer); "zeros" gives N / (N - 1) everywhere. We take the softmax over the mixing layers
    only, so that layer 1 has no parameter without gradient.

    Options:
        logit_init: "linear" or "zeros".
        scale_init: initial scale, null for the number of layers.
        init_own: initial l2.
        layers: which layers mix: "all" (2..N), "last:k", "last_third" or a list from 2.
    """

    equation = "V_n <- s softmax(z)_n V_1 + l2_n V_n, n >= 2, all trained"
    source = (
        "Zhou et al., Value Residual Learning, ACL 2025 (arXiv 2410.17897v5), Learnable-ResFormer-Plus; "
        "the initial logits are our choice"
    )

    logit_init: Literal["linear", "zeros"] = "linear"
    scale_init: float | None = None
    init_own: float = 0.5
    layers: str | tuple[int, ...] = "all"

    def plan(self, shape: Shape) -> Plan:
        return residual_plan(shape, self.mixing_layers(shape), coefficients=1)

    def policy(self, row: Row, shape: Shape) -> Policy | None:
        return BudgetedResidual(init_own=self.init_own) if row.mixes else None

    def scale(self, shape: Shape) -> float:
        """The initial scale."""
        return float(shape.layers if self.scale_init is None else self.scale_init)

    def coefficients(self, plan: Plan, shape: Shape) -> Coefficients | None:
        mixing = [row.layer for row in plan if row.mixes]
        if not mixing:
            return None
        logits = mixing if self.logit_init == "linear" else [0] * len(mixing)
        return SharedBudget(plan=plan, logits=logits, scale=self.scale(shape))

    def neutral(self, shape: Shape) -> dict[str, Any]:
        return {"scale_init": 0.0, "init_own": 1.0}

    def formula(self, shape: Shape) -> str:
        layers = layer_names(self.mixing_layers(shape))
        start = "z_n = n" if self.logit_init == "linear" else "z_n = 0"
        return (
            f"V_n <- s softmax(z)_n V_1 + l2_n V_n for n in {layers}; "
            f"s from {self.scale(shape):g}, {start}, l2 from {self.init_own:g}, trained"
        )
