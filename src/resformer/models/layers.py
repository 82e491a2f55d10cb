"""The host's block: pre-norm attention and SwiGLU, as in Llama. It names no variant: what a layer owns, reads, stores
and sends is its row.

Shapes: B batch, T new tokens, S all tokens so far, C hidden size, H query heads, H_kv key/value heads, D head
dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..core.mixing import upcast
from ..core.plan import Row
from ..core.policy import Policy
from .configuration import ResFormerConfig
from .norm import RMSNorm


class RotaryEmbedding(nn.Module):
    """Rotary positions (Su et al. 2021), half-split layout, with every scaling that transformers knows
    (`rope_parameters`).
    """

    inv_freq: Tensor

    def __init__(self, config: ResFormerConfig) -> None:
        super().__init__()
        self.config = config
        self.rope_type: str = config.rope()["rope_type"]
        self.max_seq_len_cached = self.original_max_seq_len = config.max_position_embeddings
        inv_freq, self.attention_scaling = self.rope_init_fn(config)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("original_inv_freq", inv_freq.clone(), persistent=False)

    def rope_init_fn(
        self, config: ResFormerConfig, device: torch.device | None = None, **kwargs: Any
    ) -> tuple[Tensor, float]:
        """Inverse frequencies `[D / 2]` and the factor on cos and sin; `dynamic_rope_update` calls it again as
        sequences grow.
        """
        if self.rope_type != "default":
            return ROPE_INIT_FUNCTIONS[self.rope_type](config, device=device, **kwargs)
        base, dim = float(config.rope()["rope_theta"]), config.shape().head_dim
        return 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float, device=device) / dim), 1.0

    @torch.no_grad()
    @dynamic_rope_update
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """cos of the angles and sin with the sign that `rotate` wants, each `[B, T, D]` in the dtype of `x`."""
        angles = position_ids[..., None].float() * self.inv_freq.float().to(x.device)
        angles = torch.cat((-angles, angles), dim=-1)
        return (angles.cos() * self.attention_scaling).to(x.dtype), (angles.sin() * self.attention_scaling).to(x.dtype)


def rotate(x_BHTD: Tensor, cos_B1TD: Tensor, sin_B1TD: Tensor) -> Tensor:
    """Turn queries or keys by their positions.

    (left, right) -> (left cos - right sin, right cos + left sin); the minus is in the first half of `sin`.
    """
    return x_BHTD * cos_B1TD + x_BHTD.roll(x_BHTD.shape[-1] // 2, dims=-1) * sin_B1TD


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
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Attention by matrices, which also returns the weights `[B, H, T, S]`; output `[B, T, H, D]`."""
    groups = int(module.num_key_value_groups)  # type: ignore[arg-type]
    key, value = repeat_heads(key, groups, dim=1), repeat_heads(value, groups, dim=1)
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = nn.functional.softmax(upcast(scores), dim=-1).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


class Attention(nn.Module):
    """Causal attention whose value follows from the layer's row and policy."""

    def __init__(self, config: ResFormerConfig, row: Row, policy: Policy | None) -> None:
        super().__init__()
        shape = config.shape()
        self.config, self.row, self.layer_idx = config, row, row.layer - 1
        self.head_dim, self.num_key_value_groups = shape.head_dim, shape.heads // shape.kv_heads
        self.scaling, self.attention_dropout, self.is_causal = shape.head_dim**-0.5, config.attention_dropout, True
        width, kv_width, bias = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, config.attention_bias
        self.q_proj = nn.Linear(shape.hidden_size, width, bias=bias)
        self.k_proj = nn.Linear(shape.hidden_size, kv_width, bias=bias)
        if row.owns_value:
            self.v_proj = nn.Linear(shape.hidden_size, kv_width, bias=bias)
        self.o_proj = nn.Linear(width, shape.hidden_size, bias=bias)
        self.value_residual = policy

    def forward(
        self,
        hidden: Tensor,
        *received: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor | None, ...]:
        """Attend.

        Args:
            hidden: normed input `[B, T, C]`.
            received: the tensors of `row.reads`, then `row.coefficients` tensors from outside the blocks.
            position_embeddings: cos and sin, `[B, T, D]`.
            attention_mask: as the attention function wants it.
            cache: storage only; values travel as tensors.

        Returns:
            Output `[B, T, C]`, attention weights (None but for eager), then the tensors of `row.sends`.
        """
        row, policy = self.row, self.value_residual
        reads, coefficients = received[: len(row.reads)], received[len(row.reads) :]
        heads_shape = (*hidden.shape[:-1], -1, self.head_dim)
        query = self.q_proj(hidden).view(heads_shape).transpose(1, 2)
        key = self.k_proj(hidden).view(heads_shape).transpose(1, 2)
        own = self.v_proj(hidden).view(heads_shape) if row.owns_value else None
        cos, sin = (x.unsqueeze(1) for x in position_embeddings)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)

        if row.stores == "mixed":  # only the new tokens are mixed, and the mixture is what the cache keeps
            assert own is not None
            value = own if policy is None else policy.mix(own, reads, hidden, coefficients)
            key, stored = self.store(cache, key, value.transpose(1, 2), kwargs)
            attended = stored
        else:  # the cache keeps the own value or nothing, and all tokens are mixed
            slot = key[..., :0] if own is None else own.transpose(1, 2)
            key, stored = self.store(cache, key, slot, kwargs)
            assert policy is not None, f"layer {row.layer} stores {row.stores!r} but has no policy to mix all tokens"
            value = policy.mix(None if own is None else stored.transpose(1, 2), reads, hidden, coefficients)
            attended = value.transpose(1, 2)

        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        dropout = self.attention_dropout if self.training else 0.0
        out, weights = attend(
            self, query, key, attended, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs
        )
        if policy is not None and policy.corrects:
            groups = self.num_key_value_groups
            all_heads = [repeat_heads(x, groups, dim=2) for x in (value, *reads)]
            own_heads = None if own is None else repeat_heads(own, groups, dim=2)
            out = policy.correct(out, all_heads[0], own_heads, all_heads[1:])
        sent = tuple(own if state == "raw" else stored.transpose(1, 2) for _, state in row.sends)
        return self.o_proj(out.reshape(*hidden.shape[:-1], -1)), weights, *sent

    def store(self, cache: Cache | None, key: Tensor, value: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Append to the cache; returns keys and values of all tokens so far, `[B, H_kv, S, D]` (width 0: none kept)."""
        return (key, value) if cache is None else cache.update(key, value, self.layer_idx, kwargs=kwargs)


class MLP(nn.Module):
    """down(act(gate(x)) * up(x)) (Shazeer 2020)."""

    def __init__(self, config: ResFormerConfig) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(hidden, inner, bias=bias)
        self.up_proj = nn.Linear(hidden, inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden, bias=bias)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(GradientCheckpointingLayer):
    """One block: `hidden, *sent = layer(hidden, *received)`. Tensors in, tensors out, so checkpointing and FSDP2 keep
    every gradient.
    """

    def __init__(self, config: ResFormerConfig, row: Row, policy: Policy | None) -> None:
        super().__init__()
        self.self_attn = Attention(config, row, policy)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden: Tensor, *received: Tensor, **kwargs: Any) -> tuple[Tensor, ...]:
        out, _, *sent = self.self_attn(self.input_layernorm(hidden), *received, **kwargs)
        hidden = hidden + out
        hidden = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return hidden, *sent
