"""Dense-ResFormer: every layer mixes the values of all layers before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..mixing import upcast
from ..plan import Plan, Read, Row, link
from ..policy import Policy, Shape, declare_parameters
from ..registry import register_variant
from ..residual import Granularity, SourceForm, Tie, check_own, mean, per_name, weight_size


class DenseResidual(Policy):
    """`sum_i w_i V_i + w_n V_n` over the sources and the layer's own value.

    Parameter: `weights` `[sources + 1, 1]`, `[sources + 1, H_kv, 1]` or `[sources + 1, H_kv, D]`, the own weight last;
    without the last entry when it is tied. No parameter in mode "mean".
    """

    weights: Tensor

    def __init__(
        self, *, sources: int, init_first: float, init_own: float, size: tuple[int, ...], tie: Tie, learned: bool
    ) -> None:
        super().__init__()
        self.sources, self.init_first, self.init_own = sources, float(init_first), float(init_own)
        self.size, self.tie, self.learned = size, tie, learned
        declare_parameters(self)

    def initial_values(self) -> dict[str, Tensor]:
        if not self.learned:
            return {}
        start = [self.init_first, *[0.0] * (self.sources - 1)] + [self.init_own] * (self.tie == "free")
        column = torch.tensor(start).view(-1, *[1] * len(self.size))
        return {"weights": column.expand(-1, *self.size).contiguous()}

    def all_weights(self) -> list[float | Tensor]:
        """One weight for each source, then the own one."""
        if not self.learned:
            return [1.0 / (self.sources + 1)] * (self.sources + 1)
        weights = list(self.weights.unbind())
        if self.tie == "lerp":
            return [*weights, 1.0 - self.weights.sum(0)]
        return [*weights, 1.0] if self.tie == "own_one" else list(weights)

    def mix(
        self, own: Tensor | None, reads: Sequence[Tensor], hidden: Tensor, coefficients: Sequence[Tensor]
    ) -> Tensor:
        assert own is not None
        *weights, own_weight = self.all_weights()
        total = upcast(own) * own_weight
        for value, weight in zip(reads, weights, strict=True):
            total = total + value * weight
        return total.to(own.dtype)

    def coefficient_map(self, coefficients: Sequence[Tensor]) -> dict[str, float]:
        weights = self.all_weights()
        return {"first": mean(weights[0]), "own": mean(weights[-1])}


@register_variant("dense")
@dataclass(frozen=True, kw_only=True)
class Dense(SourceForm):
    """V_n <- l_nn V_n + sum_{i<n} l_ni V_i with the raw values of all earlier layers.

    Options:
        mode: "learnable" (all weights trained) or "mean" (all 1/n, the form of eq. 5).
        init_first: initial weight of the first source; the other sources start at 0.
        init_own: initial own weight (used when `tie` is "free").
        granularity: trained weights per layer ("scalar"), KV head ("head") or channel ("channel").
        tie: "free"; "lerp" (the own weight is 1 minus the sum of the others) or "own_one" (it is 1).
        source: the first layer that is read; all from there on are sources.
        layers: which layers mix: "all" (those after the source), "last:k", "last_third" or a list.
    """

    equation = "V_n <- l_nn V_n + sum_{i<n} l_ni V_i, n >= 2"
    reference = (
        "Zhou et al., Value Residual Learning, ACL 2025 (arXiv 2410.17897v5), Dense-ResFormer; 'mean': v2, eq. 5"
    )
    when = (
        "To see whether values between the first and the last layer add anything; the paper finds that V_1 is enough."
    )
    uncertain = (
        "Whether the paper's sources are raw or mixed values, and how its weights start, is not stated: we take raw."
    )

    # "previous" is left out: `learnable` reads the layer before, this form all of them.
    source: int = 1
    mode: Literal["learnable", "mean"] = "learnable"
    init_first: float = 0.5
    init_own: float = 0.5
    granularity: Granularity = "scalar"
    tie: Tie = "free"

    def check(self, shape: Shape) -> None:
        if self.mode == "mean" and self.granularity != "scalar":
            raise ValueError(
                f"granularity is {self.granularity!r}, but mode 'mean' trains no weights; take 'learnable'"
            )
        if self.mode == "mean" and self.tie != "free":
            raise ValueError(f"tie is {self.tie!r}, but mode 'mean' trains no weights to tie; take 'learnable'")
        if self.mode == "mean" and (self.init_first, self.init_own) != (0.5, 0.5):
            raise ValueError("mode 'mean' trains no weights that init_first and init_own could start; leave them out")
        check_own(self.tie, self.init_own)
        super().check(shape)

    def plan(self, shape: Shape) -> Plan:
        layers, first = self.mixing_layers(shape), self.first_source(shape)
        return link(
            Row(layer=n, reads=tuple(Read(layer=i) for i in range(first, n)) if n in layers else ())
            for n in range(1, shape.layers + 1)
        )

    def policy(self, row: Row, shape: Shape) -> Policy | None:
        if not row.mixes:
            return None
        return DenseResidual(
            sources=len(row.reads),
            init_first=self.init_first,
            init_own=self.init_own,
            size=weight_size(self.granularity, shape),
            tie=self.tie,
            learned=self.mode == "learnable",
        )

    def neutral(self, shape: Shape) -> dict[str, Any] | None:
        return {"init_first": 0.0, "init_own": 1.0}

    def formula(self, shape: Shape) -> str:
        first = self.first_source(shape)
        if self.mode == "mean":
            return f"V_n <- V_n / k + sum_(i={first}..n-1) V_i / k for {self.where(shape)}, k terms in all"
        own = {"free": "l_nn V_n", "lerp": "(1 - sum_i l_ni) V_n", "own_one": "V_n"}[self.tie]
        start = f"l_n{first} from {self.init_first:g}, the others from 0"
        start += f", l_nn from {self.init_own:g}" if self.tie == "free" else ""
        return (
            f"V_n <- {own} + sum_(i={first}..n-1) l_ni V_i for {self.where(shape)}; {start}"
            f"{per_name(self.granularity)}, trained"
        )
