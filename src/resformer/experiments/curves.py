"""Pure arithmetic on loss curves: smoothing, the relative loss of the paper, and how much data a method saves.

Everything takes and returns numpy arrays or plain numbers and knows nothing of files. Losses are in nats per token;
tokens are training tokens seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

PAPER_WINDOW_STEPS = 100  # the moving average of the paper's relative-loss figures


def smoothing_window(steps: int, wanted: int = PAPER_WINDOW_STEPS) -> int:
    """The moving-average window for a run of `steps`: `wanted`, but at most a tenth of the run, so that a short curve
    keeps its shape.
    """
    return max(1, min(wanted, steps // 10))


def moving_average(values: ArrayLike, window: int) -> Floats:
    """Means over each full window: `[n]` -> `[n - window + 1]`, empty when there are fewer than `window` values."""
    assert window >= 1, f"window is {window}, expected at least 1"
    series = np.asarray(values, dtype=np.float64)
    if len(series) < window:
        return np.empty(0)
    return np.convolve(series, np.full(window, 1.0 / window), mode="valid")


def relative_loss(
    steps: ArrayLike, loss: ArrayLike, baseline_steps: ArrayLike, baseline_loss: ArrayLike, *, window: int
) -> tuple[Floats, Floats]:
    """The method's smoothed training loss minus the baseline's at equal steps (arXiv 2410.17897, section 4.1.2);
    negative is better.

    Only steps that both runs have are used. Returns the step in the middle of each window and the difference in nats;
    both are empty when the runs share fewer than `window` steps.
    """
    own, base = np.asarray(steps), np.asarray(baseline_steps)
    shared, at, at_base = np.intersect1d(own, base, return_indices=True)
    difference = moving_average(np.asarray(loss, dtype=np.float64)[at], window)
    difference = difference - moving_average(np.asarray(baseline_loss, dtype=np.float64)[at_base], window)
    return moving_average(shared, window), difference


@dataclass(frozen=True, kw_only=True)
class DataSaved:
    """`share` of the training tokens that a method saves (negative: needs more), or None with the `reason` why it
    cannot be known.

    `tokens` is where the better of the two curves reaches the final loss of the other.
    """

    share: float | None
    tokens: float | None = None
    reason: str = ""


def crossing(tokens: Floats, loss: Floats, target: float) -> float | None:
    """Tokens after which the curve stays at or below `target`, linear between validations; None if it ends above, or
    never was above it.

    "Stays" and not "first touches", so that one lucky validation counts for nothing. Loss curves are convex, so that
    the straight line between two validations lies above the curve and the answer errs on the late side.
    """
    above = np.flatnonzero(loss > target)
    if len(above) == 0 or above[-1] == len(loss) - 1:
        return None
    i = int(above[-1])
    share = (loss[i] - target) / (loss[i] - loss[i + 1])
    return float(tokens[i] + share * (tokens[i + 1] - tokens[i]))


def data_saved(tokens: ArrayLike, loss: ArrayLike, baseline_tokens: ArrayLike, baseline_loss: ArrayLike) -> DataSaved:
    """How much less data the method needs for the baseline's final validation loss: `1 - tokens / all tokens`.

    When the method ends above the baseline the roles change and the share is negative: how much less data the
    *baseline* needs for the method's final loss. The curves are validation losses over training tokens and must end at
    the same number of tokens.
    """
    own_x, own_y, base_x, base_y = (
        np.asarray(a, dtype=np.float64) for a in (tokens, loss, baseline_tokens, baseline_loss)
    )
    if len(own_y) == 0 or len(base_y) == 0:
        return DataSaved(share=None, reason="no validation yet")
    if own_x[-1] != base_x[-1]:
        return DataSaved(share=None, reason="the runs have not seen the same number of tokens")
    if not (np.isfinite(own_y).all() and np.isfinite(base_y).all()):
        return DataSaved(share=None, reason="a validation loss is not finite")
    total = float(base_x[-1])
    if own_y[-1] == base_y[-1]:
        return DataSaved(share=0.0, tokens=total)
    better = bool(own_y[-1] < base_y[-1])
    at = crossing(own_x, own_y, base_y[-1]) if better else crossing(base_x, base_y, own_y[-1])
    if at is None:
        return DataSaved(share=None, reason="crossed before the first validation: validate more often")
    return DataSaved(share=(1.0 - at / total) * (1.0 if better else -1.0), tokens=at)


def thin(x: ArrayLike, y: ArrayLike, most: int = 240) -> tuple[Floats, Floats]:
    """At most `most` points of a curve for drawing: equally spaced indices, always with both ends."""
    xs, ys = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if len(xs) <= most:
        return xs, ys
    keep = np.unique(np.linspace(0, len(xs) - 1, most).round().astype(int))
    return xs[keep], ys[keep]


@dataclass(frozen=True, kw_only=True)
class Band:
    """A curve's mean over seeds, and its lowest and highest values, at the `x` that all seeds have."""

    x: Floats
    mean: Floats
    low: Floats
    high: Floats
    seeds: int


def over_seeds(curves: Sequence[tuple[ArrayLike, ArrayLike]]) -> Band:
    """Mean and range of curves `(x, y)` at their common `x`, sorted; seeds that have no point yet count for nothing."""
    known = [(np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)) for x, y in curves if np.size(x)]
    if not known:
        none = np.empty(0)
        return Band(x=none, mean=none, low=none, high=none, seeds=0)
    shared = known[0][0]
    for x, _ in known[1:]:
        shared = np.intersect1d(shared, x)
    table = np.stack([y[np.isin(x, shared)] for x, y in known])
    return Band(x=shared, mean=table.mean(axis=0), low=table.min(axis=0), high=table.max(axis=0), seeds=len(known))
