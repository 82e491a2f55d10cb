"""What hidden states, keys and values are like.

Shapes: B texts, T tokens, H heads, D channels. States are `[B, T, D]`, or `[B, T, H, D]` with heads. `mask` `[B, T]` is
True where there is a token; padding changes nothing.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Heads = Literal["concatenated", "averaged"]


def joined_heads(states: Tensor, heads: Heads = "concatenated") -> Tensor:
    """States with heads as `[B, T, H D]`, or as their mean `[B, T, D]`."""
    if heads not in ("concatenated", "averaged"):
        raise ValueError(f"heads: got {heads!r}, expected 'concatenated' or 'averaged'")
    if states.dim() == 3:
        return states
    return states.flatten(2) if heads == "concatenated" else states.mean(dim=2)


def token_similarity(states: Tensor, mask: Tensor | None = None, heads: Heads = "concatenated") -> Tensor:
    """Mean cosine of the states of two different tokens, `[B]` (paper, eq. 13): 1 / (l (l - 1)) sum_{i != j} cos(h_i,
    h_j). High: over-smoothed. A state of zeros has cosine 0 with all. NaN for a text of one token.
    """
    x = joined_heads(states, heads).double()
    units = x / x.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    if mask is not None:
        units = units * mask[:, :, None]
    length = torch.full((len(x),), x.shape[1], device=x.device) if mask is None else mask.sum(dim=1)
    # The sum over all pairs is the square of the sum: no l x l matrix.
    pairs = units.sum(dim=1).square().sum(dim=-1) - units.square().sum(dim=(1, 2))
    return pairs / (length * (length - 1)).double()


def state_norms(states: Tensor, heads: Heads = "concatenated") -> Tensor:
    """Euclidean norms `[B, T]`. Of values, an abnormally small one on the sink token is a drain; of hidden states, an
    abnormally large one is a peak (paper, fig. 2, 19-21).
    """
    return joined_heads(states, heads).double().norm(dim=-1)


def first_token_ratio(norms: Tensor, mask: Tensor | None = None) -> Tensor:
    """Norm of each text's first token over the mean norm of its others, `[B]`: below 1 for a drain, above for a peak.
    NaN for a text of one token.
    """
    if mask is None:
        mask = torch.ones_like(norms, dtype=torch.bool)
    first = torch.zeros_like(mask).scatter(1, mask.int().argmax(dim=1, keepdim=True), True)
    others = mask & ~first
    mean = (norms * others).sum(dim=1) / others.sum(dim=1)
    return (norms * first).sum(dim=1) / mean


def spectrum(
    states: Tensor, mask: Tensor | None = None, *, centred: bool = False, heads: Heads = "concatenated"
) -> Tensor:
    """Eigenvalues, descending, of (1/l) sum_i v_i v_i^T, `[B, min(T, D)]` (paper, eq. 12, which does not centre).

    centred: of the covariance, as in a principal component analysis. Eigenvalues beyond the rank are 0.
    """
    x = joined_heads(states, heads).double()
    length = torch.full((len(x),), x.shape[1], device=x.device) if mask is None else mask.sum(dim=1)
    if mask is not None:
        x = x * mask[:, :, None]
    if centred:
        x = x - x.sum(dim=1, keepdim=True) / length[:, None, None]
        x = x if mask is None else x * mask[:, :, None]
    # X X^T and X^T X have the same eigenvalues; the smaller one is taken.
    gram = x @ x.transpose(1, 2) if x.shape[1] < x.shape[2] else x.transpose(1, 2) @ x
    return torch.linalg.eigvalsh(gram / length[:, None, None]).flip(-1).clamp_min(0.0)


def effective_rank(eigenvalues: Tensor) -> Tensor:
    """exp of the entropy of the normalised eigenvalues `[B, K]`, `[B]` (Roy and Vetterli, 2007): 1 for one direction, K
    for K equal ones.
    """
    shares = eigenvalues / eigenvalues.sum(dim=-1, keepdim=True)
    return torch.special.entr(shares).sum(dim=-1).exp()


def components_for(eigenvalues: Tensor, share: float) -> Tensor:
    """The least number of eigenvalues `[B, K]` (descending) that hold `share` of their sum, int64 `[B]`."""
    if not 0 < share <= 1:
        raise ValueError(f"share: got {share}, expected more than 0 and at most 1")
    held = eigenvalues.cumsum(dim=-1) / eigenvalues.sum(dim=-1, keepdim=True)
    # Rounding may leave the last sum a hair below 1.
    return ((held < share - 1e-12).sum(dim=-1) + 1).clamp_max(eigenvalues.shape[-1])


def layer_similarity(states: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean over the tokens of the cosine between the states of each two layers: `[N, B, T, D]` -> `[B, N, N]`.

    Of the values that a ResFormer's layers own, this is the similarity of Delta V across layers.
    """
    x = states.double()
    units = x / x.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    if mask is not None:
        units = units * mask[None, :, :, None]
    length = torch.full((x.shape[1],), x.shape[2], device=x.device) if mask is None else mask.sum(dim=1)
    return torch.einsum("nbtd,mbtd->bnm", units, units) / length[:, None, None]
