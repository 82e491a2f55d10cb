"""What a model costs, read off config and plan without building it: parameters, FLOPs, cache bytes. Tests hold it
against live models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from ..core.plan import Plan, Row, planes, table, with_windows
from ..core.policy import Policy, Shape
from ..core.registry import Variant
from .attention import has_out_bias, norm_widths, own_heads
from .configuration import ResFormerConfig
from .token_cache import holds_tokens

ID_BYTES = 4  # of a token id in a "tokens" cache


@dataclass(frozen=True, kw_only=True)
class Account:
    """Costs of one model.

    Attributes:
        parameters: all parameters; a tied head counts once.
        active_parameters: those that one token uses: without the experts that it does not choose.
        parameters_by_group: all of them by group: embedding (with learned positions), head, attention, mlp (with
            experts and routers), norm, lambdas (and gates), token tables if there are any.
        flops_per_token: floating-point operations of one forward pass per token at `sequence_length`, matrix products
            only (2 per multiply-add), attention scores counted over the whole sequence, without the causal half (the
            convention of the PaLM paper), or over a whole window where that is shorter; of experts only the chosen
            ones. Training costs about three times as much.
        kv_bytes_per_token: bytes that one token adds to the cache for good: in slots that keep all tokens.
        kv_bytes: bytes of the cache at `sequence_length` tokens, those of sliding slots included.
        kv_ratio: the same relative to a model with the same windows whose layers all store keys and values.
        token_kv_bytes: bytes of a "tokens" cache at `sequence_length` tokens, without its table; None where there is
            none.
        token_table_bytes: bytes of that table, one for all sequences.
        sequence_length: tokens, for `flops_per_token`, `kv_bytes` and `kv_ratio`.
    """

    parameters: int
    active_parameters: int
    parameters_by_group: dict[str, int]
    flops_per_token: int
    kv_bytes_per_token: int
    kv_bytes: int
    kv_ratio: float
    token_kv_bytes: int | None
    token_table_bytes: int | None
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
    shape, variant, plan = config.shape(), config.build_variant(), config.plan()
    length = config.max_position_embeddings if sequence_length is None else sequence_length
    policies = [variant.policy(row, shape) for row in plan]
    groups = _parameters(config, shape, variant, plan, policies)
    weights, _ = _attention_weights(config, shape, plan)
    gates = sum(policy.get_parameter(name).numel() for policy in policies if policy for name in policy.matmuls)
    unchosen = config.num_experts - config.num_experts_per_tok if config.num_experts else 0
    idle = unchosen * _expert_weights(config)
    mlp_weights = _mlp_weights(config) - idle
    head_weights = config.vocab_size * shape.hidden_size
    seen = [min(length, row.window or length) * (1 + row.extends) for row in plan]
    scores = sum(2 * shape.heads * shape.head_dim * tokens for tokens in seen)
    baseline = with_windows(
        tuple(Row(layer=row.layer) for row in plan), config.sliding_window, config.windowed_layers()
    )
    ids, id_table = token_kv_bytes(config, length, dtype_bytes=dtype_bytes) if holds_tokens(config) else (None, None)
    return Account(
        parameters=sum(groups.values()),
        active_parameters=sum(groups.values()) - shape.layers * idle,
        parameters_by_group=groups,
        flops_per_token=2 * (weights + gates + shape.layers * mlp_weights + head_weights + scores),
        kv_bytes_per_token=_kv_bytes([row for row in plan if row.slot_window is None], shape, 1, dtype_bytes),
        kv_bytes=_kv_bytes(plan, shape, length, dtype_bytes),
        kv_ratio=_kv_bytes(plan, shape, length, 1) / _kv_bytes(baseline, shape, length, 1),
        token_kv_bytes=ids,
        token_table_bytes=id_table,
        sequence_length=length,
    )


def kv_bytes(config: ResFormerConfig, tokens: int, *, dtype_bytes: int = 4) -> int:
    """Bytes of one sequence's cache after `tokens` tokens, while it decodes: a sliding slot holds a window at most.

    Right after a prompt that is longer than the window a sliding slot still holds all of the prompt's memory.
    """
    return _kv_bytes(config.plan(), config.shape(), tokens, dtype_bytes)


def token_kv_bytes(config: ResFormerConfig, tokens: int, *, dtype_bytes: int = 4) -> tuple[int, int]:
    """Bytes of one sequence's "tokens" cache after `tokens` tokens, ids in place of layer 1's values, and of the table
    that it reads from (`token_cache`; for models that can have one).
    """
    shape = config.shape()
    row, kept = shape.kv_heads * shape.head_dim * dtype_bytes, min(tokens, config.plan()[0].slot_window or tokens)
    return kv_bytes(config, tokens, dtype_bytes=dtype_bytes) - kept * (row - ID_BYTES), config.vocab_size * row


def _kv_bytes(rows: Sequence[Row], shape: Shape, tokens: int, dtype_bytes: int) -> int:
    kept = sum(sum(planes((row,))) * min(tokens, row.slot_window or tokens) for row in rows)
    return round(kept * shape.kv_heads * shape.head_dim * dtype_bytes)


def plan_rows(config: ResFormerConfig) -> list[dict[str, object]]:
    """The plan of the model's variant as plain rows, layers from 1."""
    return table(config.plan())


def _expert_weights(config: ResFormerConfig) -> int:
    """Weights of one gated feed-forward layer."""
    return 3 * config.hidden_size * config.intermediate_size


def _mlp_weights(config: ResFormerConfig) -> int:
    """Weights of one block's feed-forward half."""
    if config.num_experts:
        return config.num_experts * (_expert_weights(config) + config.hidden_size)
    return (3 if config.mlp == "gated" else 2) * config.hidden_size * config.intermediate_size


def _attention_weights(config: ResFormerConfig, shape: Shape, plan: Plan) -> tuple[int, int]:
    """Weights and biases of all attention projections."""
    hidden, width = shape.hidden_size, shape.heads * shape.head_dim
    weights = biases = 0
    for row in plan:
        kv_heads = row.owns_key * shape.kv_heads + row.owns_value * own_heads(row, shape)
        out = row.owns_query * width + kv_heads * shape.head_dim
        weights += hidden * (out + width)
        biases += out * config.attention_bias + hidden * has_out_bias(config)
    return weights, biases


def _parameters(
    config: ResFormerConfig, shape: Shape, variant: Variant, plan: Plan, policies: Sequence[Policy | None]
) -> dict[str, int]:
    hidden, inner = shape.hidden_size, config.intermediate_size
    embedding = config.vocab_size * hidden
    positions = config.max_position_embeddings * hidden if config.position_embedding == "learned" else 0
    mlp_bias = (1 + (config.mlp == "gated")) * inner + hidden if config.mlp_bias else 0
    norm = hidden * (2 if config.norm == "layernorm" else 1)
    query_norm, key_norm = norm_widths(config, shape)
    head_norms = sum(row.owns_query * query_norm + row.owns_key * key_norm for row in plan) if config.qk_norm else 0
    depth = [variant.depth(row, shape) for row in plan]
    groups = {
        "embedding": embedding + positions,
        "head": 0 if config.tie_word_embeddings else embedding,
        "attention": sum(_attention_weights(config, shape, plan)),
        "mlp": shape.layers * (_mlp_weights(config) + mlp_bias),
        "norm": (2 * shape.layers + 1) * norm + head_norms,
        "lambdas": _count(*policies, *depth, variant.coefficients(plan, shape)),
    }
    tables = _count(variant.tables(plan, shape))
    return {**groups, "tables": tables} if tables else groups


def _count(*modules: nn.Module | None) -> int:
    """Entries of all parameters of the modules."""
    return sum(parameter.numel() for module in modules if module is not None for parameter in module.parameters())
