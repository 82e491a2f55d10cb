"""Line charts as inline SVG, drawn for a given width so that text keeps its size; colours come from the page's style
sheet.

A chart is drawn twice, wide and narrow, and the style sheet shows the one that fits. The points travel once beside
both, as JSON, for the hover read-out; without scripts the chart is complete, only still.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from resformer.experiments.curves import Floats
from resformer.experiments.markup import MINUS, Markup, join, tag

SLOTS = 8  # colours in the style sheet; further series repeat all but the first, dotted
_SHAPES = ("circle", "square", "up", "diamond", "down", "circle", "square", "up")


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line: `x` and `y` are `[n]`, `slot` picks colour and marker (0 is the baseline)."""

    name: str
    x: Floats
    y: Floats
    slot: int


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
    line with its label; `hero` takes the full width of the page; `x_end` gives charts beside each other the same x
    axis.
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
    hero: bool = False
    x_end: float | None = None


@dataclass(frozen=True)
class _Frame:
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


def paint(slot: int) -> int:
    """The colour of a series, 0..SLOTS-1: the baseline's is its own, the others repeat theirs."""
    return 0 if slot == 0 else (slot - 1) % (SLOTS - 1) + 1


def dash(slot: int) -> str | None:
    """Stroke pattern: the baseline is dashed, and so seen where another curve lies on it; dots tell series apart once
    the colours repeat.
    """
    return "7 4" if slot == 0 else None if slot < SLOTS else "2 3"


def baseline_last(series: Sequence[Series]) -> list[Series]:
    """The order of drawing: the dashed baseline lies on top, or a close curve would hide it."""
    return sorted(series, key=lambda s: s.slot == 0)


def marker(slot: int, x: float, y: float, size: float = 3.6) -> Markup:
    """The series' marker as one path, so that lines can be told apart without colour."""
    shape, r = _SHAPES[paint(slot)], size
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
    return tag("path", d=d, class_=f"mark s{paint(slot)}")


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


def _frame(chart: Chart, *, narrow: bool) -> _Frame:
    xs = np.concatenate([s.x for s in chart.series])
    ys = np.concatenate(
        [s.y for s in chart.series] + [[c.y] for c in chart.crosses] + ([[chart.level[0]]] if chart.level else [])
    )
    ys = ys[np.isfinite(ys)]
    low, high = float(ys.min()), float(ys.max())
    if chart.top is not None:
        high = max(min(high, chart.top), low)
    if chart.include_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    pad = 0.06 * (high - low) or 0.05
    width, height = (358, 300) if narrow else (1060, 400) if chart.hero else (512, 340)
    return _Frame(
        width=width,
        height=height,
        left=44,
        right=14 if narrow else 168 if chart.hero else 112,
        upper=26,
        lower=40,
        x0=0.0,
        x1=chart.x_end or float(xs.max()) or 1.0,
        y0=low - pad,
        y1=high + pad,
    )


def tick_text(values: Sequence[float], largest: float) -> list[str]:
    """Token counts in one unit for the whole axis, the one that suits its `largest` value: 0, 0.5M, 1.0M."""
    size, letter = next(((s, n) for s, n in ((1e9, "B"), (1e6, "M"), (1e3, "k")) if largest >= s), (1.0, ""))
    digits = next((d for d in range(4) if all(abs(v / size - round(v / size, d)) < 1e-9 for v in values)), 3)
    return [f"{v / size:.{digits}f}{letter}" if v else "0" for v in values]


def _axes(chart: Chart, f: _Frame, y_text: Callable[[float], str]) -> Markup:
    parts: list[Markup] = []
    bottom, end = f.height - f.lower, f.width - f.right
    for value in ticks(f.y0, f.y1, 5):
        y = f.y(value)
        zero = chart.include_zero and value == 0
        parts.append(
            tag("line", x1=f.left, x2=end, y1=f"{y:.1f}", y2=f"{y:.1f}", class_="grid zero" if zero else "grid")
        )
        parts.append(tag("text", y_text(value), x=f.left - 7, y=f"{y + 4:.1f}", text_anchor="end", class_="tick"))
    marked = ticks(f.x0, f.x1, 4 if f.width < 400 else 10 if chart.hero else 5)
    for value, text in zip(marked, tick_text(marked, f.x1), strict=True):
        x = f.x(value)
        parts.append(tag("line", x1=f"{x:.1f}", x2=f"{x:.1f}", y1=bottom, y2=bottom + 4, class_="axis"))
        parts.append(tag("text", text, x=f"{x:.1f}", y=bottom + 18, text_anchor="middle", class_="tick"))
    parts.append(tag("line", x1=f.left, x2=end, y1=bottom, y2=bottom, class_="axis"))
    parts.append(tag("text", chart.y_label, x=0, y=12, class_="label"))
    parts.append(tag("text", chart.x_label, x=end, y=f.height - 4, text_anchor="end", class_="label"))
    return join(*parts)


def _lines(chart: Chart, f: _Frame, clip: str) -> Markup:
    parts = []
    for s in baseline_last(chart.series):
        known = np.isfinite(s.y)
        points = [(f.x(x), f.y(y)) for x, y in zip(s.x[known].tolist(), s.y[known].tolist(), strict=True)]
        d = "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in points)
        marks = join(*(marker(s.slot, x, y) for x, y in points)) if chart.markers and len(points) <= 40 else None
        line = tag("path", d=d, class_=f"line s{paint(s.slot)}", stroke_dasharray=dash(s.slot))
        parts.append(tag("g", line, marks, class_="series", data_name=s.name))
    return tag("g", *parts, clip_path=f"url(#{clip})")


def _end_labels(chart: Chart, f: _Frame) -> Markup:
    drawn = [s for s in chart.series if np.isfinite(s.y).any()]
    ends = [(f.x(float(s.x[np.isfinite(s.y)][-1])), f.y(float(s.y[np.isfinite(s.y)][-1]))) for s in drawn]
    at = spread([min(max(y, f.upper), f.height - f.lower) for _, y in ends], 15, f.upper + 4, f.height - f.lower - 2)
    x = f.width - f.right + 12
    parts = []
    for s, (end_x, end_y), y in zip(drawn, ends, at, strict=True):
        name = s.name if len(s.name) <= 15 else s.name[:14] + "\u2026"
        if chart.hero:
            name += f" {s.y[np.isfinite(s.y)][-1]:.3f}"
        parts.append(
            tag(
                "path",
                d=f"M{end_x + 3:.1f},{end_y:.1f}L{x - 3:.1f},{y:.1f}",
                class_=f"leader s{paint(s.slot)}",
                data_name=s.name,
            )
        )
        parts.append(tag("text", name, x=x, y=f"{y + 4:.1f}", class_=f"end s{paint(s.slot)}", data_name=s.name))
    return join(*parts)


def _notes(chart: Chart, f: _Frame) -> Markup:
    parts: list[Markup] = []
    end = f.width - f.right
    if chart.level:
        y = f.y(chart.level[0])
        parts.append(tag("line", x1=f.left, x2=end, y1=f"{y:.1f}", y2=f"{y:.1f}", class_="level"))
        parts.append(tag("text", chart.level[1], x=f.left + 4, y=f"{y - 6:.1f}", class_="note"))
    for cross in chart.crosses:
        x, y = f.x(cross.x), f.y(cross.y)
        parts.append(
            tag(
                "line",
                x1=f"{x:.1f}",
                x2=f"{x:.1f}",
                y1=f"{y:.1f}",
                y2=f.height - f.lower,
                class_=f"drop s{paint(cross.slot)}",
                data_name=cross.name,
            )
        )
        parts.append(
            tag(
                "circle",
                tag("title", cross.label),
                cx=f"{x:.1f}",
                cy=f"{y:.1f}",
                r=4,
                class_=f"cross s{paint(cross.slot)}",
                data_name=cross.name,
            )
        )
    return join(*parts)


def draw(chart: Chart, *, narrow: bool) -> Markup:
    """The chart as one SVG of fixed logical width, so that text is never scaled to an unreadable size."""
    f = _frame(chart, narrow=narrow)
    values = ticks(f.y0, f.y1, 5)
    digits = next((d for d in (1, 2, 3) if all(abs(v - round(v, d)) < 1e-9 for v in values)), 4)

    def y_text(value: float) -> str:
        text = f"{value:+.{digits}f}" if chart.signed and value else f"{value:.{digits}f}"
        return text.replace("-", MINUS)

    clip = f"clip-{chart.key}-{'n' if narrow else 'w'}"
    bounds = tag(
        "rect", x=f.left, y=f.upper - 6, width=f.width - f.left - f.right + 6, height=f.height - f.upper - f.lower + 6
    )
    return tag(
        "svg",
        tag("title", chart.title),
        tag("defs", tag("clipPath", bounds, id=clip)),
        _axes(chart, f, y_text),
        _notes(chart, f),
        _lines(chart, f, clip),
        None if narrow else _end_labels(chart, f),
        tag("line", y1=f.upper, y2=f.height - f.lower, class_="cursor", x1=0, x2=0),
        viewBox=f"0 0 {f.width} {f.height}",
        role="img",
        class_="narrow" if narrow else "wide",
        data_frame=json.dumps([f.left, f.width - f.right, f.x0, f.x1]),
    )


def figure(chart: Chart, caption: object) -> Markup:
    """Title, both drawings, the points for the hover read-out, and a caption; only the caption when there is nothing to
    draw.
    """
    if not any(np.isfinite(s.y).any() for s in chart.series):
        return tag("figure", tag("h3", chart.title), tag("p", "Nothing to draw yet.", class_="empty"), class_="chart")
    data = {
        "signed": chart.signed,
        "series": [
            {"name": s.name, "slot": paint(s.slot), "x": _numbers(s.x, 0), "y": _numbers(s.y, 4)}
            for s in chart.series
            if len(s.x)
        ],
    }
    # "</script>" inside a JSON string would end the element: "<" is written as an escape that JSON reads back to the
    # same character.
    payload = Markup(
        json.dumps(data, allow_nan=False).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    )
    return tag(
        "figure",
        tag("h3", chart.title),
        tag(
            "div",
            draw(chart, narrow=False),
            draw(chart, narrow=True),
            tag("div", class_="readout", hidden=True),
            class_="plot",
        ),
        tag("script", payload, type="application/json"),
        tag("figcaption", caption),
        class_="chart hero" if chart.hero else "chart",
        id=f"chart-{chart.key}",
    )


def _numbers(values: Floats, digits: int) -> list[float | None]:
    return [round(v, digits) if math.isfinite(v) else None for v in values.tolist()]
