"""Child processes: some at a time, each with its own log, all of them asked to stop when we are.

A child that gets SIGTERM writes a checkpoint and ends; we wait for that. Children run in sessions of their own, so that
Ctrl-C in a terminal reaches only us and every child is stopped once, in one way.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

POLL_SECONDS = 0.2


@dataclass(kw_only=True)
class Job:
    """What one run still has to do: `commands`, one after the other, while each ends with 0. `log` gets everything they
    print. `lock` is a descriptor that its processes inherit and that is closed when the job is over, `done` is called
    then if it went well.
    """

    name: str
    commands: Sequence[Sequence[str]]
    log: Path
    lock: int | None = None
    done: Callable[[], None] = lambda: None
    slot: int = -1  # the place that it runs in
    at: int = 0  # the command in progress
    process: subprocess.Popen[bytes] | None = None
    returncode: int | None = None
    started: float = 0.0
    seconds: float = 0.0

    @property
    def state(self) -> str:
        """ "waiting", "running", "finished" or "failed"."""
        if self.returncode is not None:
            return "finished" if self.returncode == 0 else "failed"
        return "running" if self.process is not None else "waiting"

    def start(self, environment: Mapping[str, str], keep_open: Sequence[int]) -> None:
        """Start the next command, appending to the log."""
        command = self.commands[self.at]
        inherited = (*keep_open, *(() if self.lock is None else (self.lock,)))
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            log.write(f"$ {shlex.join(command)}\n".encode())
            log.flush()
            self.started = self.started or time.monotonic()
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,
                pass_fds=inherited,
            )

    def poll(self, environment: Mapping[str, str], keep_open: Sequence[int], *, go_on: bool) -> None:
        """Notice the end of the command in progress and start the next one if `go_on`."""
        if self.process is None or self.returncode is not None:
            return
        code = self.process.poll()
        if code is None:
            return
        self.seconds = time.monotonic() - self.started
        if code == 0 and self.at + 1 < len(self.commands) and go_on:
            self.at += 1
            self.start(environment, keep_open)
        elif code == 0 and self.at + 1 < len(self.commands):
            self.returncode = -signal.SIGTERM
        else:
            self.returncode = code
        if self.returncode is not None:
            if self.returncode == 0:
                self.done()
            self.release()

    def release(self) -> None:
        """Let go of the lock."""
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None

    def signal(self, number: int) -> None:
        if self.process is not None and self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)


@dataclass
class Stop:
    """Which signal asked us to stop, and how often."""

    number: int = 0
    times: int = 0
    handled: int = field(default=0)


@contextlib.contextmanager
def stopping() -> Iterator[Stop]:
    """Collect SIGINT and SIGTERM instead of dying of them. Outside the main thread Python allows no handlers, and
    nothing is collected.
    """
    stop = Stop()

    def note(number: int, frame: FrameType | None) -> None:
        stop.number = stop.number or number
        stop.times += 1

    previous = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(ValueError):
                previous[number] = signal.signal(number, note)
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def run_jobs(
    jobs: Sequence[Job],
    *,
    slots: Sequence[Mapping[str, str]],
    environment: Mapping[str, str] | None = None,
    keep_open: Sequence[int] = (),
    watch: Callable[[Stop], None] = lambda stop: None,
) -> int:
    """Run all jobs, one in each of `slots` at a time; one that fails does not stop the others. `watch` is called
    several times a second.

    A slot is what it adds to `environment` (its devices). `keep_open` are file descriptors that the children inherit.
    Returns 0, or the signal that asked us to stop: then every running child has got SIGTERM and has ended (SIGKILL
    after a second signal), and nothing new was started.
    """
    environment = os.environ if environment is None else environment
    with stopping() as stop:
        try:
            while any(job.returncode is None for job in jobs):
                for job in jobs:
                    job.poll({**environment, **slots[job.slot]}, keep_open, go_on=not stop.number)
                if stop.times > stop.handled:
                    stop.handled = stop.times
                    for job in jobs:
                        job.signal(signal.SIGTERM if stop.times == 1 else signal.SIGKILL)
                running = [job for job in jobs if job.state == "running"]
                if stop.number and not running:
                    break
                free = [k for k in range(len(slots)) if k not in {job.slot for job in running}]
                waiting = [job for job in jobs if job.state == "waiting"]
                for job, slot in zip(waiting, free, strict=False):
                    if not stop.number:
                        job.slot = slot
                        job.start({**environment, **slots[slot]}, keep_open)
                watch(stop)
                time.sleep(POLL_SECONDS)
        finally:
            for job in jobs:  # an error of ours must not leave children behind
                job.signal(signal.SIGTERM)
                job.release()
        watch(stop)
    return stop.number


def tail(path: Path, lines: int = 20) -> str:
    """The last lines that the last command left in a log; progress bars that overwrite themselves count once."""
    try:
        text = path.read_bytes()[-20_000:].decode("utf-8", errors="replace")
    except OSError:
        return ""
    whole = [line.rsplit("\r", 1)[-1].rstrip() for line in text.replace("\r\n", "\n").split("\n")]
    started = max((i for i, line in enumerate(whole) if line.startswith("$ ")), default=-1)
    return "\n".join([line for line in whole[started + 1 :] if line][-lines:])
