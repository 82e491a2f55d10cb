"""PEFT on our models: LoRA on the projections, and lambdas that are trained and kept beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from resformer import ResFormerConfig, ResFormerForCausalLM
from resformer.core import registry

peft = pytest.importorskip("peft")

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj"]
# Where a variant keeps its lambdas, gates and logits, for `modules_to_save`.
KEPT = {
    "learnable": ["value_residual"],
    "learnable_plus": ["value_residual", "value_coefficients"],
    "gated": ["value_residual"],
    "rwkv": ["value_residual"],
    "dense": ["value_residual"],
}


def build(variant: str) -> Any:
    torch.manual_seed(0)
    return ResFormerForCausalLM(
        ResFormerConfig(
            variant=variant,
            vocab_size=61,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            initializer_range=0.1,
        )
    )


def ids() -> torch.Tensor:
    return torch.randint(0, 61, (2, 16), generator=torch.Generator().manual_seed(1))


def step(model: Any) -> None:
    """One step of plain gradient descent on what is trained."""
    trained = [p for p in model.parameters() if p.requires_grad]
    model(input_ids=ids(), labels=ids()).loss.backward()
    with torch.no_grad():
        for parameter in trained:
            assert parameter.grad is not None
            parameter -= 1.0 * parameter.grad
            parameter.grad = None


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(input_ids=ids()).logits


@pytest.mark.parametrize("variant", registry.names())
def test_lora_trains_merges_and_decodes(variant: str) -> None:
    if variant in ("attention_residual", "cross_attention"):
        pytest.skip("needs an attention implementation of its own; the projections are those of all others")
    base = build(variant)
    before = logits(base)
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=PROJECTIONS))
    assert torch.equal(logits(model), before)
    for _ in range(2):  # A has no gradient while B is 0
        step(model.train())
    changed = logits(model)
    assert (changed - before).abs().max() > 1e-4
    greedy = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids(), **greedy), model.generate(ids(), use_cache=False, **greedy))
    merged = model.merge_and_unload()
    assert type(merged) is ResFormerForCausalLM
    torch.testing.assert_close(logits(merged), changed, atol=2e-6, rtol=1e-5)


def test_unloading_gives_the_model_back() -> None:
    base = build("learnable")
    before = logits(base)
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=PROJECTIONS))
    for _ in range(2):
        step(model.train())
    assert torch.equal(logits(model.unload()), before)


@pytest.mark.parametrize("variant", KEPT)
def test_lambdas_are_trained_and_saved_beside_lora(variant: str, tmp_path: Path) -> None:
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"], modules_to_save=KEPT[variant]
    )
    model = peft.get_peft_model(build(variant), settings)
    start = {name: p.detach().clone() for name, p in model.named_parameters() if "modules_to_save" in name}
    assert start
    for _ in range(2):
        step(model.train())
    moved = {name: p for name, p in model.named_parameters() if name in start}
    assert all(not torch.equal(moved[name], value) for name, value in start.items())
    after = logits(model)
    model.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(build(variant), tmp_path / "adapter")
    assert torch.equal(logits(again), after)
    merged = model.merge_and_unload()
    torch.testing.assert_close(logits(merged), after, atol=2e-6, rtol=1e-5)
    merged.save_pretrained(tmp_path / "merged")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(loaded), after, atol=2e-6, rtol=1e-5)
    assert set(loaded.state_dict()) == set(build(variant).state_dict())


def test_what_peft_cannot_do_is_refused() -> None:
    settings = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], modules_to_save=["depth_average"])
    with pytest.raises(TypeError, match="modules_to_save cannot be applied"):
        peft.get_peft_model(build("denseformer"), settings)
