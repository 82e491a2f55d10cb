"""Constant-ResFormer: one strength on V_1 for every layer, the layer's own value kept whole."""

from __future__ import annotations

from dataclasses import dataclass

from ..registry import register_variant
from ..residual import FixedForm, Numbers


@register_variant("constant")
@dataclass(frozen=True, kw_only=True)
class Constant(FixedForm):
    """V_n <- first V_1 + V_n; the paper swept `first` over 0.2 ... 5 and found 2 best at 82M."""

    equation = "V_n <- 2 V_1 + V_n, n >= 2"
    reference = "Zhou et al., arXiv 2410.17897v2, figure 8: U_n = A_n (V_n + lambda V_1)"
    when = (
        "When V_1 should come strongly without a parameter: at 82M parameters the paper found 2 best of 0.2, 0.5, "
        "0.8, 1, 2, 5."
    )
    uncertain = "Which strength is best at other sizes."

    first: Numbers = 2.0
    own: Numbers = 1.0
