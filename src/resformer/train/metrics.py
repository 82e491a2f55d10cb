"""metrics.jsonl: one JSON object a line, appended whole, cut back to a checkpoint on resume."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from resformer.errors import UserError
from resformer.train.failure import RunFailure

TIMING_FIELDS = ("seconds", "tokens_per_second", "memory_bytes", "mfu")
"""Fields that differ between two runs that are otherwise equal to the bit."""


def score_rows(split: str, scores: Mapping[str, Any], *, step: int, tokens: int) -> list[dict[str, Any]]:
    """Rows of what `evaluate` found after `step` steps and `tokens` training tokens: one a domain, and "all", their
    mean.
    """
    scored = sum(d["tokens"] for d in scores["domains"].values())
    everything = {"loss": scores["loss"], "bits_per_byte": scores["bits_per_byte"], "tokens": scored}
    return [
        {"split": split, "domain": domain, "step": step}
        | {key: values[key] for key in everything}
        | {"train_tokens": tokens}
        for domain, values in [*scores["domains"].items(), ("all", everything)]
    ]


class MetricsLog:
    """The open file of one run. Holding it keeps a second process out of the run directory."""

    def __init__(self, path: Path) -> None:
        """Open or create; what is there already stays.

        Raises:
            UserError: another process is writing this run.
        """
        self.path = path
        self.listeners: list[Callable[[Mapping[str, Any]], None]] = []
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._handle)
            raise UserError(
                f"{path.parent} is being written by another process; wait for it or choose another --out"
            ) from None
        except OSError:
            pass  # a file system without locks

    def cut(self, size_bytes: int) -> bool:
        """Forget everything after `size_bytes`, and a torn line at the end. Return whether `size_bytes` were there."""
        kept = self.path.read_bytes()[:size_bytes]
        whole = kept.rfind(b"\n") + 1
        if os.fstat(self._handle).st_size != whole:
            os.ftruncate(self._handle, whole)
        return whole == size_bytes

    def write(self, *rows: Mapping[str, Any]) -> None:
        """Append rows with one write, so that a kill leaves all or, at worst, one torn line that a resume removes.

        Raises:
            RunFailure: the disk is full, or a value is no finite number.
        """
        try:
            text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows)
            left = memoryview(text.encode("utf-8"))
            while left:
                left = left[os.write(self._handle, left) :]
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise RunFailure(f"{self.path} could not be written: {reason}") from error
        for listener in self.listeners:
            for row in rows:
                listener(row)

    def sync(self) -> int:
        """Wait until all rows are on the disk; return the size of the file in bytes."""
        os.fsync(self._handle)
        return os.fstat(self._handle).st_size

    def close(self) -> None:
        os.close(self._handle)

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class NoLog:
    """The metrics of a process that is not the first: nothing is written."""

    path = Path(os.devnull)

    def __init__(self) -> None:
        self.listeners: list[Callable[[Mapping[str, Any]], None]] = []

    def cut(self, size_bytes: int) -> bool:
        return True

    def write(self, *rows: Mapping[str, Any]) -> None:
        pass

    def sync(self) -> int:
        return 0

    def close(self) -> None:
        pass

    def __enter__(self) -> NoLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All whole rows of a metrics file; a torn last line is left out.

    Raises:
        UserError: a line is no row.
    """
    lines = path.read_bytes().split(b"\n")[:-1]
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise UserError(
                f"{path}:{number} is no JSON object; remove the line, or put the file back as the run wrote it"
            )
        rows.append(row)
    return rows
