"""How far each run of a suite is, on the terminal."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from resformer.experiments.markup import duration, number
from resformer.experiments.progress import Meter, time_left
from resformer.experiments.runs import Run, read_run, read_suite
from resformer.experiments.suite import LOG_FILE, is_locked


def suite_status(out: Path | str) -> list[dict[str, Any]]:
    """Print how far each run of the suite in `out` is, and return the same as rows (name, id, state, step, steps, loss,
    seconds_left).

    Raises UserError when `out` holds no suite.
    """
    out = Path(out)
    described, active = read_suite(out), is_locked(out)
    rows, meters, states = [], [], []
    for spec in described["runs"]:
        run = read_run(out, spec)
        meter = Meter(path=run.path / "metrics.jsonl", steps=run.steps or int(spec.get("steps") or 0))
        meter.read()
        state = _state(out, run, active)
        left = (
            (meter.steps - meter.step) * meter.seconds_per_step
            if meter.seconds_per_step and state == "running"
            else None
        )
        rows.append({"name": run.name, "id": run.id, "state": state, "step": run.step, "steps": meter.steps,
                     "loss": meter.loss, "seconds_left": left})  # fmt: skip
        meters.append(meter)
        states.append(state if state in ("running", "finished") else "waiting")
    table = Table(
        title=Text(f"suite {described.get('name')} in {out}"), title_justify="left", title_style="", box=box.SIMPLE_HEAD
    )
    for column in ("run", "state", "step", "training loss", "time left"):
        table.add_column(column, justify="left" if column in ("run", "state") else "right")
    for row in rows:
        cells = (
            row["name"],
            row["state"],
            f"{row['step']:,}/{row['steps']:,}",
            number(row["loss"]),
            duration(row["seconds_left"]),
        )
        table.add_row(*(Text(str(cell)) for cell in cells))
    console = Console(highlight=False)
    console.print(table)
    parallel = max(states.count("running"), 1)
    left = time_left(meters, states, parallel)
    if active and left:
        console.print(f"about {duration(left)} left in all, {parallel} at a time")
    elif not active and any(row["state"] != "finished" for row in rows):
        console.print(Text(f"nothing is running; go on with: {described.get('command')}"), soft_wrap=True)
    return rows


def _state(out: Path, run: Run, active: bool) -> str:
    """ "finished", "running", "trained, not scored", "trained, no sample", "stopped" or "waiting". A run counts as
    running while its log or metrics moved in the last two minutes.
    """
    if run.complete:
        return "finished"
    files = (run.path / "metrics.jsonl", run.path / LOG_FILE)
    moved = max((file.stat().st_mtime for file in files if file.exists()), default=0.0)
    if active and time.time() - moved < 120:
        return "running"
    if run.trained:
        return "trained, no sample" if run.scored else "trained, not scored"
    return "stopped" if run.step else "waiting"
