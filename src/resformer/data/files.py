"""Any number of files that are added to in turns."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


class Files:
    """Files that are added to, of which so many are open that there may be any number of them."""

    def __init__(self, most: int = 64) -> None:
        self._most, self._handles = most, dict[Path, Any]()

    def write(self, file: Path, data: Any) -> None:
        """Add to a file."""
        handle = self._handles.pop(file, None)
        if handle is None:
            if len(self._handles) >= self._most:
                oldest = next(iter(self._handles))
                self._handles.pop(oldest).close()
            handle = open(file, "ab")  # noqa: SIM115 - closed here or by finish()
        self._handles[file] = handle  # the last one used stands last
        handle.write(data)

    def finish(self, file: Path) -> None:
        """Flush a file to the disk."""
        handle = self._handles.pop(file, None) or open(file, "ab")  # noqa: SIM115 - closed by the block
        with handle:
            handle.flush()
            os.fsync(handle.fileno())
