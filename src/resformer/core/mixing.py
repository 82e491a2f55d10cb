"""The one mixing primitive: `first * V_1 + own * V_n`.

Shapes: values `[B, T, H_kv, D]`; weights are Python floats or fp32 tensors that broadcast: `[1]`, `[H_kv, 1]`, `[H_kv,
D]`.
"""

from __future__ import annotations

import torch
from torch import Tensor

Weight = float | Tensor


def upcast(x: Tensor) -> Tensor:
    """`x` in at least fp32: bf16 and fp16 are raised, fp64 stays."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def weighted_sum(first: Weight, v_first: Tensor, own: Weight, v_own: Tensor) -> Tensor:
    """`first * v_first + own * v_own` in the values' dtype; with weights 0 and 1 it is `v_own` bit for bit.

    In low precision the sum is formed in fp32 and rounded once: a bf16 lambda would be rounded to 8 bits before it is
    used.
    """
    if isinstance(first, float) and isinstance(own, float):
        scaled = v_own if own == 1.0 else v_own * own
        return scaled if first == 0.0 else scaled.add(v_first, alpha=first)
    return (v_own * own + v_first * first).to(v_own.dtype)
