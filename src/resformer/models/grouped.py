"""One matrix for each group of rows: what a mixture of experts computes once its tokens are sorted by expert.

Shapes: N rows, I inputs, O outputs, E groups.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def grouped_linear(x_NI: Tensor, weight_EOI: Tensor, sizes_E: Tensor) -> Tensor:
    """`[N, O]`: the first sizes[0] rows times the first matrix, and so on; the sizes sum to N.

    Eager code loops over groups, which needs the sizes as numbers. Compiled code and fake tensors have none: in bf16
    they take PyTorch's grouped product, which knows no other type there, and else an operator of ours that hides the
    loop.
    """
    if type(sizes_E) is Tensor and not torch.compiler.is_compiling():
        return _looped(x_NI, weight_EOI, sizes_E)
    kind = x_NI.device.type
    if torch.is_autocast_enabled(kind):  # which knows neither of the two
        dtype = torch.get_autocast_dtype(kind)
        x_NI, weight_EOI = x_NI.to(dtype), weight_EOI.to(dtype)
    if x_NI.dtype == torch.bfloat16:
        return F.grouped_mm(x_NI, weight_EOI.transpose(1, 2), offs=sizes_E.cumsum(0).to(torch.int32))
    return _opaque(x_NI, weight_EOI, sizes_E)


def _looped(x_NI: Tensor, weight_EOI: Tensor, sizes_E: Tensor) -> Tensor:
    parts = x_NI.split(sizes_E.tolist())
    # unbind, since picking matrices one by one would make a gradient of the full size for each.
    return torch.cat([F.linear(part, weight) for part, weight in zip(parts, weight_EOI.unbind(), strict=True)])


@torch.library.custom_op("resformer::grouped_linear", mutates_args=())
def _opaque(x_NI: Tensor, weight_EOI: Tensor, sizes_E: Tensor) -> Tensor:
    return _looped(x_NI, weight_EOI, sizes_E)


@_opaque.register_fake
def _(x_NI: Tensor, weight_EOI: Tensor, sizes_E: Tensor) -> Tensor:
    return x_NI.new_empty(x_NI.shape[0], weight_EOI.shape[1])


@torch.library.custom_op("resformer::grouped_outer", mutates_args=())
def _outer(gradient_NO: Tensor, x_NI: Tensor, sizes_E: Tensor) -> Tensor:
    """Per group the gradient of its matrix, `[E, O, I]`."""
    sizes = sizes_E.tolist()
    return torch.stack([g.T @ x for g, x in zip(gradient_NO.split(sizes), x_NI.split(sizes), strict=True)])


@_outer.register_fake
def _(gradient_NO: Tensor, x_NI: Tensor, sizes_E: Tensor) -> Tensor:
    return x_NI.new_empty(sizes_E.shape[0], gradient_NO.shape[1], x_NI.shape[1])


def _remember(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient_NO: Tensor) -> tuple[Tensor, Tensor, None]:
    x_NI, weight_EOI, sizes_E = ctx.saved_tensors
    d_x = _opaque(gradient_NO, weight_EOI.transpose(1, 2).contiguous(), sizes_E)
    return d_x, _outer(gradient_NO, x_NI, sizes_E), None


_opaque.register_autograd(_backward, setup_context=_remember)
