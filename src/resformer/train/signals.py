"""SIGTERM and SIGINT: the first asks for a checkpoint after the running step, the second ends the process at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)


LAUNCHED = "TORCHELASTIC_RUN_ID"
"""Set by torchrun in the processes that it starts."""
ECHO_SECONDS = 3.0
"""A signal that follows the first within this time, below torchrun, is the same one, passed on."""


def name_of(number: int) -> str:
    """SIGTERM for 15."""
    return signal.Signals(number).name


class StopRequest:
    """Context in which a first signal is only noted. Outside the main thread it does nothing (Python's rule)."""

    def __init__(self) -> None:
        self.number, self._at = 0, 0.0
        self._before: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        return bool(self.number)

    def __call__(self) -> bool:
        """The same as `requested`, for those who want a function."""
        return self.requested

    def _note(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if self.requested:
            # Ctrl-C reaches a launcher and its processes alike, and the launcher then passes it on.
            if not (LAUNCHED in os.environ and now - self._at < ECHO_SECONDS):
                os._exit(128 + number)
            return
        self.number, self._at = number, now

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            # An ignored signal stays ignored: a shell ignores SIGINT for jobs in the background.
            heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._note) for number in heard}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
