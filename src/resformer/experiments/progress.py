"""How far all runs of a suite are, live: bars on a terminal, plain lines elsewhere. Read from each run's metrics file
and from nothing else.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.text import Text

from resformer.experiments.jobs import Job, Stop
from resformer.experiments.markup import duration

LINE_EVERY_SECONDS = 20.0
REFRESH_SECONDS = 0.5
FINISH_SECONDS = 15.0  # allowance for scoring and sampling after training, for the ETA only


@dataclass(kw_only=True)
class Meter:
    """Follows one metrics file: `read` takes in what was written since the last call."""

    path: Path
    steps: int
    step: int = 0
    loss: float | None = None
    recent_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=25))
    _offset: int = 0
    _rest: bytes = b""

    def read(self) -> None:
        try:
            size = self.path.stat().st_size
            if size < self._offset:  # a resumed run cuts what came after its checkpoint
                self._offset, self._rest, self.step = 0, b"", 0
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
                row = json.loads(line)
                if row.get("split") == "train":
                    self.step, self.loss = int(row["step"]), float(row["loss"])
                    self.recent_seconds.append(float(row["seconds"]))

    @property
    def seconds_per_step(self) -> float | None:
        return statistics.median(self.recent_seconds) if self.recent_seconds else None


def time_left(meters: Sequence[Meter], states: Sequence[str], parallel: int) -> float | None:
    """Seconds until the last run ends with `parallel` at a time; None before any run has shown its speed.

    A run that has not shown its speed takes the others' median.
    """
    known = [m.seconds_per_step for m in meters if m.seconds_per_step]
    if not known:
        return None
    usual = statistics.median(known)
    free = [0.0] * max(parallel, 1)
    for wanted in ("running", "waiting"):
        for meter, state in zip(meters, states, strict=True):
            if state == wanted:
                left = (meter.steps - meter.step) * (meter.seconds_per_step or usual) + FINISH_SECONDS
                heapq.heapreplace(free, free[0] + left)
    return max(free)


class _Numbers(ProgressColumn):
    """Step, loss and time left of one run."""

    def render(self, task: Task) -> Text:
        return Text(str(task.fields.get("numbers", "")))


class Display:
    """Shows jobs and meters side by side; call `update` often, it limits itself."""

    def __init__(self, jobs: Sequence[Job], meters: Sequence[Meter], *, parallel: int, console: Console) -> None:
        self.jobs, self.meters, self.parallel, self.console = jobs, meters, parallel, console
        self._said: dict[str, str] = {}
        self._told_stop = 0
        self._next = self._next_line = 0.0
        self._bars: Progress | None = None
        self._tasks: list[TaskID] = []

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        if not self.console.is_terminal:
            yield
            return
        columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=24), _Numbers())
        with Progress(*columns, console=self.console, auto_refresh=False) as self._bars:
            self._tasks = [
                self._bars.add_task(job.name, total=m.steps) for job, m in zip(self.jobs, self.meters, strict=True)
            ]
            self._tasks.append(self._bars.add_task("all", total=sum(m.steps for m in self.meters)))
            yield
            self._draw()

    def update(self, stop: Stop) -> None:
        """Take in what is new and show it."""
        if stop.times > self._told_stop:
            self._told_stop = stop.times
            self.say(
                "stopping: each run in progress writes a checkpoint first (once more: at once)"
                if stop.times == 1
                else "stopping at once"
            )
        now = time.monotonic()
        ended = any(job.state != self._said.get(job.name) for job in self.jobs)
        if now < self._next and not ended:
            return
        self._next = now + REFRESH_SECONDS
        for meter in self.meters:
            meter.read()
        for job, meter in zip(self.jobs, self.meters, strict=True):
            if job.state != self._said.get(job.name):
                self._said[job.name] = job.state
                self._announce(job, meter, stopping=bool(stop.number))
        if self._bars is not None:
            self._draw()
        elif now >= self._next_line:
            self._next_line = now + LINE_EVERY_SECONDS
            self._lines()

    def say(self, text: str) -> None:
        self.console.print(Text(text), soft_wrap=True)

    def _announce(self, job: Job, meter: Meter, *, stopping: bool) -> None:
        if job.state == "running" and self._bars is None:
            self.say(
                f"{job.name}: started" + (f", from step {meter.step}" if meter.step else "") + f" (log: {job.log})"
            )
        elif job.state == "finished":
            self.say(
                f"{job.name}: finished in {duration(job.seconds)}"
                + (f", last training loss {meter.loss:.3f}" if meter.loss else "")
            )
        elif job.state == "failed":
            how = "stopped" if stopping else f"failed with exit code {job.returncode}"
            self.say(f"{job.name}: {how} at step {meter.step}")

    def _numbers(self, job: Job, meter: Meter) -> str:
        if job.state != "running":
            return job.state
        if job.at == len(job.commands) - 1:
            return "scoring and sampling"
        if not meter.recent_seconds:
            return "starting"
        left = (meter.steps - meter.step) * (meter.seconds_per_step or 0.0)
        return f"step {meter.step}/{meter.steps}  loss {meter.loss:.3f}  {duration(left)} left"

    def _draw(self) -> None:
        assert self._bars is not None
        for task, job, meter in zip(self._tasks, self.jobs, self.meters, strict=False):
            self._bars.update(task, completed=meter.step, numbers=self._numbers(job, meter))
        left = time_left(self.meters, [job.state for job in self.jobs], self.parallel)
        numbers = "" if left is None else f"about {duration(left)} left" if left else "done"
        self._bars.update(self._tasks[-1], completed=sum(m.step for m in self.meters), numbers=numbers)
        self._bars.refresh()

    def _lines(self) -> None:
        shown = [
            f"{j.name}: {self._numbers(j, m)}"
            for j, m in zip(self.jobs, self.meters, strict=True)
            if j.state == "running"
        ]
        if not shown:
            return
        left = time_left(self.meters, [job.state for job in self.jobs], self.parallel)
        self.say("  |  ".join(shown) + ("" if left is None else f"  |  all runs: about {duration(left)} left"))
