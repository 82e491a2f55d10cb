"""Identity-ResFormer: the mean of the first layer's value and the layer's own."""

from __future__ import annotations

from dataclasses import dataclass

from ..registry import register_variant
from ..residual import FixedForm, Numbers


@register_variant("identity")
@dataclass(frozen=True, kw_only=True)
class Identity(FixedForm):
    """V_n <- first V_1 + own V_n with constants, 0.5 each, in all layers from 2."""

    equation = "V_n <- 0.5 V_1 + 0.5 V_n, n >= 2"
    reference = (
        "Zhou et al., Value Residual Learning, arXiv 2410.17897v2, eq. 7; lambda 0.5/0.5 as in the official code"
    )
    when = (
        "As the plainest form: nothing to train and nothing to choose. It is the one of the paper's first version "
        "and of the official code."
    )

    first: Numbers = 0.5
    own: Numbers = 0.5
