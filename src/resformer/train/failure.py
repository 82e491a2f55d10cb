"""How a run ends early."""

from __future__ import annotations

import signal

from resformer.errors import RunError


class RunFailure(RunError):  # noqa: N818
    """Something went wrong while the run was going: numbers that are no numbers, a disk that is full. Exit code 1."""


class Stopped(SystemExit):
    """A signal was honoured: the running step was finished and a checkpoint written. Exit code 143 after SIGTERM, 130
    after Ctrl-C (SIGINT).
    """

    def __init__(self, message: str, *, number: int = signal.SIGTERM) -> None:
        super().__init__(128 + number)
        self.message = message

    def __str__(self) -> str:
        return self.message
