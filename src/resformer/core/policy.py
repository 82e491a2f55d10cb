"""One layer's formula.

Shapes: B batch, T new tokens, S all tokens so far (S = T without a cache), H_kv key/value heads, H query heads, D head
dimension, C hidden size. Values are `[B, T, H_kv, D]`: the mix happens in KV-head space, before heads are repeated,
before RoPE and before the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# The attribute names under which a host keeps the two kinds of modules. Parameters below them are found by these names:
# they get no weight decay, a learning rate of their own, and stay fp32.
POLICY_NAME = "value_residual"
COEFFICIENTS_NAME = "value_coefficients"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes that a formula may need."""

    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int


class Policy(nn.Module):
    """One layer's formula; the default is plain attention on the layer's own value.

    A subclass with parameters overrides `initial_values`. Parameters are 1-D or more (FSDP2 cannot shard 0-dim ones)
    and fp32.
    """

    corrects = False
    """Whether `correct` does anything; a host repeats KV heads for it only then."""

    def mix(
        self, own: Tensor | None, reads: Sequence[Tensor], hidden: Tensor, coefficients: Sequence[Tensor]
    ) -> Tensor:
        """The value to attend to.

        Args:
            own: the layer's own value, `[B, T, H_kv, D]` (`[B, S, H_kv, D]` if the row stores "own"), None if it owns
                none.
            reads: the tensors named by `Row.reads`, raw `[B, T, H_kv, D]` or stored `[B, S, H_kv, D]`.
            hidden: the normed input of attention, `[B, T, C]`.
            coefficients: the tensors that parameters outside the blocks send to this layer.
        """
        assert own is not None, "the default policy needs the layer's own value"
        return own

    def correct(self, out: Tensor, mixed: Tensor, own: Tensor | None, reads: Sequence[Tensor]) -> Tensor:
        """Attention output after correction, before o_proj: `[B, T, H, D]`; values come with heads repeated to H."""
        return out

    def initial_values(self) -> dict[str, Tensor]:
        """Parameter name -> initial value, made anew from plain numbers at each call.

        Hosts apply it after their own initialisation, which would overwrite lambdas; and a tensor kept from `__init__`
        would be a fake one where a model is built on the meta device (as `from_pretrained` does).
        """
        return {}

    def coefficient_map(self, coefficients: Sequence[Tensor]) -> dict[str, float]:
        """Mean effective weights {"first": on V_1, "own": on V_n} for lambda maps; empty when the formula has no such
        pair.
        """
        return {}

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set every parameter to its initial value (for hosts outside Hugging Face)."""
        reset_parameters(self)


class Coefficients(nn.Module):
    """Parameters that span layers. They live on the model, outside the blocks, and reach layers as tensors."""

    def forward(self) -> tuple[tuple[Tensor, ...], ...]:
        """Per layer of the plan the tensors that `Policy.mix` gets as `coefficients` (an empty tuple where it gets
        none).
        """
        raise NotImplementedError

    def initial_values(self) -> dict[str, Tensor]:
        """Parameter name -> initial value."""
        raise NotImplementedError

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set every parameter to its initial value."""
        reset_parameters(self)


def reset_parameters(module: Policy | Coefficients) -> None:
    """Copy `initial_values` into the module's parameters; every parameter must have one."""
    values = module.initial_values()
    own = dict(module.named_parameters(recurse=False))
    assert own.keys() == values.keys(), (
        f"{type(module).__name__} has parameters {sorted(own)} but initial values for {sorted(values)}"
    )
    for name, parameter in own.items():
        parameter.copy_(values[name])


def declare_parameters(module: Policy | Coefficients) -> None:
    """Create an fp32 parameter for each initial value (call at the end of `__init__`)."""
    for name, value in module.initial_values().items():
        assert value.dim() >= 1, f"{type(module).__name__}.{name} is 0-dim; make it 1-D so that FSDP2 can shard it"
        module.register_parameter(name, nn.Parameter(value.to(torch.float32).clone()))
