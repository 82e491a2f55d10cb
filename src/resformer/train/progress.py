"""What one sees while a run goes: a live line on a terminal, a plain line every few seconds elsewhere (stderr)."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import deque
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

_WINDOW_STEPS = 50


class Losable:
    """A text file that may break: nobody reads any more (`... | head`), the terminal is gone, the log's disk is full.

    The run matters more than what it says, so the first failure silences the file (and what else writes to it) for
    good, and nothing is raised.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        try:
            return self._file.write(text)
        except OSError:
            self._lose()
            return len(text)

    def flush(self) -> None:
        try:
            self._file.flush()
        except OSError:
            self._lose()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def _lose(self) -> None:
        with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), self._file.fileno())


class Reporter:
    """Shows steps, loss, speed and the time left; `note` says something in between."""

    def __init__(self, *, steps: int, done: int, every_seconds: float, console: Console | None = None) -> None:
        said: Any = Losable(sys.stderr if sys.stderr is not None else open(os.devnull, "w"))  # noqa: SIM115
        self.console = console or Console(file=said)
        self.steps, self.every_seconds = steps, every_seconds
        self._finished: deque[tuple[float, int]] = deque([(time.monotonic(), done)], maxlen=_WINDOW_STEPS)
        self._shown = time.monotonic()
        self._progress: Progress | None = None
        self._task: Any = None
        if self.console.is_terminal:
            self._progress = Progress(
                TextColumn("[bold]step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[words]}"),
                console=self.console,
                transient=True,
            )
            self._task = self._progress.add_task("", total=steps, completed=done, words="")

    def step(self, step: int, *, loss: float, tokens_per_second: float, mfu: float | None = None) -> None:
        """One optimizer step is done; `mfu` is a share, 0..1."""
        now = time.monotonic()
        self._finished.append((now, step))
        share = "" if mfu is None else f"  MFU {mfu:.1%}"
        words = f"loss {loss:.3f}  {tokens_per_second:,.0f} tokens/s{share}  ETA {self._eta(step)}"
        if self._progress is not None:
            self._progress.update(self._task, completed=step, words=words)
        elif now - self._shown >= self.every_seconds or step == self.steps:
            self._shown = now
            self._line(f"step {step}/{self.steps}  {words}")

    def note(self, text: str) -> None:
        """A line that stays."""
        if self._progress is not None:
            self._progress.console.print(text, markup=False, highlight=False)
        else:
            self._line(text)

    def _line(self, text: str) -> None:
        print(text, file=self.console.file, flush=True)

    def _eta(self, step: int) -> str:
        """Time left at the pace of the last steps, validations and checkpoints included."""
        (then, before), (now, _) = self._finished[0], self._finished[-1]
        if step == before:
            return "-"
        seconds = round((now - then) / (step - before) * (self.steps - step))
        hours, rest = divmod(seconds, 3600)
        return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"

    def __enter__(self) -> Reporter:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()


class Silent:
    """The reporter of a process that is not the first."""

    def step(self, step: int, **values: object) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *_: object) -> None:
        pass
