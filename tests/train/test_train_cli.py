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
    assert "step 2: loss is" in said[-1]


def test_sigterm_ends_with_exit_code_143(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = loop.Reporter.step

    def signalled(self: loop.Reporter, step: int, **values: float) -> None:
        real(self, step, **values)
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(loop.Reporter, "step", signalled)
    code, said = run(capsys, "train", "tiny", "--data", corpus, "--out", tmp_path / "run")
    assert code == 143
    assert said[-1] == "SIGTERM: stopped after step 3, checkpoint written; go on with --resume"
