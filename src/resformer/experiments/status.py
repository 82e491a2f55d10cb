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
from resformer.experiments.places import Places, is_locked, lock_of
from resformer.experiments.progress import Meter, time_left
from resformer.experiments.runs import Run, pool_of, read_run, read_suite
from resformer.experiments.settings import resolve
from resformer.experiments.suite import LOG_FILE, Request, check_numbers, check_only, check_tasks, label


def suite_status(out: Path | str) -> list[dict[str, Any]]:
    """Print how far each run of the suite in `out` is, and return the same as rows (name, id, state, step, steps, loss,
    seconds_left).

    Raises UserError when `out` holds no suite.
    """
    out = Path(out)
    described = read_suite(out)
    active, pool = is_locked(out), pool_of(out, described)
    records = out / described["records"] if described.get("records") else None
    several = len(described.get("seeds") or ()) > 1
    rows, meters, states = [], [], []
    for spec in described["runs"]:
        run = read_run(pool / "runs" / spec["id"], spec, records=records)
        meter = Meter(path=run.path / "metrics.jsonl", steps=run.steps or int(spec.get("steps") or 0))
        meter.read()
        state = _state(run, active or is_locked(lock_of(pool, run.id)))
        left = (
            (meter.steps - meter.step) * meter.seconds_per_step
            if meter.seconds_per_step and state == "running"
            else None
        )
        name = f"{run.name} (seed {run.seed})" if several else run.name
        rows.append({"name": name, "id": run.id, "state": state, "step": run.step, "steps": meter.steps,
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


def _state(run: Run, active: bool) -> str:
    """ "finished", "running", "trained, not scored", "trained, not analysed", "stopped" or "waiting". A run counts as
    running while its log or metrics moved in the last two minutes.
    """
    if run.complete:
        return "finished"
    files = (run.path / "metrics.jsonl", run.path / LOG_FILE)
    moved = max((file.stat().st_mtime for file in files if file.exists()), default=0.0)
    if active and time.time() - moved < 120:
        return "running"
    if run.failure and not run.trained:
        return "failed"
    if run.trained:
        return "trained, not analysed" if run.scored else "trained, not scored"
    return "stopped" if run.step else "waiting"


def list_runs(request: Request) -> list[dict[str, Any]]:
    """Print the runs of a suite with the numbers that `--only` takes, and return them: what one job of an array each
    would train. Writes nothing; ids are not known before there is a corpus, on which they depend.
    """
    planned, places = request.planned, request.places
    settings = resolve(planned, places.data, request.overrides)
    check_only(request.only, len(settings))
    fingerprint = known_fingerprint(places)
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("only", "run", "id", "state"):
        table.add_column(column, justify="right" if column == "only" else "left", no_wrap=True)
    rows = []
    for i, one in enumerate(settings, 1):
        spec = {"name": one.spec.name, "seed": one.seed, "steps": one.config.train.steps}
        run_id, state = "not known yet", "waiting"
        if fingerprint is not None:
            run_id = one.id(fingerprint)
            run = read_run(places.run(run_id), spec, records=places.records)
            state = _state(run, is_locked(lock_of(places.pool, run_id)))
        rows.append({"only": i, "name": label(spec, planned), "id": run_id, "state": state})
        if not request.only or i in request.only:
            table.add_row(*(Text(str(value)) for value in rows[-1].values()))
    Console(highlight=False).print(table)
    return rows


def known_fingerprint(places: Places) -> str | None:
    """Of the corpus, None where it is not prepared yet."""
    if not (places.data / "index.json").is_file():
        return None
    from resformer.data import open_dataset

    return str(open_dataset(places.data, verify="none").fingerprint)


def dry_run(request: Request) -> None:
    """Print what a suite would take and how to start it; nothing is prepared, written or trained."""
    from resformer.experiments.budget import PLACEHOLDER, budget, print_budget

    planned, places = request.planned, request.places
    check_numbers(request.launch)
    check_tasks(request.launch)
    settings = resolve(planned, places.data, request.overrides)
    check_only(request.only, len(settings))
    vocab_size = None
    if (places.data / "index.json").is_file():
        from resformer.data import open_dataset

        vocab_size = open_dataset(places.data, verify="none").vocab_size
    found = budget(
        planned,
        [(one.spec.name, one.seed, one.config) for one in settings],
        processes=request.launch.processes,
        vocab_size=vocab_size,
    )
    own = places.data != places.pool / "data"
    print_budget(
        found,
        typed=request.typed,
        data=places.data if own else PLACEHOLDER,
        out=places.out,
        pool=places.pool,
        more=request.elsewhere(),
    )
