"""How figures look and are written: one column wide, colour-blind safe, the same bytes for the same numbers."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context, rcParamsDefault
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter

WIDTH = 3.3
"""Inches of a column of a two-column paper."""
PANEL_HEIGHT = 2.1

# Told apart by the common forms of colour blindness, dark enough on white; the HTML report's colours, in its order.
COLOURS = ("#4b535d", "#0072b2", "#d55e00", "#00875f", "#b0528c", "#8c6d00", "#2d9fd8", "#7a4fd0")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p")
DASHES: tuple[Any, ...] = (
    "-",
    (0, (5, 1.5)),
    (0, (1.2, 1.2)),
    (0, (6, 1.5, 1.2, 1.5)),
    (0, (3, 1.2)),
    (0, (6, 1.5, 1.2, 1.5, 1.2, 1.5)),
    (0, (9, 2)),
    (0, (1.2, 2.4)),
)
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib, so that figures are alike on all machines
    "font.size": 7.5,
    "axes.labelsize": 7.5,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e6ea",
    "grid.linewidth": 0.5,
    "axes.axisbelow": True,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "lines.linewidth": 1.1,
    "lines.markersize": 3.2,
    "pdf.fonttype": 42,
    "mathtext.fontset": "dejavusans",
}
_MOST_LABEL = 34  # characters of a name in a legend; a longer one loses its middle


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A figure and the numbers behind it. name: of its files; columns and table: what the CSV holds."""

    name: str
    figure: Figure
    columns: tuple[str, ...]
    table: Sequence[Sequence[Any]]


def look(index: int) -> dict[str, Any]:
    """Colour, marker and dashes of the model number `index`. From the ninth on they repeat with hollow markers."""
    i = index % len(COLOURS)
    hollow = {"markerfacecolor": "white"} if index >= len(COLOURS) else {}
    return {"color": COLOURS[i], "marker": MARKERS[i], "linestyle": DASHES[i], "markeredgewidth": 0.7, **hollow}


def panels(count: int, *, columns: int = 1, height: float = PANEL_HEIGHT) -> tuple[Figure, list[Axes]]:
    """A figure one column wide with `count` panels, `columns` beside each other, each `height` inches high."""
    columns = min(columns, count)
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(WIDTH, height * rows), layout=ConstrainedLayoutEngine(w_pad=0.03, h_pad=0.03, wspace=0.04))
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False)
    axes = list(grid.flat)
    for spare in axes[count:]:
        spare.remove()
    return figure, axes[:count]


def shorten(name: str, most: int = _MOST_LABEL) -> str:
    """A name of at most `most` characters; a longer one loses its middle."""
    if len(name) <= most:
        return name
    head = (most - 1) // 2
    return f"{name[:head]}\u2026{name[len(name) - (most - 1 - head) :]}"


def legend(figure: Figure, names: Sequence[str], *, looks: Sequence[dict[str, Any]] = (), of: int = 0) -> None:
    """Name the models above all panels, where the legend covers nothing; the figure grows by its height. A single one
    is named where it is one `of` several.
    """
    if not names or max(len(names), of) < 2:
        return
    styles = looks or [look(i) for i in range(len(names))]
    handles = [Line2D([], [], label=_plain(shorten(n)), **s) for n, s in zip(names, styles, strict=True)]
    width, height = figure.get_size_inches()
    placed: Legend | None = None
    for columns in range(min(4, len(names)), 0, -1):
        if placed is not None:
            placed.remove()
        placed = figure.legend(
            handles=handles,
            loc="outside upper center",
            ncols=columns,
            frameon=False,
            handlelength=2.4,
            columnspacing=1.0,
            handletextpad=0.5,
            borderaxespad=0.0,
            labelspacing=0.3,
        )
        box = placed.get_window_extent(figure.canvas.get_renderer())  # type: ignore[attr-defined]
        if box.width / figure.dpi <= width - 0.1:
            break
    assert placed is not None
    figure.set_size_inches(width, height + box.height / figure.dpi)


def _plain(text: str) -> str:
    """Text in which matplotlib sees no formula, and which it does not take for a hidden label."""
    text = text.replace("$", r"\$")
    return f"\u200b{text}" if text.startswith("_") else text


def panel_name(axes: Axes, text: str, *, most: int = 24) -> None:
    """Say what a panel shows, above it."""
    axes.set_title(_plain(shorten(text, most)), fontsize=7, loc="left", pad=2.5)


def layer_axis(axes: Axes, layers: int, *, label: bool = True, most: int = 12) -> None:
    """Layers from 1 along x, about `most` numbers at the most, so that none touch."""
    step = next(s for s in (1, 2, 4, 5, 8, 10, 20, 50, 100, 200, 500) if layers / s <= most)
    ticks = list(range(step, layers + 1, step))
    axes.xaxis.set_major_locator(FixedLocator(ticks if step == 1 else [1, *ticks]))
    margin = max(0.3, 0.03 * layers)
    axes.set_xlim(1 - margin, layers + margin)
    if label:
        axes.set_xlabel("layer")


def amounts(axes: Axes, which: str, unit: str = "") -> None:
    """Numbers with k, M, B along an axis, in words that stay short."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_formatter(FuncFormatter(lambda value, _: amount(value) + unit))
    axis.set_minor_formatter(NullFormatter())


def amount(value: float) -> str:
    """12,000 as 12k, 4.68e8 as 468M."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def band(axes: Axes, x: np.ndarray, low: np.ndarray, high: np.ndarray, index: int) -> None:
    """An interval around a line, in its colour."""
    axes.fill_between(x, low, high, color=COLOURS[index % len(COLOURS)], alpha=0.18, linewidth=0)


def styled(draw: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function draw in our style, whatever the process has set."""

    @wraps(draw)
    def inner(*args: Any, **kwargs: Any) -> Any:
        with rc_context({**_defaults(), **STYLE}):
            return draw(*args, **kwargs)

    return inner


def _defaults() -> dict[Any, Any]:
    """matplotlib's own settings, but for those that are no matter of looks."""
    kept = ("backend", "interactive", "toolbar", "date.")
    return {k: v for k, v in rcParamsDefault.items() if not k.startswith(kept)}


@styled
def save(drawing: Drawing, out: Path) -> list[Path]:
    """Write NAME.png (300 dpi), NAME.pdf and NAME.csv into `out`, each as a whole; return their paths.

    The same numbers give the same bytes: nothing says when or by what the files were made.
    """
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / f"{drawing.name}.{kind}" for kind in ("png", "pdf", "csv")]
    metadata: dict[str, dict[str, Any]] = {
        "png": {"Software": None},
        "pdf": {"CreationDate": None, "ModDate": None, "Creator": None, "Producer": None},
    }
    for path in paths[:2]:
        kind = path.suffix[1:]
        waiting = path.with_name(f".{path.name}.{os.getpid()}")
        drawing.figure.savefig(waiting, format=kind, dpi=300, metadata=metadata[kind])
        os.replace(waiting, path)
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(drawing.columns)
    writer.writerows([["" if x is None else x for x in row] for row in drawing.table])
    waiting = paths[2].with_name(f".{paths[2].name}.{os.getpid()}")
    waiting.write_text(text.getvalue(), encoding="utf-8")
    os.replace(waiting, paths[2])
    return paths
