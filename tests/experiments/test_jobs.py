"""Child processes: order, failure, and being asked to stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from resformer.experiments.jobs import Job, run_jobs, tail


def job(folder: Path, name: str, *codes: str) -> Job:
    return Job(name=name, commands=[[sys.executable, "-c", code] for code in codes], log=folder / name / "run.log")


def test_commands_run_in_order_and_a_failure_stops_only_its_own_job(tmp_path: Path) -> None:
    good = job(tmp_path, "good", "print('one')", "print('two')")
    bad = job(tmp_path, "bad", "import sys; print('reason'); sys.exit(3)", "print('never')")
    last = job(tmp_path, "last", "print('last')")
    assert run_jobs([bad, good, last], slots=[{}, {}]) == 0
    assert [(j.state, j.returncode) for j in (bad, good, last)] == [("failed", 3), ("finished", 0), ("finished", 0)]
    assert good.log.read_text().index("one") < good.log.read_text().index("two")
    assert tail(bad.log) == "reason"
    assert "never" not in bad.log.read_text()


def test_no_more_than_so_many_at_a_time(tmp_path: Path) -> None:
    jobs = [job(tmp_path, name, "import time; time.sleep(0.3)") for name in "abcd"]
    most = 0

    def watch(stop: object) -> None:
        nonlocal most
        most = max(most, sum(j.state == "running" for j in jobs))

    assert run_jobs(jobs, slots=[{}, {}], watch=watch) == 0
    assert most == 2


def test_children_get_the_environment(tmp_path: Path) -> None:
    one = job(tmp_path, "one", "import os; print('threads', os.environ['OMP_NUM_THREADS'])")
    run_jobs([one], slots=[{}], environment={**os.environ, "OMP_NUM_THREADS": "1"})
    assert "threads 1" in one.log.read_text()


CHILD = """
import signal, sys, time
def stop(number, frame):
    print("checkpoint", flush=True)
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
time.sleep(60)
"""

PARENT = """
import sys
from pathlib import Path
from resformer.experiments.jobs import Job, run_jobs
folder = Path(sys.argv[1])
child = Path(sys.argv[2]).read_text()
commands = [[sys.executable, "-c", child], [sys.executable, "-c", "print('second')"]]
jobs = [Job(name=name, commands=commands, log=folder / name) for name in "ab"]
print(run_jobs(jobs, slots=[{}]), jobs[0].returncode, jobs[1].state, flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on_as_sigterm_and_waited_for(tmp_path: Path, number: int) -> None:
    (tmp_path / "child.py").write_text(CHILD)
    command = [sys.executable, "-c", PARENT, str(tmp_path), str(tmp_path / "child.py")]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    log = tmp_path / "a"
    wait_for(lambda: log.exists() and "ready" in log.read_text())
    parent.send_signal(number)
    said, _ = parent.communicate(timeout=20)
    assert said.split() == [str(int(number)), "143", "waiting"]
    assert "checkpoint" in log.read_text()
    assert "second" not in log.read_text()
    assert not (tmp_path / "b").exists()


def wait_for(condition, seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.02)


def test_the_tail_of_a_log_is_that_of_the_last_command(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"$ first\nold\n$ second\n 10%\r 50%\r100%\n\nlast \xff line\n")
    assert tail(log) == "100%\nlast \ufffd line"
    assert tail(log, 1) == "last \ufffd line"
    assert tail(tmp_path / "missing") == ""
