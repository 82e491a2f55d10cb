"""What a model costs, read off config and plan without building it: parameters, FLOPs, cache bytes. Tests hold it
against live models.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..core.plan import Plan, kv_ratio, planes, table
from ..core.policy import Shape
from ..core.registry import Variant
from .configuration import ResFormerConfig


@dataclass(frozen=True, kw_only=True)
class Account:
    """Costs of one model.

    Attributes:
        parameters: all parameters; a tied head counts once.
        parameters_by_group: the same by group: embedding, head, attention, mlp, norm, lambdas.
        flops_per_token: floating-point operations of one forward pass per token at `sequence_length`, matrix products
            only (2 per multiply-add), attention scores counted over the whole sequence, without the causal half (the
            convention of the PaLM paper). Training costs about three times as much.
        kv_bytes_per_token: bytes that one token adds to the cache.
        kv_ratio: the same relative to a model whose layers all store keys and values.
        sequence_length: tokens, for `flops_per_token`.
    """

    parameters: int
    parameters_by_group: dict[str, int]
    flops_per_token: int
    kv_bytes_per_token: int
    kv_ratio: float
    sequence_length: int

    def asdict(self) -> dict[str, Any]:
        """As a plain dictionary for JSON."""
        return asdict(self)


def account(config: ResFormerConfig, *, sequence_length: int | None = None, dtype_bytes: int = 4) -> Account:
    """Costs of the model that `config` describes.

    Args:
        config: the model's config.
        sequence_length: tokens, for the attention part of the FLOPs; default `max_position_embeddings`.
        dtype_bytes: bytes of one cached number (4 = fp32, 2 = bf16).
    """
    shape, variant = config.shape(), config.build_variant()
    plan = variant.plan(shape)
    length = config.max_position_embeddings if sequence_length is None else sequence_length
    groups = _parameters(config, shape, variant, plan)
    weights, _ = _attention_weights(config, shape, plan)
    mlp_weights = shape.layers * 3 * shape.hidden_size * config.intermediate_size
    head_weights = config.vocab_size * shape.hidden_size
    scores = shape.layers * 2 * shape.heads * shape.head_dim * length
    return Account(
        parameters=sum(groups.values()),
        parameters_by_group=groups,
        flops_per_token=2 * (weights + mlp_weights + head_weights + scores),
        kv_bytes_per_token=sum(planes(plan)) * shape.kv_heads * shape.head_dim * dtype_bytes,
        kv_ratio=kv_ratio(plan),
        sequence_length=length,
    )


def plan_rows(config: ResFormerConfig) -> list[dict[str, object]]:
    """The plan of the model's variant as plain rows, layers from 1."""
    return table(config.build_variant().plan(config.shape()))


def _attention_weights(config: ResFormerConfig, shape: Shape, plan: Plan) -> tuple[int, int]:
    """Weights and biases of all attention projections."""
    hidden, width, kv_width = shape.hidden_size, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    weights = sum(2 * hidden * width + hidden * kv_width * (1 + row.owns_value) for row in plan)
    biases = sum(width + hidden + kv_width * (1 + row.owns_value) for row in plan)
    return weights, biases if config.attention_bias else 0


def _parameters(config: ResFormerConfig, shape: Shape, variant: Variant, plan: Plan) -> dict[str, int]:
    hidden, inner = shape.hidden_size, config.intermediate_size
    embedding = config.vocab_size * hidden
    mlp = 3 * hidden * inner + (2 * inner + hidden if config.mlp_bias else 0)
    policies = [variant.policy(row, shape) for row in plan]
    modules = [*policies, variant.coefficients(plan, shape)]
    return {
        "embedding": embedding,
        "head": 0 if config.tie_word_embeddings else embedding,
        "attention": sum(_attention_weights(config, shape, plan)),
        "mlp": shape.layers * mlp,
        "norm": (2 * shape.layers + 1) * hidden,
        "lambdas": sum(
            parameter.numel() for module in modules if module is not None for parameter in module.parameters()
        ),
    }
