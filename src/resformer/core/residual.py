"""What the ResFormer forms share: a layer reads one earlier value and mixes it into its own with two weights.

Shapes: values `[B, T, H_kv, D]`; weights `[1]`, `[H_kv, 1]` or `[H_kv, D]`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from .mixing import Weight, weighted_sum
from .plan import Plan, Read, Row, What, link, select_layers
from .policy import Policy, Shape, declare_parameters
from .registry import Variant

Granularity = Literal["scalar", "head", "channel"]
Tie = Literal["free", "lerp", "own_one"]
Numbers = float | tuple[float, ...]
Source = int | Literal["previous"]


@dataclass(frozen=True, kw_only=True)
class SourceForm(Variant):
    """A variant whose mixing layers each read one earlier layer.

    Options:
        source: the layer that is read: a number from 1 (only later layers mix), or "previous" for the layer before.
        layers: which layers mix: "all" (those after the source), "last:k", "last_third" or a list.
    """

    source: Source = 1
    layers: str | tuple[int, ...] = "all"

    def first_source(self, shape: Shape) -> int:
        """The lowest layer that is read.

        Raises:
            ValueError: if the model has no such layer, or none after it.
        """
        if self.source == "previous":
            return 1
        assert isinstance(self.source, int)
        if self.source < 1 or (self.source >= shape.layers and self.source > 1):
            raise ValueError(
                f"source is {self.source}, but only a layer from 1 to {max(1, shape.layers - 1)} has layers after it; "
                "choose one of these"
            )
        return self.source

    def mixing_layers(self, shape: Shape) -> tuple[int, ...]:
        """The layers that the option `layers` names (numbers from 1)."""
        lenient = self.layers == type(self).options()["layers"]
        return select_layers(self.layers, shape.layers, lenient=lenient, after=self.first_source(shape))

    def source_of(self, layer: int) -> int:
        """The layer that `layer` reads."""
        return layer - 1 if self.source == "previous" else int(self.source)

    def source_plan(self, shape: Shape, *, what: What = "value", coefficients: int = 0) -> Plan:
        """Every layer owns its value; the mixing ones also read a raw tensor of their source. The mixed value is what
        is cached.
        """
        layers = self.mixing_layers(shape)
        return link(
            Row(layer=n, reads=(Read(layer=self.source_of(n), what=what),), coefficients=coefficients)
            if n in layers
            else Row(layer=n)
            for n in range(1, shape.layers + 1)
        )

    def plan(self, shape: Shape) -> Plan:
        return self.source_plan(shape)

    def source_name(self, letter: str = "V") -> str:
        """The source in a formula: "V_1", or "V_(n-1)"."""
        return f"{letter}_(n-1)" if self.source == "previous" else f"{letter}_{self.source}"

    def where(self, shape: Shape) -> str:
        """The mixing layers in a formula: "n in 2..8"."""
        return f"n in {layer_names(self.mixing_layers(shape))}"


class FixedResidual(Policy):
    """`first * V_1 + own * V_n` with constants: numbers, or one number for each head or channel."""

    def __init__(self, *, first: Numbers, own: Numbers, size: tuple[int, ...] = (1,)) -> None:
        super().__init__()
        self.first, self.own, self.size = first, own, size

    def weight(self, value: Numbers, like: Tensor) -> Weight:
        """A float, or an fp32 tensor of the granularity's size."""
        if isinstance(value, tuple):
            return torch.tensor(value, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device).view(
                self.size
            )
        return float(value)

    def mix(
        self, own: Tensor | None, reads: Sequence[Tensor], hidden: Tensor, coefficients: Sequence[Tensor]
    ) -> Tensor:
        assert own is not None
        return weighted_sum(self.weight(self.first, own), reads[0], self.weight(self.own, own), own)

    def coefficient_map(self, coefficients: Sequence[Tensor]) -> dict[str, float]:
        return {"first": mean(self.first), "own": mean(self.own)}


@dataclass(frozen=True, kw_only=True)
class FixedForm(SourceForm):
    """V_n <- first V_1 + own V_n with constants: what the forms without parameters share; they differ in defaults.

    Options:
        first: weight of V_1; with a finer granularity a number, or one for each KV head (or channel, heads in order).
        own: weight of the layer's own value, likewise.
        granularity: what `first` and `own` may list: nothing ("scalar"), KV heads ("head") or channels ("channel").
        tie: "free" (as given), "lerp" (own = 1 - first) or "own_one" (own = 1); the latter two set `own`.
        source, layers: see `SourceForm`.
    """

    first: Numbers
    own: Numbers
    granularity: Granularity = "scalar"
    tie: Tie = "free"

    def weights(self, shape: Shape) -> tuple[Numbers, Numbers]:
        """The weights on V_1 and on V_n.

        Raises:
            ValueError: a list of the wrong length, or an `own` that contradicts `tie`.
        """
        size = weight_size(self.granularity, shape)
        count = size[0] * size[-1] if len(size) == 2 else 0
        for name, value in (("first", self.first), ("own", self.own)):
            if isinstance(value, tuple) and len(value) != count:
                expected = "a number" if self.granularity == "scalar" else f"a number or {count} of them"
                raise ValueError(
                    f"{name} is a list of {len(value)} numbers; granularity {self.granularity!r} takes {expected}"
                )
        if self.tie == "free":
            return self.first, self.own
        if self.tie == "own_one":
            own: Numbers = 1.0
        else:
            own = tuple(1 - x for x in self.first) if isinstance(self.first, tuple) else 1 - self.first
        if self.own != type(self).options()["own"] and not close(self.own, own):
            raise ValueError(f"own is {self.own}, but tie {self.tie!r} makes it {own}; leave one of them out")
        return self.first, own

    def check(self, shape: Shape) -> None:
        self.weights(shape)
        super().check(shape)

    def policy(self, row: Row, shape: Shape) -> Policy | None:
        if not row.mixes:
            return None
        first, own = self.weights(shape)
        return FixedResidual(first=first, own=own, size=weight_size(self.granularity, shape))

    def neutral(self, shape: Shape) -> dict[str, Any] | None:
        return {"first": 0.0, "own": 1.0}

    def formula(self, shape: Shape) -> str:
        first, own = self.weights(shape)
        text = f"V_n <- {term(first, self.source_name())} + {term(own, 'V_n')} for {self.where(shape)}"
        return text.replace("+ -", "- ")


class LearnedResidual(Policy):
    """`l1 * V_1 + l2 * V_n` with both trained; tied as l2 = 1 - l1 ("lerp") or l2 = 1 ("own_one") on request.

    Parameters: `first` (l1) and, when `tie` is "free", `own` (l2).
    """

    first: Tensor
    own: Tensor

    def __init__(self, *, init_first: float, init_own: float, granularity: Granularity, tie: Tie, shape: Shape) -> None:
        super().__init__()
        self.init_first, self.init_own, self.tie = float(init_first), float(init_own), tie
        self.size = weight_size(granularity, shape)
        declare_parameters(self)

    def initial_values(self) -> dict[str, Tensor]:
        values = {"first": torch.full(self.size, self.init_first)}
        if self.tie == "free":
            values["own"] = torch.full(self.size, self.init_own)
        return values

    def weights(self) -> tuple[Tensor, Weight]:
        """The weights on V_1 and on V_n."""
        return self.first, self.own if self.tie == "free" else tied(self.first, self.tie)

    def mix(
        self, own: Tensor | None, reads: Sequence[Tensor], hidden: Tensor, coefficients: Sequence[Tensor]
    ) -> Tensor:
        assert own is not None
        first_weight, own_weight = self.weights()
        return weighted_sum(first_weight, reads[0], own_weight, own)

    def coefficient_map(self, coefficients: Sequence[Tensor]) -> dict[str, float]:
        first_weight, own_weight = self.weights()
        return {"first": mean(first_weight), "own": mean(own_weight)}


def weight_size(granularity: Granularity, shape: Shape) -> tuple[int, ...]:
    """Size of a weight that broadcasts over values `[B, T, H_kv, D]`."""
    return {"scalar": (1,), "head": (shape.kv_heads, 1), "channel": (shape.kv_heads, shape.head_dim)}[granularity]


def tied(first: Tensor, tie: Tie) -> Weight:
    """The weight on V_n that follows from the one on V_1."""
    return 1.0 - first if tie == "lerp" else 1.0


def check_own(tie: Tie, init_own: float) -> None:
    """Refuse an initial own weight that `tie` leaves without a parameter.

    Raises:
        ValueError: if it is not the default.
    """
    if tie != "free" and init_own != 0.5:
        raise ValueError(f"init_own is {init_own:g}, but tie {tie!r} trains no own weight; leave one of them out")


def own_name(tie: Tie, init_own: float) -> str:
    """The own term in a formula."""
    return {"free": f"l2_n V_n (l2 from {init_own:g})", "lerp": "(1 - l1_n) V_n", "own_one": "V_n"}[tie]


def per_name(granularity: Granularity) -> str:
    """How fine the weights are, in a formula; nothing for scalars."""
    return "" if granularity == "scalar" else f", one weight per {granularity}"


def close(left: Numbers, right: Numbers) -> bool:
    """Equal but for rounding."""
    if isinstance(left, tuple) or isinstance(right, tuple):
        return isinstance(left, tuple) and isinstance(right, tuple) and all(map(close, left, right))
    return math.isclose(left, right, abs_tol=1e-9)


def mean(value: Numbers | Tensor) -> float:
    """Mean over heads or channels."""
    if isinstance(value, tuple):
        return sum(value) / len(value)
    return float(value.mean()) if isinstance(value, Tensor) else float(value)


def term(weight: Numbers, name: str) -> str:
    """A weighted term of a formula: "2 V_1", "V_n" for a weight of 1, or how many constants there are."""
    if isinstance(weight, tuple):
        return f"c {name} ({len(weight)} constants c, mean {mean(weight):g})"
    if abs(weight) == 1:
        return name if weight > 0 else f"-{name}"
    return f"{weight:g} {name}"


def layer_names(layers: Sequence[int]) -> str:
    """Layer numbers as a short text: "2..8", "6, 8" or "none"."""
    if not layers:
        return "none"
    if len(layers) > 2 and list(layers) == list(range(layers[0], layers[-1] + 1)):
        return f"{layers[0]}..{layers[-1]}"
    return ", ".join(map(str, layers))
