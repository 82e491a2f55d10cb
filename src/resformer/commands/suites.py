"""Commands on suites of runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from resformer import lookup, tables

if TYPE_CHECKING:
    from resformer.experiments.places import Places
    from resformer.experiments.spec import Planned


def suite_list() -> None:
    """List the suites: experiments of several runs with what they claim."""
    rows = [
        (name, ", ".join(suite.scales), len(suite.runs), len(suite.claims), suite.title)
        for name, suite in lookup.suites().items()
    ]
    tables.show("suites", ["name", "scales", "runs", "claims", "what"], rows)


def suite_run(
    name: str,
    /,
    *,
    scale: str = "",
    seeds: tuple[int, ...] = (),
    out: Path | None = None,
    pool: Path | None = None,
    data: Path | None = None,
    records: Path | None = None,
    jobs: int = 2,
    processes: int | None = None,
    task_files: Path | None = None,
    list: bool = False,
    only: tuple[int, ...] = (),
    dry_run: bool = False,
    set: tuple[str, ...] = (),
    import_: tuple[Path, ...] = (),
) -> None:
    """Train every run of a suite, evaluate them, and write the report; what is done already is kept.

    Example: `resformer suite run variants --scale mini --jobs 2`

    Args:
        name: The suite; `resformer suite list` names them. Or a Python file of yours that defines SUITE.
        scale: How large: mini (a CPU, hours), small (one GPU, a day) or paper (many GPUs); the suite's first when not
            given.
        seeds: Seeds of weights and data order, one run of everything for each; the scale's when not given.
        out: The suite's directory (report.html); runs/SCALE/NAME when not given.
        pool: Directory of corpus and runs, which suites may share; --out when that is given, else runs/SCALE.
        data: A prepared corpus of yours; the pool's, prepared as the scale says, when not given.
        records: Directory of records of finished runs: runs that it holds are not trained again, and those that are
            finished here are added to it.
        jobs: Runs to train at the same time, each on one CPU thread or on devices of its own.
        processes: Processes (GPUs) of one run; the scale's when not given.
        task_files: Directory with data of the scale's lm-eval tasks (docs/evaluation.md); without it no tasks are
            scored.
        list: Only list the runs with their numbers and states.
        only: Numbers of runs, as --list shows them: train these and write no report, for one job a run in a queue.
        dry_run: Only say what it would take: GPU hours, memory, disk, and how to launch it.
        set: Keys to replace in every run, as section.key=value.
        import_: A Python file of yours that registers variants (@register_variant), run before anything is built; may
            be given several times.
    """
    lookup.import_variants(import_)
    from resformer.experiments.launch import Launch
    from resformer.experiments.suite import Request, run_suite

    planned = lookup.suite(name).at(scale, seeds)
    places = _places(planned, out, pool, data, records)
    launch = Launch(
        jobs=jobs,
        processes=planned.scale.processes if processes is None else processes,
        imports=import_,
        tasks=planned.scale.tasks if task_files is not None else (),
        task_files=task_files,
    )
    request = Request(planned=planned, places=places, launch=launch, overrides=set, only=only, typed=name)
    if list:
        from resformer.experiments.status import list_runs

        list_runs(request)
        return
    if dry_run:
        from resformer.experiments.status import dry_run as show

        show(request)
        return
    code = run_suite(request)
    if code != 0:
        raise SystemExit(code)


def suite_status(name: str, /, *, scale: str = "", out: Path | None = None) -> None:
    """Show how far each run of a suite is.

    Args:
        name: The suite.
        scale: Its scale, for the directory; the suite's first when not given.
        out: The suite's directory; runs/SCALE/NAME when not given.
    """
    from resformer.experiments.status import suite_status as status

    status(_places(lookup.suite(name).at(scale), out).out)


def suite_report(name: str, /, *, scale: str = "", out: Path | None = None) -> None:
    """Write the report of a suite again from what its runs, or their records, have left so far.

    Args:
        name: The suite.
        scale: Its scale, for the directory; the suite's first when not given.
        out: The suite's directory, or its directory among records; runs/SCALE/NAME when not given.
    """
    from resformer.experiments.suite import show_report

    show_report(_places(lookup.suite(name).at(scale), out).out)


def suite_index(directory: Path, /) -> None:
    """Write a page over all suites below a directory: index.html, and index.md for reading in a repository.

    Args:
        directory: Where suites lie: runs/mini, or a directory of records.
    """
    from resformer.experiments.index import write_index

    print(write_index(directory, lookup.suites()))


def _places(
    planned: Planned,
    out: Path | None,
    pool: Path | None = None,
    data: Path | None = None,
    records: Path | None = None,
) -> Places:
    from resformer.experiments.places import Places

    name, scale = planned.suite.name, planned.scale_name
    if out is None:
        # A suite of one scale that is called like it lies alone: `make compare` writes runs/quick.
        out = Path("runs") / name if scale == name else Path("runs") / scale / name
        pool = pool or (out if scale == name else out.parent)
    return Places.of(out, pool, data, records)
