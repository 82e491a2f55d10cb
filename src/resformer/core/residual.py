"""What the ResFormer forms share: a layer reads one earlier value and mixes it into its own with two weights.

Shapes: values `[B, T, H_kv, D]`; weights `[1]`, `[H_kv, 1]` or `[H_kv, D]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from .mixing import weighted_sum
from .plan import Plan, Read, Row, link
from .policy import Policy, Shape, declare_parameters
from .registry import Variant

Granularity = Literal["scalar", "head", "channel"]
Tie = Literal["free", "lerp", "own_one"]


def residual_plan(shape: Shape, layers: Sequence[int], *, coefficients: int = 0) -> Plan:
    """Every layer owns its value; those in `layers` also read the raw value of layer 1. The mixed value is what is
    cached.
    """
    return link(
        Row(layer=n, reads=(Read(layer=1),), coefficients=coefficients) if n in layers else Row(layer=n)
        for n in range(1, shape.layers + 1)
    )


class FixedResidual(Policy):
    """`first * V_1 + own * V_n` with constants."""

    def __init__(self, *, first: float, own: float) -> None:
        super().__init__()
        self.first, self.own = float(first), float(own)

    def mix(
        self, own: Tensor | None, reads: Sequence[Tensor], hidden: Tensor, coefficients: Sequence[Tensor]
    ) -> Tensor:
        assert own is not None
        return weighted_sum(self.first, reads[0], self.own, own)

    def coefficient_map(self, coefficients: Sequence[Tensor]) -> dict[str, float]:
        return {"first": self.first, "own": self.own}


@dataclass(frozen=True, kw_only=True)
class FixedForm(Variant):
    """V_n <- first V_1 + own V_n with constants: what the forms without parameters share; they differ in defaults.

    Options:
        first: weight of V_1.
        own: weight of the layer's own value.
        layers: which layers mix: "all" (2..N), "last:k", "last_third" or a list from 2.
    """

    first: float
    own: float
    layers: str | tuple[int, ...] = "all"

    def plan(self, shape: Shape) -> Plan:
        return residual_plan(shape, self.mixing_layers(shape))

    def policy(self, row: Row, shape: Shape) -> Policy | None:
        return FixedResidual(first=self.first, own=self.own) if row.mixes else None

    def neutral(self, shape: Shape) -> dict[str, Any]:
        return {"first": 0.0, "own": 1.0}

    def formula(self, shape: Shape) -> str:
        return f"V_n <- {self.first:g} V_1 + {self.own:g} V_n for n in {layer_names(self.mixing_layers(shape))}"


class LearnedResidual(Policy):
    """`l1 * V_1 + l2 * V_n` with both trained; tied as l2 = 1 - l1 ("lerp") or l2 = 1 ("own_one") on request.

    Parameters: `first` (l1) and, when `tie` is "free", `own` (l2).
    """

    first: Tensor
    own: Tensor

    def __init__(self, *, init_first: float, init_own: float, granularity: Granularity, tie: Tie, shape: Shape) -> None:
        super().__init__()
        self.init_first, self.init_own, self.tie = float(init_first), float(init_own), tie
        sizes = {"scalar": (1,), "head": (shape.kv_heads, 1), "channel": (shape.kv_heads, shape.head_dim)}
        self.size = sizes[granularity]
        declare_parameters(self)

    def initial_values(self) -> dict[str, Tensor]:
        values = {"first": torch.full(self.size, self.init_first)}
        if self.tie == "free":
            values["own"] = torch.full(self.size, self.init_own)
        return values

    def weights(self) -> tuple[Tensor, float | Tensor]:
        """The weights on V_1 and on V_n."""
        if self.tie == "free":
            return self.first, self.own
        return self.first, 1.0 - self.first if self.tie == "lerp" else 1.0

    def mix(
        self, own: Tensor | None, reads: Sequence[Tensor], hidden: Tensor, coefficients: Sequence[Tensor]
    ) -> Tensor:
        assert own is not None
        first_weight, own_weight = self.weights()
        return weighted_sum(first_weight, reads[0], own_weight, own)

    def coefficient_map(self, coefficients: Sequence[Tensor]) -> dict[str, float]:
        return {
            name: float(torch.as_tensor(weight).mean())
            for name, weight in zip(("first", "own"), self.weights(), strict=True)
        }


def layer_names(layers: Sequence[int]) -> str:
    """Layer numbers as a short text: "2..8", "6, 8" or "none"."""
    if not layers:
        return "none"
    if len(layers) > 2 and list(layers) == list(range(layers[0], layers[-1] + 1)):
        return f"{layers[0]}..{layers[-1]}"
    return ", ".join(map(str, layers))
