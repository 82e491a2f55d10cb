"""`--init-from`: weights of another model."""

from __future__ import annotations

import json
import shutil
from fnmatch import fnmatch
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
from resformer.train.export import export_run
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
        ({"model.intermediate_size": 48}, "does not fit the model: model.layers.0.mlp.gate_proj.weight is ["),
        ({"model.num_hidden_layers": 9}, "is missing"),
        ({"model.vocab_size": 320}, "has a vocabulary of 300 entries, the model one of 320; prepare the data with its"),
        ({"model.num_attention_heads": 4}, "model.num_attention_heads is 4, there 2"),
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
    with pytest.raises(UserError, match=r"no model\.safetensors in .*save_pretrained"):
        load_initial(fresh(config), str(tmp_path), report=print)
    torch.save({}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="is damaged or cut short"):
        load_initial(fresh(config), str(tmp_path), report=print)
    with pytest.raises(UserError, match="no model at"):
        load_initial(fresh(config), str(tmp_path / "nowhere"), report=print)


def exported(directory: Path, whole_run: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A copy of the run's export, to be changed, and its tensors."""
    shutil.copytree(whole_run / "model", directory)
    return directory, load_file(directory / "model.safetensors")


def test_a_run_without_an_export_gives_its_last_checkpoint(whole_run: Path, config: Config, tmp_path: Path) -> None:
    """An older export, as `export --step` leaves one, does not count; damaged checkpoints are passed over."""
    run, said = tmp_path / "run", []
    shutil.copytree(whole_run, run)
    shutil.rmtree(run / "model")
    model = fresh(config)
    load_initial(model, str(run), report=said.append)
    last = saved_weights(run, 20)
    assert all(torch.equal(tensor, last[name]) for name, tensor in model_tensors(model).items())
    assert "(step 20)" in said[-1]
    export_run(run, step=15)
    (run / "checkpoints" / "step-00000020" / "state.json").write_text("{}")
    load_initial(model, str(run), report=said.append)
    assert "damaged checkpoint passed over: step-00000020" in said[-2]
    assert "(step 15)" in said[-1]
    shutil.rmtree(run / "checkpoints")  # only the export is left
    load_initial(model, str(run), report=said.append)
    assert torch.equal(model_tensors(model)["model.norm.weight"], last["model.norm.weight"]) is False
    shutil.rmtree(run / "model")
    with pytest.raises(UserError, match="has no exported model yet"):
        load_initial(model, str(run), report=said.append)


def test_a_run_of_another_variant_and_other_sizes(whole_run: Path, config: Config, tmp_path: Path) -> None:
    run, said = tmp_path / "run", []
    shutil.copytree(whole_run, run, ignore=shutil.ignore_patterns("model"))
    model = fresh(config, **{"model.variant": "svformer", "model.rope_theta": 500.0})
    load_initial(model, str(run), report=said.append)
    assert "left out" in said[-1]
    assert "model.rope_theta is 500.0, there 10000.0" in said[-1]
    with pytest.raises(UserError, match=r"model\.layers\.2\.self_attn\.q_proj\.weight is missing"):
        load_initial(fresh(config, **{"model.num_hidden_layers": 9}), str(run), report=print)


def test_only_the_models_own_files_are_read(whole_run: Path, config: Config, tmp_path: Path) -> None:
    """An adapter or another copy that lies there must not replace weights."""
    directory, tensors = exported(tmp_path / "m", whole_run)
    save_file({"model.embed_tokens.weight": torch.zeros(1)}, directory / "zz_adapter.safetensors")
    model = fresh(config)
    load_initial(model, str(directory), report=print)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in model_tensors(model).items())


def test_shards_are_read_by_their_index(whole_run: Path, config: Config, tmp_path: Path) -> None:
    directory, tensors = exported(tmp_path / "m", whole_run)
    (directory / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {"model-00001-of-00002.safetensors": names[:5], "model-00002-of-00002.safetensors": names[5:]}
    for file, inside in files.items():
        save_file({name: tensors[name] for name in inside}, directory / file)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {name: file for file, inside in files.items() for name in inside}}))
    model = fresh(config)
    load_initial(model, str(directory), report=print)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in model_tensors(model).items())
    (directory / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match=r"model-00001-of-00002\.safetensors is missing, which .*index\.json names"):
        load_initial(model, str(directory), report=print)
    for wrong in ("{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": "../m/model.safetensors"}}'):
        index.write_text(wrong)
        with pytest.raises(UserError, match=r"index\.json is no index of safetensors files"):
            load_initial(model, str(directory), report=print)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_weights_are_refused(whole_run: Path, config: Config, tmp_path: Path, dtype: torch.dtype) -> None:
    """They have the shape of weights, and are none without their scales."""
    directory, tensors = exported(tmp_path / "m", whole_run)
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"].to(dtype)
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(UserError, match=r"model\.layers\.1\.mlp\.up_proj\.weight holds (I8|F8_E4M3) numbers"):
        load_initial(fresh(config), str(directory), report=print)


def test_half_precision_is_widened_and_other_settings_are_said(whole_run: Path, config: Config, tmp_path: Path) -> None:
    directory, tensors = exported(tmp_path / "m", whole_run)
    half = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(half, directory / "model.safetensors")
    about = json.loads((directory / "config.json").read_text())
    about["rms_norm_eps"] = 1e-6
    about.pop("rope_parameters")
    about["rope_theta"] = 5e5  # as older files have it
    (directory / "config.json").write_text(json.dumps(about))
    model, said = fresh(config), []
    load_initial(model, str(directory), report=said.append)
    for name, tensor in model_tensors(model).items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, half[name].float())
    assert len(said) == 1
    assert "model.rms_norm_eps is 1e-05, there 1e-06" in said[0]
    assert "model.rope_theta is 10000.0, there 500000.0" in said[0]


def test_a_hub_name_that_cannot_be_fetched(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: object, allow_patterns: list[str], **__: object) -> str:
        assert not any(fnmatch("pytorch_model.bin", p) or fnmatch("modeling.py", p) for p in allow_patterns)
        raise OSError("no\nnetwork")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(UserError, match=r"train\.init_from some/model cannot be fetched: no network"):
        load_initial(fresh(config), "some/model", report=print)
