"""How a layer spreads its attention over the tokens.

Shapes: B texts, H heads, T tokens. Attention is what the softmax gives, `[B, H, T, T]` (query, key), or its mean over
the heads, `[B, T, T]`. `mask` `[B, T]` is True where there is a token; padding changes nothing.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def token_importance(attention: Tensor, mask: Tensor | None = None) -> Tensor:
    """The attention that each token receives, `[B, T]`, sums to 1: a_j = 1/l sum_i A_ij, over its sum (paper, eq. 11,
    whose printed index is swapped; the official script sums over queries, as here). Heads are averaged.

    Early tokens are seen by more queries, so compare at equal lengths only.
    """
    weights = attention.double()
    if weights.dim() == 4:
        weights = weights.mean(dim=1)
    if mask is not None:
        weights = weights * mask[:, :, None] * mask[:, None, :]
    received = weights.sum(dim=1)
    return received / received.sum(dim=1, keepdim=True)


def importance_entropy(importance: Tensor) -> Tensor:
    """-sum a ln a of `[B, T]`, nats, `[B]`. Low: concentrated. The most is ln l, of equal importance; uniform causal
    attention gives about ln(l) - 0.42.
    """
    return torch.special.entr(importance.double()).sum(dim=-1)


def token_importance_entropy(attention: Tensor, mask: Tensor | None = None) -> Tensor:
    """Entropy of token importance (paper, eq. 11), nats, `[B]`."""
    return importance_entropy(token_importance(attention, mask))


def first_token_share(importance: Tensor, mask: Tensor | None = None) -> Tensor:
    """Importance of each text's first token, `[B]`: how much of a sink it is (paper, fig. 2)."""
    if mask is None:
        return importance[:, 0]
    return importance.gather(1, mask.int().argmax(dim=1, keepdim=True))[:, 0]


def top_share(importance: Tensor, top: int | float, mask: Tensor | None = None) -> Tensor:
    """Importance of the `top` most important tokens together, `[B]` (paper, fig. 21).

    top: a number of tokens (int), or a share of each text's tokens (float below 1, at least one token).
    """
    if (isinstance(top, float) and not 0 < top < 1) or (isinstance(top, int) and top < 1):
        raise ValueError(f"top: got {top}, expected a number of tokens from 1, or a share between 0 and 1")
    length = importance.shape[1]
    lengths = torch.full((len(importance),), length) if mask is None else mask.sum(dim=1).cpu()
    ordered = importance.sort(dim=1, descending=True).values.cumsum(dim=1)
    counts = [min(max(1, math.floor(top * int(n))) if isinstance(top, float) else top, length) for n in lengths]
    return ordered.gather(1, torch.tensor(counts, device=importance.device)[:, None] - 1)[:, 0]
