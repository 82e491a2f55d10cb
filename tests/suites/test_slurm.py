"""docs/slurm/suite.sbatch, with srun and scontrol that only write down how they were called."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from resformer import cli, shell

SCRIPT = Path(__file__).parents[2] / "docs" / "slurm" / "suite.sbatch"
WORDS = ["variants", "paper", "/d a", "/runs/variants", "--pool", "/runs"]
TASK = {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_JOB_ID": "70", "SLURM_GPUS_ON_NODE": "8"}


def submit(
    tmp_path: Path, *words: str, code: int = 0, **variables: str
) -> tuple[subprocess.CompletedProcess[str], list[list[str]]]:
    """Run the script; what it started, a list of words each."""
    log = tmp_path / "calls"
    for name, status in (("srun", code), ("scontrol", 0)):
        tool, into = tmp_path / name, shlex.quote(str(log))
        words_out = f'for word in {name} "$@"; do printf "%s\\n" "$word"; done >> {into}'
        tool.write_text(f"#!/bin/sh\n{words_out}\necho >> {into}\nexit {status}\n")
        tool.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **variables}
    done = subprocess.run(["bash", SCRIPT, *words], env=environment, capture_output=True, text=True)
    calls = log.read_text().strip().split("\n\n") if log.exists() else []
    return done, [call.split("\n") for call in calls]


def test_it_trains_the_run_of_its_number(tmp_path: Path) -> None:
    done, calls = submit(tmp_path, *WORDS, **TASK)
    assert done.returncode == 0, done.stderr
    (call,) = calls
    start = call.index("resformer")
    assert call[:start] == ["srun", "--ntasks=1"]
    words = call[start + 1 :]
    assert words[:2] == ["suite", "run"]
    _, given = shell.parse(cli.COMMANDS["suite run"], words[2:], program="resformer suite run")
    assert (given["scale"], given["data"], given["out"]) == ("paper", Path("/d a"), Path("/runs/variants"))
    assert (given["only"], given["processes"], given["jobs"], given["pool"]) == ((3,), 8, 1, Path("/runs"))


def test_fewer_devices_are_fewer_processes(tmp_path: Path) -> None:
    for variables, processes in (
        ({**TASK, "SLURM_GPUS_ON_NODE": "1"}, "1"),
        ({**TASK, "PROCESSES": "4"}, "4"),
        ({"SLURM_ARRAY_TASK_ID": "3"}, "1"),
    ):
        (tmp_path / "calls").unlink(missing_ok=True)
        _, (call,) = submit(tmp_path, *WORDS, **variables)
        assert call[call.index("--processes") + 1] == processes


@pytest.mark.parametrize(("code", "restarts", "again"), [(143, "0", True), (143, "20", False), (1, "0", False)])
def test_a_job_that_was_stopped_goes_back_into_the_queue(tmp_path: Path, code: int, restarts: str, again: bool) -> None:
    done, calls = submit(tmp_path, *WORDS, code=code, **TASK, SLURM_RESTART_COUNT=restarts)
    assert done.returncode == code
    assert calls[1:] == ([["scontrol", "requeue", "70_3"]] if again else [])


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    done, calls = submit(tmp_path, *WORDS[:3], **TASK)
    assert (done.returncode, calls) == (2, []) and "expected NAME SCALE DATA OUT, got 3 words" in done.stderr
    done, calls = submit(tmp_path, *WORDS)
    assert (done.returncode, calls) == (2, []) and "--array=1-N" in done.stderr
