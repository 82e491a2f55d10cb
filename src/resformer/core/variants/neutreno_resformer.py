"""NeuTRENO on top of the identity form, as in the official code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..plan import Row
from ..policy import Policy, Shape
from ..registry import register_variant
from ..residual import SourceForm
from .neutreno import Neutreno


@register_variant("neutreno_resformer")
@dataclass(frozen=True, kw_only=True)
class NeutrenoResFormer(SourceForm):
    """M_n = first V_1 + own V_n; U_n = A_n M_n + strength (V_1 - M_n), n >= 2.

    Options:
        strength: lambda of the correction.
        first: weight of V_1 in the mix.
        own: weight of the layer's own value in the mix.
        source: the layer that is read in place of layer 1, or "previous" for the layer before.
        layers: which layers mix: "all" (those after the source), "last:k", "last_third" or a list.
    """

    equation = "M_n = 0.5 V_1 + 0.5 V_n, U_n = A_n M_n + 0.2 (V_1 - M_n), n >= 2"
    reference = "Zhou et al., arXiv 2410.17897v2, figure 7; values of the official code"
    when = "To see whether the two corrections add up; the paper reports that they do a little."

    strength: float = 0.2
    first: float = 0.5
    own: float = 0.5

    def policy(self, row: Row, shape: Shape) -> Policy | None:
        return Neutreno(strength=self.strength, first=self.first, own=self.own) if row.mixes else None

    def neutral(self, shape: Shape) -> dict[str, Any] | None:
        return {"strength": 0.0, "first": 0.0, "own": 1.0}

    def formula(self, shape: Shape) -> str:
        source = self.source_name()
        return (
            f"M_n = {self.first:g} {source} + {self.own:g} V_n, U_n = A_n M_n + {self.strength:g} ({source} - M_n) "
            f"for {self.where(shape)}"
        )
