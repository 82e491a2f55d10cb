"""An export is what transformers expects, and its card tells the truth."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from train_helpers import WEIGHTS, crash_after, saved_weights

from resformer.errors import UserError
from resformer.evaluate.loading import load_model
from resformer.train import tensors
from resformer.train.config import Config
from resformer.train.configure import edit
from resformer.train.export import export_run
from resformer.train.loop import train
from resformer.train.metrics import read_rows


def test_files_and_bits(whole_run: Path) -> None:
    model = whole_run / "model"
    assert {path.name for path in model.iterdir()} >= {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "modeling_resformer.py",
        "tokenizer.json",
        "tokenizer_config.json",
        "README.md",
    }
    saved = saved_weights(whole_run, 20)
    exported = load_file(model / "model.safetensors")
    assert saved.keys() == exported.keys()
    assert all(torch.equal(saved[name], exported[name]) for name in saved)
    generation = json.loads((model / "generation_config.json").read_text())
    assert generation["eos_token_id"] == generation["pad_token_id"] == 0
    assert {oct(path.stat().st_mode & 0o777) for path in model.iterdir()} == {"0o644"}


def test_the_code_of_the_card_runs_in_a_new_process(whole_run: Path) -> None:
    card = (whole_run / "model" / "README.md").read_text()
    code = re.search(r"```python\n(.*?)```", card, re.S)
    assert code is not None
    lines = [line for line in code[1].splitlines() if line.strip()]
    assert len(lines) == 6
    done = subprocess.run(
        [sys.executable, "-c", code[1]],
        cwd=whole_run / "model",
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "The history of the" in done.stdout


def test_the_card_says_what_was_recorded(whole_run: Path) -> None:
    card = (whole_run / "model" / "README.md").read_text()
    facts = json.loads((whole_run / "environment.json").read_text())
    assert card.startswith("---\nlibrary_name: transformers\npipeline_tag: text-generation\n")
    assert facts["data"]["fingerprint"] in card
    assert f"{facts['accounting']['parameters']:,} parameters" in card
    rows = [r for r in read_rows(whole_run / "metrics.jsonl") if r["split"] == "validation" and r["step"] == 20]
    for row in rows:
        assert f"{row['loss']:.4f} | {row['bits_per_byte']:.4f} |" in card
    assert "20 steps, 5,120 tokens" in card
    assert "0.1 tokens per parameter" in card


def test_the_tokenizer_is_the_corpuss(whole_run: Path, corpus: Path) -> None:
    _, tokenizer = load_model(whole_run)
    text = "hello world"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert len(tokenizer) == 300
    assert (whole_run / "model" / "tokenizer.json").read_bytes() == (corpus / "tokenizer.json").read_bytes()


def test_export_of_an_earlier_step(whole_run: Path, tmp_path: Path) -> None:
    made = export_run(whole_run, step=15, out=tmp_path / "at15")
    saved = saved_weights(whole_run, 15)
    assert all(torch.equal(saved[name], tensor) for name, tensor in load_file(made / "model.safetensors").items())
    card = (made / "README.md").read_text()
    assert "15 of 20 steps (an intermediate checkpoint)" in card
    assert "Step 15 was not validated." in card


def test_export_of_an_interrupted_run_without_its_corpus(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crash_after(config, tmp_path / "run", 7, monkeypatch)
    monkeypatch.setattr("resformer.train.setup.open_dataset", None)
    with pytest.raises(UserError, match=r"no exported model yet; write one with `resformer export .*run`"):
        load_model(tmp_path / "run")
    assert export_run(tmp_path / "run") == tmp_path / "run" / "model"
    model, _ = load_model(tmp_path / "run")
    assert model.config.variant == "learnable"


@pytest.mark.parametrize("changes", [{"model.tie_word_embeddings": True}, {"model.variant": "svformer"}])
def test_other_models_survive_the_way(config: Config, tmp_path: Path, changes: dict[str, object]) -> None:
    out = tmp_path / "run"
    train(edit(config, {"train.steps": 2, **changes}), out)
    model, _ = load_model(out)
    saved = saved_weights(out, 2)
    found = tensors.model_tensors(model)
    assert found.keys() == saved.keys()
    assert all(torch.equal(found[name], saved[name]) for name in saved)


def test_a_damaged_checkpoint_is_said_to_be_passed_over(
    whole_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole_run, run)
    os.truncate(run / "checkpoints" / "step-00000020" / WEIGHTS, 100)
    export_run(run, overwrite=True)
    said = capsys.readouterr().err.splitlines()
    assert f"damaged checkpoint passed over: step-00000020: {WEIGHTS} does not fit" in said[0]
    assert said[-1] == "note: exported step 15 of 20"
    assert "15 of 20 steps" in (run / "model" / "README.md").read_text()


def test_export_refuses(whole_run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no checkpoint of step 7 in .*; checkpoints there: 15, 20"):
        export_run(whole_run, step=7, out=tmp_path / "x")
    with pytest.raises(UserError, match="no run in"):
        export_run(tmp_path)
    with pytest.raises(UserError, match="is there already; pass --overwrite or another --out"):
        export_run(whole_run)
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"holds other files \(notes.txt\)"):
        export_run(whole_run, out=tmp_path / "x", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_checkpoint_of_another_model_is_named(whole_run: Path, config: Config, tmp_path: Path) -> None:
    from resformer.train.build import build_model, model_config

    other = edit(config, {"model.variant": "transformer", "model.intermediate_size": 48})
    model = build_model(other, model_config(other, vocab_size=300), torch.device("cpu"))
    path = whole_run / "checkpoints" / "step-00000020"
    with pytest.raises(UserError) as caught:
        tensors.read_model(path, model)
    assert "value_residual.first is unexpected" in str(caught.value)
    assert "and " in str(caught.value)
    assert "more" in str(caught.value)
