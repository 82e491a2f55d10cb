"""`resformer train` and `resformer export` from the command line: exit codes and one line each."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from resformer.cli import main
from resformer.train import loop


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, list[str]]:
    """Exit code, and what was said on stderr."""
    try:
        code = main([str(argument) for argument in arguments])
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    return code, capsys.readouterr().err.splitlines()


def test_train_resume_and_export(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    call = ("train", "tiny", "--data", corpus, "--out", out, "--variant", "sparse", "--steps", 6, "--set")
    options = ("train.device=cpu", "model.variant_options.first=3", "model.variant_options.layers=last:1")
    assert run(capsys, *call, *options)[0] == 0
    assert "first = 3" in (out / "config.toml").read_text()
    code, said = run(capsys, *call, *options)
    assert code == 2
    assert len(said) == 1
    assert f"--out {out} holds a run already (last checkpoint: step 6); pass --resume" in said[0]
    assert run(capsys, *call, *options, "--resume")[0] == 0
    assert run(capsys, "export", out, "--step", 5, "--out", tmp_path / "five")[0] == 0
    assert (tmp_path / "five" / "README.md").exists()
    code, said = run(capsys, "export", out, "--step", 4, "--out", tmp_path / "four")
    assert (code, len(said)) == (2, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--set", "optim.learning_rate=1"), "did you mean optim.lr?"),
        (("--set", "train.steps=1.5"), "got 1.5, expected a whole number"),
        (("--variant", "lernable"), "did you mean 'learnable'?"),
        (
            ("--set", "data.sequence_length=512", "model.max_position_embeddings=64"),
            "is over model.max_position_embeddings",
        ),
        (("--set", "model.num_attention_heads=3"), "does not divide model.hidden_size 32"),
        (("--set", "train.batch_size=100000"), "fewer than one batch"),
        (("--resume",), "--resume: no run in"),
        (("--steps", "0"), "--steps 0 (train.steps): got 0, expected at least 1"),
        (("--seed", "99999999999999999999"), "(train.seed): got 99999999999999999999, expected less than"),
        (("--config", ""), "--config: expected a path, got an empty text"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], message: str
) -> None:
    code, said = run(capsys, "train", "tiny", "--data", corpus, "--out", tmp_path / "run", *options)
    assert code == 2
    assert len(said) == 1
    assert message in said[0]
    assert not (tmp_path / "run").exists()


def test_numbers_that_are_none_end_with_exit_code_1(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wild = ("--set", "optim.lr=1e30", "optim.warmup_steps=0")
    code, said = run(capsys, "train", "tiny", "--data", corpus, "--out", tmp_path / "run", *wild)
    assert code == 1
    assert said[-1].startswith("resformer: error: step 2: loss is ")
    assert "there is no checkpoint yet; start again with a lower optim.lr" in said[-1]


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_with_its_exit_code(
    corpus: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    expected: int,
) -> None:
    real = loop.Reporter.step

    def signalled(self: loop.Reporter, step: int, **values: float) -> None:
        real(self, step, **values)
        if step == 3:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(loop.Reporter, "step", signalled)
    code, said = run(capsys, "train", "tiny", "--data", corpus, "--out", tmp_path / "run")
    assert code == expected
    assert said[-1] == f"{number.name}: stopped after step 3, checkpoint written; go on with --resume"


def test_a_run_outlives_who_read_its_lines(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "w", buffering=1) as nobody:
        monkeypatch.setattr("sys.stderr", nobody)
        assert main(["train", "tiny", "--data", str(corpus), "--out", str(tmp_path / "run")]) == 0
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()


def test_export_says_which_step(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert run(capsys, "train", "tiny", "--data", corpus, "--out", out, "--steps", 2)[0] == 0
    assert run(capsys, "export", out, "--overwrite") == (0, ["note: exported step 2 of 2"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tiny", "--sequence-length", -1), "--sequence-length is -1; expected 1 to"),
        (("tiny", "--vocab-size", 99999999999999999999), "--vocab-size is 99999999999999999999; expected 1 to"),
        (("83m",), "unknown recipe '83m'; did you mean '82m'? (known: quick, tiny, mini, small, uptrain, paper_2m,"),
        (("",), "RECIPE of `resformer plan` is empty"),
    ],
)
def test_plan_refuses(capsys: pytest.CaptureFixture[str], arguments: tuple[object, ...], message: str) -> None:
    code, said = run(capsys, "plan", *arguments)
    assert (code, len(said)) == (2, 1)
    assert message in said[0]


def test_the_title_of_a_plan_says_what_was_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "82m", "--set", "model.num_hidden_layers=2"]) == 0
    assert capsys.readouterr().out.startswith("82m --set model.num_hidden_layers=2, variant transformer: ")
