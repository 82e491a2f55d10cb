"""Endings that nobody chose, a full disk and SIGTERM: one line that says what and where, and nothing half made."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from resformer.errors import RunError

FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def disk_errors(place: Path | str) -> Iterator[None]:
    """Turn the OSError of a write into a RunError of one line, with `place` where it names no file or a temporary one.

    Errors about files that the user named pass as they are.
    """
    try:
        yield
    except OSError as error:
        name = "" if error.filename is None else os.fsdecode(error.filename)
        parts = Path(name).parts
        ours = not name or parts[-1].startswith(".") or any(p[0] == "." and p.endswith(".partial") for p in parts)
        if error.errno is None or not (ours or error.errno in FULL):
            raise
        way_out = "free some space or take another --out" if error.errno in FULL else "take another --out"
        raise RunError(f"{place if ours else name}: {os.strerror(error.errno)}; {way_out}") from error


@contextmanager
def ends_on_sigterm(what: str) -> Iterator[None]:
    """Let SIGTERM leave the block as an exception would, so that it cleans up: SystemExit 143 and one line with `what`.

    Python's default would end the process at once. A handler that somebody else has set stays, and outside the main
    thread Python allows none.
    """
    heard = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if not heard:
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)  # once is enough: the second would stop the cleaning up
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except SystemExit:
        print(f"stopped by SIGTERM; {what}", file=sys.stderr, flush=True)
        raise
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
