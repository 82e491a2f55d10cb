"""How much of the machine a run uses: memory, and the share of the arithmetic that the model needs (MFU)."""

from __future__ import annotations

import resource
import sys
from typing import Any

import torch

# Dense bf16 FLOP/s without sparsity, by a part of the device's name; from the makers' data sheets.
PEAK_FLOPS = {"A100": 312e12, "H100": 989.4e12, "H200": 989.4e12}


class Usage:
    """Fields for the rows of metrics.jsonl.

    Args:
        device: of this process.
        flops_per_token: of a forward pass; a training step takes three times as many.
        processes: that train together, each on a device of that kind.
        peak_flops: FLOP/s of one device; None = what is known of it, and no MFU where nothing is.
    """

    def __init__(self, device: torch.device, flops_per_token: int, processes: int, peak_flops: float | None) -> None:
        self.device = device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        known = next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)
        peak = peak_flops or known
        self.mfu_per_speed = 3 * flops_per_token / (peak * processes) if peak else None
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def fields(self, tokens_per_second: float) -> dict[str, Any]:
        """ "memory_bytes", the peak so far of this process (on a GPU: of its tensors there), and "mfu" (0..1)."""
        found: dict[str, Any] = {"memory_bytes": self.peak_bytes()}
        if self.mfu_per_speed is not None:
            found["mfu"] = self.mfu_per_speed * tokens_per_second
        return found

    def peak_bytes(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts bytes there, KiB elsewhere
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
