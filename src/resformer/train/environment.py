"""environment.json: what a reader needs to judge or repeat the numbers of a run."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from resformer import __version__

_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy")


def versions() -> dict[str, str]:
    """Versions of what the numbers depend on."""
    found = {"python": platform.python_version(), "resformer": __version__}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def environment(
    *, command: Sequence[str] | None, device: torch.device, dataset: Any, processes: int = 1
) -> dict[str, Any]:
    """Versions, commit, command, machine and data of a run that starts now."""
    return {
        "versions": versions(),
        "commit": commit(),
        "command": list(command) if command is not None else None,
        "platform": platform.platform(),
        "processor": processor(),
        "cpu_count": os.cpu_count(),
        "processes": processes,
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "data": {
            "fingerprint": dataset.fingerprint,
            "vocab_size": dataset.vocab_size,
            "eos_token_id": dataset.eos_token_id,
            "bos_token_id": dataset.bos_token_id,
            "domains": list(dataset.domains),
            "weights": dict(dataset.weights),
            "train_tokens": {domain: dataset.tokens("train", domain) for domain in dataset.domains},
            "validation_tokens": {domain: dataset.tokens("validation", domain) for domain in dataset.domains},
        },
    }


def commit() -> str | None:
    """The commit of the source tree that the package runs from, "-dirty" if it was changed; None outside one."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--dirty", "--exclude", "*"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def processor() -> str:
    """The processor by its maker's name, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()
