"""SVFormer's critical point: the step from which a method that is ahead early stays behind.

Losses are nats per token. Arrays are `[n]`, sorted by step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from resformer.analyze.curves import PAPER_WINDOW, Floats, differences, relative_loss

PAPER_LAST = 1000
"""Points of the straight line by which the paper prolongs a relative loss that has not turned yet."""


@dataclass(frozen=True, kw_only=True)
class CriticalPoint:
    """Where a method that is ahead early is overtaken for good.

    kind: "crossed" (it happened), "extrapolated" (a straight line through the last points says where it will), "never"
    (it is ahead and the line does not lead to 0; step is infinite) or "behind" (it never was ahead; step is the first).
    low, high: the ends of the interval; infinite where the points do not bound it.
    """

    step: float
    low: float
    high: float
    kind: Literal["crossed", "extrapolated", "never", "behind"]
    confidence: float


def critical_point(
    steps: ArrayLike,
    loss: ArrayLike,
    baseline_steps: ArrayLike,
    baseline_loss: ArrayLike,
    *,
    window: int = PAPER_WINDOW,
    last: int = PAPER_LAST,
    confidence: float = 0.95,
) -> CriticalPoint:
    """SVFormer's critical point (v1, fig. 14): the step where the relative loss turns positive for good, or, where it
    has not, where the straight line through its last `last` points does, if that line surely rises.

    Where it crossed is read off a parabola through the differences around the smoothed curve's last crossing: that
    crossing itself is the last of several that noise makes, and late.

    The interval is from the unsmoothed differences, with a variance that allows for neighbours that hang together:
    where a parabola through the 3 `last` steps around the crossing may be 0, or Fieller's for the zero of a straight
    line through the last ones. Of a prolonged curve it says how far noise moves the point, not how far the curve bends.

    Raises:
        ValueError: see `relative_loss`; losses that are no finite numbers.
    """
    x, smooth = relative_loss(steps, loss, baseline_steps, baseline_loss, window=window)
    raw_x, raw = differences(steps, loss, baseline_steps, baseline_loss)
    if not np.isfinite(raw).all():
        raise ValueError("a loss is no finite number; leave that step out")
    ahead = np.flatnonzero(smooth <= 0)
    if not len(ahead):
        return CriticalPoint(step=float(x[0]), low=-math.inf, high=float(x[0]), kind="behind", confidence=confidence)
    i = int(ahead[-1])
    if i < len(x) - 1:
        seen = float(x[i] + (x[i + 1] - x[i]) * smooth[i] / (smooth[i] - smooth[i + 1]))
        near = np.argsort(np.abs(raw_x - seen), kind="stable")[: 3 * last]
        root, low, high = _crossing(raw_x[near], raw[near], window, confidence)
        step = seen if root is None else root
        return CriticalPoint(step=step, low=min(low, step), high=max(high, step), kind="crossed", confidence=confidence)
    tail = slice(-min(last, len(x)), None)
    if len(x[tail]) < 3:
        raise ValueError(f"got {len(x)} smoothed points, expected at least 3 to prolong; train longer")
    slope, level = np.polyfit(x[tail] - x[-1], smooth[tail], 1)
    low, high = _zero_interval(raw_x[-last:], raw[-last:], window, confidence)
    if slope <= 0 or not _rises(raw_x[-last:], raw[-last:], window, confidence):
        never = math.inf
        return CriticalPoint(step=never, low=max(low, float(x[-1])), high=never, kind="never", confidence=confidence)
    step = max(float(x[-1] - level / slope), float(x[-1]))
    return CriticalPoint(
        step=step, low=min(low, step), high=max(high, step), kind="extrapolated", confidence=confidence
    )


def _regression(x: Floats, y: Floats, degree: int, window: int) -> tuple[Floats, Floats, float, float]:
    """A polynomial in (x - centre) / scale: coefficients, their covariance, centre and scale. Residuals may hang
    together (Newey and West): where the same batch is hard for both, or a spike lasts.
    """
    order = np.argsort(x)
    centre, scale = float(x.mean()), float(np.ptp(x)) or 1.0
    design = np.vander((x[order] - centre) / scale, degree + 1, increasing=True)
    inverse = np.linalg.pinv(design.T @ design)
    found = inverse @ (design.T @ y[order])
    scores = design * (y[order] - design @ found)[:, None]
    middle = scores.T @ scores
    lags = min(window, max(1, round(len(x) ** 0.5 / 2)), len(x) - 2)
    for lag in range(1, lags + 1):
        part = scores[lag:].T @ scores[:-lag]
        middle += (1 - lag / (lags + 1)) * (part + part.T)
    return found, inverse @ middle @ inverse * len(x) / (len(x) - degree - 1), centre, scale


def _rises(x: Floats, y: Floats, window: int, confidence: float) -> bool:
    """Whether the slope of a straight line through the points is surely above 0."""
    if len(x) < 4:
        return True
    (_, slope), covariance, _, _ = _regression(x, y, 1, window)
    t = float(stats.t.ppf(0.5 + confidence / 2, len(x) - 2))
    return bool(slope > t * math.sqrt(max(covariance[1, 1], 0.0)))


def _crossing(x: Floats, y: Floats, window: int, confidence: float) -> tuple[float | None, float, float]:
    """Where a parabola through the points turns positive for the last time (None: nowhere), and where it is not surely
    off 0; open where that reaches the first or last point.
    """
    if len(x) < 8:
        return None, -math.inf, math.inf
    found, covariance, centre, scale = _regression(x, y, 2, window)
    t = float(stats.t.ppf(0.5 + confidence / 2, len(x) - 3))
    at = np.linspace(x.min(), x.max(), 2001)
    design = np.vander((at - centre) / scale, 3, increasing=True)
    error = np.sqrt(np.einsum("ni,ij,nj->n", design, covariance, design))
    curve = design @ found
    up = np.flatnonzero((curve[:-1] <= 0) & (curve[1:] > 0))
    root = None
    if len(up):
        k = int(up[-1])
        root = float(at[k] + (at[k + 1] - at[k]) * curve[k] / (curve[k] - curve[k + 1]))
    inside = np.flatnonzero(np.abs(curve) <= t * error)
    if not len(inside):
        return root, math.inf, -math.inf
    low, high = int(inside[0]), int(inside[-1])
    ends = -math.inf if low == 0 else float(at[low - 1]), math.inf if high == len(at) - 1 else float(at[high + 1])
    return root, *ends


def _zero_interval(x: Floats, y: Floats, window: int, confidence: float) -> tuple[float, float]:
    """Fieller's interval of where a rising straight line through the points is 0; -inf or inf where it is open."""
    if len(x) < 4:
        return -math.inf, math.inf
    (a, b), covariance, centre, scale = _regression(x, y, 1, window)
    q = float(stats.t.ppf(0.5 + confidence / 2, len(x) - 2)) ** 2
    # All z with (a + b z)^2 <= q var(a + b z).
    two = b * b - q * covariance[1, 1]
    one, none = 2 * (a * b - q * covariance[0, 1]), a * a - q * covariance[0, 0]
    root = one * one - 4 * two * none
    if root < 0 or two == 0:
        return -math.inf, math.inf
    low, high = sorted(centre + scale * (-one + k * math.sqrt(root)) / (2 * two) for k in (-1, 1))
    if two > 0 and b > 0:
        return low, high
    # Not surely rising: nothing bounds the zero from above; from below, that the line is surely negative so far.
    return (high if two < 0 and a < 0 else -math.inf), math.inf
