"""From own values to shared ones step by step: what a training loop calls between its steps.

A `learnable` model that starts as its source (l1 = 0, l2 = 1) is moved to l1 = 1, l2 = 0, where its mixing layers use
V_1 alone; `resformer convert` then makes an `svformer` of it that computes the same and has no W_v there.
"""

from __future__ import annotations

import torch
from torch import nn

from ..core.policy import POLICY_NAME
from ..core.residual import LearnedResidual
from ..errors import UserError


def share_after(step: int, steps: int) -> float:
    """How much is shared after `step` of `steps` steps: linear, from 0 to 1."""
    return min(1.0, max(0.0, step / steps)) if steps > 0 else 1.0


@torch.no_grad()
def morph(model: nn.Module, share: float) -> int:
    """Set every mixing layer of a `learnable` model to (1 - share) V_n + share V_1; returns how many there are.

    In place, so that compiled and sharded models stay as they are. The optimizer must leave these weights alone
    (`optim.lambda_lr_scale=0`).

    Raises:
        UserError: the model has no such layer, or `share` is not in 0..1.
    """
    if not 0.0 <= share <= 1.0:
        raise UserError(f"share is {share}; expected 0 (own values) to 1 (those of layer 1)")
    layers = [
        module
        for name, module in model.named_modules()
        if name.rpartition(".")[2] == POLICY_NAME and isinstance(module, LearnedResidual)
    ]
    if not layers:
        raise UserError("the model has no layer with learned weights l1 and l2; morph one of the variant 'learnable'")
    for policy in layers:
        if policy.tie == "own_one":
            raise UserError("with tie 'own_one' a layer always uses its own value; morph a model with 'free' or 'lerp'")
        policy.first.fill_(share)
        if policy.tie == "free":
            policy.own.fill_(1.0 - share)
    return len(layers)
