"""SIGTERM and SIGINT: the first asks for a checkpoint after the running step, the second ends the process at once."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Context in which a first signal is only noted. Outside the main thread it does nothing (Python's rule)."""

    def __init__(self) -> None:
        self.name, self.number = "", 0
        self._before: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        return bool(self.name)

    def __call__(self) -> bool:
        """The same as `requested`, for those who want a function."""
        return self.requested

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.requested:
            os._exit(128 + number)
        self.name, self.number = signal.Signals(number).name, number

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            # An ignored signal stays ignored: a shell ignores SIGINT for jobs in the background.
            heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._note) for number in heard}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
