"""Run a suite: prepare the corpus once, train what is not trained yet, some runs at a time, and write the report.

`out` holds everything: data/ (the corpus), runs/<id>/ with its run.log, configs/<id>.toml, suite.json, report.html,
results.json, report.png. The same command goes on where an earlier one stopped. Exit codes: 0, 1 if a run failed, 130
and 143 after Ctrl-C and SIGTERM.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from resformer.data.guard import disk_errors
from resformer.errors import UserError
from resformer.experiments.jobs import Job, run_jobs, tail
from resformer.experiments.progress import Display, Meter
from resformer.experiments.runs import EVAL_FILE, SUITE_FILE, Run, read_json, read_run
from resformer.experiments.settings import Overrides, Settings, override_paths, resolve
from resformer.experiments.spec import Suite
from resformer.train.files import write_atomic, write_json

LOCK_FILE, LOG_FILE = ".lock", "run.log"


def run_suite(
    suite: Suite,
    out: Path | str,
    *,
    jobs: int = 2,
    config_overrides: Overrides | None = None,
    load_recipe: Callable[[str], Any] | None = None,
    imports: Sequence[Path] = (),
) -> int:
    """Train every run of `suite` into `out`, then write and print the report.

    Args:
        suite: what to run.
        out: the suite's directory, made if needed.
        jobs: runs at the same time, each a process on one CPU thread.
        config_overrides: configuration keys that replace the recipe's in every run; such runs get ids of their own.
        load_recipe: recipe name -> configuration; the installed recipes when not given.
        imports: files with variants of the user's own; the runs' processes run them too.

    Returns:
        0; 1 if a run failed; 130 or 143 if Ctrl-C or SIGTERM stopped it (runs in progress have written a checkpoint).

    Raises:
        UserError: settings that make no sense, a corpus that cannot be read, something else or another process at work
            in `out`.
        RunError: the disk is full.
    """
    out, overrides, console = Path(out), config_overrides or {}, Console(highlight=False)
    if jobs < 1:
        raise UserError(f"jobs is {jobs}, expected 1 or more")
    settings = resolve(suite, out / "data", overrides, load_recipe=load_recipe)
    _check_place(out)
    with disk_errors(out):
        return _run_in(suite, out, settings, overrides, jobs, imports, console)


def _check_place(out: Path) -> None:
    """UserError where something else is than a suite."""
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out}: is a file, expected a directory to write into; choose another")
    if (out / SUITE_FILE).exists() and not isinstance(read_json(out / SUITE_FILE).get("runs"), list):
        raise UserError(
            f"{out / SUITE_FILE}: not written by `resformer suite run`, so it is not replaced; choose another --out or "
            "remove the file"
        )


def _run_in(
    suite: Suite,
    out: Path,
    settings: Sequence[Settings],
    overrides: Overrides,
    jobs: int,
    imports: Sequence[Path],
    console: Console,
) -> int:
    out.mkdir(parents=True, exist_ok=True)
    with locked(out) as lock:
        fingerprint = _prepare(suite, out)
        described = _describe(suite, out, settings, overrides, fingerprint, jobs, imports)
        for note in dict.fromkeys(note for one in settings for note in one.notes):
            console.print(Text(note), soft_wrap=True)
        todo, meters = _plan(suite, out, described, console, imports)
        stopped = _run(todo, meters, jobs, lock, console)
    if stopped:
        console.print(Text(f"stopped; go on with the same command: {described['command']}"), soft_wrap=True)
        return 130 if stopped == signal.SIGINT else 143
    failed = [job for job in todo if job.state == "failed"]
    for job in failed:
        text = f"\n{job.name} failed with exit code {job.returncode}; the end of {job.log}:"
        console.print(Text(text), style="bold red", soft_wrap=True)
        console.print(Text(tail(job.log)), soft_wrap=True)
    show_report(out, console)
    return 1 if failed else 0


def show_report(out: Path, console: Console | None = None) -> Path:
    """Write the report of what is there, print the table and, as the last line, the report's path."""
    from resformer.experiments.report import RESULTS_FILE, write_report
    from resformer.experiments.terminal import print_results

    with disk_errors(out):
        report = write_report(out)
    print_results(read_json(Path(out) / RESULTS_FILE), report, console)
    return report


@contextlib.contextmanager
def locked(out: Path) -> Iterator[int]:
    """Hold the suite's directory; yields the descriptor, which children inherit.

    So the lock lives as long as any of them does, and a suite whose parent was killed cannot be started a second time
    beside its own children.
    """
    with (out / LOCK_FILE).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(
                f"another process is training in {out}; wait for it (`resformer suite status`) or take another --out"
            ) from None
        yield file.fileno()


def is_locked(out: Path) -> bool:
    """Whether some process trains in `out` right now."""
    try:
        with (out / LOCK_FILE).open("r") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def _prepare(suite: Suite, out: Path) -> str:
    """The prepared corpus's fingerprint."""
    from resformer.data import open_dataset, prepare

    options: dict[str, Any] = dict(suite.prepare_options)
    prepare(list(suite.inputs), out / "data", **options)
    return str(open_dataset(out / "data", verify="none").fingerprint)


def _describe(
    suite: Suite,
    out: Path,
    settings: Sequence[Settings],
    overrides: Overrides,
    fingerprint: str,
    jobs: int,
    imports: Sequence[Path],
) -> dict[str, Any]:
    """Write suite.json and the runs' configuration files, and return what suite.json says."""
    from resformer.train.configure import to_toml

    (out / "configs").mkdir(exist_ok=True)
    runs = []
    for one in settings:
        run_id = one.id(fingerprint)
        write_atomic(out / "configs" / f"{run_id}.toml", to_toml(one.config))
        runs.append(
            {
                "id": run_id,
                "name": one.spec.name,
                "variant": one.spec.variant,
                "seed": one.spec.seed,
                "overrides": dict(one.spec.overrides),
                "steps": one.config.train.steps,
            }
        )
    if isinstance(overrides, Mapping):
        texts = [f"{path}={value}" for path, value in overrides.items()]
    else:
        texts = [str(text) for text in overrides]
    again = [
        "resformer",
        "suite",
        "run",
        suite.name,
        "--out",
        str(out),
        "--jobs",
        str(jobs),
        *(["--set", *texts] if texts else []),
        *_import_flags(imports),
    ]
    described = {
        "schema": 1,
        "name": suite.name,
        "title": suite.title,
        "recipe": suite.recipe,
        "baseline": suite.baseline,
        "claims": [{"left": claim.left, "right": claim.right, "on": claim.on} for claim in suite.claims],
        "runs": runs,
        "config_overrides": dict(zip(override_paths(overrides), (t.partition("=")[2] for t in texts), strict=True)),
        "data_fingerprint": fingerprint,
        "command": shlex.join(again),
    }
    write_json(out / SUITE_FILE, described)
    return described


def _plan(
    suite: Suite, out: Path, described: dict[str, Any], console: Console, imports: Sequence[Path]
) -> tuple[list[Job], list[Meter]]:
    """What is left to do; says what is reused and what is resumed."""
    todo, meters = [], []
    for spec in described["runs"]:
        run = read_run(out, spec)
        if run.complete:
            console.print(Text(f"{run.name}: already trained ({run.steps} steps), reused: {run.path}"), soft_wrap=True)
            continue
        if run.trained and not run.scored:
            console.print(Text(f"{run.name}: trained, scored again: {_score_fault(run)}"), soft_wrap=True)
        if run.step and not run.trained:
            console.print(Text(f"{run.name}: resumed, {run.step} of {spec['steps']} steps were done"), soft_wrap=True)
        commands = ([] if run.trained else [_train_command(suite, out, run)]) + [_finish_command(suite, out, run)]
        commands = [[*command, *_import_flags(imports)] for command in commands]
        todo.append(Job(name=run.name, commands=commands, log=run.path / LOG_FILE))
        meters.append(Meter(path=run.path / "metrics.jsonl", steps=spec["steps"]))
    return todo, meters


def _score_fault(run: Run) -> str:
    file = run.path / EVAL_FILE
    return f"{file} {'is damaged or of another step or corpus' if file.exists() else 'is missing'}"


def _import_flags(imports: Sequence[Path]) -> list[str]:
    return [word for path in imports for word in ("--import", str(path))]


def _train_command(suite: Suite, out: Path, run: Run) -> list[str]:
    command = [
        sys.executable,
        "-m",
        "resformer",
        "train",
        suite.recipe,
        "--config",
        str(out / "configs" / f"{run.id}.toml"),
    ]
    command += ["--out", str(run.path)]
    if (run.path / "checkpoints" / "latest").exists():
        return [*command, "--resume"]
    # Killed before its first checkpoint: there is nothing to resume from, and nothing that could be lost.
    return [*command, "--overwrite"] if run.path.exists() else command


def _finish_command(suite: Suite, out: Path, run: Run) -> list[str]:
    options = ["--prompt", suite.prompt, "--max-new-tokens", str(suite.sample_tokens), "--seed", str(suite.sample_seed)]
    return [sys.executable, "-m", "resformer.experiments.finish", str(run.path), "--data", str(out / "data"), *options]


def _run(todo: list[Job], meters: list[Meter], jobs: int, lock: int, console: Console) -> int:
    """Run the jobs under the live display; returns the signal that stopped them, or 0."""
    if not todo:
        return 0
    single = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    environment = {**os.environ, **single, "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    names = ", ".join(job.name for job in todo)
    console.print(
        Text(f"training {len(todo)} runs, {min(jobs, len(todo))} at a time on one CPU thread each: {names}"),
        soft_wrap=True,
    )
    display = Display(todo, meters, parallel=jobs, console=console)
    with display.shown():
        return run_jobs(todo, parallel=jobs, environment=environment, keep_open=[lock], watch=display.update)
