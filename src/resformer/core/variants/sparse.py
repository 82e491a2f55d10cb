"""Sparse-ResFormer: a strong residual on the last layers only."""

from __future__ import annotations

from dataclasses import dataclass

from ..registry import register_variant
from ..residual import FixedForm, Numbers


@register_variant("sparse")
@dataclass(frozen=True, kw_only=True)
class Sparse(FixedForm):
    """V_n <- first V_1 + V_n on chosen layers, plain attention elsewhere; the paper's best for 8 layers: 6 to 8,
    strength 5.

    That the own value keeps weight 1 is by analogy with the constant form; the paper's text does not say. The default
    "last:3" takes the mixing layers that there are in models of fewer layers.
    """

    equation = "V_n <- 5 V_1 + V_n on the last 3 layers"
    reference = "Zhou et al., Value Residual Learning, ACL 2025 (arXiv 2410.17897v5), Sparse-ResFormer"
    when = (
        "When no parameter is wanted and the depth is near 8: the paper's best hand-found setting there (layers 6 "
        "to 8, strength 5)."
    )
    uncertain = (
        "That the own value keeps weight 1 is by analogy with the constant form; for other depths than 8, that it "
        "is the last three layers."
    )

    first: Numbers = 5.0
    own: Numbers = 1.0
    layers: str | tuple[int, ...] = "last:3"
