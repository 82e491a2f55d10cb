"""`resformer watch`: a run seen from outside."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from resformer.cli import main
from resformer.errors import UserError
from resformer.train import watch as watching
from resformer.train.metrics import MetricsLog
from resformer.train.watch import Follower, lambda_lines, line, look


def test_a_finished_run(whole_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    view = look(whole_run)
    assert (view.state, view.steps, view.checkpoint, view.train["step"]) == ("finished", 20, 20, 20)
    assert main(["watch", str(whole_run)]) == 0  # ends by itself
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    for part in ("finished  step 20/20", f"loss {view.train['loss']:.4f}", "tokens/s", "GiB", "checkpoint 20"):
        assert part in said
    assert "ETA" not in said
    assert main(["watch", str(whole_run), "--once"]) == 0
    said = capsys.readouterr().out
    assert f"{view.lambdas['first'][0]:.2f}" in said


def test_every_state_on_the_way(whole_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    shutil.copy(whole_run / "config.toml", out)
    assert look(out).state == "starting"
    assert line(look(out)).endswith("step 0/20  no checkpoint yet")
    whole = (whole_run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (out / "metrics.jsonl").write_bytes(b"".join(whole[:7]) + whole[7][:20])  # the eighth is half written
    view = look(out)
    assert (view.state, view.train["step"], view.validation) == ("running", 7, {})
    assert "ETA 0:0" in line(view)
    assert lambda_lines(view) == []
    (out / "metrics.jsonl").write_bytes(b"\xff no row\n" + b"".join(whole[:3]))  # shorter: a resume cuts it back
    assert look(out).train["step"] == 3
    old = time.time() - 7300
    os.utime(out / "metrics.jsonl", (old, old))
    assert "no new row for 2:01:" in line(look(out))


def test_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=r"no run in .* \(config.toml is missing\)"):
        look(tmp_path)
    assert main(["watch", str(tmp_path / "nowhere"), "--once"]) == 2
    assert main(["watch", str(tmp_path), "--every", "0"]) == 2
    (tmp_path / "config.toml").write_text("[")
    assert main(["watch", str(tmp_path)]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_it_needs_no_torch(whole_run: Path) -> None:
    code = (
        "import sys; from resformer.cli import main; "
        f"main(['watch', {str(whole_run)!r}, '--once']); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


ROWS = [
    {"split": "train", "step": 1, "tokens": 8, "loss": 3.0, "lr": 1e-3, "tokens_per_second": 10.0, "seconds": 2.0},
    {"split": "train", "step": 2, "tokens": 16, "loss": 2.5, "lr": 2e-3, "tokens_per_second": 20.0, "seconds": 4.0},
]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of 10 steps that has done two."""
    (tmp_path / "config.toml").write_text("[train]\nsteps = 10\n")
    append(tmp_path, *ROWS)
    return tmp_path


def append(run: Path, *rows: object) -> None:
    with open(run / "metrics.jsonl", "a") as file:
        file.writelines((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


@pytest.mark.parametrize(
    "row",
    [
        {"split": "validation", "domain": "all"},
        {"split": "validation", "domain": "all", "step": 2, "loss": None},
        {"split": "train", "step": "x"},
        {"split": "train"},
        {"split": "train", "step": 2, "loss": None, "lr": "a", "seconds": "b", "tokens_per_second": [], "mfu": {}},
        {"split": "train", "step": True, "loss": 9.0},
        {"split": "lambdas", "layers": 3},
        {"split": "lambdas", "step": 2, "layers": [1], "first": [None], "own": [1.0]},
        {"split": "lambdas", "step": 2, "layers": [1, 2], "first": [1.0], "own": [1.0, 1.0]},
        {"split": ["train"]},
        "[" * 100_000,
        '{"split": "train", "step": 3, "lo',
        "3",
        "",
    ],
)
def test_damaged_rows_are_passed_over(run: Path, row: object) -> None:
    append(run, row)
    view = look(run)
    assert view.step == 2
    assert "step 2/10" in line(view)
    assert lambda_lines(view) == []


@pytest.mark.parametrize("text", ["train = 3", "[train]\nsteps = 'x'", ""])
def test_a_configuration_that_does_not_say_how_many_steps(run: Path, text: str) -> None:
    (run / "config.toml").write_text(text)
    said = line(look(run))
    assert "step 2 " in said
    assert "ETA" not in said


def test_only_what_is_new_is_read(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Watching must not cost the run its processor: a long file is not parsed at every look."""
    append(run, *({**ROWS[0], "step": step} for step in range(3, 5000)))
    parsed, real = [], watching._row
    monkeypatch.setattr(watching, "_row", lambda text: (parsed.append(text), real(text))[1])
    follower = Follower(run)
    assert follower.look().step == 4999
    append(run, {**ROWS[0], "step": 5000}, {"split": "validation", "domain": "all", "step": 5000, "loss": 2.0})
    view = follower.look()
    assert (view.step, view.validation["loss"], view.seconds_per_step) == (5000, 2.0, 2.0)
    assert len(parsed) <= 2 * 50 + 1


def test_rows_that_a_resume_takes_back_are_forgotten(run: Path) -> None:
    """Also when the file has grown past its old size before the next look."""
    append(run, {"split": "validation", "domain": "all", "step": 2, "loss": 2.25})
    follower = Follower(run)
    assert follower.look().validation["loss"] == 2.25
    kept = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)[:1]
    (run / "metrics.jsonl").write_bytes(b"".join(kept))
    view = follower.look()
    assert (view.step, view.validation) == (1, {})
    append(run, ROWS[1], {"split": "validation", "domain": "all", "step": 2, "loss": 2.0})
    assert follower.look().validation["loss"] == 2.0
    (run / "metrics.jsonl").write_bytes(b"".join(kept))
    append(run, *({**ROWS[1], "step": step, "seconds": 9.0} for step in range(2, 8)))
    view = follower.look()
    assert (view.step, view.validation) == (7, {})
    assert view.seconds_per_step == pytest.approx((2.0 + 6 * 9.0) / 7)


def test_a_half_written_row_is_read_when_it_is_whole(run: Path) -> None:
    follower = Follower(run)
    text = json.dumps({**ROWS[1], "step": 3}) + "\n"
    for part, step in ((text[:-1], 2), ("\n", 3)):
        with open(run / "metrics.jsonl", "a") as file:
            file.write(part)
        assert follower.look().step == step


def test_a_run_whose_last_step_was_left_out_is_finished(run: Path) -> None:
    append(run, {"split": "skipped", "step": 10, "reason": "spike"})
    (run / "model").mkdir()
    (run / "model" / "config.json").write_text("{}")
    assert look(run).state == "finished"


def test_a_run_that_nobody_writes_any_more_is_stopped(run: Path) -> None:
    """Whoever writes a run holds the lock of its metrics."""
    old = time.time() - 3600
    with MetricsLog(run / "metrics.jsonl"):
        os.utime(run / "metrics.jsonl", (old, old))
        follower = Follower(run)
        view = follower.look()
        if watching.held(run / "metrics.jsonl") is None:
            pytest.skip("the system does not say who holds which file")
        assert view.state == "quiet"
        assert "no new row for 1:00:0" in line(view)
        os.utime(run / "metrics.jsonl")
        assert follower.look().state == "running"
    assert follower.look().state == "stopped"  # at once: it was held a moment ago
    assert look(run).state == "running"  # may be another machine's
    os.utime(run / "metrics.jsonl", (old, old))
    assert look(run).state == "stopped"
    said = line(look(run))
    assert "no process of this machine is writing it" in said
    assert "ETA" not in said


def test_a_run_that_starts_anew_is_waited_for(run: Path) -> None:
    follower = Follower(run)
    assert follower.look().step == 2
    (run / "config.toml").unlink()
    (run / "metrics.jsonl").write_bytes(b"")
    assert follower.look().step == 0
    shutil.rmtree(run)
    with pytest.raises(UserError, match="no run in"):
        follower.look()


def test_many_layers_fit_the_terminal(run: Path) -> None:
    layers = list(range(2, 33))
    append(run, {"split": "lambdas", "step": 2, "layers": layers, "first": [0.5] * 31, "own": [1.25] * 31})
    said = lambda_lines(look(run), width=80)
    assert max(map(len, said)) <= 80
    assert [int(word) for text in said if "layer" in text for word in text.split()[1:]] == layers
    assert sum(text.count("1.25") for text in said) == 31
    assert lambda_lines(look(run), width=1)  # whatever the width


def test_ctrl_c_ends_it_well(run: Path) -> None:
    command = [sys.executable, "-m", "resformer", "watch", str(run), "--every", "0.1"]
    watcher = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert watcher.stdout is not None
    assert "step 2/10" in watcher.stdout.readline()
    append(run, {**ROWS[1], "step": 3})
    assert "step 3/10" in watcher.stdout.readline()
    watcher.send_signal(signal.SIGINT)
    _, errors = watcher.communicate(timeout=20)
    assert (watcher.returncode, errors) == (0, "")
