"""Commands on suites of runs."""

from __future__ import annotations

from pathlib import Path

from resformer import lookup, tables


def suite_list() -> None:
    """List the suites: experiments of several runs with what they claim."""
    rows = [(name, [run.name for run in suite.runs], suite.title) for name, suite in lookup.suites().items()]
    tables.show("suites", ["name", "runs", "what"], rows)


def suite_run(
    name: str,
    /,
    *,
    out: Path | None = None,
    jobs: int = 2,
    set: tuple[str, ...] = (),
    import_: tuple[Path, ...] = (),
) -> None:
    """Train every run of a suite, evaluate them, and write the report; what is done already is kept.

    Example: `resformer suite run quick --out runs/quick`

    Args:
        name: The suite; `resformer suite list` names them.
        out: The suite's directory (corpus, runs, report.html); runs/NAME when not given.
        jobs: Runs to train at the same time, each on one CPU thread.
        set: Keys to replace in every run, as section.key=value.
        import_: A Python file of yours that registers variants (@register_variant), run before anything is built; may
            be given several times.
    """
    lookup.import_variants(import_)
    from resformer.experiments.suite import run_suite

    code = run_suite(lookup.suite(name), _suite_directory(name, out), jobs=jobs, config_overrides=set, imports=import_)
    if code != 0:
        raise SystemExit(code)


def suite_status(name: str, /, *, out: Path | None = None) -> None:
    """Show how far each run of a suite is.

    Args:
        name: The suite.
        out: The suite's directory; runs/NAME when not given.
    """
    lookup.suite(name)
    from resformer.experiments.status import suite_status as status

    status(_suite_directory(name, out))


def suite_report(name: str, /, *, out: Path | None = None) -> None:
    """Write the report of a suite again from what its runs have left so far.

    Args:
        name: The suite.
        out: The suite's directory; runs/NAME when not given.
    """
    lookup.suite(name)
    from resformer.experiments.suite import show_report

    show_report(_suite_directory(name, out))


def _suite_directory(name: str, out: Path | None) -> Path:
    return out if out is not None else Path("runs") / name
