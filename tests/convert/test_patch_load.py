"""Saving and loading a patched model: strict to the last name, and safetensors only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import patch_families as families
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import resformer
from resformer import UserError

FIRST = "model.layers.1.self_attn.value_residual.first"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model = resformer.patch(families.build("llama"), variant="learnable")
    with torch.no_grad():
        model.get_parameter(FIRST).fill_(0.123456789)
    model.save_pretrained(tmp_path)
    return tmp_path


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_weights(directory: Path, *, drop: str = "", add: str = "") -> None:
    path = directory / "model.safetensors"
    weights = {name: tensor.clone() for name, tensor in load_file(path).items() if name != drop}
    if add:
        weights[add] = torch.zeros(1)
    save_file(weights, path, metadata={"format": "pt"})


@pytest.mark.parametrize("gone", [FIRST, "model.layers.3.self_attn.value_residual.own", "model.norm.weight"])
def test_a_missing_weight_is_an_error(saved: Path, gone: str) -> None:
    edit_weights(saved, drop=gone)
    with pytest.raises(UserError, match=f"1 weights missing .first: {gone}"):
        resformer.load_patched(saved)


def test_a_weight_too_many_is_an_error(saved: Path) -> None:
    edit_weights(saved, add="model.layers.0.self_attn.value_residual.first")
    with pytest.raises(UserError, match=r"1 weights unexpected .first: model.layers.0.self_attn.value_residual.first"):
        resformer.load_patched(saved)


def test_other_options_than_those_of_the_weights_are_an_error(saved: Path) -> None:
    record = {"variant": "learnable", "variant_options": {"granularity": "head"}, "version": 1}
    edit_config(saved, resformer_patch=record)
    with pytest.raises(UserError, match="another shape"):
        resformer.load_patched(saved)
    edit_config(saved, resformer_patch={**record, "variant_options": {"granulraity": "head"}})
    with pytest.raises(UserError, match="did you mean 'granularity'"):
        resformer.load_patched(saved)


def test_records_that_cannot_be_read(saved: Path, tmp_path: Path) -> None:
    record = json.loads((saved / "config.json").read_text())["resformer_patch"]
    edit_config(saved, resformer_patch={**record, "version": 2})
    with pytest.raises(UserError, match="newer resformer"):
        resformer.load_patched(saved)
    edit_config(saved, resformer_patch="learnable")
    with pytest.raises(UserError, match="expected variant, variant_options and version"):
        resformer.load_patched(saved)
    families.build("llama").save_pretrained(tmp_path / "stock")
    with pytest.raises(UserError, match=r"no patched model.*resformer.patch"):
        resformer.load_patched(tmp_path / "stock")
    with pytest.raises(UserError, match="no config"):
        resformer.load_patched(tmp_path / "nowhere")


def test_a_pickle_is_not_read(saved: Path) -> None:
    torch.save(load_file(saved / "model.safetensors"), saved / "pytorch_model.bin")
    (saved / "model.safetensors").unlink()
    with pytest.raises(UserError, match="safetensors"):
        resformer.load_patched(saved)


def test_the_model_that_stock_transformers_loads_is_not_taken_for_a_patched_one(saved: Path) -> None:
    stock = transformers.AutoModelForCausalLM.from_pretrained(saved)
    with pytest.raises(UserError, match=r"saved patched, but loaded without its patch.*load_patched"):
        resformer.patch(stock, variant="learnable")


def test_lambdas_keep_their_bits_in_bf16_and_in_shards(saved: Path, tmp_path: Path) -> None:
    model = resformer.load_patched(saved, dtype=torch.bfloat16)
    assert model.get_parameter(FIRST).dtype == torch.float32
    assert model.get_parameter(FIRST).item() == pytest.approx(0.123456789, abs=1e-8)
    assert model.get_parameter("model.layers.1.self_attn.v_proj.weight").dtype == torch.bfloat16
    model.save_pretrained(tmp_path / "shards", max_shard_size="10KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    again = resformer.load_patched(tmp_path / "shards", dtype="auto")
    assert all(torch.equal(p, again.get_parameter(name)) for name, p in model.named_parameters())
    assert again.get_parameter(FIRST).dtype == torch.float32


def test_the_loaded_model_is_an_ordinary_one(saved: Path) -> None:
    model = resformer.load_patched(saved, attn_implementation="eager")
    assert type(model) is transformers.LlamaForCausalLM
    assert model.config._attn_implementation == "eager"
    assert model.config.architectures == ["LlamaForCausalLM"]
    headless = resformer.load_patched(saved, model_class=transformers.LlamaForCausalLM)
    given = families.inputs(model)
    out = headless(**given, output_hidden_states=True)
    assert len(out.hidden_states) == families.LAYERS + 1
    resformer.unpatch(model)
    assert model.config.to_dict().get("resformer_patch") is None


def composite() -> Any:
    """A vision encoder and a language model."""
    siglip = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
    vision = transformers.SiglipVisionConfig(**siglip, image_size=16, patch_size=8)
    text = transformers.Gemma3TextConfig(**families.GEMMA)
    torch.manual_seed(0)
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    return transformers.Gemma3ForConditionalGeneration(config).eval()


def test_parts_of_a_model_are_patched_and_loaded_by_themselves(tmp_path: Path) -> None:
    model = composite()
    with pytest.raises(UserError, match=r"several lists of blocks.*get_submodule\('model.language_model'\)"):
        resformer.patch(model, variant="learnable")
    resformer.patch(model.get_submodule("model.language_model"), variant="learnable")
    model.save_pretrained(tmp_path / "one")
    resformer.patch(model.get_submodule("model.vision_tower"), variant="identity")
    model.save_pretrained(tmp_path / "both")

    given = {"input_ids": torch.randint(3, families.VOCAB, (1, 7)), "pixel_values": torch.randn(1, 3, 16, 16)}
    features = model.get_image_features(given["pixel_values"]).last_hidden_state
    both, one = resformer.load_patched(tmp_path / "both"), resformer.load_patched(tmp_path / "one")
    ids = {"input_ids": given["input_ids"]}
    with torch.no_grad():
        assert torch.equal(both(**ids).logits, model(**ids).logits)
        assert torch.equal(one(**ids).logits, model(**ids).logits)
        assert torch.equal(both.get_image_features(given["pixel_values"]).last_hidden_state, features)
        assert not torch.equal(one.get_image_features(given["pixel_values"]).last_hidden_state, features)
    resformer.unpatch(both.model.vision_tower)
    assert not hasattr(both.config.vision_config, "resformer_patch")
    assert both.config.text_config.resformer_patch["variant"] == "learnable"
    resformer.unpatch(both)
    assert "resformer_patch" not in json.dumps(both.config.to_dict())


def test_the_record_is_written_where_the_config_is(tmp_path: Path) -> None:
    """Also when a wrapper or the bare stack is patched."""
    model = families.build("llama")
    resformer.patch(torch.nn.Sequential(model), variant="identity")
    assert model.config.resformer_patch["variant"] == "identity"
    resformer.unpatch(model.model)
    assert not hasattr(model.config, "resformer_patch")


def test_device_maps_and_the_hooks_of_accelerate(saved: Path) -> None:
    accelerate: Any = pytest.importorskip("accelerate")
    model = resformer.load_patched(saved)
    given = families.inputs(model)
    with torch.no_grad():
        expected = families.logits(model, given)
        assert torch.equal(families.logits(resformer.load_patched(saved, device_map="cpu"), given), expected)
        places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
        places |= {f"model.layers.{n}": "cpu" for n in range(families.LAYERS)}
        accelerate.dispatch_model(model, places, force_hooks=True)  # which replaces forward methods
        assert torch.equal(families.logits(model, given), expected)


def test_a_trainer_saves_and_goes_on_with_the_lambdas(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    model = resformer.patch(families.build("llama"), variant="learnable")
    rows = [{"input_ids": row, "labels": row} for row in families.inputs(model, batch=8)["input_ids"]]
    optimizer = torch.optim.AdamW(resformer.optimizer_groups(model, lr=1e-2))
    common: dict[str, Any] = {"report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True}
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=4, gradient_checkpointing=True, **common
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=rows, optimizers=(optimizer, None))
    trainer.train()
    assert abs(model.get_parameter(FIRST).item() - 0.5) > 1e-3
    trainer.save_model(str(tmp_path / "out"))
    loaded, given = resformer.load_patched(tmp_path / "out"), families.inputs(model)
    model.eval()
    with torch.no_grad():
        assert torch.equal(families.logits(loaded, given), families.logits(model, given))
