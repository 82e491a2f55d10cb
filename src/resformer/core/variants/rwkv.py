"""RWKV-7's way to the first value: a low-rank gate for each token and channel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..mixing import upcast
from ..plan import Row
from ..policy import Policy, Shape, declare_parameters
from ..registry import register_variant
from ..residual import SourceForm


class LowRankGate(Policy):
    """`V_n + (V_1 - V_n) sigmoid(base + (h down) up)`, the gate in fp32 and per channel.

    Parameters: `base` `[H_kv D]`, `down` `[C, r]` from zero, `up` `[r, H_kv D]` from an orthogonal matrix times 0.1.
    """

    matmuls = ("down", "up")
    base: Tensor
    down: Tensor
    up: Tensor

    def __init__(self, *, rank: int, shape: Shape) -> None:
        super().__init__()
        self.rank, self.hidden_size, self.heads = rank, shape.hidden_size, (shape.kv_heads, shape.head_dim)
        declare_parameters(self)

    def initial_values(self) -> dict[str, Tensor]:
        width = self.heads[0] * self.heads[1]
        channel = torch.arange(width, dtype=torch.float32) / max(1, width - 1)
        up = torch.empty(self.rank, width)
        nn.init.orthogonal_(up, gain=0.1 * math.sqrt(max(1.0, self.rank / width)))
        return {"base": 0.73 - 0.4 * (channel - 0.5), "down": torch.zeros(self.hidden_size, self.rank), "up": up}

    def mix(
        self, own: Tensor | None, reads: Sequence[Tensor], hidden: Tensor, coefficients: Sequence[Tensor]
    ) -> Tensor:
        assert own is not None
        hidden = upcast(hidden)
        logits = upcast(self.base) + hidden @ self.down.to(hidden.dtype) @ self.up.to(hidden.dtype)
        gate = torch.sigmoid(logits).view(*hidden.shape[:-1], *self.heads)
        return (own + (reads[0] - own) * gate).to(own.dtype)


@register_variant("rwkv")
@dataclass(frozen=True, kw_only=True)
class RWKV(SourceForm):
    """V_n <- V_n + (V_1 - V_n) sigmoid(v0 + (h_n v1) v2), n >= 2: per token and channel, low rank.

    The gate is the weight of V_1; it starts between 0.63 and 0.72. RWKV feeds it the token-shifted input; a
    Transformer block has no token shift, so h_n is the normed input of attention.

    Options:
        rank: of the gate; null for RWKV-7's max(32, 32 round(1.7 sqrt(C) / 32)), C the hidden size.
        source: the layer that is read in place of layer 1, or "previous" for the layer before.
        layers: which layers mix: "all" (those after the source), "last:k", "last_third" or a list.
    """

    equation = "V_n <- V_n + (V_1 - V_n) sigmoid(v0 + (h_n v1) v2), n >= 2"
    reference = "RWKV-7 (Peng et al. 2025) and its public training code: v_first, v0, v1, v2"
    when = "When channels should choose for themselves, at about 2 r C extra parameters a layer."
    uncertain = "No ablation of the gate alone is published; inits are those of RWKV-7's code."

    rank: int | None = None

    def gate_rank(self, shape: Shape) -> int:
        """The rank that is used."""
        return max(32, 32 * round(1.7 * math.sqrt(shape.hidden_size) / 32)) if self.rank is None else self.rank

    def check(self, shape: Shape) -> None:
        if self.rank is not None and not 1 <= self.rank <= shape.hidden_size:
            raise ValueError(f"rank is {self.rank}; expected 1 to {shape.hidden_size}, the hidden size")
        super().check(shape)

    def policy(self, row: Row, shape: Shape) -> Policy | None:
        return LowRankGate(rank=self.gate_rank(shape), shape=shape) if row.mixes else None

    def formula(self, shape: Shape) -> str:
        return (
            f"V_n <- V_n + ({self.source_name()} - V_n) sigmoid(v0 + (h_n v1) v2) for {self.where(shape)}, "
            f"rank {self.gate_rank(shape)}"
        )
