"""What is written down when a step goes wrong: numbers that are no numbers, or a spike of the gradient."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from resformer.train.files import write_json

DIRECTORY = "incidents"
MEMORY_STEPS = 50
"""Steps over which the running mean of the gradient's norm forgets."""
WARM_STEPS = 20
"""Steps before which no norm is called a spike."""


def running_mean(mean: float, norm: float) -> float:
    """The mean after one more norm; the first is taken as it is."""
    return norm if mean == 0.0 else mean + (norm - mean) / MEMORY_STEPS


def is_spike(norm: float, mean: float, *, factor: float | None, steps: int) -> bool:
    """Whether a finite norm is a spike against the mean of `steps` steps before it."""
    return factor is not None and steps >= WARM_STEPS and mean > 0 and norm > factor * mean


def write_incident(
    out: Path,
    *,
    step: int,
    kind: str,
    action: str,
    loss: float,
    norm: float,
    norm_mean: float,
    norms: Mapping[str, float],
    lr: float,
    sampler: Any,
    domains: Sequence[str],
    samples: range,
) -> Path:
    """Write `incidents/step-N.json`: what happened, to which samples, and how large the gradient was where.

    Numbers that are not finite are written as texts, since JSON has none.
    """
    batch = sampler.samples(np.arange(samples.start, samples.stop))
    counts = Counter(domains[number] for number in batch.domains.tolist())
    path = out / DIRECTORY / f"step-{step:08d}.json"
    path.parent.mkdir(exist_ok=True)
    write_json(
        path,
        {
            "step": step,
            "kind": kind,
            "action": action,
            "loss": _plain(loss),
            "grad_norm": _plain(norm),
            "grad_norm_mean": _plain(norm_mean),
            "grad_norms": {name: _plain(value) for name, value in norms.items()},
            "lr": lr,
            "samples": {"first": samples.start, "last": samples.stop - 1},
            "domains": dict(sorted(counts.items())),
        },
    )
    return path


def _plain(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
