"""PEFT: adapters on a patched model work; a model that has adapters already is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import patch_families as families
import pytest
import torch
from torch import Tensor, nn

import resformer
from resformer.convert.patch import lambda_names

peft: Any = pytest.importorskip("peft")

TARGETS = {"llama": ["v_proj", "o_proj"], "gpt2": ["c_attn", "c_proj"], "vit": ["v_proj", "o_proj"]}
TASK = {"llama": "CAUSAL_LM", "gpt2": "CAUSAL_LM", "vit": None}


def adapted(name: str, variant: str, **more: Any) -> Any:
    torch.manual_seed(0)
    model = resformer.patch(families.build(name), variant=variant)
    config = peft.LoraConfig(
        r=2, target_modules=TARGETS[name], task_type=TASK[name], fan_in_fan_out=name == "gpt2", **more
    )
    model = peft.get_peft_model(model, config)
    with torch.no_grad():
        for parameter, value in model.named_parameters():
            if "lora_" in parameter:
                value.normal_(0, 0.3)
    return model.eval()


def merged(model: Any) -> Any:
    """The same function without adapters, by PEFT's own arithmetic, on a fresh copy."""
    import copy

    return copy.deepcopy(model).merge_and_unload()


@pytest.mark.parametrize("variant", ["identity", "learnable", "learnable_plus", "neutreno"])
@pytest.mark.parametrize("name", list(TARGETS))
def test_values_are_mixed_after_the_adapter_has_added_to_them(name: str, variant: str) -> None:
    """Mixing in front of it would use another V_1, and correct only a part of the output."""
    model = adapted(name, variant)
    given = families.inputs(families.build(name))
    with torch.no_grad():
        got = families.logits(model, given)
        plain = merged(model)
        torch.testing.assert_close(got, families.logits(plain, given), atol=2e-4, rtol=1e-3)
        weights: dict[str, Tensor] = plain.state_dict()
        fresh = resformer.patch(families.build(name, seed=3), variant=variant)
        fresh.load_state_dict(weights)
        torch.testing.assert_close(got, families.logits(fresh, given), atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("variant", ["learnable", "learnable_plus", "gated"])
@pytest.mark.parametrize("name", list(TARGETS))
def test_the_residual_can_be_trained_and_saved_with_the_adapter(name: str, variant: str, tmp_path: Path) -> None:
    wanted = ["value_residual", *(["value_coefficients"] if variant == "learnable_plus" else [])]
    model = adapted(name, variant, modules_to_save=wanted)
    given = families.inputs(families.build(name))
    trained = [n for n, p in model.named_parameters() if p.requires_grad and "lora_" not in n]
    assert trained
    assert set(trained) <= set(lambda_names(model))
    groups = {group["name"]: group for group in resformer.optimizer_groups(model)}
    assert set(groups["lambdas"]["names"]) == set(trained)
    families.loss(model, given).backward()
    got = families.gradients(model)
    assert all(got[n].abs().max() > 0 for n in trained)
    with torch.no_grad():
        for n in trained:
            model.get_parameter(n).add_(0.1 * torch.randn(model.get_parameter(n).shape))
        expected = families.logits(model, given)
    model.save_pretrained(tmp_path)
    base = resformer.patch(families.build(name), variant=variant)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(families.logits(loaded, given), expected)


def test_checkpointing_and_generation_with_adapters() -> None:
    model = adapted("llama", "learnable", modules_to_save=["value_residual"])
    given = families.inputs(families.build("llama"))
    with torch.no_grad():
        ask = {"do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6}
        assert torch.equal(model.generate(**given, **ask), model.generate(**given, **ask, use_cache=False))
    model.train()
    families.loss(model, given).backward()
    wanted = families.gradients(model)
    families.checkpointing(model.get_base_model())
    model.enable_input_require_grads()
    families.loss(model, given).backward()
    for parameter, gradient in families.gradients(model).items():
        assert torch.equal(gradient, wanted[parameter]), parameter


def test_a_model_with_adapters_is_refused_in_the_wrong_order() -> None:
    model = peft.get_peft_model(families.build("llama"), peft.LoraConfig(r=2, target_modules=["v_proj"]))
    parts: list[nn.Module] = [model, model.get_base_model()]
    for part in parts:
        with pytest.raises(resformer.UserError, match=r"has PEFT adapters.*patch the model first.*modules_to_save"):
            resformer.patch(part, variant="learnable")


def test_unpatch_under_adapters() -> None:
    model = adapted("llama", "identity")
    given = families.inputs(families.build("llama"))
    resformer.unpatch(model)
    stock = merged(model)
    with torch.no_grad():
        torch.testing.assert_close(families.logits(model, given), families.logits(stock, given), atol=2e-4, rtol=1e-3)
    assert not lambda_names(model)
