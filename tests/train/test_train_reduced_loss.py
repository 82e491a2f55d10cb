"""The loss in bf16: products rounded, sum and scale not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from resformer.train import loss as loss_module
from resformer.train import reduced_loss
from resformer.train.loss import IGNORED


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [2, 1000])
def test_sum_and_gradients_are_those_of_fp32_over_bf16_logits(
    monkeypatch: pytest.MonkeyPatch, bias: bool, rows: int
) -> None:
    monkeypatch.setattr(reduced_loss, "LOGITS", 50 * rows)
    monkeypatch.setattr(reduced_loss, "max", lambda *x: min(x), raising=False)
    torch.manual_seed(0)
    head = nn.Linear(16, 50, bias=bias)
    hidden = torch.randn(99, 16, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(50, (99,))
    targets[5:9] = IGNORED
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = loss_module._linear_nll(hidden, head, targets)
    (found / 95).backward()
    got = [hidden.grad, head.weight.grad, head.bias.grad if bias else None]
    hidden.grad = None
    head.zero_grad()
    logits = F.linear(hidden, head.weight.bfloat16(), head.bias.bfloat16() if bias else None).float()
    expected = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    assert found.dtype == torch.float32 and float(found.detach()) == pytest.approx(float(expected), rel=1e-6)
    (expected / 95).backward()
    for a, b in zip(got, [hidden.grad, head.weight.grad, head.bias.grad if bias else None], strict=True):
        if a is not None and b is not None:
            assert a.dtype == b.dtype
            assert (a - b).norm() < 5e-3 * b.norm()


def test_the_scale_of_the_gradient_is_not_rounded() -> None:
    """1 / 2039 in bf16 is 0.3 % off."""
    torch.manual_seed(0)
    head, hidden = nn.Linear(8, 30, bias=False), torch.randn(64, 8)
    targets = torch.randint(30, (64,))

    def gradient(count: int) -> torch.Tensor:
        head.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            (loss_module._linear_nll(hidden, head, targets) / count).backward()
        assert head.weight.grad is not None
        return head.weight.grad

    assert torch.allclose(gradient(2039) * 2039, gradient(1).clone(), rtol=1e-6)


def test_what_needs_no_gradient_gets_none() -> None:
    head = nn.Linear(8, 30, bias=False).requires_grad_(False)
    hidden = torch.randn(4, 8, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss_module._linear_nll(hidden, head, torch.arange(4)).backward()
    assert hidden.grad is not None and head.weight.grad is None
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert loss_module._linear_nll(hidden, head, torch.arange(4)).dtype == torch.float32
