"""Texts beyond the positions that a model was trained for: a warning where it can go on, an error where it cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from resformer.errors import UserError
from resformer.models.configuration import ResFormerConfig

TABLES = ("wpe", "embed_position", "position_embedding")
"""Parts of the names that models of transformers give to tables with a row for each position."""


def check_positions(
    model: Any, prompt_tokens: int, max_new_tokens: int, *, strict: bool, warn: Callable[[str], None]
) -> None:
    """Warn once if prompt and new tokens are more than the model was trained for.

    Raises:
        UserError: they are, and `strict` is set or the model learned its positions and has no more of them.
    """
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    total = prompt_tokens + max_new_tokens
    if limit is None or total <= limit:
        return
    what = f"{prompt_tokens} prompt tokens and {max_new_tokens} new ones (max_new_tokens) make {total}"
    room = limit - prompt_tokens
    way_out = (
        f"shorten the prompt or ask for {room} or less" if room > 0 else f"shorten the prompt below {limit} tokens"
    )
    if learned_positions(model, limit):
        raise UserError(
            f"{what}, but the model was built for {limit} positions, which it learned: there are no more; {way_out}"
        )
    if strict:
        raise UserError(f"{what}, but the model was built for {limit} positions; {way_out}")
    warn(f"{what}; the model was trained for {limit} positions, and text beyond may be poor")


def learned_positions(model: Any, limit: int) -> bool:
    """Whether positions come from a table of `limit` rows (a few more in some models)."""
    if isinstance(model.config, ResFormerConfig):
        return model.config.position_embedding == "learned"
    embeddings = (
        (name, module.num_embeddings) for name, module in model.named_modules() if isinstance(module, nn.Embedding)
    )
    buffers = ((name, buffer.shape[0]) for name, buffer in model.named_buffers() if buffer.dim() == 2)
    return any(
        limit <= rows <= limit + 8 and any(part in name for part in TABLES) for name, rows in (*embeddings, *buffers)
    )
