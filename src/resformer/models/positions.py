"""Positions: rotary ones, which turn queries and keys, and learned ones, which are added to the embeddings.

Shapes: B batch, T new tokens, D head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update

from ..errors import UserError
from .configuration import ResFormerConfig


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
        """cos of the angles and sin with the sign that `rotate` wants, each `[B, 1, T, D]` in the dtype of `x`."""
        angles = position_ids[:, None, :, None].float() * self.inv_freq.float().to(x.device)
        angles = torch.cat((-angles, angles), dim=-1)
        return (angles.cos() * self.attention_scaling).to(x.dtype), (angles.sin() * self.attention_scaling).to(x.dtype)


def rotate(x_BHTD: Tensor, cos_B1TD: Tensor, sin_B1TD: Tensor) -> Tensor:
    """Turn queries or keys by their positions.

    (left, right) -> (left cos - right sin, right cos + left sin); the minus is in the first half of `sin`.
    """
    return x_BHTD * cos_B1TD + x_BHTD.roll(x_BHTD.shape[-1] // 2, dims=-1) * sin_B1TD


class LearnedPositions(nn.Embedding):
    """One trained vector for each position, as in GPT-2. There is none for positions beyond the last."""

    def __init__(self, config: ResFormerConfig) -> None:
        super().__init__(config.max_position_embeddings, config.hidden_size)

    def forward(self, position_ids: Tensor) -> Tensor:
        """The vectors `[B, T, C]` of the positions `[B, T]`.

        Raises:
            UserError: for a position beyond the last; on other devices than the CPU PyTorch complains.
        """
        real = type(position_ids) is Tensor and not torch.compiler.is_compiling()  # fake tensors have no numbers
        if real and position_ids.device.type == "cpu":
            last = int(position_ids.max())
            if last >= self.num_embeddings:
                raise UserError(
                    f"the sequence has a token at position {last + 1}, but the model has learned {self.num_embeddings} "
                    "(max_position_embeddings); shorten it, or train with position_embedding='rope'"
                )
        return super().forward(position_ids)


def consecutive(new: int, past: int | Tensor, device: torch.device) -> Tensor:
    """Positions `[1, T]` of `new` tokens after `past` ones."""
    return (torch.arange(new, device=device) + past).unsqueeze(0)


def unpadded(attention_mask: Tensor, new: int) -> Tensor:
    """Positions `[B, T]` of the last `new` tokens, counted over the tokens that a mask `[B, S]` keeps: padding on the
    left shifts nothing.
    """
    return (attention_mask.long().cumsum(dim=-1) - 1).clamp(min=0)[:, -new:]
