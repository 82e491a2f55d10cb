"""`--init-from`: weights of another model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from train_helpers import saved_weights
from transformers import LlamaConfig, LlamaForCausalLM

from resformer.errors import UserError
from resformer.train.build import build_model, model_config
from resformer.train.config import Config
from resformer.train.configure import edit
from resformer.train.initial import load_initial
from resformer.train.loop import train
from resformer.train.tensors import model_tensors


def fresh(config: Config, **changes: object) -> torch.nn.Module:
    other = edit(config, {"train.seed": 7, **changes})
    return build_model(other, model_config(other, vocab_size=300), torch.device("cpu"))


def test_a_run_goes_on_with_another_runs_weights(whole_run: Path, config: Config, tmp_path: Path) -> None:
    """The learning rate is as good as 0, so the first step leaves the weights that were taken."""
    still = {"optim.lr": 1e-30, "optim.start_lr": 0.0, "train.steps": 1, "train.seed": 3}
    train(edit(config, {"train.init_from": str(whole_run), **still}), tmp_path / "run")
    old, new = saved_weights(whole_run, 20), saved_weights(tmp_path / "run", 1)
    assert all(torch.equal(old[name], new[name]) for name in old)
    assert json.loads((tmp_path / "run" / "checkpoints" / "step-00000001" / "state.json").read_text())["samples"] == 8


def test_a_transformers_llama_becomes_a_resformer(config: Config, tmp_path: Path) -> None:
    model = fresh(config)
    shape = model.config
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    llama = LlamaForCausalLM(LlamaConfig(**{name: getattr(shape, name) for name in names}))
    llama.save_pretrained(tmp_path)
    before, said = {name: tensor.clone() for name, tensor in model_tensors(model).items()}, []
    load_initial(model, str(tmp_path), report=said.append)
    for name, tensor in model_tensors(model).items():
        expected = llama.state_dict().get(name, before[name])
        assert torch.equal(tensor, expected), name
    assert "initial values kept for" in said[0]
    assert "value_residual" in said[0]


def test_what_a_model_has_no_place_for_is_said(whole_run: Path, config: Config) -> None:
    model, said = fresh(config, **{"model.variant": "svformer"}), []
    load_initial(model, str(whole_run), report=said.append)
    assert "left out" in said[0]
    assert "v_proj" in said[0] or "value_residual" in said[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.intermediate_size": 48}, "does not fit the model: model.layers.0.mlp.down_proj.weight is ["),
        ({"model.num_hidden_layers": 9}, "is missing"),
        ({"model.vocab_size": 320}, "model.embed_tokens.weight is [300, "),
    ],
)
def test_models_of_other_sizes_are_refused(
    whole_run: Path, config: Config, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError) as caught:
        load_initial(fresh(config, **changes), str(whole_run), report=print)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_tied_source_gives_its_head_too(whole_run: Path, config: Config, tmp_path: Path) -> None:
    tensors = load_file(whole_run / "model" / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    model = fresh(config)
    load_initial(model, str(tmp_path), report=lambda _: None)
    assert torch.equal(model_tensors(model)["lm_head.weight"], tensors["model.embed_tokens.weight"])
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"lm_head\.weight is missing"):
        load_initial(model, str(tmp_path), report=lambda _: None)


def test_pickles_and_damaged_files_are_refused(config: Config, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"no \.safetensors file in .*save_pretrained"):
        load_initial(fresh(config), str(tmp_path), report=print)
    torch.save({}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="is damaged or cut short"):
        load_initial(fresh(config), str(tmp_path), report=print)
    with pytest.raises(UserError, match="no model at"):
        load_initial(fresh(config), str(tmp_path / "nowhere"), report=print)
