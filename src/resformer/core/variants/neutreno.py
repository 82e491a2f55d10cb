"""NeuTRENO: a correction towards the first layer's value after attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..mixing import weighted_sum
from ..plan import Row
from ..policy import Policy, Shape
from ..registry import register_variant
from ..residual import FixedResidual, SourceForm


class Neutreno(FixedResidual):
    """`A M + strength (V_1 - M)` with M = first V_1 + own V_n.

    The correction is per token and head, after attention and before o_proj: no attention weights on it.
    """

    corrects = True

    def __init__(self, *, strength: float, first: float, own: float) -> None:
        super().__init__(first=first, own=own)
        self.strength = float(strength)

    def correct(self, out: Tensor, mixed: Tensor, own: Tensor | None, reads: Sequence[Tensor]) -> Tensor:
        return weighted_sum(self.strength, reads[0] - mixed, 1.0, out)

    def coefficient_map(self, coefficients: Sequence[Tensor]) -> dict[str, float]:
        return {}  # the correction is no weight on a value that is attended to


@register_variant("neutreno")
@dataclass(frozen=True, kw_only=True)
class NeutrenoVariant(SourceForm):
    """U_n = A_n V_n + strength (V_1 - V_n), n >= 2; KV heads are repeated to query heads for the correction.

    Options:
        strength: lambda; the paper swept 0.2 to 0.8 and found 0.4 best for language models (0.6 in the original).
        source: the layer that is read in place of layer 1, or "previous" for the layer before.
        layers: which layers are corrected: "all" (those after the source), "last:k", "last_third" or a list.
    """

    equation = "U_n = A_n V_n + 0.4 (V_1 - V_n), n >= 2"
    reference = "Nguyen et al., NeuTRENO, NeurIPS 2023; as in Zhou et al., arXiv 2410.17897v2, eq. 8"
    when = "As the baseline that the paper compares with; it needs the new tokens' values only."

    strength: float = 0.4

    def policy(self, row: Row, shape: Shape) -> Policy | None:
        return Neutreno(strength=self.strength, first=0.0, own=1.0) if row.mixes else None

    def neutral(self, shape: Shape) -> dict[str, Any] | None:
        return {"strength": 0.0}

    def formula(self, shape: Shape) -> str:
        return f"U_n = A_n V_n + {self.strength:g} ({self.source_name()} - V_n) for {self.where(shape)}"
