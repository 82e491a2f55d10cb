"""Cross-layer sharing of keys, values or queries in groups of adjacent layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ..plan import Plan, Read, Row, link
from ..policy import Shape
from ..registry import Variant, register_variant


@register_variant("cla")
@dataclass(frozen=True, kw_only=True)
class CrossLayerAttention(Variant):
    """The layers of a group use the first one's keys and values; the others have no projections for them and no slot in
    the cache.

    With `group` = the number of layers and `share` "k" or "q" every layer uses the first one's keys or queries
    (figure 16 of the paper); `share` "k" or "v" in pairs is its figure 5.

    Options:
        group: layers in a group; the last one may be smaller.
        share: what they share: "kv" (CLA), "k", "v" or "q".
    """

    equation = "K_n, V_n = K_m, V_m of the first layer m of n's group"
    reference = "Brandon et al., CLA, arXiv 2405.12981; as compared in Zhou et al., arXiv 2410.17897v2, section 4.6"
    when = "As the rival of SVFormer at half the cache (`kv` in pairs), or to see what sharing keys or queries costs."

    group: int = 2
    share: Literal["kv", "k", "v", "q"] = "kv"

    def plan(self, shape: Shape) -> Plan:
        lenient = self.group == type(self).options()["group"]
        if self.group < 1 or (self.group > shape.layers and not lenient):
            raise ValueError(f"group is {self.group}; expected 1 to {shape.layers}, the number of layers")
        return link(self._row(n) for n in range(1, shape.layers + 1))

    def _row(self, layer: int) -> Row:
        leader = layer - (layer - 1) % self.group
        if leader == layer:
            return Row(layer=layer)
        if self.share == "q":
            return Row(layer=layer, owns_query=False, reads=(Read(layer=leader, what="query"),))
        reads = []
        if "k" in self.share:
            reads.append(Read(layer=leader, what="key", state="stored"))
        if "v" in self.share:
            reads.append(Read(layer=leader, what="value", state="stored"))
        owns_value = "v" not in self.share
        return Row(
            layer=layer,
            owns_key="k" not in self.share,
            owns_value=owns_value,
            stores="mixed" if owns_value else "none",
            reads=tuple(reads),
        )

    def neutral(self, shape: Shape) -> dict[str, Any] | None:
        return {"group": 1}

    def formula(self, shape: Shape) -> str:
        what = {"kv": "K and V", "k": "K", "v": "V", "q": "Q"}[self.share]
        return f"{what} of the first layer of every group of {self.group}"
