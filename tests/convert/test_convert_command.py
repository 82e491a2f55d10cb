"""The command as a newcomer types it: one clear line for a mistake, nothing lost, nothing left behind."""

from __future__ import annotations

import json
import signal
import tempfile
from pathlib import Path

import pytest
import torch
from convert_models import VOCAB, ids, make
from test_convert_checkpoint import SHAPED, left_in, run, write
from transformers import AutoModelForCausalLM

from resformer.commands import convert as command
from resformer.convert import check

WORDS = " ".join(f"w{n % VOCAB}" for n in range(977))


def test_calibration_text_is_taken_from_all_files_in_turn(tmp_path):
    for name, letter, size in (("a.txt", "a", 10_000), ("b.txt", "b", 3_000), ("c.txt", "c", 5_000)):
        (tmp_path / name).write_text(letter * size)
    pieces = list(command._texts((str(tmp_path),)))
    assert [piece[0] for piece in pieces] == ["a", "b", "c", "a", "c", "a"]
    assert {letter: sum(len(x) for x in pieces if x[0] == letter) for letter in "abc"} == {
        "a": 10_000,
        "b": 3_000,
        "c": 5_000,
    }
    assert max(map(len, pieces)) == command._PIECE


def test_calibration_text_begins_with_the_beginnings_of_all_documents(tmp_path):
    """One long book would else be all that a fit sees of a file."""
    texts = ("a" * 10_000, "b" * 100, "c" * 5_000)
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / "y.txt").write_text("y" * 100)
    pieces = list(command._texts((str(tmp_path),)))
    assert [piece[0] for piece in pieces] == ["a", "y", "b", "c", "a", "a", "c"]
    assert sum(map(len, pieces)) == sum(map(len, texts)) + 100


def test_a_bad_line_of_calibration_text_comes_with_advice_that_can_be_followed(tmp_path, capsys):
    model = write(tmp_path / "llama", tokenizer=True)
    (tmp_path / "bad.jsonl").write_text("{\n")
    arguments = ("--variant", "svformer", "--calibration", tmp_path / "bad.jsonl", "--out", tmp_path / "shared")
    assert run(model, *arguments) == 2
    assert capsys.readouterr().err.strip().endswith("; mend the file, or leave it out")


def test_no_more_files_are_opened_than_are_needed(tmp_path, monkeypatch):
    """A directory of a million files must not be read to its end for some thousand tokens."""
    from resformer.evaluate import text_source

    for number in range(30):
        (tmp_path / f"{number:02}.txt").write_text(f"{number} " * 100)
    opened = []

    class Counted(text_source.TextSource):
        def __init__(self, inputs):
            opened.append(Path(inputs[0]).stem)
            super().__init__(inputs)

    monkeypatch.setattr(text_source, "TextSource", Counted)
    texts = command._texts((str(tmp_path),))
    assert [next(texts).split()[0] for _ in range(3)] == ["0", "1", "2"]
    assert opened == ["00", "01", "02"]


def test_the_source_is_never_overwritten(tmp_path, capsys):
    model = write(tmp_path / "llama")
    before = (model / "config.json").read_bytes()
    for out in (model, tmp_path / "x" / ".." / "llama"):
        assert run(model, "--variant", "learnable", "--out", out, "--overwrite") == 2
        assert "holds the model that is converted" in capsys.readouterr().err
    assert (model / "config.json").read_bytes() == before and left_in(tmp_path) == ["llama"]


def test_a_file_or_no_model_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "llama")
    (tmp_path / "empty").mkdir()
    for name, message in (
        ("llama/model.safetensors", "is a file; expected a directory with config.json, a hub name or a GGUF file"),
        ("llama/config.json", "is a file"),
        ("nowhere", "no model at nowhere"),
        ("empty", "holds no model"),
        ("nowhere.gguf", "no file nowhere.gguf"),
    ):
        assert run(name, "--variant", "learnable", "--out", tmp_path / "out") == 2
        error = capsys.readouterr().err.strip().splitlines()
        assert len(error) == 1 and message in error[0], error
    assert left_in(tmp_path) == ["empty", "llama"]


def test_shards_without_a_tokenizer(tmp_path, capsys, monkeypatch):
    model = make("llama", **SHAPED)
    model.save_pretrained(tmp_path / "llama", max_shard_size="10KB")
    assert len(list((tmp_path / "llama").glob("*.safetensors"))) > 3
    monkeypatch.setattr(check, "in_another_process", loaded_here)
    assert run(tmp_path / "llama", "--variant", "learnable", "--out", tmp_path / "out") == 0
    assert "llama has no tokenizer; the new model gets none" in capsys.readouterr().err
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(ours(ids()).logits, model(ids()).logits)
    (tmp_path / "words.txt").write_text(WORDS)
    arguments = ("--variant", "svformer", "--calibration", tmp_path / "words.txt", "--out", tmp_path / "shared")
    assert run(tmp_path / "llama", *arguments) == 2
    assert "--calibration needs the tokenizer" in capsys.readouterr().err
    next((tmp_path / "llama").glob("*.safetensors")).unlink()
    assert run(tmp_path / "llama", "--variant", "learnable", "--out", tmp_path / "again") == 2
    assert "cannot be loaded" in capsys.readouterr().err
    assert left_in(tmp_path) == ["llama", "out", "words.txt"]


def loaded_here(directory, probe, prelude=()):
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    return check.logits(model, probe.ids, probe.positions)


def test_no_space_leaves_nothing(tmp_path, monkeypatch, capsys):
    from resformer.convert import checkpoint

    def full(model, tokenizer, generation, place):
        (place / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    model = write(tmp_path / "llama")
    monkeypatch.setattr(checkpoint, "save", full)
    assert run(model, "--variant", "learnable", "--out", tmp_path / "deep" / "out") == 1
    assert capsys.readouterr().err.strip().splitlines()[-1] == "resformer: error: No space left on device"
    assert left_in(tmp_path) == ["llama"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_in_the_middle_of_a_calibration_loses_nothing(tmp_path, number, capsys, monkeypatch):
    """An older model stays in its place, and no directory with half of a new one is left."""
    import os

    from resformer.convert import fits

    model, out = write(tmp_path / "llama", tokenizer=True), tmp_path / "out"
    monkeypatch.setattr(check, "in_another_process", loaded_here)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "words.txt").write_text(f"{WORDS} " * 8)
    assert run(model, "--variant", "learnable", "--out", out) == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    solve, calls = fits._solve, []

    def stopped(*arguments, **more):
        calls.append(solve(*arguments, **more))
        os.kill(os.getpid(), number)
        raise AssertionError("a signal comes at once")

    monkeypatch.setattr(fits, "_solve", stopped)
    arguments = ("--variant", "svformer", "--calibration", tmp_path / "words.txt", "--calibration-tokens", 4096)
    capsys.readouterr()
    if number == signal.SIGINT:
        assert run(model, *arguments, "--out", out, "--overwrite") == 130
        assert capsys.readouterr().err.strip().splitlines()[-1] == "resformer: error: interrupted"
    else:
        with pytest.raises(SystemExit) as stop:
            run(model, *arguments, "--out", out, "--overwrite")
        assert stop.value.code == 143
    assert len(calls) == 1
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert left_in(tmp_path) == ["llama", "out", "words.txt"]


def test_a_calibration_from_files_is_told_and_written_down(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(check, "in_another_process", loaded_here)
    model, out = write(tmp_path / "llama", tokenizer=True), tmp_path / "out"
    (tmp_path / "words.txt").write_text(f"{WORDS} " * 8)
    arguments = ("--calibration", tmp_path / "words.txt", "--calibration-tokens", 4096, "--out", out)
    assert run(model, "--variant", "svformer", *arguments) == 0
    said = capsys.readouterr()
    assert "loss on held-out calibration text" in said.out and "NOT equal to" in said.out
    assert "layer 5: " in said.err and "of what the stream lacks" in said.err
    card = (out / "README.md").read_text()
    assert "Loss on held-out calibration text" in card and "way back" not in card  # it has no W_v to give back
    assert json.loads((out / "config.json").read_text())["variant_options"] == {
        "layers": "last_third",
        "anchors": [1, 3],
    }
