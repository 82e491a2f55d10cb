"""The baseline: every layer attends to its own value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..policy import Shape
from ..registry import Variant, register_variant


@register_variant("transformer")
@dataclass(frozen=True, kw_only=True)
class Transformer(Variant):
    """U_n = A_n V_n in every layer."""

    equation = "U_n = A_n V_n"
    reference = "Vaswani et al. 2017; the Llama block of Touvron et al. 2023"
    when = "As the baseline of every comparison: key for key and logit for logit it is Llama."

    def neutral(self, shape: Shape) -> dict[str, Any]:
        return {}
