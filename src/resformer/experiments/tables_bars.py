"""Differences as bars with intervals on a common axis around zero, drawn by the style sheet: they take whatever width a
table cell has, on a phone and on paper alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from resformer.experiments.axis import Range, around_zero, decimals, ticks
from resformer.experiments.markup import Markup, join, tag

_ROOM = 32  # characters of an axis, so that numbers do not run into each other in a column of a table


def range_of(differences: Sequence[dict[str, Any] | None], borders: Sequence[float] = ()) -> Range | None:
    """The axis for differences (as `report_rows.summary` gives them) and other marks, `borders`."""
    known = [found for found in differences if found]
    means = [found["mean"] for found in known]
    singles = [value for found in known for value in found["by_seed"].values()]
    ends = [end for found in known for end in (found["low"], found["high"]) if end is not None]
    return around_zero([*means, *borders], [*ends, *singles]) if means else None


def look(found: dict[str, Any], *, higher: bool = False) -> str:
    """The colour of a difference to another run: better or worse where the interval says so (or, with one seed, the
    sign), else open. `higher` for accuracies, of which more is better.
    """
    below, above = ("worse", "better") if higher else ("better", "worse")
    if found["low"] is None or found["high"] is None:
        return "open" if found["mean"] == 0 else f"single {below if found['mean'] < 0 else above}"
    return below if found["high"] < 0 else above if found["low"] > 0 else "open"


def bar(
    found: dict[str, Any] | None,
    at: Range | None,
    colour: str,
    *,
    border: float | None = None,
    paper: float | None = None,
) -> Markup | None:
    """Zero, the interval, each seed as a tick, and the mean on top; `border` is another line than zero that matters,
    `paper` what the paper reports.
    """
    if found is None or at is None:
        return None
    parts = [tag("s", style=f"left:{at.at(0.0):.1f}%")]
    if border:
        parts.append(tag("s", class_="border", style=f"left:{at.at(border):.1f}%"))
    low, high = found["low"], found["high"]
    if low is None or high is None:
        start, end = sorted((at.at(0.0), at.at(found["mean"])))
        parts.append(tag("i", style=f"left:{start:.1f}%;width:{end - start:.1f}%"))
    else:
        cut = " ".join(name for name, out in (("cut-low", low < at.low), ("cut-high", high > at.high)) if out)
        start, end = at.at(low), at.at(high)
        parts.append(tag("i", class_=cut or None, style=f"left:{start:.1f}%;width:{end - start:.1f}%"))
        parts += [tag("u", style=f"left:{at.at(value):.1f}%") for value in found["by_seed"].values()]
    if paper is not None:
        parts.append(tag("q", style=f"left:{at.at(paper):.1f}%"))
    parts.append(tag("b", style=f"left:{at.at(found['mean']):.1f}%"))
    return tag("span", *parts, class_=f"forest {colour}", aria_hidden="true")


def axis(at: Range, unit: str) -> Markup:
    """The axis above bars: numbers at their places, and what they count."""
    values = ticks(at.low, at.high, 6)
    texts = decimals(values, signed=True)
    while len(values) > 3 and len(values) * max(map(len, texts)) > _ROOM:
        step = values[1] - values[0]
        values = [value for value in values if round(value / step) % 2 == 0]
        texts = decimals(values, signed=True)
    marks = [tag("em", text, style=f"left:{at.at(value):.1f}%") for value, text in zip(values, texts, strict=True)]
    return join(
        tag("span", *marks, class_="forest-axis", aria_hidden="true"), tag("span", unit, class_="sub") if unit else None
    )
