"""The plain attention that every reference changes in one or two places, and what references share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Layers = dict[int, Tensor]  # layer, from 1 -> its tensor
Start = float | list | Callable[[Tensor], bool]  # expected initial values, or a check of random ones


class Plain:
    """The Transformer. `defaults` are the options' values as documented; names of parameters are those of the state
    dict.

    Shapes: Q `[B, T, H, D]`; K, V `[B, T, H_kv, D]`; A `[B, H, T, T]`; U `[B, T, H, D]`; X, h `[B, T, C]`.
    """

    defaults: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, config: Any, state: dict[str, Tensor]) -> None:
        self.o = {**self.defaults, **config.variant_options}
        self.N, self.H, self.C = config.num_hidden_layers, config.num_attention_heads, config.hidden_size
        self.H_kv, self.D = config.num_key_value_heads, config.head_dim
        self.state = state

    def query(self, n: int, Q: Layers) -> Tensor:
        """Queries before positions."""
        return Q[n]

    def key(self, n: int, K: Layers) -> Tensor:
        """Keys before positions."""
        return K[n]

    def value(self, n: int, V: Layers, h: Tensor, ids: Tensor) -> Tensor:
        """What layer n attends to."""
        return V[n]

    def attention(self, n: int, A: Layers) -> Tensor:
        """Attention weights after the softmax."""
        return A[n]

    def output(self, n: int, U: Tensor, M: Tensor, V: Layers) -> Tensor:
        """Attention output per query head before o_proj; M is what was attended to."""
        return U

    def hidden(self, n: int, X: Layers) -> Tensor:
        """Input of block n + 1; X[0] are the embeddings."""
        return X[n]

    def beside(self, n: int) -> int | None:
        """A layer whose keys and values are attended to beside the own ones."""
        return None

    def starts(self) -> dict[str, Start]:
        """Every parameter that the Transformer lacks -> its initial values."""
        return {}

    # What references share.

    def own(self, n: int, name: str) -> Tensor:
        """A parameter of layer n's formula."""
        return self.state[self.own_key(n, name)]

    def own_key(self, n: int, name: str) -> str:
        return f"model.layers.{n - 1}.self_attn.value_residual.{name}"

    def heads(self, x: Tensor) -> Tensor:
        """KV heads repeated for query heads."""
        return torch.stack([x[:, :, head // (self.H // self.H_kv)] for head in range(self.H)], dim=2)

    def source(self, n: int) -> int:
        return n - 1 if self.o["source"] == "previous" else self.o["source"]

    def first_source(self) -> int:
        return 1 if self.o.get("source", 1) == "previous" else self.o.get("source", 1)

    def chosen(self) -> list[int]:
        """The layers that the option `layers` names."""
        spec = self.o.get("layers", "all")
        later = list(range(self.first_source() + 1, self.N + 1))
        if spec == "all":
            return later
        if spec == "last_third":
            return [n for n in later if n > self.N - max(1, round(self.N / 3))]
        if isinstance(spec, str):
            return [n for n in later if n > self.N - int(spec.split(":")[1])]
        return sorted(spec)


SOURCE = {"source": 1, "layers": "all"}
