"""Progress is read from metrics files while they grow."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from resformer.experiments.jobs import Job, Stop
from resformer.experiments.progress import FINISH_SECONDS, Display, Meter, time_left


def line(step: int, seconds: float = 2.0) -> str:
    return json.dumps({"split": "train", "step": step, "loss": 5.0 - step / 100, "seconds": seconds}) + "\n"


def meter(path: Path, *steps: int, of: int = 100, seconds: float = 2.0) -> Meter:
    path.write_text("".join(line(step, seconds) for step in steps))
    found = Meter(path=path, steps=of)
    found.read()
    return found


def test_a_meter_follows_a_growing_file(tmp_path: Path) -> None:
    path = tmp_path / "m"
    found = Meter(path=path, steps=10)
    found.read()
    assert (found.step, found.seconds_per_step) == (0, None)
    whole = line(2)
    path.write_text(line(1) + whole[:20])
    found.read()
    assert found.step == 1
    with path.open("a") as file:
        file.write(whole[20:] + '{"split": "validation", "step": 2, "loss": 9}\nnot json\n[1]\n')
    found.read()
    assert (found.step, found.loss, found.seconds_per_step) == (2, pytest.approx(4.98), 2.0)


def test_a_meter_notices_that_a_resume_cut_the_file(tmp_path: Path) -> None:
    found = meter(tmp_path / "m", 1, 2, 3, 4)
    found.path.write_text(line(1) + line(2))
    found.read()
    assert found.step == 2


def test_time_left_packs_the_runs_onto_the_places(tmp_path: Path) -> None:
    half, slow = meter(tmp_path / "a", 50), meter(tmp_path / "b", 50, seconds=4.0)
    new = Meter(path=tmp_path / "c", steps=100)
    assert time_left([new], ["waiting"], 2) is None
    assert time_left([half], ["running"], 2) == pytest.approx(100 + FINISH_SECONDS)
    # 100 s and 200 s left side by side, then 100 steps at the median 3 s behind the first of them.
    wanted = 100 + FINISH_SECONDS + 300 + FINISH_SECONDS
    assert time_left([half, slow, new], ["running", "running", "waiting"], 2) == pytest.approx(wanted)
    assert time_left([half], ["finished"], 2) == 0.0


def test_plain_lines_where_there_is_no_terminal(tmp_path: Path) -> None:
    text = io.StringIO()
    jobs = [Job(name="a", commands=[["x"], ["y"]], log=tmp_path / "log"), Job(name="b", commands=[["x"]], log=tmp_path)]
    display = Display(jobs, [meter(tmp_path / "a", 1, 2), Meter(path=tmp_path / "b", steps=5)], parallel=1,
                      console=Console(file=text, width=200))  # fmt: skip
    with display.shown():
        jobs[0].process = object()  # type: ignore[assignment]  # stands for a process that runs
        display.update(Stop())
        jobs[0].returncode, jobs[0].seconds = 0, 65
        display.update(Stop())
        jobs[1].process, jobs[1].returncode = object(), 1  # type: ignore[assignment]
        display.update(Stop())
    said = text.getvalue()
    assert "a: started, from step 2" in said
    assert "a: step 2/100  loss 4.980  3 min 16 s left" in said
    assert "a: finished in 1 min 05 s, last training loss 4.980" in said
    assert "b: failed with exit code 1 at step 0" in said
    assert "\x1b" not in said


def test_bars_on_a_terminal(tmp_path: Path) -> None:
    text = io.StringIO()
    jobs = [Job(name="a", commands=[["x"], ["y"]], log=tmp_path / "log")]
    jobs[0].process = object()  # type: ignore[assignment]  # stands for a process that runs
    console = Console(file=text, force_terminal=True, width=120)
    display = Display(jobs, [meter(tmp_path / "a", 1, 2)], parallel=1, console=console)
    with display.shown():
        display.update(Stop())
    assert "step 2/100" in text.getvalue() and "about 3 min 31 s left" in text.getvalue()
