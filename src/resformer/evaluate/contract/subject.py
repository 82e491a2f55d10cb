"""What is checked: tiny models of one variant, made anew for each check, and what all checks need.

Shapes: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from resformer.core.plan import Plan
from resformer.core.policy import LAMBDA_NAMES, TABLES_NAME
from resformer.evaluate.loading import no_progress_bars
from resformer.models import ResFormerConfig, ResFormerForCausalLM

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 8,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
HEADS = {"MHA": 8, "GQA": 4}
TOLERANCE = 2e-5


class ContractError(Exception):
    """The variant does not keep its contract; the message says where."""


class NotApplicable(Exception):  # noqa: N818 - nothing is wrong
    """The check says nothing about this variant; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One variant with its options, in one form of attention."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    kv_heads: int = HEADS["MHA"]
    layers: int = 4

    def config(self, **changes: Any) -> ResFormerConfig:
        """The config of the tiny model; `changes` replace its fields."""
        fields = {
            "variant": self.name,
            "variant_options": dict(self.options),
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            **SIZES,
            **changes,
        }
        return ResFormerConfig(**fields)

    def model(self, *, moved: bool = True, **changes: Any) -> ResFormerForCausalLM:
        """A model in evaluation mode, equal for equal `changes`.

        With `moved` its lambdas are off their initial values, so that they matter (a gate that starts shut hides
        every mistake behind it), and its matrices are larger than a fresh model's, whose attention is nearly uniform.
        """
        torch.manual_seed(0)
        model = ResFormerForCausalLM(self.config(**changes)).eval()
        generator = torch.Generator().manual_seed(1)
        if moved:
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if is_lambda(name):
                        parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
                    elif parameter.dim() > 1:
                        parameter.mul_(4.0)
        return model

    def plan(self) -> Plan:
        """The plan for the tiny model."""
        config = self.config()
        return config.plan()

    def baseline(self) -> Subject:
        """The Transformer of the same sizes."""
        return Subject(name="transformer", kv_heads=self.kv_heads, layers=self.layers)


def ids(rows: int = 2, length: int = 12, seed: int = 5) -> Tensor:
    """Token ids `[B, T]`, none of them padding."""
    return torch.randint(1, SIZES["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(seed))


def is_lambda(name: str) -> bool:
    """The parameter is found by name as a lambda, gate or logit."""
    return bool(set(LAMBDA_NAMES) & set(name.split(".")))


def is_extra(name: str) -> bool:
    """The parameter is one that the Transformer lacks."""
    return is_lambda(name) or TABLES_NAME in name.split(".")


def gradients(model: ResFormerForCausalLM, *terms: tuple[float, Tensor]) -> dict[str, Tensor | None]:
    """Gradient of `sum weight * loss(tokens)` by parameter; all forward passes come before the one backward pass."""
    model.zero_grad()
    losses = [weight * model(input_ids=tokens, labels=tokens).loss for weight, tokens in terms]
    torch.stack(losses).sum().backward()
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def same(got: Tensor, want: Tensor, what: str, *, tolerance: float = TOLERANCE) -> float:
    """The largest difference; ContractError if it is over `tolerance` times (1 + the largest value)."""
    assert got.shape == want.shape, f"{what}: {tuple(got.shape)} against {tuple(want.shape)}"
    difference = float((got - want).abs().max()) if got.numel() else 0.0
    if not difference <= tolerance * (1 + float(want.abs().max() if want.numel() else 0.0)):
        raise ContractError(f"{what} differs by {difference:.1e}")
    return difference


@contextmanager
def raw_memory_is_nan() -> Iterator[None]:
    """Memory that is taken and not written holds NaN, so that a parameter without an initial value shows."""
    memory: Any = torch.utils.deterministic
    fill, before = memory.fill_uninitialized_memory, torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        memory.fill_uninitialized_memory = True
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
        memory.fill_uninitialized_memory = fill


@contextmanager
def quiet() -> Iterator[None]:
    """transformers reports on weights that are missing or left over; the checks judge that themselves."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with no_progress_bars():
            yield
    finally:
        logging.set_verbosity(level)
