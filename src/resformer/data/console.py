"""Lines and progress bars on stderr; stdout is left to results."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def say(message: str) -> None:
    """One line on stderr."""
    print(message, file=sys.stderr, flush=True)


@contextmanager
def stage(description: str, total: int | None, enabled: bool) -> Iterator[Callable[[int], None]]:
    """A progress bar with ETA over `total` bytes (None: unknown); yields `advance(bytes)`. Not on a terminal: one
    line when it starts.
    """
    if not enabled:
        yield lambda amount: None
        return
    if not sys.stderr.isatty():
        say(description)
        yield lambda amount: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(description, total=total)
        yield lambda amount: progress.advance(task, amount)
