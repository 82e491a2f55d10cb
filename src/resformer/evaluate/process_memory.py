"""The most memory that a stretch of work needed, and which clock of the machine said so.

On CUDA it is the allocator's own peak. On Linux the kernel's high-water mark of the process is reset first (writing 5
to /proc/self/clear_refs; proc(5)), so that it counts this stretch alone. Anywhere else only the mark of the whole
life of the process is there: a stretch that stays below an earlier one then reads 0.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True, kw_only=True)
class Peak:
    """`added_bytes` is the peak beyond what was in use at the start, `source` what was read."""

    added_bytes: int
    source: str


class PeakMemory:
    """Starts to watch when it is made; `peak()` may be read any number of times."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device if device is not None and device.type == "cuda" else None
        self.resettable = False
        if self.device is not None:
            torch.cuda.reset_peak_memory_stats(self.device)
            self.start_bytes = torch.cuda.memory_allocated(self.device)
        elif (resident := _status("VmRSS")) is not None:
            self.resettable = _reset()
            self.start_bytes = resident if self.resettable else _status("VmHWM") or resident
        else:
            self.start_bytes = _highest_resident()

    def peak(self) -> Peak:
        """The peak since the start, in bytes beyond what was in use then."""
        if self.device is not None:
            highest, source = torch.cuda.max_memory_allocated(self.device), "CUDA memory allocated"
        elif (mark := _status("VmHWM")) is not None:
            highest, source = mark, "resident memory" if self.resettable else "highest resident memory of the process"
        else:
            highest, source = _highest_resident(), "highest resident memory of the process"
        return Peak(added_bytes=max(0, highest - self.start_bytes), source=source)


def _status(field: str) -> int | None:
    """A field of /proc/self/status in bytes, None where there is none."""
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), None)


def _reset() -> bool:
    """Set the high-water mark to what is resident now; False where the kernel does not let us."""
    try:
        RESET.write_text("5")
    except OSError:
        return False
    return True


def _highest_resident() -> int:
    """The highest resident memory of the process so far, in bytes; 0 where nobody counts it."""
    try:
        import resource
    except ImportError:  # not a POSIX system
        return 0
    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return highest if sys.platform == "darwin" else highest * 1024
