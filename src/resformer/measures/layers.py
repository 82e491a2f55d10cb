"""What one layer's output is made of, and what attention to other layers would be.

Shapes: B texts, H heads (keys and values repeated to query heads), T tokens, D channels a head. `mask` `[B, T]` is True
where there is a token; padding changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def contribution(part: Tensor, whole: Tensor, mask: Tensor | None = None) -> Tensor:
    """The share of `whole` that points along it and comes from `part`: mean over the tokens of <part, whole> / <whole,
    whole>, `[B]`; both `[B, T, D]`. The shares of parts that sum to the whole sum to 1.
    """
    part, whole = part.double(), whole.double()
    length = whole.square().sum(dim=-1)
    shares = (part * whole).sum(dim=-1) / length.clamp_min(torch.finfo(torch.float64).tiny)
    return _mean(shares, mask)


def weight_by_head(part: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """With which weight `value` is in `part`, mean over the tokens: <part, value> / <value, value>, `[B, H]`; both `[B,
    T, H, D]`. Of a gated residual it is the mean gate of each head.
    """
    part, value = part.double(), value.double()
    length = value.square().sum(dim=-1).clamp_min(torch.finfo(torch.float64).tiny)
    weights = (part * value).sum(dim=-1) / length
    return torch.stack([_mean(weights[:, :, h], mask) for h in range(weights.shape[2])], dim=1)


def cosine(a: Tensor, b: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean over the tokens of the cosine between two outputs `[B, T, D]`, `[B]`."""
    return _mean(torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=-1), mask)


def cross_layer_attention(
    query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], bias: Tensor | None, scaling: float
) -> Tensor:
    """Attention of one layer's queries to several layers' keys and values (paper, eq. 2): one softmax over all of them.

    query `[B, H, T, D]`, keys and values `[B, H, T, D]` each; bias is added to the scores of each layer `[.., T, T]`;
    None: causal. Returns `[B, H, T, D]`.
    """
    if bias is None:
        bias = causal_bias(query.shape[2], query)
    scores = [query @ key.transpose(2, 3) * scaling + bias for key in keys]
    weights = torch.softmax(torch.cat(scores, dim=-1).float(), dim=-1).to(query.dtype)
    return weights @ torch.cat(list(values), dim=2)


def shared_attention(weights: Tensor, values: Sequence[Tensor]) -> Tensor:
    """Its approximation with one layer's attention for all (paper, eq. 4 and 5): A_n times the mean of the values."""
    return weights @ (sum(values[1:], values[0]) / len(values))


def identity_mapping(weights: Tensor, own: Tensor, others: Sequence[Tensor]) -> Tensor:
    """The control (paper, eq. 6): A_n V_n plus the mean of the other layers' values, without attention."""
    return weights @ own + sum(others[1:], others[0]) / len(others)


def causal_bias(length: int, like: Tensor) -> Tensor:
    """0 where a query may see a key, the lowest number elsewhere, `[T, T]`."""
    bias = torch.full((length, length), torch.finfo(like.dtype).min, dtype=like.dtype, device=like.device)
    return bias.triu(1)


def _mean(values: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return values.mean(dim=1)
    return (values * mask).sum(dim=1) / mask.sum(dim=1)
