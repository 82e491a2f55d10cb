"""SVFormer: later layers attend to the first layer's value and have none of their own, so the cache is about half."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..mixing import upcast
from ..plan import Plan, Read, Row, link, select_layers
from ..policy import Policy, Shape, declare_parameters
from ..registry import Variant, register_variant
from ..residual import layer_names


class SharedValue(Policy):
    """The value is the source layer's, all tokens of it; with `gamma` the layer has a trained scale of its own.

    The scale commutes with attention: gamma (A V_1) = A (gamma V_1). It is applied to the output, which in decoding is
    one token, where the value is all of them. Parameter: `gamma` `[1]`, from 1.
    """

    corrects_heads = False
    gamma: Tensor

    def __init__(self, *, gamma: bool) -> None:
        super().__init__()
        self.corrects = gamma
        declare_parameters(self)

    def initial_values(self) -> dict[str, Tensor]:
        return {"gamma": torch.ones(1)} if self.corrects else {}

    def correct(self, out: Tensor, mixed: Tensor, own: Tensor | None, reads: Sequence[Tensor]) -> Tensor:
        return (upcast(out) * self.gamma).to(out.dtype)

    def coefficient_map(self, coefficients: Sequence[Tensor]) -> dict[str, float]:
        return {"first": float(self.gamma) if self.corrects else 1.0, "own": 0.0}


@register_variant("svformer")
@dataclass(frozen=True, kw_only=True)
class SVFormer(Variant):
    """U_n = A_n V_1; layers that share have no W_v and no value slot in the cache.

    Options:
        layers: which layers share: "all" (2..N), "last:k", "last_third" or a list from 2.
        anchors: layers that take a fresh value; a sharing layer reads the nearest one before it. Layer 1 is always one.
        gamma: a trained scale on the value, one for each sharing layer, from 1.
        key_group: layers in groups of so many share the keys of the group's first layer as well (SVFormer + CLA); 1 =
            every layer has its own.
    """

    equation = "U_n = A_n V_1, n >= 2, without W_v of layer n"
    reference = "Zhou et al., arXiv 2410.17897v2, eq. 10; anchors: figure 17; with CLA: section 4.6"
    when = "Long contexts with little memory for the cache. `layers='last_third'` with `gamma=true` costs less quality."
    uncertain = (
        "Ahead early in training and overtaken later, the later the longer sequences are (paper, figure 14); a rival "
        "study finds whole-depth sharing harmful and sharing in the last third useful (arXiv 2606.02780)."
    )

    layers: str | tuple[int, ...] = "all"
    anchors: tuple[int, ...] = (1,)
    gamma: bool = False
    key_group: int = 1

    def sharing(self, shape: Shape) -> dict[int, int]:
        """Sharing layer -> the layer whose value it reads."""
        if len(set(self.anchors)) != len(self.anchors):
            raise ValueError(f"anchors is {list(self.anchors)}; a layer is named twice")
        outside = [n for n in self.anchors if not 1 <= n <= shape.layers]
        if outside:
            raise ValueError(f"anchors is {list(self.anchors)}; the model has layers 1 to {shape.layers}")
        if 1 not in self.anchors:
            raise ValueError(
                f"anchors is {list(self.anchors)}; it must contain layer 1, which has no earlier value to read"
            )
        layers = select_layers(self.layers, shape.layers)
        both = [] if isinstance(self.layers, str) else [n for n in layers if n in self.anchors]
        if both:
            raise ValueError(f"layers and anchors both name {both}: a layer either shares a value or takes a fresh one")
        return {n: max(a for a in self.anchors if a < n) for n in layers if n not in self.anchors}

    def plan(self, shape: Shape) -> Plan:
        if not 1 <= self.key_group <= max(1, shape.layers):
            raise ValueError(f"key_group is {self.key_group}; the model has {shape.layers} layers to group")
        sharing = self.sharing(shape)
        rows = []
        for n in range(1, shape.layers + 1):
            leader = n - (n - 1) % self.key_group
            key = () if leader == n else (Read(layer=leader, what="key", state="stored"),)
            value = (Read(layer=sharing[n], state="stored"),) if n in sharing else ()
            rows.append(
                Row(
                    layer=n,
                    owns_value=not value,
                    owns_key=not key,
                    stores="none" if value else "mixed",
                    reads=(*key, *value),
                )
            )
        return link(rows)

    def policy(self, row: Row, shape: Shape) -> Policy | None:
        return SharedValue(gamma=self.gamma) if row.mixes else None

    def neutral(self, shape: Shape) -> dict[str, Any] | None:
        return {"anchors": list(range(1, shape.layers + 1))}

    def formula(self, shape: Shape) -> str:
        sharing = self.sharing(shape)
        sources = sorted(set(sharing.values()))
        value = "V_1" if sources in ([1], []) else f"the value of the nearest earlier layer of {layer_names(sources)}"
        scale = "g_n " if self.gamma else ""
        keys = "" if self.key_group == 1 else f"; keys shared in groups of {self.key_group}"
        return f"U_n = {scale}A_n {value} for n in {layer_names(sorted(sharing))}, which have no W_v{keys}"
