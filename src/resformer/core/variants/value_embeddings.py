"""Value embeddings: layers read a table indexed by the token, with a gate for each token and head."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from ..mixing import upcast
from ..plan import Plan, Read, Row, link, select_layers
from ..policy import Policy, Shape, TokenTables, declare_parameters
from ..registry import Variant, register_variant
from ..residual import layer_names

Style = Literal["nanochat", "modded_nanogpt"]


@dataclass(frozen=True, kw_only=True)
class _Recipe:
    """What a style fixes: placement, gate = scale * sigmoid(W x), its input and start, the table's start."""

    layers: str
    scale: float
    hidden_inputs: int
    table_inputs: int


RECIPES: dict[Style, _Recipe] = {
    "nanochat": _Recipe(layers="alternating", scale=3.0, hidden_inputs=12, table_inputs=0),
    "modded_nanogpt": _Recipe(layers="ends:3", scale=2.0, hidden_inputs=6, table_inputs=6),
}


class Tables(TokenTables):
    """One table `[vocabulary, H_kv D]` for each reading layer, or for each pair when tied: `table_<layer>`."""

    def __init__(self, *, owner: dict[int, int], shape: Shape, style: Style) -> None:
        super().__init__()
        self.owner, self.shape, self.style = owner, shape, style
        declare_parameters(self)

    def initial_values(self) -> dict[str, Tensor]:
        size = (self.shape.vocab_size, self.shape.kv_heads * self.shape.head_dim)
        bound = math.sqrt(3 / self.shape.hidden_size)
        return {
            f"table_{n}": torch.empty(size).uniform_(-bound, bound)
            if self.style == "nanochat"
            else torch.randn(size) * 0.01
            for n in sorted(set(self.owner.values()))
        }

    def forward(self, input_ids: Tensor) -> tuple[Tensor | None, ...]:
        rows = {n: embedding(input_ids, self.get_parameter(f"table_{n}")) for n in sorted(set(self.owner.values()))}
        heads = (*input_ids.shape, self.shape.kv_heads, self.shape.head_dim)
        return tuple(
            rows[self.owner[n]].view(heads) if n in self.owner else None for n in range(1, self.shape.layers + 1)
        )


class GatedTable(Policy):
    """`V_n + scale sigmoid(W x) E_n[token]`, the gate in fp32 and per token and KV head.

    x is the first few channels of the normed attention input, for "modded_nanogpt" also of the table's row.
    Parameter: `weight` `[H_kv, inputs]`.
    """

    matmuls = ("weight",)
    weight: Tensor

    def __init__(self, *, style: Style, shape: Shape) -> None:
        super().__init__()
        recipe = RECIPES[style]
        self.style, self.scale, self.kv_heads = style, recipe.scale, shape.kv_heads
        self.hidden_inputs = min(recipe.hidden_inputs, shape.hidden_size)
        self.table_inputs = min(recipe.table_inputs, shape.kv_heads * shape.head_dim)
        declare_parameters(self)

    def initial_values(self) -> dict[str, Tensor]:
        size = (self.kv_heads, self.hidden_inputs + self.table_inputs)
        return {"weight": torch.empty(size).uniform_(0, 0.02) if self.style == "nanochat" else torch.zeros(size)}

    def mix(
        self, own: Tensor | None, reads: Sequence[Tensor], hidden: Tensor, coefficients: Sequence[Tensor]
    ) -> Tensor:
        assert own is not None
        inputs = upcast(hidden[..., : self.hidden_inputs])
        if self.table_inputs:
            inputs = torch.cat((inputs, reads[0].flatten(-2)[..., : self.table_inputs].to(inputs.dtype)), dim=-1)
        gate = self.scale * torch.sigmoid(linear(inputs, self.weight.to(inputs.dtype)))
        return (own + gate.unsqueeze(-1) * reads[0]).to(own.dtype)


@register_variant("value_embeddings")
@dataclass(frozen=True, kw_only=True)
class ValueEmbeddings(Variant):
    """V_n <- V_n + g(x) E_n[token] in chosen layers, layer 1 among them if asked for; E_n is a trained table.

    Tables are embeddings: they decay like matrices and follow the model's dtype. Calls need token ids.

    Options:
        style: gate, starts and placement as in "nanochat" (3 sigmoid, from about 1.5; alternating layers with the last)
            or "modded_nanogpt" (2 sigmoid of hidden and table channels, from exactly 1; the first and last 3 layers).
        layers: "alternating" (every second layer, the last among them), "ends:k" (the first and last k), "all",
            "last:k", "last_third" or a list from 1; null for the style's placement.
        tied: a layer and its mirror image (n and N + 1 - n) share a table.
    """

    equation = "V_n <- V_n + g(x_n) E_n[token]"
    reference = "nanochat (commit 92d63d4) and modded-nanogpt (commit f411b3d3), public training code"
    when = "When parameters are cheap and compute is not: tables cost memory and no matrix products."
    uncertain = (
        "Both recipes are tuned with other optimizers and table learning rates (their own groups) than AdamW here."
    )

    style: Style = "nanochat"
    layers: str | tuple[int, ...] | None = None
    tied: bool = False

    def reading_layers(self, shape: Shape) -> tuple[int, ...]:
        """The layers that read a table (numbers from 1).

        Raises:
            ValueError: for a placement that this model does not have.
        """
        total = shape.layers
        spec = RECIPES[self.style].layers if self.layers is None else self.layers
        if spec == "alternating":
            return tuple(n for n in range(1, total + 1) if (total - n) % 2 == 0)
        if isinstance(spec, str) and spec.startswith("ends:"):
            count = spec.removeprefix("ends:")
            if not count.isascii() or not count.isdigit() or int(count) < 1:
                raise ValueError(f"layers is {spec!r}; expected 'ends:k' with k >= 1")
            if int(count) > total and self.layers is not None:
                raise ValueError(f"layers is {spec!r}, but the model has only {total} layers")
            return tuple(n for n in range(1, total + 1) if n <= int(count) or n > total - int(count))
        return select_layers(spec, total, after=0)

    def plan(self, shape: Shape) -> Plan:
        layers = self.reading_layers(shape)
        table = (Read(layer=0, what="table"),)
        return link(Row(layer=n, reads=table if n in layers else ()) for n in range(1, shape.layers + 1))

    def policy(self, row: Row, shape: Shape) -> Policy | None:
        return GatedTable(style=self.style, shape=shape) if row.mixes else None

    def tables(self, plan: Plan, shape: Shape) -> TokenTables | None:
        layers = [row.layer for row in plan if row.mixes]
        mirrored = {n: min(n, shape.layers + 1 - n) if shape.layers + 1 - n in layers else n for n in layers}
        owner = mirrored if self.tied else {n: n for n in layers}
        return Tables(owner=owner, shape=shape, style=self.style) if layers else None

    def formula(self, shape: Shape) -> str:
        recipe = RECIPES[self.style]
        tied = ", tables shared by mirrored layers" if self.tied else ""
        layers = layer_names(self.reading_layers(shape))
        return f"V_n <- V_n + {recipe.scale:g} sigmoid(W_n x) E_n[token] for n in {layers}{tied}"
