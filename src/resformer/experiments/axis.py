"""Axes shared by all drawings of the report: round ticks, their texts, labels that keep their distance, and where a
value lies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from resformer.experiments.markup import MINUS


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers (1, 2, 2.5, 5 times a power of ten) inside `low..high`, roughly `about` of them."""
    span = high - low
    if not span > 0:
        return [low]
    raw = span / max(about, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1.0, 2.0, 2.5, 5.0, 10.0) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def whole_ticks(low: float, high: float, about: int) -> list[float]:
    """Whole numbers inside `low..high`, equally spaced from the first: layers have no halves."""
    first, last = math.ceil(low), math.floor(high)
    step = max(1, math.ceil((last - first) / max(about, 1)))
    return [float(n) for n in range(first, last + 1, step)]


def amounts(values: Sequence[float], largest: float) -> list[str]:
    """Counts in one unit for the whole axis, the one that suits its `largest` value: 0, 0.5M, 1.0M."""
    size, letter = next(((s, n) for s, n in ((1e9, "B"), (1e6, "M"), (1e3, "k")) if largest >= s), (1.0, ""))
    digits = next((d for d in range(4) if all(abs(v / size - round(v / size, d)) < 1e-9 for v in values)), 3)
    return [f"{v / size:.{digits}f}{letter}" if v else "0" for v in values]


def decimals(values: Sequence[float], *, signed: bool = False, least: int = 0) -> list[str]:
    """Numbers of an axis, all with the digits that the finest of them needs; `signed` writes a plus as well."""
    digits = next((d for d in range(least, 6) if all(abs(v - round(v, d)) < 1e-9 for v in values)), 6)
    sign = "+" if signed else ""
    return [(f"{v:{sign}.{digits}f}" if v else f"{0:.{digits}f}").replace("-", MINUS) for v in values]


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Positions near `wanted` that are at least `gap` apart, inside `low..high` if they fit: end labels that do not
    overlap.
    """
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    placed: list[float] = []
    for i in order:
        placed.append(max(wanted[i], placed[-1] + gap if placed else low))
    overflow = placed[-1] - high if placed else 0.0
    if overflow > 0:
        placed[-1] = high
        for k in range(len(placed) - 2, -1, -1):
            placed[k] = min(placed[k], placed[k + 1] - gap)
    result = [0.0] * len(wanted)
    for i, value in zip(order, placed, strict=True):
        result[i] = value
    return result


@dataclass(frozen=True)
class Frame:
    """Pixel geometry of one drawing and its axis ranges."""

    width: int
    height: int
    left: int
    right: int
    upper: int
    lower: int
    x0: float
    x1: float
    y0: float
    y1: float

    def x(self, value: float) -> float:
        return self.left + (value - self.x0) / (self.x1 - self.x0) * (self.width - self.left - self.right)

    def y(self, value: float) -> float:
        return self.upper + (self.y1 - value) / (self.y1 - self.y0) * (self.height - self.upper - self.lower)


@dataclass(frozen=True, kw_only=True)
class Range:
    """A horizontal axis in percent of whatever width it gets, around zero: what intervals are drawn on."""

    low: float
    high: float

    def at(self, value: float) -> float:
        """Percent from the left, cut at both ends."""
        return 100.0 * (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)


# An interval of two seeds can be twenty times as wide as the differences: it is cut there, and marked as cut.
_WIDEST = 2.5


def around_zero(means: Sequence[float], ends: Sequence[float] = ()) -> Range | None:
    """An axis that holds zero, all `means`, and interval ends up to some distance beyond; None without any mean."""
    if not means:
        return None
    largest = max(abs(m) for m in means) or max((abs(e) for e in ends), default=0.0) or 1.0
    kept = [max(min(e, _WIDEST * largest), -_WIDEST * largest) for e in ends]
    low, high = min([0.0, *means, *kept]), max([0.0, *means, *kept])
    if low == high:  # all differences are exactly zero
        low, high = -largest, largest
    pad = 0.05 * (high - low)
    return Range(low=low - pad, high=high + pad)
