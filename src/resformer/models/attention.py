"""Attention whose queries, keys and value follow from the layer's row and policy. It names no variant: what a layer
owns, reads, stores and sends is its row.

Shapes: B batch, T new tokens, S all tokens so far, C hidden size, H query heads, H_kv key/value heads, D head
dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..core.mixing import upcast
from ..core.plan import Plan, Row
from ..core.policy import Policy, Shape
from .configuration import ResFormerConfig
from .masks import Span, aligned, choose_lengths
from .norm import RMSNorm
from .positions import rotate


def repeat_heads(x: Tensor, groups: int, dim: int) -> Tensor:
    """Repeat each KV head along `dim` for its query heads: H_kv -> H."""
    return x if groups == 1 else x.repeat_interleave(groups, dim=dim)


def eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    mix: Callable[[Tensor], Tensor] | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Attention by matrices, which also returns the weights `[B, H, T, S]` as the softmax gives them; output `[B, T, H,
    D]`. `mix` changes the weights that are used.
    """
    groups = int(module.num_key_value_groups)  # type: ignore[arg-type]
    key, value = repeat_heads(key, groups, dim=1), repeat_heads(value, groups, dim=1)
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = nn.functional.softmax(upcast(scores), dim=-1).to(query.dtype)
    used = weights if mix is None else mix(weights)
    used = nn.functional.dropout(used, p=dropout, training=module.training)
    return torch.matmul(used, value).transpose(1, 2).contiguous(), weights


class Attention(nn.Module):
    """Causal attention whose queries, keys and value follow from the layer's row and policy."""

    def __init__(self, config: ResFormerConfig, row: Row, policy: Policy | None) -> None:
        super().__init__()
        shape = config.shape()
        # Hidden states are averaged outside the block; a compiled block must not be told apart by how many there are.
        self.row = replace(row, reads=row.received)
        self.config, self.layer_idx = config, row.layer - 1
        self.head_dim, self.num_key_value_groups = shape.head_dim, shape.heads // shape.kv_heads
        self.scaling, self.attention_dropout, self.is_causal = shape.head_dim**-0.5, config.attention_dropout, True
        width, kv_width, bias = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, config.attention_bias
        norm_width, norm_kv_width = norm_widths(config, shape)
        if row.owns_query:
            self.q_proj = nn.Linear(shape.hidden_size, width, bias=bias)
        if row.owns_query and config.qk_norm:
            self.q_norm = RMSNorm(norm_width, eps=config.rms_norm_eps)
        if row.owns_key:
            self.k_proj = nn.Linear(shape.hidden_size, kv_width, bias=bias)
        if row.owns_key and config.qk_norm:
            self.k_norm = RMSNorm(norm_kv_width, eps=config.rms_norm_eps)
        if row.owns_value:
            self.v_proj = nn.Linear(shape.hidden_size, own_heads(row, shape) * shape.head_dim, bias=bias)
        self.o_proj = nn.Linear(width, shape.hidden_size, bias=has_out_bias(config))
        self.value_residual = Policy() if policy is None else policy
        # A step asks often, and a config is slow.
        self.read_kinds, self.turns = read_kinds(self.row), row.layer not in (config.nope_layers or ())
        self.norms_heads = config.qk_norm and config.qk_norm_over == "head"
        self.norms_all = config.qk_norm and config.qk_norm_over == "all"

    def forward(
        self,
        hidden: Tensor,
        *received: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        span: Span | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor | None, ...]:
        """Attend.

        Args:
            hidden: normed input `[B, T, C]`.
            received: the tensors of `row.received`, then `row.coefficients` tensors from outside the blocks.
            position_embeddings: cos and sin, `[B, 1, T, D]`; None where positions are in the hidden states.
            attention_mask: as the attention function wants it.
            cache: storage only; values travel as tensors.
            span: what to attend to, where the slots that the layer reads return tokens of different spans.

        Returns:
            Output `[B, T, C]`, attention weights (None but for eager), then the tensors of `row.sends`.
        """
        row, policy = self.row, self.value_residual
        reads = sort_reads(self.read_kinds, received, span)
        values, coefficients = reads["value"], received[len(self.read_kinds) :]
        raw_query, raw_key, own = self.project(hidden)
        position_embeddings = position_embeddings if self.turns else None
        query = turned(policy.mix_query(raw_query, reads["query"]), position_embeddings)
        key = None if raw_key is None else turned(policy.mix_key(raw_key, reads["key"]), position_embeddings)

        if row.stores == "mixed":  # only the new tokens are mixed, and the mixture is what the cache keeps
            mixed = policy.mix(own, values, hidden, coefficients)
            key, stored = self.store(cache, key, mixed.transpose(1, 2), kwargs)
            assert stored is not None
            attended = aligned(stored, span, dim=2)
        else:  # the cache keeps the own value or nothing, and all tokens are mixed
            key, stored = self.store(cache, key, None if own is None else own.transpose(1, 2), kwargs)
            all_own = None if stored is None else aligned(stored, span, dim=2).transpose(1, 2)
            mixed = policy.mix(all_own, values, hidden, coefficients)
            attended = mixed.transpose(1, 2)

        all_keys = reads["key"][0].transpose(1, 2) if key is None else aligned(key, span, dim=2)
        if row.extends:  # two sets of keys, of the same tokens
            assert attention_mask is not None, "a plan that attends to two sets of keys needs its masks materialised"
            attention_mask = torch.cat((attention_mask, attention_mask), dim=-1)
            all_keys = torch.cat((all_keys, reads["key"][0].transpose(1, 2)), dim=2)
            attended = torch.cat((attended, reads["attended"][0].transpose(1, 2)), dim=2)
        out, weights = self.attend(query, all_keys, attended, attention_mask, reads["attention"], kwargs)
        if policy.corrects:
            out = self.correct(out, mixed, own, values)
        sent: tuple[Tensor | None, ...] = ()
        if row.sends:
            raw = {"query": raw_query, "key": raw_key, "value": own, "attention": weights}
            kept: dict[str, Any] = {"key": key, "value": stored}
            sent = tuple(raw[what] if state == "raw" else kept[what].transpose(1, 2) for what, state in row.sends)
        return self.o_proj(out.reshape(*hidden.shape[:-1], -1)), weights, *sent

    def project(self, hidden: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Queries `[B, T, H, D]` and keys `[B, T, H_kv, D]`, after QK-norm, and values `[B, T, H_kv, D]` of the new
        tokens; None for what the layer does not own.
        """
        heads_shape = (*hidden.shape[:-1], -1, self.head_dim)
        query = self.q_proj(hidden) if self.row.owns_query else None
        key = self.k_proj(hidden) if self.row.owns_key else None
        value = self.v_proj(hidden).view(heads_shape) if self.row.owns_value else None
        if self.norms_all:
            query = self.q_norm(query) if query is not None else None
            key = self.k_norm(key) if key is not None else None
        query = query.view(heads_shape) if query is not None else None
        key = key.view(heads_shape) if key is not None else None
        if self.norms_heads:
            query = self.q_norm(query) if query is not None else None
            key = self.k_norm(key) if key is not None else None
        return query, key, value

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        read_weights: Sequence[Tensor],
        kwargs: dict[str, Any],
    ) -> tuple[Tensor, Tensor | None]:
        """Attention output `[B, T, H, D]` by the configured implementation, and its weights if it has any."""
        name = self.config._attn_implementation
        function = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention)
        if name == "paged|eager":  # transformers' own does not let weights be mixed
            function = eager_attention
        if read_weights:
            kwargs = {**kwargs, "mix": lambda weights: self.value_residual.mix_attention(weights, read_weights)}
        if self.row.window is not None:
            kwargs = {**kwargs, "sliding_window": self.row.window}  # some implementations take it in place of a mask
        dropout = self.attention_dropout if self.training else 0.0
        return function(self, query, key, value, mask, dropout=dropout, scaling=self.scaling, **kwargs)

    def correct(self, out: Tensor, mixed: Tensor, own: Tensor | None, values: Sequence[Tensor]) -> Tensor:
        """The policy's correction, with KV heads repeated to query heads for it."""
        policy, groups = self.value_residual, self.num_key_value_groups
        if not policy.corrects_heads:
            return policy.correct(out, mixed, own, values)
        all_own = None if own is None else repeat_heads(own, groups, dim=2)
        mixed, *values = [repeat_heads(x, groups, dim=2) for x in (mixed, *values)]
        return policy.correct(out, mixed, all_own, values)

    def store(
        self, cache: Cache | None, key: Tensor | None, value: Tensor | None, kwargs: dict[str, Any]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Append to the cache what the layer stores; returns keys and values of all tokens so far, `[B, H_kv, S, D]`,
        None for what it does not store.
        """
        if cache is None:
            return key, value
        if key is None and value is None:
            choose_lengths(kwargs, self.row.window)
            return None, None
        if key is None:
            # The length of a slot is that of its first tensor, so a slot without keys keeps its values there.
            assert value is not None
            stored, _ = cache.update(value, value[..., :0], self.layer_idx, kwargs=kwargs)
            return None, stored
        slot = key[..., :0] if value is None else value
        key, stored = cache.update(key, slot, self.layer_idx, kwargs=kwargs)
        return key, None if value is None else stored


def turned(x: Tensor, turns: tuple[Tensor, ...] | None) -> Tensor:
    """Queries or keys `[B, T, H, D]` as `[B, H, T, D]`, turned by cos and sin `[B, 1, T, D]` where positions turn."""
    return x.transpose(1, 2) if turns is None else rotate(x.transpose(1, 2), *turns)


def has_out_bias(config: ResFormerConfig) -> bool:
    """Whether o_proj has a bias."""
    return config.attention_bias if config.attention_out_bias is None else config.attention_out_bias


def norm_widths(config: ResFormerConfig, shape: Shape) -> tuple[int, int]:
    """Sizes of the norms of queries and of keys."""
    if config.qk_norm_over == "head":
        return shape.head_dim, shape.head_dim
    return shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim


def own_heads(row: Row, shape: Shape) -> int:
    """Number of KV heads whose value is the layer's own."""
    return round(row.value_share * shape.kv_heads)


def implementations(plan: Plan) -> tuple[str, ...]:
    """Attention implementations that can run a plan, the default first; empty when all can."""
    if any(read.what == "attention" for row in plan for read in row.reads):
        return ("eager",)  # nothing else has attention weights
    return ("sdpa", "eager") if any(row.extends for row in plan) else ()  # others take no mask for two sets of keys


def read_kinds(row: Row) -> tuple[tuple[str, bool], ...]:
    """Per tensor that a layer receives: what its policy calls it, and whether it is a stored one.

    Kinds: "value" (and token tables) to mix, or "attended" where it is attended to beside the own ones; "key", "query",
    "attention".
    """
    kinds = []
    for read in row.received:
        kind: str = "value" if read.what == "table" else read.what
        kinds.append(("attended" if kind == "value" and row.extends else kind, read.state == "stored"))
    return tuple(kinds)


NOTHING: dict[str, tuple[Tensor, ...]] = {"value": (), "attended": (), "key": (), "query": (), "attention": ()}


def sort_reads(
    kinds: Sequence[tuple[str, bool]], received: Sequence[Tensor], span: Span | None
) -> dict[str, tuple[Tensor, ...]]:
    """The tensors that a layer received by their kind; stored ones are cut to `span`."""
    if not kinds:
        return NOTHING
    reads = dict(NOTHING)
    for (kind, stored), tensor in zip(kinds, received, strict=False):  # coefficients follow
        reads[kind] = (*reads[kind], aligned(tensor, span, dim=1) if stored else tensor)
    return reads
