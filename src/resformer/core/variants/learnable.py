"""Learnable-ResFormer: both weights are trained, one pair a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..plan import Row
from ..policy import Policy, Shape
from ..registry import register_variant
from ..residual import Granularity, LearnedResidual, SourceForm, Tie, check_own, own_name, per_name


@register_variant("learnable")
@dataclass(frozen=True, kw_only=True)
class Learnable(SourceForm):
    """V_n <- l1_n V_1 + l2_n V_n with l1_n, l2_n trained from 0.5.

    Options:
        init_first: initial l1.
        init_own: initial l2 (used when `tie` is "free").
        granularity: one weight per layer ("scalar", the paper), per KV head ("head") or per channel ("channel").
        tie: "free" (the paper), "lerp" (l2 = 1 - l1) or "own_one" (l2 = 1).
        source: the layer that is read in place of layer 1, or "previous" for the layer before.
        layers: which layers mix: "all" (those after the source), "last:k", "last_third" or a list.
    """

    equation = "V_n <- l1_n V_1 + l2_n V_n, n >= 2, both trained"
    reference = "Zhou et al., Value Residual Learning, ACL 2025 (arXiv 2410.17897v5), Learnable-ResFormer"
    when = "The plain trained form of the paper, and a safe start: two scalars a layer that find their own strength."
    uncertain = (
        "The paper names no exception for these scalars from weight decay or in learning rate; here they do not "
        "decay, and `optim.lambda_lr_scale` scales their rate."
    )

    init_first: float = 0.5
    init_own: float = 0.5
    granularity: Granularity = "scalar"
    tie: Tie = "free"

    def check(self, shape: Shape) -> None:
        check_own(self.tie, self.init_own)
        super().check(shape)

    def policy(self, row: Row, shape: Shape) -> Policy | None:
        if not row.mixes:
            return None
        return LearnedResidual(
            init_first=self.init_first, init_own=self.init_own, granularity=self.granularity, tie=self.tie, shape=shape
        )

    def neutral(self, shape: Shape) -> dict[str, Any] | None:
        return {"init_first": 0.0, "init_own": 1.0}

    def formula(self, shape: Shape) -> str:
        return (
            f"V_n <- l1_n {self.source_name()} + {own_name(self.tie, self.init_own)} for {self.where(shape)}, "
            f"l1 from {self.init_first:g}{per_name(self.granularity)}, trained"
        )
