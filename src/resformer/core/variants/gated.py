"""A gate for each token and KV head on the first layer's value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import linear

from ..mixing import upcast
from ..plan import Row
from ..policy import Policy, Shape, declare_parameters
from ..registry import register_variant
from ..residual import SourceForm

Activation = Literal["tanh", "relu", "sigmoid"]
ACTIVATIONS = {"tanh": torch.tanh, "relu": torch.relu, "sigmoid": torch.sigmoid}
RELU_STD, SIGMOID_BIAS = 0.02, -4.0


class GatedResidual(Policy):
    """`V_n + g(W h) V_1`, g in fp32. Parameters: `weight` `[H_kv, C]`; with a sigmoid `bias` `[H_kv]`."""

    matmuls = ("weight",)
    weight: Tensor
    bias: Tensor

    def __init__(self, *, activation: Activation, shape: Shape) -> None:
        super().__init__()
        self.activation, self.kv_heads, self.hidden_size = activation, shape.kv_heads, shape.hidden_size
        declare_parameters(self)

    def initial_values(self) -> dict[str, Tensor]:
        size = (self.kv_heads, self.hidden_size)
        # A relu whose weights are all zero passes no gradient: it would stay shut for ever.
        values = {"weight": torch.randn(size) * RELU_STD if self.activation == "relu" else torch.zeros(size)}
        if self.activation == "sigmoid":
            values["bias"] = torch.full((self.kv_heads,), SIGMOID_BIAS)
        return values

    def gate(self, hidden: Tensor) -> Tensor:
        """`[B, T, H_kv, 1]` from the attention input `[B, T, C]`."""
        bias = upcast(self.bias) if self.activation == "sigmoid" else None
        hidden = upcast(hidden)
        return ACTIVATIONS[self.activation](linear(hidden, self.weight.to(hidden.dtype), bias)).unsqueeze(-1)

    def mix(
        self, own: Tensor | None, reads: Sequence[Tensor], hidden: Tensor, coefficients: Sequence[Tensor]
    ) -> Tensor:
        assert own is not None
        return (own + self.gate(hidden) * reads[0]).to(own.dtype)


@register_variant("gated")
@dataclass(frozen=True, kw_only=True)
class Gated(SourceForm):
    """V_n <- V_n + g(W_n h_n) V_1, n >= 2: one gate per token and KV head, h_n the normed input of attention.

    Options:
        activation: "tanh" (zero weights: starts as the Transformer, exactly, and trains), "relu" (weights N(0, 0.02):
            starts near it) or "sigmoid" (zero weights, bias -4: the gate starts at 0.018).
        source: the layer that is read in place of layer 1, or "previous" for the layer before.
        layers: which layers mix: "all" (those after the source), "last:k", "last_third" or a list.
    """

    equation = "V_n <- V_n + g(W_n h_n) V_1, n >= 2"
    reference = "SATFormer, arXiv 2605.03953 (relu); the tanh form is the exact no-op start of this library"
    when = "For retrieval-heavy work, and to add value residual to a trained checkpoint without changing it (tanh)."
    uncertain = "The tanh and sigmoid forms and their starts are this library's choice; SATFormer measured relu."

    activation: Activation = "tanh"

    def policy(self, row: Row, shape: Shape) -> Policy | None:
        return GatedResidual(activation=self.activation, shape=shape) if row.mixes else None

    def neutral(self, shape: Shape) -> dict[str, Any] | None:
        return {"activation": "tanh"}

    def formula(self, shape: Shape) -> str:
        bias = f", bias from {SIGMOID_BIAS:g}" if self.activation == "sigmoid" else ""
        start = f"N(0, {RELU_STD:g})" if self.activation == "relu" else "0"
        return (
            f"V_n <- V_n + {self.activation}(W_n h_n) {self.source_name()} for {self.where(shape)}, "
            f"one gate per token and KV head, W from {start}{bias}"
        )
