"""Output head and cross-entropy in bf16 or fp16 arithmetic, with the loss and its scale in fp32.

torch's `linear_cross_entropy` returns the sum in the dtype of its inputs: 17,408 where it should be 17,390.3, and a
gradient whose scale 1/tokens is rounded as well. Here only the matrix products are in the lower precision.

Shapes: N rows, C hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

LOGITS = 1 << 26  # of a chunk, at a time: 256 MB in fp32


def reduced_nll(
    hidden_NC: Tensor, weight_VC: Tensor, bias_V: Tensor | None, targets_N: Tensor, *, dtype: torch.dtype, ignored: int
) -> Tensor:
    """Sum of the negative log-likelihoods, fp32 scalar; rows whose target is `ignored` count nothing.

    Logits of a part of the rows exist at a time, their gradients are made in the forward pass. Gradients of `weight_VC`
    and `bias_V` are sums in fp32.
    """
    return _ReducedNll.apply(hidden_NC, weight_VC, bias_V, targets_N, dtype, ignored)


class _ReducedNll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NC: Tensor,
        weight_VC: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        dtype: torch.dtype,
        ignored: int,
    ) -> Tensor:
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        hidden, weight = hidden_NC.to(dtype), weight_VC.to(dtype)
        bias = None if bias_V is None else bias_V.to(dtype)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight_VC, dtype=torch.float32) if needs_weight else None
        grad_bias = torch.zeros_like(bias_V, dtype=torch.float32) if needs_bias and bias_V is not None else None
        rows = max(128, LOGITS // weight.shape[0])
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(hidden), rows):
                part, targets = hidden[start : start + rows], targets_N[start : start + rows]
                logits = torch.nn.functional.linear(part, weight, bias).float()
                counted = targets != ignored
                at = targets.clamp_min(0)[:, None]
                log_sum = logits.logsumexp(dim=1, keepdim=True)
                total += ((log_sum - logits.gather(1, at))[:, 0] * counted).sum()
                if not any(ctx.needs_input_grad[:3]):
                    continue
                slopes = logits.sub_(log_sum).exp_()
                slopes.scatter_add_(1, at, torch.full_like(at, -1, dtype=slopes.dtype))
                slopes = (slopes * counted[:, None]).to(dtype)
                if grad_hidden is not None:
                    grad_hidden[start : start + rows] = slopes @ weight
                if grad_weight is not None:
                    grad_weight += slopes.t() @ part
                if grad_bias is not None:
                    grad_bias += slopes.sum(dim=0, dtype=torch.float32)
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.dtypes = hidden_NC.dtype, weight_VC.dtype, None if bias_V is None else bias_V.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        scaled = [
            None if part is None else (part * grads[0]).to(dtype)
            for part, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return (*scaled, None, None, None)
