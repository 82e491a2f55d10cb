"""What must hold for every family of stock models."""

from __future__ import annotations

import copy
import io
import json
import pickle
from pathlib import Path
from typing import Any

import patch_families as families
import pytest
import torch
import transformers
from packaging.version import Version
from torch import nn

import resformer
from resformer.convert.patch import lambda_names
from resformer.core import registry
from resformer.core.policy import Shape

ALL, EIGHT = list(families.FAMILIES), list(families.EIGHT)
TRAINED = ["learnable", "learnable_plus", "dense", "gated", "rwkv"]
FIXED = ["identity", "constant", "sparse", "neutreno"]


def pairs(names: list[str], variants: list[str]) -> list[tuple[str, str]]:
    """Every family with the first variant, and every variant with a split and a fused projection."""
    return [(name, variants[0]) for name in names] + [(n, v) for v in variants[1:] for n in ("llama", "gpt2")]


def patched(name: str, variant: str = "learnable", **options: Any) -> Any:
    """A patched model whose lambdas have moved from their start, each by another amount."""
    model = resformer.patch(families.build(name), variant=variant, variant_options=options)
    with torch.no_grad():
        for parameter in lambda_names(model):
            model.get_parameter(parameter).add_(0.2 * torch.randn(model.get_parameter(parameter).shape))
    return model


def neutral_options(variant: str) -> dict[str, Any] | None:
    shape = Shape(layers=families.LAYERS, hidden_size=families.WIDTH, heads=4, kv_heads=2, head_dim=8)
    return registry.build(variant, None, shape).neutral(shape)


@pytest.mark.parametrize(("name", "variant"), pairs(ALL, [*TRAINED[:4], *FIXED]))
def test_at_neutral_options_the_output_is_the_stock_models_bit_for_bit(name: str, variant: str) -> None:
    model = families.build(name)
    given = families.inputs(model)
    with torch.no_grad():
        before = families.logits(model, given)
        resformer.patch(model, variant=variant, variant_options=neutral_options(variant))
        assert torch.equal(families.logits(model, given), before)


@pytest.mark.parametrize(("name", "variant"), [*pairs(ALL, [*TRAINED, *FIXED]), *((n, "neutreno") for n in ALL)])
def test_other_options_change_the_output_and_train_every_parameter(name: str, variant: str) -> None:
    model = families.build(name)
    given = families.inputs(model)
    with torch.no_grad():
        before = families.logits(model, given)
    resformer.patch(model, variant=variant)
    if variant != "gated":  # which starts as the stock model
        assert (families.logits(model, given) - before).abs().max() > 1e-3
    families.loss(model, given).backward()
    got = families.gradients(model)
    trained = set(lambda_names(model)) - {name for name in lambda_names(model) if name.endswith("up")}  # times zero
    assert trained <= got.keys()
    assert all(got[name].abs().max() > 0 for name in trained)
    assert bool(trained) == (variant in TRAINED)


@pytest.mark.parametrize(("name", "variant"), pairs(families.LANGUAGE, ["learnable", *TRAINED[1:], *FIXED]))
def test_generation_with_a_cache_is_generation_without_one(name: str, variant: str) -> None:
    model = patched(name, variant)
    ids = families.inputs(model)["input_ids"]
    mask = torch.ones_like(ids)
    ids[0, :4], mask[0, :4] = 0, 0  # padded on the left
    ask = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 8, "min_new_tokens": 8}
    with torch.no_grad():
        cached = model.generate(ids, **ask, use_cache=True)
        assert torch.equal(cached, model.generate(ids, **ask, use_cache=False))
        beams = model.generate(ids, **ask, num_beams=3, use_cache=True)
        assert torch.equal(beams, model.generate(ids, **ask, num_beams=3, use_cache=False))


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_a_static_cache_gives_the_same_tokens(name: str) -> None:
    model = patched(name)
    ids = families.inputs(model)["input_ids"]
    ask = {"do_sample": False, "max_new_tokens": 8, "min_new_tokens": 8}
    with torch.no_grad():
        static = model.generate(ids, **ask, cache_implementation="static")
        assert torch.equal(static, model.generate(ids, **ask, use_cache=False))


@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_continuous_batching_gives_the_same_tokens(name: str) -> None:
    """Requests of different lengths share a forward pass, packed into one row."""
    model = patched(name)
    texts = [[5, 6, 7, 8, 9, 10, 11], [12, 13], [20, 21, 22, 23]]
    ask = transformers.GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)
    size = transformers.ContinuousBatchingConfig(page_size=4, num_blocks=13, max_batch_tokens=8)
    results = model.generate_batch(texts, ask, size).values()
    assert not [result.error for result in results if result.error]
    with torch.no_grad():
        for text, result in zip(texts, results, strict=True):
            alone = model.generate(torch.tensor([text]), generation_config=ask, use_cache=False)
            assert result.generated_tokens == alone[0, len(text) :].tolist()


@pytest.mark.parametrize("name", families.LANGUAGE)
def test_logits_in_pieces_equal_those_at_once(name: str) -> None:
    model = patched(name)
    ids = families.inputs(model)["input_ids"]
    with torch.no_grad():
        whole, pieces, cache = model(ids, use_cache=True).logits, [], None
        for part in (ids[:, :4], ids[:, 4:5], ids[:, 5:]):
            out = model(part, past_key_values=cache, use_cache=True)
            cache = out.get("cache", out.get("past_key_values"))
            pieces.append(out.logits)
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("name", "variant"), [*pairs(ALL, [*TRAINED, *FIXED]), *((n, "neutreno") for n in ALL)])
def test_checkpointing_is_exact_with_two_forwards_before_one_backward(name: str, variant: str) -> None:
    model = patched(name, variant).train()
    first, second = families.inputs(model, seed=1), families.inputs(model, seed=2)

    def step() -> dict[str, Any]:
        left, right = families.loss(model, first), families.loss(model, second)
        (left + 2 * right).backward()
        return families.gradients(model)

    def alone() -> dict[str, Any]:
        families.loss(model, first).backward()
        (2 * families.loss(model, second)).backward()
        return families.gradients(model)

    plain, one_by_one = step(), alone()
    families.checkpointing(model)
    recomputed = step()
    assert plain.keys() == recomputed.keys() == one_by_one.keys()
    for parameter, gradient in plain.items():
        assert torch.equal(recomputed[parameter], gradient), parameter
        torch.testing.assert_close(one_by_one[parameter], gradient, atol=1e-5, rtol=1e-4, msg=parameter)


@pytest.mark.parametrize("name", ALL)
def test_reentrant_checkpointing_is_refused(name: str) -> None:
    model = patched(name).train()
    families.checkpointing(model, reentrant=True)
    with pytest.raises(resformer.UserError, match=r"reentrant.*use_reentrant"):
        families.loss(model, families.inputs(model))
    with torch.no_grad():  # no gradient to lose
        families.loss(model, families.inputs(model))


@pytest.mark.parametrize("variant", ["learnable_plus", "identity"])
@pytest.mark.parametrize("name", ALL)
def test_save_and_load_give_the_same_bits(name: str, variant: str, tmp_path: Path) -> None:
    if name == "vit" and lambda_names(patched(name, variant)) and Version(transformers.__version__) < Version("5.24"):
        pytest.skip("older transformers take attention.value_residual for attention.value; load_patched says so")
    model = patched(name, variant)
    model.save_pretrained(tmp_path)
    record = json.loads((tmp_path / "config.json").read_text())["resformer_patch"]
    options = registry.get(variant).options()
    assert record == {"variant": variant, "variant_options": options, "version": 1}
    assert not list(tmp_path.glob("*.bin"))

    loaded = resformer.load_patched(tmp_path)
    assert type(loaded) is type(model)
    assert not loaded.training
    for (one, left), (other, right) in zip(loaded.named_parameters(), model.named_parameters(), strict=True):
        assert one == other
        assert torch.equal(left, right), one
    given = families.inputs(model)
    with torch.no_grad():
        assert torch.equal(families.logits(loaded, given), families.logits(model, given))
    loaded.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["resformer_patch"] == record


@pytest.mark.parametrize("name", ALL)
def test_a_copy_works_on_itself(name: str) -> None:
    model = patched(name, "learnable_plus")
    given = families.inputs(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)]
    with torch.no_grad():
        before = families.logits(model, given)
        for parameter in model.parameters():
            parameter.zero_()
        for other in copies:
            assert torch.equal(families.logits(other, given), before)
    for other in copies:
        families.loss(other, given).backward()
        assert set(lambda_names(other)) <= families.gradients(other).keys()
        assert resformer.unpatch(other) is other


def test_hooks_of_an_unpickled_model_do_not_collide_with_new_ones() -> None:
    """torch numbers hooks from 0 in each process; here the next number is put where an unpickled model may have it."""
    model = pickle.loads(pickle.dumps(patched("llama")))
    given = families.inputs(model)
    with torch.no_grad():
        before = families.logits(model, given)
        for _ in range(60):
            for module in model.modules():
                module.register_forward_hook(lambda *_: None)
        assert torch.equal(families.logits(model, given), before)


@pytest.mark.parametrize("variant", ["learnable_plus", "neutreno"])
@pytest.mark.parametrize("name", ALL)
def test_unpatch_gives_the_stock_model_back(name: str, variant: str) -> None:
    model = families.build(name)
    keys, modules, given = list(model.state_dict()), len(list(model.modules())), families.inputs(model)
    config = model.config.to_dict()
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    with torch.no_grad():
        before = families.logits(model, given)
        assert resformer.patch(model, variant=variant) is model
        families.logits(model, given)
        assert resformer.unpatch(model) is model
        assert torch.equal(families.logits(model, given), before)
    assert list(model.state_dict()) == keys
    assert len(list(model.modules())) == modules
    assert model.config.to_dict() == config
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()) == hooks
    with pytest.raises(resformer.UserError, match="not patched"):
        resformer.unpatch(model)
    resformer.patch(model, variant=variant)  # and again


@pytest.mark.parametrize(("name", "variant"), pairs(EIGHT, TRAINED))
def test_lambdas_are_parameters_found_by_name_and_do_not_decay(name: str, variant: str) -> None:
    model = families.build(name)
    stock = set(dict(model.named_parameters()))
    resformer.patch(model, variant=variant)
    added = dict(model.named_parameters()).keys() - stock
    assert added == set(lambda_names(model))
    assert all(isinstance(model.get_parameter(name), nn.Parameter) for name in added)
    groups = {group["name"]: group for group in resformer.optimizer_groups(model, lambda_lr_scale=5.0)}
    assert set(groups["lambdas"]["names"]) == added
    assert groups["lambdas"]["weight_decay"] == 0
    assert groups["lambdas"]["lr"] == 5 * groups["matrices"]["lr"]
    for layer in ("layers.0.", "h.0."):  # layer 1 mixes nothing, so it has nothing to train
        assert not any(layer in name for name in added)


@pytest.mark.parametrize("name", ALL)
def test_hidden_states_and_attentions_can_be_asked_for(name: str) -> None:
    model = patched(name)
    model.set_attn_implementation("eager")
    given = families.inputs(model)
    with torch.no_grad():
        plain = families.logits(model, given)
        out = model(**given, output_hidden_states=True, output_attentions=True)
    assert torch.equal(out.logits, plain)
    assert len(out.hidden_states) == families.LAYERS + 1
    assert len(out.attentions) == families.LAYERS


@pytest.mark.parametrize("name", ALL)
def test_a_training_step_lowers_the_loss(name: str) -> None:
    model = patched(name, "learnable")
    given = families.inputs(model)
    optimizer = torch.optim.AdamW(resformer.optimizer_groups(model, lr=1e-3, lambda_lr_scale=10))
    losses = []
    for _ in range(4):
        value = families.loss(model, given)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    assert losses[-1] < losses[0]
