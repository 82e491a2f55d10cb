"""`resformer watch`: what a run is doing, read from its directory. No torch, nothing is written or locked."""

from __future__ import annotations

import json
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from resformer.errors import UserError
from resformer.train import checkpoint

CONFIG, METRICS, MODEL, CHECKPOINTS = "config.toml", "metrics.jsonl", "model", "checkpoints"
QUIET_SECONDS = 60.0
"""A run that has written no row for so long, and for ten steps, is called quiet."""
_WINDOW_ROWS = 50


@dataclass(frozen=True, kw_only=True)
class View:
    """What is known of a run.

    Attributes:
        run: its directory.
        steps: how many it is to have; None if config.toml does not say.
        train: its last row of training, or nothing.
        validation: its last row of validation over all domains, or nothing.
        lambdas: its last row of lambdas, or nothing.
        seconds_per_step: of its last rows.
        checkpoint: the step of its newest checkpoint.
        state: "starting", "running", "quiet" or "finished".
        quiet_seconds: since metrics.jsonl was written last.
    """

    run: Path
    steps: int | None
    train: dict[str, Any] = field(default_factory=dict)
    validation: dict[str, Any] = field(default_factory=dict)
    lambdas: dict[str, Any] = field(default_factory=dict)
    seconds_per_step: float | None = None
    checkpoint: int | None = None
    state: str = "starting"
    quiet_seconds: float = 0.0


def look(run: Path) -> View:
    """Read the run in `run`.

    Raises:
        UserError: there is none.
    """
    config = _config(run)
    steps = config.get("train", {}).get("steps")
    train, validation, lambdas, seconds = {}, {}, {}, []
    for row in _rows(run / METRICS):
        if row.get("split") == "train":
            train = row
            seconds.append(row.get("seconds"))
        elif row.get("split") == "validation" and row.get("domain") == "all":
            validation = row
        elif row.get("split") == "lambdas":
            lambdas = row
    known = [value for value in seconds[-_WINDOW_ROWS:] if isinstance(value, int | float)]
    pace = sum(known) / len(known) if known else None
    quiet = _age(run / METRICS)
    done = train.get("step") == steps and (run / MODEL / "config.json").is_file()
    late = quiet > max(QUIET_SECONDS, 10 * (pace or 0.0))
    return View(
        run=run,
        steps=steps,
        train=train,
        validation=validation,
        lambdas=lambdas,
        seconds_per_step=pace,
        checkpoint=checkpoint.latest_step(run / CHECKPOINTS),
        state="finished" if done else "quiet" if late else "running" if train else "starting",
        quiet_seconds=quiet,
    )


def line(view: View) -> str:
    """The run in one line."""
    parts = [f"{view.run}: {_state(view)}"]
    step = view.train.get("step", 0)
    parts.append(f"step {step:,}/{view.steps:,}" if isinstance(view.steps, int) else f"step {step:,}")
    shown = (("loss", "loss {:.4f}"), ("lr", "lr {:.3g}"), ("grad_norm", "gradient {:.3g}"))
    parts += [text.format(view.train[name]) for name, text in shown if name in view.train]
    if view.validation:
        parts.append(f"validation {view.validation['loss']:.4f} at step {view.validation['step']:,}")
    if "tokens_per_second" in view.train:
        parts.append(f"{view.train['tokens_per_second']:,.0f} tokens/s")
    if "mfu" in view.train:
        parts.append(f"MFU {view.train['mfu']:.1%}")
    if "memory_bytes" in view.train:
        parts.append(f"memory {view.train['memory_bytes'] / 2**30:.2f} GiB")
    if view.state == "running" and view.seconds_per_step and isinstance(view.steps, int):
        parts.append(f"ETA {_clock(view.seconds_per_step * (view.steps - step))}")
    parts.append("no checkpoint yet" if view.checkpoint is None else f"checkpoint {view.checkpoint:,}")
    return "  ".join(parts)


def lambda_lines(view: View) -> list[str]:
    """The lambdas by layer, as two short lines; none where the variant has none."""
    if not view.lambdas:
        return []
    layers = view.lambdas.get("layers", [])
    head = "  layer  " + " ".join(f"{layer:>6}" for layer in layers)
    rows = [f"  {kind:5}  " + " ".join(f"{x:6.2f}" for x in view.lambdas.get(kind, [])) for kind in ("first", "own")]
    return [head, *rows]


def watch(run: Path, *, once: bool, every_seconds: float) -> None:
    """Show the run until it is finished, or once; Ctrl-C ends it."""
    try:
        if once:
            _show(look(run))
        elif sys.stdout.isatty():
            _live(run, every_seconds)
        else:
            _follow(run, every_seconds)
    except KeyboardInterrupt:
        return


def _show(view: View) -> None:
    print("\n".join([line(view), *lambda_lines(view)]), flush=True)


def _follow(run: Path, every_seconds: float) -> None:
    """A line whenever something has changed."""
    before = None
    while True:
        view = look(run)
        now = (view.state, view.train, view.validation, view.checkpoint)
        if now != before:
            print(line(view), flush=True)
        before = now
        if view.state == "finished":
            return
        time.sleep(every_seconds)


def _live(run: Path, every_seconds: float) -> None:
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    with Live(auto_refresh=False) as live:
        while True:
            view = look(run)
            live.update(Group(*map(Text, [line(view), *lambda_lines(view)])), refresh=True)
            if view.state == "finished":
                return
            time.sleep(every_seconds)


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


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """All whole rows; the last may be half written, and a damaged one is not ours to judge."""
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return
    for text in lines:
        try:
            row = json.loads(text)
        except ValueError:
            continue
        if isinstance(row, dict):
            yield row


def _age(path: Path) -> float:
    try:
        return max(0.0, time.time() - path.stat().st_mtime)
    except FileNotFoundError:
        return 0.0


def _state(view: View) -> str:
    return f"no new row for {_clock(view.quiet_seconds)}" if view.state == "quiet" else view.state


def _clock(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"
