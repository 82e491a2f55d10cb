"""How much of the machine a run uses: memory, and the share of the arithmetic that the model needs (MFU)."""

from __future__ import annotations

import re
import resource
import sys
from typing import Any

import torch

A100, H100_SXM = 312e12, 989.4e12
PEAK_FLOPS = {
    r"A100\b": A100,  # NVIDIA A100 data sheet: 312 TFLOPS BF16 without sparsity, PCIe and SXM
    r"H100 PCIe": 756e12,  # NVIDIA H100 data sheet: 1,513 TFLOPS BF16 with sparsity
    r"H100 80GB HBM3$": H100_SXM,  # the same, SXM: 1,979 with sparsity
    r"H200$": H100_SXM,  # NVIDIA H200 data sheet, SXM: 1,979 with sparsity
}
"""Dense bf16 FLOP/s by a pattern for the device's name; only devices whose number is beyond doubt."""


def known_peak(name: str) -> float | None:
    """FLOP/s of a device by its name, None if it is not in the table or a slice (MIG) of one that is."""
    if "MIG" in name:
        return None
    return next((flops for pattern, flops in PEAK_FLOPS.items() if re.search(rf"\b{pattern}", name)), None)


class Usage:
    """Fields for the rows of metrics.jsonl. Nothing in it waits for the device.

    Args:
        device: of this process.
        flops_per_token: of a forward pass; a training step takes three times as many, recomputation not counted.
        processes: that train together, each on a device of that kind.
        peak_flops: FLOP/s of one device; None = what is known of it in bf16, and no MFU where nothing is.
    """

    def __init__(self, device: torch.device, flops_per_token: int, processes: int, peak_flops: float | None) -> None:
        self.device = device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        peak = peak_flops or known_peak(name)
        self.mfu_per_speed = 3 * flops_per_token / (peak * processes) if peak else None
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def fields(self, tokens_per_second: float) -> dict[str, Any]:
        """ "memory_bytes", the peak so far of this process (on a GPU: of its tensors there, since the start of the
        run), and "mfu" (0..1), where the peak of the device is known. `tokens_per_second` is that of all processes.
        """
        found: dict[str, Any] = {"memory_bytes": self.peak_bytes()}
        if self.mfu_per_speed is not None:
            found["mfu"] = self.mfu_per_speed * tokens_per_second
        return found

    def peak_bytes(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts bytes there, KiB elsewhere
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
