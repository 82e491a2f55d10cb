"""Lines and progress bars on stderr; stdout is left to results."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from types import TracebackType
from typing import Any

_LINE_SECONDS = 30.0


def say(message: str) -> None:
    """One line on stderr."""
    print(message, file=sys.stderr, flush=True)


class Progress:
    """Progress of a stage with its ETA and tokens per second: a bar on a terminal, elsewhere a line now and then.

    total: bytes or tokens of the whole stage, 0 where that is not known; done: how many of them were done before.
    """

    def __init__(self, what: str, total: int, enabled: bool, *, done: int = 0) -> None:
        self.what, self.total, self.enabled, self.done, self.before = what, total, enabled, done, done
        self.tokens = 0
        self.bar: Any = None

    def __enter__(self) -> Progress:
        self.started = self.said = time.perf_counter()
        if self.enabled and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
            self.bar = Progress(*columns, TextColumn("{task.fields[speed]}"), console=Console(stderr=True))
            self.task = self.bar.add_task(self.what, total=self.total or None, completed=self.done, speed="")
            self.bar.start()
        elif self.enabled:
            say(self.what)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()

    def advance(self, amount: int, *, tokens: int = 0) -> None:
        """`amount` more of the total is done, which gave `tokens`."""
        self.done += amount
        self.tokens += tokens
        now = time.perf_counter()
        speed = f"{self.tokens / max(now - self.started, 1e-9):,.0f} tokens/s" if self.tokens else ""
        if self.bar is not None:
            self.bar.update(self.task, completed=self.done, speed=speed)
        elif self.enabled and now - self.said > _LINE_SECONDS:
            self.said = now
            say(", ".join(part for part in (self.what, self._share(now), speed) if part))

    def _share(self, now: float) -> str:
        """How much of the stage is done, and how long the rest takes at this speed."""
        here = self.done - self.before
        if not self.total or here <= 0:
            return ""
        left = max(0.0, (self.total - self.done) / here * (now - self.started))
        return f"{min(1.0, self.done / self.total):.0%}, {timedelta(seconds=round(left))} left"
