"""SVFormer: later layers attend to the first layer's value and have none of their own, so the cache is about half."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..plan import Plan, Read, Row, link
from ..policy import Policy, Shape
from ..registry import Variant, register_variant
from ..residual import layer_names


class SharedValue(Policy):
    """The value is the source layer's, all tokens of it."""

    def mix(
        self, own: Tensor | None, reads: Sequence[Tensor], hidden: Tensor, coefficients: Sequence[Tensor]
    ) -> Tensor:
        return reads[0]

    def coefficient_map(self, coefficients: Sequence[Tensor]) -> dict[str, float]:
        return {"first": 1.0, "own": 0.0}


@register_variant("svformer")
@dataclass(frozen=True, kw_only=True)
class SVFormer(Variant):
    """U_n = A_n V_1; layers that share have no W_v and no value slot in the cache.

    Options:
        layers: which layers share: "all" (2..N), "last:k", "last_third" or a list from 2.
        anchors: layers that take a fresh value; a sharing layer reads the nearest one before it. Layer 1 is always one.
    """

    equation = "U_n = A_n V_1, n >= 2, without W_v of layer n"
    source = "Zhou et al., arXiv 2410.17897v2, eq. 10; anchors: figure 17"

    layers: str | tuple[int, ...] = "all"
    anchors: tuple[int, ...] = (1,)

    def sharing(self, shape: Shape) -> dict[int, int]:
        """Sharing layer -> the layer whose value it reads."""
        outside = [n for n in self.anchors if not 1 <= n <= shape.layers]
        if outside:
            raise ValueError(f"anchors is {list(self.anchors)}; the model has layers 1 to {shape.layers}")
        if 1 not in self.anchors:
            raise ValueError(
                f"anchors is {list(self.anchors)}; it must contain layer 1, which has no earlier value to read"
            )
        return {n: max(a for a in self.anchors if a < n) for n in self.mixing_layers(shape) if n not in self.anchors}

    def plan(self, shape: Shape) -> Plan:
        sharing = self.sharing(shape)
        return link(
            Row(layer=n, owns_value=False, stores="none", reads=(Read(layer=sharing[n], state="stored"),))
            if n in sharing
            else Row(layer=n)
            for n in range(1, shape.layers + 1)
        )

    def policy(self, row: Row, shape: Shape) -> Policy | None:
        return SharedValue() if row.mixes else None

    def neutral(self, shape: Shape) -> dict[str, Any]:
        return {"anchors": list(range(1, shape.layers + 1))}

    def formula(self, shape: Shape) -> str:
        sources = sorted(set(self.sharing(shape).values()))
        value = "V_1" if sources in ([1], []) else f"the value of the nearest earlier layer of {layer_names(sources)}"
        return f"U_n = A_n {value} for n in {layer_names(sorted(self.sharing(shape)))}, which have no W_v"
