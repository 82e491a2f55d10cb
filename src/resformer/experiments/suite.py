"""Run a suite: prepare the corpus once, train what is not trained yet, some runs at a time, and write the report.

What lies where is in `places`. The same command goes on where an earlier one stopped. Exit codes: 0, 1 if a run failed,
130 and 143 after Ctrl-C and SIGTERM.
"""

from __future__ import annotations

import contextlib
import shlex
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from resformer.data.guard import disk_errors
from resformer.errors import UserError
from resformer.experiments import launch
from resformer.experiments.jobs import Job, run_jobs, tail
from resformer.experiments.launch import Launch
from resformer.experiments.places import Places, deposit, deposit_suite, lock_run, locked, record_fault, waiting_for
from resformer.experiments.progress import Display, Meter
from resformer.experiments.runs import EVAL_FILE, FAILED_FILE, SUITE_FILE, Run, read_json, read_run
from resformer.experiments.settings import Overrides, Settings, override_paths, resolve
from resformer.experiments.spec import Planned
from resformer.train.files import write_atomic, write_json

LOG_FILE = "run.log"


@dataclass(frozen=True, kw_only=True)
class Request:
    """A suite at a scale, where it lies, how it is started, and what the user changed."""

    planned: Planned
    places: Places
    launch: Launch
    overrides: Overrides = ()
    only: tuple[int, ...] = ()
    typed: str = ""  # how the user named the suite: a file, if it is one of their own

    def command(self) -> str:
        """What to type to go on."""
        suite, places, launch = self.planned.suite, self.places, self.launch
        words = ["resformer", "suite", "run", self.typed or suite.name]
        if len(suite.scales) > 1:
            words += ["--scale", self.planned.scale_name]
        if self.planned.scale.seeds != suite.scales[self.planned.scale_name].seeds:
            words += ["--seeds", *map(str, self.planned.scale.seeds)]
        words += ["--out", str(places.out)]
        for flag, path, usual in (
            ("--pool", places.pool, places.out),
            ("--data", places.data, places.pool / "data"),
            ("--records", places.records, None),
            ("--task-files", launch.task_files, None),
        ):
            words += [flag, str(path)] if path is not None and path != usual else []
        words += ["--jobs", str(launch.jobs)]
        words += ["--processes", str(launch.processes)] if launch.processes > 1 else []
        return shlex.join([*words, *self.changed(seeds=False)])

    def changed(self, *, seeds: bool = True) -> list[str]:
        """The words that change what the runs are."""
        usual = self.planned.suite.scales[self.planned.scale_name].seeds
        words = ["--seeds", *map(str, self.planned.scale.seeds)] if seeds and self.planned.scale.seeds != usual else []
        words += ["--set", *texts] if (texts := override_texts(self.overrides)) else []
        return [*words, *self.launch.import_flags()]

    def elsewhere(self) -> list[str]:
        """The words of a launch line on another machine, beside places: what changes the runs, tasks and records."""
        files, records = self.launch.task_files, self.places.records
        words = ["--task-files", str(files)] if files is not None else []
        return [*words, *(["--records", str(records)] if records is not None else []), *self.changed()]


def override_texts(overrides: Overrides) -> list[str]:
    """As they are typed after `--set`."""
    if isinstance(overrides, Mapping):
        return [f"{path}={value}" for path, value in overrides.items()]
    return [str(text) for text in overrides]


def run_suite(request: Request, *, load_recipe: Callable[[str], Any] | None = None) -> int:
    """Train every run of a suite that is not trained yet, then write and print the report.

    Args:
        request: what to run, and where. With `only`, these runs (numbered from 1, as `list_runs` shows them) and no
            report: for one job a run, in a queue.
        load_recipe: recipe name -> configuration; the installed recipes when not given.

    Returns:
        0; 1 if a run failed; 130 or 143 if Ctrl-C or SIGTERM stopped it (runs in progress have written a checkpoint).

    Raises:
        UserError: settings that make no sense, a corpus that cannot be read, something else or another process at work
            in the suite's directory.
        RunError: the disk is full.
    """
    places, console = request.places, Console(highlight=False)
    check_numbers(request.launch)
    settings = resolve(request.planned, places.data, request.overrides, load_recipe=load_recipe)
    check_only(request.only, len(settings))
    check_tasks(request.launch)
    places.check()
    with disk_errors(places.pool):
        places.out.mkdir(parents=True, exist_ok=True)
        with locked(places.out, shared=bool(request.only)) as lock:
            return _run_in(request, settings, lock, console)


def check_only(only: Sequence[int], count: int) -> None:
    """UserError for a number that no run has."""
    for number in only:
        if not 1 <= number <= count:
            raise UserError(f"--only {number}: the suite has runs 1 to {count}; `--list` shows them")


def check_numbers(launch: Launch) -> None:
    """UserError for a number below 1."""
    for name, value in (("jobs", launch.jobs), ("processes", launch.processes)):
        if value < 1:
            raise UserError(f"{name} is {value}, expected 1 or more")


def check_tasks(launch: Launch) -> None:
    """UserError before anything is trained, if the tasks' data are not there."""
    if launch.task_files is not None and not launch.task_files.is_dir():
        raise UserError(f"--task-files {launch.task_files}: no such directory; it holds a file for each task")


def _run_in(request: Request, settings: Sequence[Settings], lock: int, console: Console) -> int:
    places, records = request.places, request.places.records
    fingerprint = prepare(request.planned, places)
    described = describe(request, settings, fingerprint)
    for note in dict.fromkeys(note for one in settings for note in one.notes):
        console.print(Text(note), soft_wrap=True)
    wanted = [described["runs"][i - 1] for i in request.only] or described["runs"]
    todo, meters, left = _plan(request, wanted, console)
    stopped = _run(request, todo, meters, lock, console)
    if stopped:
        console.print(Text(f"stopped; go on with the same command: {described['command']}"), soft_wrap=True)
        return 130 if stopped == signal.SIGINT else 143
    failed = [job for job in todo if job.state == "failed"]
    for job in failed:
        said = tail(job.log, 1) or f"exit code {job.returncode}"
        write_json(job.log.parent / FAILED_FILE, {"returncode": job.returncode, "message": said})
        text = f"\n{job.name} failed with exit code {job.returncode}; the end of {job.log}:"
        console.print(Text(text), style="bold red", soft_wrap=True)
        console.print(Text(tail(job.log)), soft_wrap=True)
    if records is not None and not request.only:
        kept = deposit_suite(places.data, records, described)
        if kept is None:
            text = (
                f"{records / described['name']}: holds the suite at another scale, with other settings or more seeds, "
                "and stays as it is"
            )
            console.print(Text(text), soft_wrap=True)
        else:
            show_report(kept, quiet=True)
    if not request.only:
        show_report(places.out, console)
    if left:
        text = f"in progress elsewhere, not waited for: {', '.join(left)}; type the command again when they are done"
        console.print(Text(text), style="bold", soft_wrap=True)
    return 1 if failed else 0


def show_report(out: Path, console: Console | None = None, *, quiet: bool = False) -> Path:
    """Write the report of what is there, print the table and, as the last line, the report's path."""
    from resformer.experiments.report import RESULTS_FILE, write_report
    from resformer.experiments.terminal import print_results

    with disk_errors(out):
        report = write_report(out)
    if not quiet:
        print_results(read_json(Path(out) / RESULTS_FILE), report, console)
    return report


def prepare(planned: Planned, places: Places) -> str:
    """The fingerprint of the corpus, which is prepared first unless the user brought it."""
    from resformer.data import open_dataset
    from resformer.data import prepare as build

    if places.data != places.pool / "data":
        return str(open_dataset(places.data, verify="sample").fingerprint)
    if not planned.scale.inputs:
        if not (places.data / "index.json").is_file():
            raise UserError(
                f"suite {planned.suite.name!r} at scale {planned.scale_name!r} needs a corpus of yours: pass --data "
                "DIR (`resformer data prepare` writes one; docs/reproduce.md)"
            )
        return str(open_dataset(places.data, verify="sample").fingerprint)
    with waiting_for(places.pool / ".data.lock"):  # the jobs of an array start together
        options: dict[str, Any] = dict(planned.scale.prepare_options)
        build(list(planned.scale.inputs), places.data, **options)
    return str(open_dataset(places.data, verify="none").fingerprint)


def describe(request: Request, settings: Sequence[Settings], fingerprint: str) -> dict[str, Any]:
    """Write suite.json and the runs' configuration files, and return what suite.json says."""
    from resformer.train.configure import to_toml

    places, planned, suite = request.places, request.planned, request.planned.suite
    (places.out / "configs").mkdir(exist_ok=True)
    runs = []
    for one in settings:
        run_id = one.id(fingerprint)
        write_atomic(places.out / "configs" / f"{run_id}.toml", to_toml(one.config))
        runs.append(
            {
                "id": run_id,
                "name": one.spec.name,
                "variant": one.spec.variant,
                "seed": one.seed,
                "overrides": dict(one.overrides),
                "steps": one.config.train.steps,
            }
        )
    texts = override_texts(request.overrides)
    described = {
        "schema": 2,
        "name": suite.name,
        "scale": planned.scale_name,
        "title": suite.title,
        "question": suite.question,
        "recipe": planned.scale.recipe,
        "baseline": suite.baseline,
        "seeds": list(planned.scale.seeds),
        "pool": places.relative(places.pool),
        "records": None if places.records is None else places.relative(places.records),
        "claims": [
            {"kind": c.kind, "left": c.left, "right": c.right, "on": c.on, "margin": c.margin, "paper": c.paper}
            for c in planned.claims
        ],
        "paper": [{"run": r.run, "values": dict(r.values), "source": r.source} for r in suite.paper],
        "paper_setting": suite.paper_setting,
        "notes": list(suite.notes),
        "runs": runs,
        "config_overrides": dict(zip(override_paths(request.overrides), _values(texts), strict=True)),
        "data_fingerprint": fingerprint,
        "command": request.command(),
    }
    write_json(places.out / SUITE_FILE, described)
    return described


def _values(texts: Sequence[str]) -> Iterator[str]:
    return (text.partition("=")[2] for text in texts)


def _plan(
    request: Request, wanted: Sequence[dict[str, Any]], console: Console
) -> tuple[list[Job], list[Meter], list[str]]:
    """What is left to do, and the names of runs that somebody else trains; says what is reused and what is resumed."""
    places, launch = request.places, request.launch
    todo: list[Job] = []
    meters: list[Meter] = []
    left: list[str] = []
    seen: set[str] = set()
    for spec in wanted:
        run = read_run(places.run(spec["id"]), spec, records=places.records)
        name = label(spec, request.planned)
        if run.recorded and (fault := record_fault(run)):
            console.print(Text(f"{name}: its record is not taken: {fault}"), soft_wrap=True)
            run = read_run(places.run(spec["id"]), spec)
        if spec["id"] in seen:  # two names for the same training
            continue
        seen.add(spec["id"])
        if run.complete and not _lacks_tasks(run, launch.tasks):
            console.print(Text(f"{name}: already trained ({run.steps} steps), reused: {run.path}"), soft_wrap=True)
            if places.records is not None and not run.recorded:
                deposit(run, places.records)
            continue
        if (held := lock_run(places.pool, run.id)) is None:
            console.print(Text(f"{name}: another process is training it"), soft_wrap=True)
            left.append(name)
            continue
        if run.recorded:  # a record has no model that could be scored
            run = read_run(places.run(spec["id"]), spec)
        if run.trained:
            console.print(Text(f"{name}: trained, scored again: {_missing(run)}"), soft_wrap=True)
        elif run.step:
            console.print(Text(f"{name}: resumed, {run.step} of {spec['steps']} steps were done"), soft_wrap=True)
        (run.path / FAILED_FILE).unlink(missing_ok=True)
        commands = [launch.finish(request.planned, places, run)]
        if not run.trained:
            commands.insert(0, launch.train(request.planned, places, run))
        log = run.path / LOG_FILE
        todo.append(Job(name=name, commands=commands, log=log, lock=held, done=_keeper(places, spec)))
        meters.append(Meter(path=run.path / "metrics.jsonl", steps=spec["steps"]))
    return todo, meters, left


def label(spec: Mapping[str, Any], planned: Planned) -> str:
    """How a run is called where several seeds are: `identity (seed 1)`."""
    return f"{spec['name']} (seed {spec['seed']})" if len(planned.scale.seeds) > 1 else str(spec["name"])


def _keeper(places: Places, spec: dict[str, Any]) -> Callable[[], None]:
    """What to do when a run is over: keep its record."""

    def keep() -> None:
        if places.records is not None and (run := read_run(places.run(spec["id"]), spec)).complete:
            deposit(run, places.records)

    return keep


def _lacks_tasks(run: Run, tasks: Sequence[str]) -> bool:
    found = run.evaluation.get("tasks")
    return any(not (isinstance(found, dict) and task in found) for task in tasks)


def _missing(run: Run) -> str:
    """Why a trained run is not complete."""
    file = run.path / EVAL_FILE
    if not run.scored:
        return f"{file} {'is damaged or of another step or corpus' if file.exists() else 'is missing'}"
    if not run.sampled:
        return "it has no sample"
    return "it has no losses by document or no analysis" if not run.measured else "it lacks tasks"


def _run(request: Request, todo: list[Job], meters: list[Meter], lock: int, console: Console) -> int:
    """Run the jobs under the live display; returns the signal that stopped them, or 0."""
    if not todo:
        return 0
    jobs, processes = request.launch.jobs, request.launch.processes
    devices = launch.visible_devices()
    slots = launch.slots(jobs, processes, devices)
    if not slots:
        raise UserError(f"--processes {processes}: only {len(devices)} CUDA devices are visible")
    names = ", ".join(job.name for job in todo)
    where = f"{processes} of {len(devices)} devices each" if devices else "one CPU thread each"
    text = f"training {len(todo)} runs, {min(len(slots), len(todo))} at a time on {where}: {names}"
    console.print(Text(text), soft_wrap=True)
    display = Display(todo, meters, parallel=len(slots), console=console)
    with contextlib.ExitStack() as stack:
        for job in todo:
            stack.callback(job.release)
        stack.enter_context(display.shown())
        return run_jobs(todo, slots=slots, environment=launch.environment(), keep_open=[lock], watch=display.update)
