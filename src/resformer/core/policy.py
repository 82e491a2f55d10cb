"""The formulas: of one layer (`Policy`), of parameters that span layers (`Coefficients`), of hidden states between
blocks (`DepthAverage`), and token tables as a source of values (`TokenTables`).

Shapes: B batch, T new tokens, S all tokens so far (S = T without a cache), H_kv key/value heads, H query heads, D head
dimension, C hidden size. Values are `[B, T, H_kv, D]`: the mix happens in KV-head space, before heads are repeated,
before RoPE and before the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# The attribute names under which a host keeps these modules. Parameters below the first three are found by name: they
# get no weight decay, a learning rate of their own, and stay fp32. A token table is an embedding and treated like one.
POLICY_NAME = "value_residual"
COEFFICIENTS_NAME = "value_coefficients"
DEPTH_NAME = "depth_average"
TABLES_NAME = "value_tables"
LAMBDA_NAMES = (POLICY_NAME, COEFFICIENTS_NAME, DEPTH_NAME)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes that a formula may need; `vocab_size` only for token tables."""

    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int = 0


class Initialised(nn.Module):
    """A module whose parameters all have initial values.

    A subclass with parameters overrides `initial_values` and calls `declare_parameters` at the end of `__init__`.
    Parameters are 1-D or more (FSDP2 cannot shard 0-dim ones) and fp32.
    """

    def initial_values(self) -> dict[str, Tensor]:
        """Parameter name -> initial value, made anew from plain numbers at each call.

        Hosts apply it after their own initialisation, which would overwrite lambdas; and a tensor kept from `__init__`
        would be a fake one where a model is built on the meta device (as `from_pretrained` does).
        """
        return {}

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set every parameter to its initial value (for hosts outside Hugging Face)."""
        values = self.initial_values()
        own = dict(self.named_parameters(recurse=False))
        assert own.keys() == values.keys(), (
            f"{type(self).__name__} has parameters {sorted(own)} but initial values for {sorted(values)}"
        )
        for name, parameter in own.items():
            parameter.copy_(values[name])


def declare_parameters(module: Initialised) -> None:
    """Create a parameter for each initial value (call at the end of `__init__`): fp32, but for token tables, which like
    other embeddings have the default dtype (`from_pretrained` sets it to the one asked for).
    """
    dtype = torch.get_default_dtype() if isinstance(module, TokenTables) else torch.float32
    for name, value in module.initial_values().items():
        assert value.dim() >= 1, f"{type(module).__name__}.{name} is 0-dim; make it 1-D so that FSDP2 can shard it"
        module.register_parameter(name, nn.Parameter(value.to(dtype).clone()))


class Policy(Initialised):
    """One layer's formula; the default is plain attention on what the layer owns, or reads where it owns nothing.

    Each hook gets the reads of its kind, in the order of the row.

    Class attributes:
        corrects: `correct` does something.
        corrects_heads: `correct` needs values; the host repeats KV heads for it only then.
        matmuls: names of the parameters that enter matrix products (gates), for counting FLOPs.
    """

    corrects = False
    corrects_heads = True
    matmuls: tuple[str, ...] = ()

    def mix(
        self, own: Tensor | None, reads: Sequence[Tensor], hidden: Tensor, coefficients: Sequence[Tensor]
    ) -> Tensor:
        """The value to attend to.

        Args:
            own: the layer's own value, `[B, T, H_kv, D]` (`[B, S, H_kv, D]` if the row stores "own"; fewer heads if
                its `value_share` is below 1), None if it owns none.
            reads: the values and token-table entries named by `Row.reads`, raw `[B, T, H_kv, D]` or stored `[B, S,
                H_kv, D]`.
            hidden: the normed input of attention, `[B, T, C]`.
            coefficients: the tensors that parameters outside the blocks send to this layer.
        """
        return reads[0] if own is None else own

    def mix_query(self, own: Tensor | None, reads: Sequence[Tensor]) -> Tensor:
        """The queries `[B, T, H, D]`, after QK-norm and before positions."""
        return reads[0] if own is None else own

    def mix_key(self, own: Tensor, reads: Sequence[Tensor]) -> Tensor:
        """The keys `[B, T, H_kv, D]` of a layer that owns some, after QK-norm and before positions."""
        return own

    def mix_attention(self, own: Tensor, reads: Sequence[Tensor]) -> Tensor:
        """The attention weights `[B, H, T, S]` after the softmax."""
        return own

    def correct(self, out: Tensor, mixed: Tensor, own: Tensor | None, reads: Sequence[Tensor]) -> Tensor:
        """Attention output after correction, before o_proj: `[B, T, H, D]`; values come with heads repeated to H."""
        return out

    def coefficient_map(self, coefficients: Sequence[Tensor]) -> dict[str, float]:
        """Mean effective weights {"first": on V_1, "own": on V_n} for lambda maps; empty when the formula has no such
        pair.
        """
        return {}


class Coefficients(Initialised):
    """Parameters that span layers. They live on the model, outside the blocks, and reach layers as tensors."""

    def forward(self) -> tuple[tuple[Tensor, ...], ...]:
        """Per layer of the plan the tensors that `Policy.mix` gets as `coefficients` (an empty tuple where it gets
        none).
        """
        raise NotImplementedError


class DepthAverage(Initialised):
    """One block's formula on hidden states; it runs in the layer loop, after the block."""

    def forward(self, hidden: Tensor, reads: Sequence[Tensor]) -> Tensor:
        """The input of the next block `[B, T, C]`.

        Args:
            hidden: the block's output X_n, `[B, T, C]`.
            reads: the hidden states named by `Row.reads`, `[B, T, C]` each.
        """
        raise NotImplementedError


class TokenTables(Initialised):
    """Embedding tables that layers read values from. They live on the model, since they need the token ids."""

    def forward(self, input_ids: Tensor) -> tuple[Tensor | None, ...]:
        """Per layer of the plan the table's rows for the tokens `[B, T]`, as `[B, T, H_kv, D]`; None for layers that
        read no table.
        """
        raise NotImplementedError
