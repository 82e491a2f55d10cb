"""The headline figure as a PNG: validation loss and relative training loss side by side, for a README or a slide."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from resformer.experiments.chart import SLOTS, Chart, baseline_last, dash, paint
from resformer.experiments.markup import compact

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
assert len(COLOURS) == len(MARKERS) == SLOTS


def write_picture(path: Path, charts: Mapping[str, Chart]) -> None:
    """Draw `charts["validation"]` and `charts["relative"]` into a PNG of about 1700 x 640 pixels."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.6, 4.0), dpi=160, layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes, chart in ((left, charts["validation"]), (right, charts["relative"])):
        _draw(axes, chart)
    handles, labels = left.get_legend_handles_labels()
    if charts["validation"].series and charts["validation"].series[0].slot == 0:  # drawn last, named first
        handles, labels = handles[-1:] + handles[:-1], labels[-1:] + labels[:-1]
    if handles:
        figure.legend(
            handles, labels, loc="outside lower center", ncols=min(len(labels), 5), frameon=False, fontsize=10
        )
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        figure.savefig(temporary, format="png", metadata={"Software": "resformer"})
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _draw(axes: Any, chart: Chart) -> None:
    for s in baseline_last(chart.series):
        known = np.isfinite(s.y)
        marker = MARKERS[paint(s.slot)] if chart.markers and known.sum() <= 40 else None
        # A leading underscore would hide the entry from matplotlib's legend, and "$" would start its maths mode.
        label = s.name.lstrip("_").replace("$", r"\$")
        pattern = dash(s.slot)
        style: Any = "-" if pattern is None else (0, tuple(float(length) / 2 for length in pattern.split()))
        axes.plot(
            s.x[known],
            s.y[known],
            linestyle=style,
            color=COLOURS[paint(s.slot)],
            marker=marker,
            markersize=4,
            linewidth=1.8,
            label=label,
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
