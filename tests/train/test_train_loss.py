"""The training loss equals cross entropy over whole logits, however the batch is cut."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from resformer import ResFormerConfig, ResFormerForCausalLM
from resformer.train import loss as loss_module
from resformer.train.loss import accumulate, summed_nll

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}


def new_model(**changes: object) -> ResFormerForCausalLM:
    torch.manual_seed(1)
    model = ResFormerForCausalLM(ResFormerConfig(**{**SIZES, "initializer_range": 0.2, **changes}))  # type: ignore[arg-type]
    return model.train()


def batch() -> tuple[Tensor, Tensor]:
    """Eight sequences of very unequal numbers of counted tokens: 0, 1, ... 24."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 97, (8, 25), generator=generator)
    lengths = torch.tensor([24, 1, 24, 2, 0, 3, 24, 1])
    return tokens, torch.arange(24)[None] < lengths[:, None]


def reference(model: nn.Module, tokens: Tensor, mask: Tensor) -> Tensor:
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    losses = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return (losses * mask.flatten()).sum() / mask.sum()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("micro_batch_size", [1, 2, 3, 8])
@pytest.mark.parametrize("tied", [False, True])
def test_accumulation_equals_the_full_batch(micro_batch_size: int, tied: bool) -> None:
    model = new_model(tie_word_embeddings=tied)
    tokens, mask = batch()
    expected_loss = reference(model, tokens, mask)
    expected_loss.backward()
    expected = gradients(model)
    loss = accumulate(model, tokens, micro_batch_size=micro_batch_size, mask_BT=mask)
    found = gradients(model)
    assert loss.item() == pytest.approx(expected_loss.item(), abs=1e-6)
    assert found.keys() == expected.keys()
    scale = max(g.abs().max() for g in expected.values())
    for name, gradient in found.items():
        assert (gradient - expected[name]).abs().max() <= 1e-6 * scale, name


def test_a_mean_of_means_would_be_told_apart() -> None:
    """The batch above is uneven enough that the usual mistake fails the test before this one."""
    model = new_model()
    tokens, mask = batch()
    rows = [i for i in range(8) if mask[i].any()]
    wrong = torch.stack([reference(model, tokens[i : i + 1], mask[i : i + 1]) for i in rows]).mean()
    assert abs(wrong.item() - reference(model, tokens, mask).item()) > 1e-3


def test_more_rows_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    model = new_model()
    tokens, mask = batch()
    expected = summed_nll(model, tokens, mask).item()
    monkeypatch.setattr(loss_module, "CPU_CHUNK_ROWS", 7)
    assert summed_nll(model, tokens, mask).item() == pytest.approx(expected, rel=1e-6)


def test_without_the_chunked_kernel_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    model = new_model()
    tokens, mask = batch()
    accumulate(model, tokens, micro_batch_size=8, mask_BT=mask)
    expected = gradients(model)
    monkeypatch.delattr(nn, "LinearCrossEntropyOptions", raising=False)
    accumulate(model, tokens, micro_batch_size=8, mask_BT=mask)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-7)


def test_bf16_is_near_fp32_and_gradients_stay_fp32() -> None:
    model = new_model(initializer_range=0.02)
    tokens, _ = batch()
    exact = accumulate(model, tokens, micro_batch_size=8)
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = accumulate(model, tokens, micro_batch_size=8)
    assert rough.dtype == torch.float32
    assert rough.item() != exact.item()
    assert rough.item() == pytest.approx(exact.item(), abs=2e-2)
    assert {gradient.dtype for gradient in gradients(model).values()} == {torch.float32}


def test_any_causal_lm_of_transformers() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))  # type: ignore[arg-type]
    tokens, mask = batch()
    assert summed_nll(model, tokens, mask).item() == pytest.approx(
        (reference(model, tokens, mask) * mask.sum()).item(), rel=1e-5
    )
