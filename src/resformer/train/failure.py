"""How a run ends early."""

from __future__ import annotations


class RunFailure(RuntimeError):  # noqa: N818
    """Something went wrong while the run was going: numbers that are no numbers, a disk that is full. Exit code 1."""


class Stopped(SystemExit):
    """A signal was honoured: the running step was finished and a checkpoint written. Exit code 143."""

    def __init__(self, message: str) -> None:
        super().__init__(143)
        self.message = message

    def __str__(self) -> str:
        return self.message
