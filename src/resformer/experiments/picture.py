"""The headline figure as a PNG, for a README or a slide: validation loss, and beside it the relative training loss or,
for many runs or several seeds, the final differences with their intervals.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from resformer.experiments.chart import FAINT, SLOTS, Chart, dash, drawing_order
from resformer.experiments.markup import compact
from resformer.experiments.tables_bars import look
from resformer.experiments.tables_dots import FEWEST, order

COLOURS = (
    "#4b535d",
    "#0072b2",
    "#d55e00",
    "#00875f",
    "#b0528c",
    "#8c6d00",
    "#2d9fd8",
    "#7a4fd0",
)  # as in the page's light scheme
MARKERS = ("o", "s", "^", "D", "v", "o", "s", "^")
_FAINT = "#d3d0c9"
_LOOKS = {"better": "#0072b2", "worse": "#d55e00", "open": "#7d848d"}
assert len(COLOURS) == len(MARKERS) == SLOTS


def write_picture(path: Path, charts: Mapping[str, Chart], results: dict[str, Any]) -> None:
    """Draw two panels into a PNG 1700 pixels wide."""
    from matplotlib.figure import Figure

    rows = order(results["runs"], results["baseline"])
    dotted = len(rows) >= FEWEST or (bool(rows) and len(results["seeds"]) > 1)
    height = 4.0 if not dotted else max(4.0, 1.6 + 0.24 * len(rows))
    figure = Figure(figsize=(10.6, height), dpi=160, layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw(left, charts["validation"])
    if dotted:
        _dots(right, rows, results["baseline"])
    else:
        _draw(right, charts["relative"])
    handles, labels = left.get_legend_handles_labels()
    named = [(h, name) for h, name in zip(handles, labels, strict=True) if not name.startswith("_")]
    if charts["validation"].series and charts["validation"].series[0].slot == 0:  # drawn last, named first
        named = named[-1:] + named[:-1]
    if named:
        handles, labels = zip(*named, strict=True)
        figure.legend(
            handles, labels, loc="outside lower center", ncols=min(len(labels), 5), frameon=False, fontsize=10
        )
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        figure.savefig(temporary, format="png", metadata={"Software": "resformer"})
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _plain(name: str) -> str:
    """A leading underscore would hide the entry from matplotlib's legend, and "$" would start its maths mode."""
    return name.lstrip("_").replace("$", r"\$")


def _draw(axes: Any, chart: Chart) -> None:
    for s in drawing_order(chart.series):
        known = np.isfinite(s.y)
        if s.slot == FAINT:
            axes.plot(s.x[known], s.y[known], linestyle="-", color=_FAINT, linewidth=0.9, label="_grey")
            continue
        pattern = dash(s.slot)
        style: Any = "-" if pattern is None else (0, tuple(float(length) / 2 for length in pattern.split()))
        if s.low is not None and s.high is not None:
            axes.fill_between(s.x, s.low, s.high, color=COLOURS[s.slot], alpha=0.14, linewidth=0)
        axes.plot(
            s.x[known],
            s.y[known],
            linestyle=style,
            color=COLOURS[s.slot],
            marker=MARKERS[s.slot] if chart.markers and known.sum() <= 40 else None,
            markersize=4,
            linewidth=1.8,
            label=_plain(s.name),
        )
    if chart.include_zero:
        axes.axhline(0.0, color="#5a616b", linewidth=1, linestyle=(0, (5, 4)))
    if chart.level is not None:
        axes.axhline(chart.level[0], color=COLOURS[0], linewidth=1, linestyle=(0, (1, 3)))
    ys = np.concatenate([s.y[np.isfinite(s.y)] for s in chart.series]) if chart.series else np.empty(0)
    if chart.top is not None and len(ys) and ys.min() < chart.top:
        pad = 0.06 * (chart.top - float(ys.min()))
        axes.set_ylim(float(ys.min()) - pad, chart.top + pad)
    axes.set_title(chart.title, fontsize=11, fontweight="bold", loc="left")
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label.replace("; below zero is better", ""))
    axes.xaxis.set_major_formatter(lambda value, _: compact(value))
    axes.grid(axis="y", color="#ecebe7")
    axes.spines[["top", "right"]].set_visible(False)


def _dots(axes: Any, rows: Sequence[dict[str, Any]], baseline: str) -> None:
    """Final differences, the first row on top; an interval where there is one."""
    plain = all(r["against"] == baseline for r in rows)
    means = [r["difference"]["mean"] for r in rows]
    reach = 2.5 * max(abs(mean) for mean in means) or 1.0
    for y, r in enumerate(rows):
        found = r["difference"]
        colour = _LOOKS[look(found).removeprefix("single ")]
        if found["low"] is not None and found["high"] is not None:
            axes.plot(
                [max(found["low"], -reach), min(found["high"], reach)], [y, y], color=colour, linewidth=3, alpha=0.4
            )
        else:  # a thin stem, which nobody takes for an interval
            axes.plot([0.0, found["mean"]], [y, y], color=colour, linewidth=1, alpha=0.6)
        axes.plot([found["mean"]], [y], marker="o", color=colour, markersize=6)
    axes.axvline(0.0, color="#5a616b", linewidth=1, linestyle=(0, (5, 4)))
    axes.set_yticks(range(len(rows)), [_plain(r["name"]) for r in rows])
    axes.invert_yaxis()
    whom = f"the {_plain(baseline)}" if plain else "the run compared with"
    axes.set_title(f"Final loss minus that of {whom}", fontsize=11, fontweight="bold", loc="left")
    known = any(r["difference"]["low"] is not None for r in rows)
    axes.set_xlabel("nats per token; " + ("bars are 95 % intervals over seeds" if known else "one seed"))
    axes.grid(axis="x", color="#ecebe7")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
