"""Real cross-layer attention: queries attend to the own keys and values and to the first layer's. A control."""

from __future__ import annotations

from dataclasses import dataclass

from ..plan import Plan, Read, Row, link
from ..policy import Shape
from ..registry import register_variant
from ..residual import SourceForm


@register_variant("cross_attention")
@dataclass(frozen=True, kw_only=True)
class CrossAttention(SourceForm):
    """U_n = softmax(Q_n [K_n; K_1]^T / sqrt(d)) [V_n; V_1], n >= 2: one softmax, the causal mask on each half.

    Keys are the ones with positions. Costs twice the attention scores; needs masks that only the "eager" and "sdpa"
    implementations take.

    Options:
        source: the layer that is attended to besides, in place of layer 1, or "previous" for the layer before.
        layers: which layers do so: "all" (those after the source), "last:k", "last_third" or a list.
    """

    equation = "U_n = softmax(Q_n [K_n; K_1]^T / sqrt(d)) [V_n; V_1], n >= 2"
    reference = "Zhou et al., arXiv 2410.17897v2, eq. 2"
    when = "As a control: it is what ResFormer approximates. The paper finds it slightly worse than ResFormer."

    def plan(self, shape: Shape) -> Plan:
        layers = self.mixing_layers(shape)
        return link(
            Row(layer=n, extends=True, reads=self._reads(n)) if n in layers else Row(layer=n)
            for n in range(1, shape.layers + 1)
        )

    def _reads(self, layer: int) -> tuple[Read, Read]:
        source = self.source_of(layer)
        return (
            Read(layer=source, what="key", state="stored"),
            Read(layer=source, what="value", state="stored"),
        )

    def formula(self, shape: Shape) -> str:
        k, v = self.source_name("K"), self.source_name("V")
        return f"U_n = softmax(Q_n [K_n; {k}]^T / sqrt(d)) [V_n; {v}] for {self.where(shape)}"
