"""Learnable-ResFormer: both weights are trained, one pair a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..plan import Plan, Row
from ..policy import Policy, Shape
from ..registry import Variant, register_variant
from ..residual import Granularity, LearnedResidual, Tie, layer_names, residual_plan


@register_variant("learnable")
@dataclass(frozen=True, kw_only=True)
class Learnable(Variant):
    """V_n <- l1_n V_1 + l2_n V_n with l1_n, l2_n trained from 0.5.

    Options:
        init_first: initial l1.
        init_own: initial l2 (used when `tie` is "free").
        granularity: one weight per layer ("scalar", the paper), per KV head ("head") or per channel ("channel").
        tie: "free" (the paper), "lerp" (l2 = 1 - l1) or "own_one" (l2 = 1).
        layers: which layers mix: "all" (2..N), "last:k", "last_third" or a list from 2.
    """

    equation = "V_n <- l1_n V_1 + l2_n V_n, n >= 2, both trained"
    source = "Zhou et al., Value Residual Learning, ACL 2025 (arXiv 2410.17897v5), Learnable-ResFormer"

    init_first: float = 0.5
    init_own: float = 0.5
    granularity: Granularity = "scalar"
    tie: Tie = "free"
    layers: str | tuple[int, ...] = "all"

    def plan(self, shape: Shape) -> Plan:
        return residual_plan(shape, self.mixing_layers(shape))

    def policy(self, row: Row, shape: Shape) -> Policy | None:
        if not row.mixes:
            return None
        return LearnedResidual(
            init_first=self.init_first, init_own=self.init_own, granularity=self.granularity, tie=self.tie, shape=shape
        )

    def neutral(self, shape: Shape) -> dict[str, Any]:
        return {"init_first": 0.0, "init_own": 1.0}

    def formula(self, shape: Shape) -> str:
        own = {"free": f"l2_n V_n (l2 from {self.init_own:g})", "lerp": "(1 - l1_n) V_n", "own_one": "V_n"}[self.tie]
        per = "" if self.granularity == "scalar" else f", one weight per {self.granularity}"
        layers = layer_names(self.mixing_layers(shape))
        return f"V_n <- l1_n V_1 + {own} for n in {layers}, l1 from {self.init_first:g}{per}, trained"
