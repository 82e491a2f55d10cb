"""`resformer watch`: what a run is doing, read from its directory. No torch, nothing is written or locked."""

from __future__ import annotations

import json
import shutil
import sys
import time
import tomllib
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from resformer.errors import UserError
from resformer.train import checkpoint
from resformer.train.rundir import CHECKPOINTS, CONFIG, METRICS, MODEL

LOCKS = Path("/proc/locks")
QUIET_SECONDS = 60.0
"""A run that has written no row for so long, and for ten steps, is called quiet."""
_WINDOW_ROWS = 50
_TRAIN = b'"split": "train"'


@dataclass(frozen=True, kw_only=True)
class View:
    """What is known of a run.

    Attributes:
        run: its directory.
        steps: how many it is to have; None if config.toml does not say.
        step: how many are done.
        train: its last row of training, or nothing.
        validation: its last row of validation over all domains, or nothing.
        lambdas: its last row of lambdas, or nothing.
        seconds_per_step: of its last rows.
        checkpoint: the step of its newest checkpoint.
        state: "starting", "running", "quiet" (no row for long), "stopped" (nor a process here that writes it) or
            "finished".
        quiet_seconds: since metrics.jsonl was written last.
    """

    run: Path
    steps: int | None
    step: int = 0
    train: dict[str, Any] = field(default_factory=dict)
    validation: dict[str, Any] = field(default_factory=dict)
    lambdas: dict[str, Any] = field(default_factory=dict)
    seconds_per_step: float | None = None
    checkpoint: int | None = None
    state: str = "starting"
    quiet_seconds: float = 0.0


class Follower:
    """Looks at a run again and again, and reads only what is new in its metrics."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self._config: dict[str, Any] | None = None
        self._was_held = False
        self._forget()

    def _forget(self) -> None:
        self._read_bytes, self._last_line = 0, b""
        self._step = 0
        self._validation: dict[str, Any] = {}
        self._lambdas: dict[str, Any] = {}
        self._train_lines: deque[bytes] = deque(maxlen=_WINDOW_ROWS)

    def look(self) -> View:
        """Read what the run has written since the last look.

        Raises:
            UserError: there is no run.
        """
        try:
            self._config = _config(self.run)
        except UserError:
            if self._config is None or not self.run.is_dir():  # else it is being started anew
                raise
        table = self._config.get("train")
        steps = _whole(table, "steps") if isinstance(table, dict) else None
        self._take_lines()
        rows = [row for text in self._train_lines if _whole(row := _row(text), "step") is not None]
        train = rows[-1] if rows else {}
        step = max(self._step, train.get("step", 0))
        seconds = [value for row in rows if (value := _number(row, "seconds")) is not None]
        pace = sum(seconds) / len(seconds) if seconds else None
        quiet = _age(self.run / METRICS)
        return View(
            run=self.run,
            steps=steps,
            step=step,
            train=train,
            validation=self._validation,
            lambdas=self._lambdas,
            seconds_per_step=pace,
            checkpoint=checkpoint.latest_step(self.run / CHECKPOINTS),
            state=self._state(step, steps, late=quiet > max(QUIET_SECONDS, 10 * (pace or 0.0))),
            quiet_seconds=quiet,
        )

    def _state(self, step: int, steps: int | None, *, late: bool) -> str:
        if step == steps and (self.run / MODEL / "config.json").is_file():
            return "finished"
        writer = held(self.run / METRICS)
        # A writer on another machine is not seen here, so that only a long silence tells, or that there was one.
        stopped = writer is False and (late or self._was_held)
        self._was_held = bool(writer)
        return "stopped" if stopped else "quiet" if late else "running" if step else "starting"

    def _take_lines(self) -> None:
        """Whole lines alone; a file that is shorter, or another one up to where we were, is read from its start."""
        try:
            with open(self.run / METRICS, "rb") as file:
                start = self._read_bytes - len(self._last_line)
                file.seek(start)
                if file.read(len(self._last_line)) != self._last_line:
                    self._forget()
                    file.seek(0)
                new = file.read()
        except FileNotFoundError:
            return self._forget()
        new = new[: new.rfind(b"\n") + 1]
        if not new:
            return None
        self._read_bytes += len(new)
        lines = new.split(b"\n")[:-1]
        self._last_line = lines[-1] + b"\n"
        for text in lines:
            if _TRAIN in text:
                self._train_lines.append(text)  # only the last ones are ever parsed
            else:
                self._take(_row(text))
        return None

    def _take(self, row: dict[str, Any]) -> None:
        split, step = row.get("split"), _whole(row, "step")
        if step is None:
            return
        if split == "validation" and row.get("domain") == "all" and _number(row, "loss") is not None:
            self._validation = row
        elif split == "lambdas" and _is_table(row):
            self._lambdas = row
        elif split == "train":  # of another writer than ours
            self._train_lines.append(json.dumps(row).encode())
        elif split != "skipped":
            return
        self._step = max(self._step, step)


def look(run: Path) -> View:
    """Read the run in `run`, once.

    Raises:
        UserError: there is none.
    """
    return Follower(run).look()


def line(view: View) -> str:
    """The run in one line."""
    parts = [f"{view.run}: {_words(view)}"]
    parts.append(f"step {view.step:,}" if view.steps is None else f"step {view.step:,}/{view.steps:,}")
    parts += _shown(view.train, {"loss": "loss {:.4f}", "lr": "lr {:.3g}", "grad_norm": "gradient {:.3g}"})
    if view.validation:
        parts.append(f"validation {view.validation['loss']:.4f} at step {view.validation['step']:,}")
    parts += _shown(view.train, {"tokens_per_second": "{:,.0f} tokens/s", "mfu": "MFU {:.1%}"})
    memory = _number(view.train, "memory_bytes")
    if memory is not None:
        parts.append(f"memory {memory / 2**30:.2f} GiB")
    if view.state == "running" and view.seconds_per_step is not None and view.steps is not None:
        parts.append(f"ETA {_clock(view.seconds_per_step * (view.steps - view.step))}")
    parts.append("no checkpoint yet" if view.checkpoint is None else f"checkpoint {view.checkpoint:,}")
    return "  ".join(parts)


def lambda_lines(view: View, *, width: int = 80) -> list[str]:
    """The lambdas by layer, in lines of at most `width` characters; none where the variant has none."""
    layers = view.lambdas.get("layers", [])
    each = max(1, (width - 8) // 7)
    said = []
    for start in range(0, len(layers), each):
        part = slice(start, start + each)
        said.append("  layer " + " ".join(f"{layer:>6}" for layer in layers[part]))
        said += [f"  {kind:5} " + " ".join(f"{x:6.2f}" for x in view.lambdas[kind][part]) for kind in ("first", "own")]
    return said


def watch(run: Path, *, once: bool, every_seconds: float) -> None:
    """Show the run until it is finished, or once; Ctrl-C ends it.

    Raises:
        UserError: there is no run.
    """
    try:
        if once:
            view = look(run)
            print("\n".join([line(view), *lambda_lines(view, width=_width())]), flush=True)
        elif sys.stdout.isatty():
            _live(Follower(run), every_seconds)
        else:
            _follow(Follower(run), every_seconds)
    except KeyboardInterrupt:
        return


def _follow(run: Follower, every_seconds: float) -> None:
    """A line whenever something has changed."""
    before = None
    while True:
        view = run.look()
        now = (view.state, view.step, view.train, view.validation, view.checkpoint)
        if now != before:
            print(line(view), flush=True)
        before = now
        if view.state == "finished":
            return
        time.sleep(every_seconds)


def _live(run: Follower, every_seconds: float) -> None:
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    with Live(auto_refresh=False) as live:
        while True:
            view = run.look()
            live.update(Group(*map(Text, [line(view), *lambda_lines(view, width=_width())])), refresh=True)
            if view.state == "finished":
                return
            time.sleep(every_seconds)


def held(path: Path) -> bool | None:
    """Whether a process of this machine has the lock of `path`; None where the system does not say."""
    try:
        inode = path.stat().st_ino
        locks = LOCKS.read_text().splitlines()
    except OSError:
        return None
    return any(word.rpartition(":")[2] == str(inode) for lock in locks for word in lock.split() if word.count(":") == 2)


def _config(run: Path) -> dict[str, Any]:
    path = run / CONFIG
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"no run in {run} ({CONFIG} is missing); expected a directory that `resformer train` writes"
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); expected what the run wrote") from None


def _row(text: bytes) -> dict[str, Any]:
    """The row in a line, or an empty one: what is damaged is not ours to judge."""
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return row if isinstance(row, dict) else {}


def _number(row: Mapping[str, Any], name: str) -> float | None:
    value = row.get(name)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _whole(row: Mapping[str, Any], name: str) -> int | None:
    value = row.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _is_table(row: Mapping[str, Any]) -> bool:
    """Whether a row of lambdas has a number of each kind for each layer."""
    columns = [row.get(name) for name in ("layers", "first", "own")]
    lists = [column for column in columns if isinstance(column, list)]
    numbers = all(isinstance(x, int | float) for column in lists for x in column)
    return len(lists) == len(columns) and numbers and len({len(column) for column in lists}) == 1


def _shown(row: Mapping[str, Any], formats: Mapping[str, str]) -> list[str]:
    return [text.format(value) for name, text in formats.items() if (value := _number(row, name)) is not None]


def _age(path: Path) -> float:
    try:
        return max(0.0, time.time() - path.stat().st_mtime)
    except FileNotFoundError:
        return 0.0


def _words(view: View) -> str:
    silence = f"no new row for {_clock(view.quiet_seconds)}"
    if view.state == "stopped":
        return f"{silence}, no process of this machine is writing it"
    return silence if view.state == "quiet" else view.state


def _width() -> int:
    return shutil.get_terminal_size().columns


def _clock(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"
