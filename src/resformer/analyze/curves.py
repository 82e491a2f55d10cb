"""Loss curves of runs: read back from their files, against each other, and against tokens, FLOPs and hours.

Losses are nats per token. Arrays are `[n]`, sorted by step; steps count from 1.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from resformer.errors import UserError

Floats = NDArray[np.float64]
Against = Literal["steps", "tokens", "flops", "hours"]

PAPER_WINDOW = 100
"""Steps of the moving average in the paper's relative-loss figures; its text says 10 or 100."""
_SPLITS = ("train", "validation", "lambdas", "source")
_BY_DOMAIN = ("validation", "source")
_FORWARD_AND_BACKWARD = 3  # a training token costs so many forward passes


@dataclass(frozen=True, kw_only=True)
class RunCurves:
    """What a run wrote about itself. train and validation (mean of domains): column -> numbers by row; a column that a
    row lacks is NaN there. lambdas: rows {"step", "layers", "first", "own"}. gradient_norms: parameter -> norms by
    training row (`track.gradient_norms`). flops_per_token: forward. source_loss: of the model that the run's was
    made from.
    """

    name: str
    path: Path
    train: Mapping[str, Floats]
    validation: Mapping[str, Floats]
    lambdas: Sequence[Mapping[str, Any]] = ()
    gradient_norms: Mapping[str, Floats] = field(default_factory=dict)
    config: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    flops_per_token: float | None = None
    layers: int | None = None
    source_loss: float | None = None

    def against(self, what: Against, split: Literal["train", "validation"] = "train") -> tuple[Floats, Floats]:
        """(x, loss) with x in steps, training tokens, FLOPs (three forward passes a token) or hours of training steps.

        Hours sum the seconds of steps up to each row; time between them (validation, checkpoints, a stop) is not in it.

        Raises:
            UserError: the run says nothing from which that could be told.
        """
        rows = self.train if split == "train" else self.validation
        if not len(rows["step"]):
            raise UserError(f"{self.path}: holds no {split} losses; train the run first")
        if what == "steps":
            return rows["step"], rows["loss"]
        tokens = rows["tokens"] if split == "train" else rows["train_tokens"]
        if what == "tokens":
            return tokens, rows["loss"]
        if what == "flops":
            if self.flops_per_token is None:
                raise UserError(f"{self.path}: environment.json has no accounting.flops_per_token; no FLOPs to draw")
            return tokens * (_FORWARD_AND_BACKWARD * self.flops_per_token), rows["loss"]
        if what != "hours":
            raise ValueError(f"what: got {what!r}, expected steps, tokens, flops or hours")
        seconds = self.train["seconds"]
        if not len(seconds) or not np.isfinite(seconds).all():
            raise UserError(f"{self.path}: metrics.jsonl has steps without seconds; no hours to draw")
        hours = np.concatenate(([0.0], np.cumsum(seconds))) / 3600.0
        return hours[np.searchsorted(self.train["step"], rows["step"], side="right")], rows["loss"]


def read_run(run: Path | str, name: str | None = None) -> RunCurves:
    """The curves of a run directory (metrics.jsonl, environment.json, config.toml). A last line that was torn by a kill
    is left out; of a step that was done again after a resume the last row counts.

    Raises:
        UserError: no run there, or a line before the last that is no row.
    """
    path = Path(run)
    rows = read_rows(path / "metrics.jsonl")
    by_split: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in _SPLITS}
    for row in rows:
        split, step = row.get("split"), row.get("step")
        whole = isinstance(step, int) and not isinstance(step, bool)
        if whole and split in by_split and (split not in _BY_DOMAIN or row.get("domain") == "all"):
            by_split[split][int(step)] = row  # type: ignore[arg-type]
    train, validation, lambdas, source = ([found[step] for step in sorted(found)] for found in by_split.values())
    environment, config = read_json(path / "environment.json"), _toml(path / "config.toml")
    accounting = environment.get("accounting")
    flops = accounting.get("flops_per_token") if isinstance(accounting, dict) else None
    layers = config.get("model", {}).get("num_hidden_layers")
    return RunCurves(
        name=name or path.name,
        path=path,
        train=_columns(train, ("step", "tokens", "loss", "lr", "seconds")),
        validation=_columns(validation, ("step", "train_tokens", "loss", "bits_per_byte")),
        lambdas=lambdas,
        gradient_norms=_gradient_norms(train),
        config=config,
        flops_per_token=float(flops) if isinstance(flops, int | float) else None,
        layers=layers if isinstance(layers, int) else None,
        source_loss=_number(source[-1].get("loss")) if source else None,
    )


def read_rows(file: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file, without a torn last line.

    Raises:
        UserError: no such file, or another line that is no row.
    """
    try:
        *lines, last = file.read_bytes().split(b"\n")
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{file.parent}: holds no {file.name}; give the directory of a run") from None
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from None
    rows = []
    for number, line in enumerate([*lines, last], start=1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict):
            rows.append(row)
        elif number <= len(lines):
            raise UserError(f"{file}:{number}: is no JSON object; remove the line, or put the file back as it was")
    return rows


def _columns(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Floats]:
    return {name: np.array([_number(row.get(name)) for row in rows], dtype=np.float64) for name in names}


def _gradient_norms(rows: Sequence[Mapping[str, Any]]) -> dict[str, Floats]:
    found = [row["gradient_norms"] if isinstance(row.get("gradient_norms"), dict) else {} for row in rows]
    return _columns(found, sorted({str(name) for row in found for name in row}))


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in a file, empty where none can be read."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _toml(file: Path) -> dict[str, dict[str, Any]]:
    """Sections of a run's config.toml, where "none" stands for None; empty where it cannot be read."""
    try:
        tree = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {
        name: {k: None if v == "none" else v for k, v in section.items()}
        for name, section in tree.items()
        if isinstance(section, dict)
    }


def moving_average(values: ArrayLike, window: int) -> Floats:
    """Means over each full window, `[n]` -> `[n - window + 1]`, as `np.convolve(..., "valid")`; empty if n < window."""
    if window < 1:
        raise ValueError(f"window: got {window}, expected at least 1")
    series = np.asarray(values, dtype=np.float64)
    return np.empty(0) if len(series) < window else np.convolve(series, np.full(window, 1.0 / window), mode="valid")


def differences(
    steps: ArrayLike, loss: ArrayLike, baseline_steps: ArrayLike, baseline_loss: ArrayLike
) -> tuple[Floats, Floats]:
    """(step, method's loss minus baseline's) at the steps that both have.

    Raises:
        ValueError: lists of different lengths, a step twice, or no common step.
    """
    own, base = (np.asarray(v, dtype=np.float64) for v in (steps, baseline_steps))
    own_loss, base_loss = (np.asarray(v, dtype=np.float64) for v in (loss, baseline_loss))
    for name, x, y in (("method", own, own_loss), ("baseline", base, base_loss)):
        if x.ndim != 1 or x.shape != y.shape:
            raise ValueError(f"{name}: got steps {x.shape} and losses {y.shape}, expected two lists of one length")
        if len(np.unique(x)) < len(x):
            raise ValueError(f"{name}: a step is there twice; keep the last row of each")
    shared, at, at_base = np.intersect1d(own, base, return_indices=True)
    if not len(shared):
        raise ValueError("the two runs have no step in common, so that their losses cannot be compared")
    return shared, own_loss[at] - base_loss[at_base]


def relative_loss(
    steps: ArrayLike,
    loss: ArrayLike,
    baseline_steps: ArrayLike,
    baseline_loss: ArrayLike,
    *,
    window: int = PAPER_WINDOW,
) -> tuple[Floats, Floats]:
    """The paper's relative training loss (arXiv 2410.17897, section 4.1.2): both losses smoothed by a moving average,
    then method minus baseline at equal steps; negative is better. Returns the mean step of each window and nats.

    Runs are aligned by step, not by row: a step that only one of them has is left out before smoothing.

    Raises:
        ValueError: see `differences`; fewer than `window` common steps.
    """
    shared, difference = differences(steps, loss, baseline_steps, baseline_loss)
    if len(shared) < window:
        raise ValueError(f"window: got {window}, but the runs have {len(shared)} steps in common; take a smaller one")
    return moving_average(shared, window), moving_average(difference, window)


def learning_rates(
    peak: float, *, steps: int = 10_000, warmup_steps: int = 120, floor: float = 0.1, start: float = 1e-7
) -> Floats:
    """Learning rates of steps 1..`steps` of the paper's schedule: linear from `start` to `peak`, then half a cosine
    down to `floor` times the peak.
    """
    t = np.arange(1, steps + 1, dtype=np.float64)
    warm = start + (peak - start) * t / max(warmup_steps, 1)
    done = np.clip((t - warmup_steps) / max(steps - warmup_steps, 1), 0.0, 1.0)
    down = peak * (floor + (1 - floor) * 0.5 * (1 + np.cos(np.pi * done)))
    return np.where(t <= warmup_steps, warm, down)


def cumulative_lr(lr: ArrayLike) -> Floats:
    """Sum of the learning rates up to each step (v1, fig. 15): by it, not by steps, SVFormer is overtaken.

    Raises:
        ValueError: a learning rate that is negative or no finite number.
    """
    rates = np.asarray(lr, dtype=np.float64)
    if rates.ndim != 1 or not (np.isfinite(rates) & (rates >= 0)).all():
        raise ValueError("learning rates: expected a list of finite numbers from 0; leave other steps out")
    return np.cumsum(rates)
