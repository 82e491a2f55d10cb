"""Identity mapping: the values of all earlier layers pass by attention. A control of the paper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..mixing import upcast
from ..plan import Plan, Read, Row, link
from ..policy import Policy, Shape
from ..registry import Variant, register_variant


class MeanOfEarlier(Policy):
    """`A V_n + mean_i V_i`, without attention weights on the mean."""

    corrects = True

    def correct(self, out: Tensor, mixed: Tensor, own: Tensor | None, reads: Sequence[Tensor]) -> Tensor:
        total = upcast(reads[0])
        for value in reads[1:]:
            total = total + value
        return (out + total / len(reads)).to(out.dtype)

    def mix(
        self, own: Tensor | None, reads: Sequence[Tensor], hidden: Tensor, coefficients: Sequence[Tensor]
    ) -> Tensor:
        assert own is not None
        return own


@register_variant("identity_mapping")
@dataclass(frozen=True, kw_only=True)
class IdentityMapping(Variant):
    """U_n = A_n V_n + 1/(n-1) sum_{i<n} V_i with raw values, n >= 2."""

    equation = "U_n = A_n V_n + 1/(n-1) sum_{i<n} V_i, n >= 2"
    reference = "Zhou et al., arXiv 2410.17897v2, eq. 6"
    when = "As a control: earlier values must pass through the layer's own attention. The paper finds this form bad."

    def plan(self, shape: Shape) -> Plan:
        return link(Row(layer=n, reads=tuple(Read(layer=i) for i in range(1, n))) for n in range(1, shape.layers + 1))

    def policy(self, row: Row, shape: Shape) -> Policy | None:
        return MeanOfEarlier() if row.mixes else None
