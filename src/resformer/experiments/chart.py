"""Line charts as inline SVG, drawn for a given width so that text keeps its size; colours come from the page's style
sheet.

A chart is drawn twice, wide and narrow, and the style sheet shows the one that fits; a small one only once. The points
travel once beside the drawing, as JSON, for the hover read-out; without scripts the chart is complete, only still.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from resformer.experiments.axis import Frame, amounts, decimals, spread, ticks, whole_ticks
from resformer.experiments.curves import Floats
from resformer.experiments.markup import Markup, join, tag

SLOTS = 8  # colours in the style sheet, the baseline's included
FAINT = -1  # the slot of a series that is only background: thin, grey, without label and read-out
_SHAPES = ("circle", "square", "up", "diamond", "down", "circle", "square", "up")


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line: `x` and `y` are `[n]`, `slot` picks colour and marker (0 is the baseline). `low` and `high`, if there,
    are the edges of a band around it.
    """

    name: str
    x: Floats
    y: Floats
    slot: int
    low: Floats | None = None
    high: Floats | None = None


@dataclass(frozen=True, kw_only=True)
class Cross:
    """A point that the chart points out: `name`'s curve reaches a level at `(x, y)`."""

    name: str
    slot: int
    x: float
    y: float
    label: str


@dataclass(frozen=True, kw_only=True)
class Chart:
    """What is drawn, whatever the width. `top` cuts the y axis (early losses dwarf the end); `level` draws a dashed
    line with its label; `size` "hero" takes the full width of the page, "small" a third; `x_start` and `x_end` give
    charts beside each other the same x axis; `x_unit` says what x counts.
    """

    key: str
    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    markers: bool = False
    level: tuple[float, str] | None = None
    crosses: Sequence[Cross] = ()
    top: float | None = None
    signed: bool = False
    include_zero: bool = False
    size: Literal["hero", "half", "small"] = "half"
    x_start: float = 0.0
    x_end: float | None = None
    x_unit: Literal["tokens", "layer"] = "tokens"

    @property
    def hero(self) -> bool:
        return self.size == "hero"


def ink(slot: int) -> str:
    """The style sheet's class for the colour of a slot."""
    if slot == FAINT:
        return "faint"
    assert 0 <= slot < SLOTS, f"slot is {slot}, expected below {SLOTS}"
    return f"s{slot}"


def dash(slot: int) -> str | None:
    """Stroke pattern: the baseline is dashed, and so seen where another curve lies on it."""
    return "7 4" if slot == 0 else None


def drawing_order(series: Sequence[Series]) -> list[Series]:
    """Background first, and the dashed baseline on top, or a close curve would hide it."""
    return sorted(series, key=lambda s: (s.slot == 0) - (s.slot == FAINT))


def marker(slot: int, x: float, y: float, size: float = 3.6) -> Markup:
    """The series' marker as one path, so that lines can be told apart without colour."""
    shape, r = _SHAPES[slot], size
    if shape == "circle":
        d = f"M{x - r:.1f},{y:.1f}a{r},{r} 0 1,0 {2 * r},0a{r},{r} 0 1,0 {-2 * r},0z"
    elif shape == "square":
        r *= 0.9
        d = f"M{x - r:.1f},{y - r:.1f}h{2 * r:.1f}v{2 * r:.1f}h{-2 * r:.1f}z"
    elif shape == "diamond":
        r *= 1.25
        d = f"M{x:.1f},{y - r:.1f}l{r:.1f},{r:.1f}l{-r:.1f},{r:.1f}l{-r:.1f},{-r:.1f}z"
    else:
        r *= 1.15 if shape == "up" else -1.15
        d = f"M{x:.1f},{y - r:.1f}l{r:.1f},{1.8 * r:.1f}h{-2 * r:.1f}z"
    return tag("path", d=d, class_=f"mark {ink(slot)}")


def _frame(chart: Chart, *, narrow: bool) -> Frame:
    xs = np.concatenate([s.x for s in chart.series])
    bands = [edge for s in chart.series for edge in (s.low, s.high) if edge is not None]
    ys = np.concatenate(
        [s.y for s in chart.series]
        + bands
        + [[c.y] for c in chart.crosses]
        + ([[chart.level[0]]] if chart.level else [])
    )
    ys = ys[np.isfinite(ys)]
    low, high = float(ys.min()), float(ys.max())
    if chart.top is not None:
        high = max(min(high, chart.top), low)
    if chart.include_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    pad = 0.06 * (high - low) or 0.05
    if chart.size == "small":
        width, height, right = 340, 220, 12
    elif narrow:
        width, height, right = 358, 300, 14
    else:
        width, height, right = (1060, 400, 168) if chart.hero else (512, 340, 112)
    end = chart.x_end or float(xs.max())
    return Frame(
        width=width,
        height=height,
        left=44,
        right=right,
        upper=26 if chart.y_label else 12,
        lower=40,
        x0=chart.x_start,
        x1=end if end > chart.x_start else chart.x_start + 1.0,
        y0=low - pad,
        y1=high + pad,
    )


def _axes(chart: Chart, f: Frame) -> Markup:
    parts: list[Markup] = []
    bottom, end = f.height - f.lower, f.width - f.right
    values = ticks(f.y0, f.y1, 5 if f.height > 250 else 4)
    for value, text in zip(values, decimals(values, signed=chart.signed, least=1), strict=True):
        y = f.y(value)
        zero = chart.include_zero and value == 0
        parts.append(
            tag("line", x1=f.left, x2=end, y1=f"{y:.1f}", y2=f"{y:.1f}", class_="grid zero" if zero else "grid")
        )
        parts.append(tag("text", text, x=f.left - 7, y=f"{y + 4:.1f}", text_anchor="end", class_="tick"))
    about = 4 if f.width < 400 else 10 if chart.hero else 5
    if chart.x_unit == "layer":
        marked = whole_ticks(f.x0, f.x1, 8)
        texts = [f"{v:.0f}" for v in marked]
    else:
        marked = ticks(f.x0, f.x1, about)
        texts = amounts(marked, f.x1)
    for value, text in zip(marked, texts, strict=True):
        x = f.x(value)
        parts.append(tag("line", x1=f"{x:.1f}", x2=f"{x:.1f}", y1=bottom, y2=bottom + 4, class_="axis"))
        parts.append(tag("text", text, x=f"{x:.1f}", y=bottom + 18, text_anchor="middle", class_="tick"))
    parts.append(tag("line", x1=f.left, x2=end, y1=bottom, y2=bottom, class_="axis"))
    if chart.y_label:
        parts.append(tag("text", chart.y_label, x=0, y=12, class_="label"))
    parts.append(tag("text", chart.x_label, x=end, y=f.height - 4, text_anchor="end", class_="label"))
    return join(*parts)


def _points(f: Frame, x: Floats, y: Floats) -> list[tuple[float, float]]:
    known = np.isfinite(y)
    return [(f.x(a), f.y(b)) for a, b in zip(x[known].tolist(), y[known].tolist(), strict=True)]


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _lines(chart: Chart, f: Frame, clip: str) -> Markup:
    bands, lines = [], []
    for s in drawing_order(chart.series):
        points = _points(f, s.x, s.y)
        if not points:
            continue
        if s.low is not None and s.high is not None and s.slot != FAINT:
            edge = _points(f, s.x, s.low) + _points(f, s.x, s.high)[::-1]
            bands.append(tag("path", d=f"{_path(edge)}Z", class_=f"band {ink(s.slot)}", data_name=s.name))
        title = tag("title", s.name) if s.slot == FAINT else None
        shown = chart.markers and len(points) <= 40 and s.slot != FAINT
        marks = join(*(marker(s.slot, x, y) for x, y in points)) if shown else None
        line = tag("path", title, d=_path(points), class_=f"line {ink(s.slot)}", stroke_dasharray=dash(s.slot))
        lines.append(tag("g", line, marks, class_="series", data_name=s.name))
    return tag("g", *bands, *lines, clip_path=f"url(#{clip})")


def _end_labels(chart: Chart, f: Frame) -> Markup:
    drawn = [s for s in chart.series if s.slot != FAINT and np.isfinite(s.y).any()]
    ends = [_points(f, s.x, s.y)[-1] for s in drawn]
    at = spread([min(max(y, f.upper), f.height - f.lower) for _, y in ends], 15, f.upper + 4, f.height - f.lower - 2)
    x = f.width - f.right + 12
    parts = []
    for s, (end_x, end_y), y in zip(drawn, ends, at, strict=True):
        name = s.name if len(s.name) <= 15 else s.name[:14] + "\u2026"
        if chart.hero:
            name += f" {s.y[np.isfinite(s.y)][-1]:.3f}"
        leader = f"M{end_x + 3:.1f},{end_y:.1f}L{x - 3:.1f},{y:.1f}"
        parts.append(tag("path", d=leader, class_=f"leader {ink(s.slot)}", data_name=s.name))
        parts.append(tag("text", name, x=x, y=f"{y + 4:.1f}", class_=f"end {ink(s.slot)}", data_name=s.name))
    return join(*parts)


def _notes(chart: Chart, f: Frame) -> Markup:
    parts: list[Markup] = []
    end = f.width - f.right
    if chart.level:
        y = f.y(chart.level[0])
        parts.append(tag("line", x1=f.left, x2=end, y1=f"{y:.1f}", y2=f"{y:.1f}", class_="level"))
        parts.append(tag("text", chart.level[1], x=f.left + 4, y=f"{y - 6:.1f}", class_="note"))
    for cross in chart.crosses:
        at_x, at_y, label = f"{f.x(cross.x):.1f}", f"{f.y(cross.y):.1f}", tag("title", cross.label)
        drop = {"x1": at_x, "x2": at_x, "y1": at_y, "y2": f.height - f.lower, "class_": f"drop {ink(cross.slot)}"}
        parts.append(tag("line", **drop, data_name=cross.name))
        circle = tag("circle", label, cx=at_x, cy=at_y, r=4, class_=f"cross {ink(cross.slot)}", data_name=cross.name)
        parts.append(circle)
    return join(*parts)


def draw(chart: Chart, *, narrow: bool) -> Markup:
    """The chart as one SVG of fixed logical width, so that text is never scaled to an unreadable size."""
    f = _frame(chart, narrow=narrow)
    clip = f"clip-{chart.key}-{'n' if narrow else 'w'}"
    bounds = tag(
        "rect", x=f.left, y=f.upper - 6, width=f.width - f.left - f.right + 6, height=f.height - f.upper - f.lower + 6
    )
    return tag(
        "svg",
        tag("title", chart.title),
        tag("defs", tag("clipPath", bounds, id=clip)),
        _axes(chart, f),
        _notes(chart, f),
        _lines(chart, f, clip),
        None if narrow or chart.size == "small" else _end_labels(chart, f),
        tag("line", y1=f.upper, y2=f.height - f.lower, class_="cursor", x1=0, x2=0),
        viewBox=f"0 0 {f.width} {f.height}",
        role="img",
        class_=None if chart.size == "small" else "narrow" if narrow else "wide",
        data_frame=json.dumps([f.left, f.width - f.right, f.x0, f.x1]),
    )


def figure(chart: Chart, caption: object = None) -> Markup:
    """Title, the drawings, the points for the hover read-out, and a caption; without points, only words that say so."""
    if not any(np.isfinite(s.y).any() for s in chart.series):
        return tag("figure", tag("h3", chart.title), tag("p", "Nothing to draw yet.", class_="empty"), class_="chart")
    data = {
        "signed": chart.signed,
        "unit": chart.x_unit,
        "series": [
            {"name": s.name, "slot": s.slot, "x": _numbers(s.x, 0), "y": _numbers(s.y, 4)}
            for s in chart.series
            if len(s.x) and s.slot != FAINT
        ],
    }
    # "</script>" inside a JSON string would end the element: "<" is written as an escape that JSON reads back to the
    # same character.
    payload = Markup(
        json.dumps(data, allow_nan=False).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    )
    small = chart.size == "small"
    return tag(
        "figure",
        tag("h3", chart.title),
        tag(
            "div",
            draw(chart, narrow=False),
            None if small else draw(chart, narrow=True),
            tag("div", class_="readout", hidden=True),
            class_="plot",
        ),
        tag("script", payload, type="application/json"),
        tag("figcaption", caption) if caption else None,
        class_="chart hero" if chart.hero else "chart",
        id=f"chart-{chart.key}",
    )


def _numbers(values: Floats, digits: int) -> list[float | None]:
    return [round(v, digits) if math.isfinite(v) else None for v in values.tolist()]
