"""Finding and loading a model, strictly and without pickles."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from resformer import ResFormerConfig, ResFormerForCausalLM
from resformer.errors import UserError
from resformer.evaluate.loading import load_model, model_directory, no_progress_bars, resolve_device

SIZES = {
    "vocab_size": 3,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 8,
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("export") / "model"
    ResFormerForCausalLM(ResFormerConfig(variant="learnable", **SIZES)).save_pretrained(out)  # type: ignore[arg-type]
    _save_tokenizer(out)
    return out


def _save_tokenizer(out: Path) -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(out)


def test_an_export_a_run_and_a_foreign_model(exported: Path, tmp_path: Path) -> None:
    model, tokenizer = load_model(exported, "cpu")
    assert isinstance(model, ResFormerForCausalLM)
    assert not model.training
    assert tokenizer("a b").input_ids == [0, 1] or tokenizer("a").input_ids == [0]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text("")
    shutil.copytree(exported, tmp_path / "run" / "model")
    assert load_model(str(tmp_path / "run"))[0].config.variant == "learnable"
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(tmp_path / "llama")  # type: ignore[arg-type]
    _save_tokenizer(tmp_path / "llama")
    assert isinstance(load_model(tmp_path / "llama", torch.device("cpu"))[0], LlamaForCausalLM)


def test_where_no_model_is(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no model at .*expected a run directory"):
        model_directory(tmp_path / "none")
    with pytest.raises(UserError, match="no model at none"):
        model_directory("none")
    with pytest.raises(UserError, match="holds no model"):
        model_directory(tmp_path)
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(UserError, match=f"no exported model yet; write one with `resformer export {tmp_path}`"):
        model_directory(tmp_path)
    assert model_directory("org/name") == "org/name"


@pytest.mark.parametrize("change", ["missing", "unexpected"])
def test_weights_must_fit_to_the_last_name(exported: Path, tmp_path: Path, change: str) -> None:
    copy = shutil.copytree(exported, tmp_path / "copy")
    tensors = load_file(copy / "model.safetensors")
    if change == "missing":
        tensors.pop("model.norm.weight")
    else:
        tensors["model._orig_mod.norm.weight"] = torch.ones(16)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=rf"1 weights {change} \(first: .*norm.weight\)"):
        load_model(copy)


def test_a_pickle_is_never_read(exported: Path, tmp_path: Path) -> None:
    mark = tmp_path / "executed"

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {mark}",)

    copy = shutil.copytree(exported, tmp_path / "copy")
    (copy / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Evil()}, copy / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"copy holds no weights \(model.safetensors is missing\)"):
        load_model(copy)
    assert not mark.exists()


def test_damaged_files_are_a_users_error(exported: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(exported, tmp_path / "copy")
    content = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=r"model.safetensors is damaged or cut short .*`resformer export RUN") as caught:
        load_model(copy)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("tokenizer.json", None, "tokenizer.json is missing"),
        ("config.json", b"{", "config.json is no JSON"),
        ("model.safetensors", b"short", "model.safetensors is damaged or cut short"),
    ],
)
def test_a_bad_file_of_a_runs_export_is_named_with_the_way_out(
    exported: Path, tmp_path: Path, name: str, text: bytes | None, message: str
) -> None:
    copy = shutil.copytree(exported, tmp_path / "model")
    (tmp_path / "config.toml").write_text("")
    (copy / name).unlink()
    if text is not None:
        (copy / name).write_bytes(text)
    with pytest.raises(UserError) as caught:
        load_model(tmp_path)
    assert message in str(caught.value)
    assert str(caught.value).endswith(f"write it again with `resformer export {tmp_path} --overwrite`")


def test_an_empty_name_is_no_model() -> None:
    with pytest.raises(UserError, match="the model's name is empty"):
        model_directory("")


def test_devices() -> None:
    assert resolve_device("cpu").type == "cpu"
    assert resolve_device("auto").type in ("cpu", "cuda", "mps")
    with pytest.raises(UserError, match="device 'tpu9' is unknown"):
        resolve_device("tpu9")
    with pytest.raises(UserError, match="device 'cuda:99' is not available on this machine"):
        resolve_device("cuda:99")


def test_progress_bars_come_back() -> None:
    before = logging.is_progress_bar_enabled()
    with no_progress_bars():
        assert not logging.is_progress_bar_enabled()
    assert logging.is_progress_bar_enabled() == before
