"""Figures of loss curves: relative loss, loss against its cost, scaling and what it saves, critical points."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator, NullLocator
from numpy.typing import ArrayLike

from resformer.analyze import axes as style
from resformer.analyze.axes import Drawing, styled
from resformer.analyze.critical import CriticalPoint
from resformer.analyze.curves import PAPER_WINDOW, Against, Floats, RunCurves, moving_average, relative_loss
from resformer.analyze.layer_figures import log_y
from resformer.analyze.savings import Saving
from resformer.errors import UserError

_UNITS: dict[Against, tuple[str, float]] = {
    "steps": ("training step", 1.0),
    "tokens": ("training tokens", 1.0),
    "flops": ("training FLOPs", 1.0),
    "hours": ("training time (hours)", 1.0),
}
_MOST_PANELS = 6
_MOST_POINTS = 400  # of a line that is drawn; the CSV has all
_EARLY = 0.1  # of a curve, whose losses dwarf the rest, do not set the axis


def _marks(points: int) -> int:
    return max(1, points // 8)


def _thin(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    keep = np.unique(np.linspace(0, len(x) - 1, min(len(x), _MOST_POINTS)).round().astype(int))
    return x[keep], y[keep]


def _window(runs: Sequence[RunCurves], wanted: int | None) -> int:
    """The paper's window, or for short runs a tenth of the shortest."""
    if wanted is not None:
        return wanted
    return max(1, min(PAPER_WINDOW, min(len(run.train["step"]) for run in runs) // 10))


@styled
def relative_losses(
    runs: Sequence[RunCurves], *, baseline: str | None = None, window: int | None = None
) -> Drawing | None:
    """Smoothed training loss of each run minus that of the baseline (the first run unless named), over the step."""
    base = next((run for run in runs if run.name == baseline), runs[0] if runs and baseline is None else None)
    if base is None or len(runs) < 2:
        return None
    size = _window(runs, window)
    figure, (panel,) = style.panels(1)
    table: list[list[Any]] = []
    drawn: list[tuple[str, dict[str, Any]]] = []
    for index, run in enumerate(runs):
        if run is base:
            continue
        try:
            x, y = relative_loss(
                run.train["step"], run.train["loss"], base.train["step"], base.train["loss"], window=size
            )
        except ValueError:
            continue  # no common steps
        thin_x, thin_y = _thin(x, y)
        panel.plot(thin_x, thin_y, **style.look(index), markevery=_marks(len(thin_x)))
        drawn.append((run.name, style.look(index)))
        table += [[run.name, base.name, size, *point] for point in zip(x.tolist(), y.tolist(), strict=True)]
    if not drawn:
        return None
    late = [np.asarray(line.get_ydata())[len(np.asarray(line.get_ydata())) // 20 :] for line in panel.lines]
    _y_range(panel, np.concatenate([*late, [0.0]]))
    zero: dict[str, Any] = {"color": "#222222", "linewidth": 0.8, "linestyle": (0, (4, 3))}
    panel.axhline(0.0, **zero)
    drawn.append((f"{base.name} (baseline)", zero))
    panel.xaxis.set_major_locator(MaxNLocator(6))
    style.amounts(panel, "x")
    panel.set_xlabel("training step")
    panel.set_ylabel("relative training loss (nats)")
    style.legend(figure, [name for name, _ in drawn], looks=[look for _, look in drawn])
    columns = ("model", "baseline", "window", "step", "relative_loss")
    return Drawing(name="relative_loss", figure=figure, columns=columns, table=table)


def _y_range(panel: Axes, values: Floats) -> None:
    values = values[np.isfinite(values)]
    if len(values):
        pad = 0.06 * float(np.ptp(values)) or 0.01
        panel.set_ylim(float(values.min()) - pad, float(values.max()) + pad)


@styled
def loss_against(runs: Sequence[RunCurves], what: Against, *, window: int | None = None) -> Drawing | None:
    """Validation loss, or where runs have fewer than two validations smoothed training loss, over tokens, FLOPs or
    hours. Runs that do not say what they cost are left out.
    """
    validated = all(len(run.validation["step"]) > 1 for run in runs)
    figure, (panel,) = style.panels(1)
    table: list[list[Any]] = []
    drawn: list[tuple[str, dict[str, Any]]] = []
    late, farthest = [np.empty(0)], 0.0
    for index, run in enumerate(runs):
        try:
            x, y = run.against(what, "validation" if validated else "train")
        except UserError:
            continue
        if not validated:
            size = _window(runs, window)
            x, y = moving_average(x, size), moving_average(y, size)
        known = np.isfinite(x) & np.isfinite(y)
        x, y = x[known], y[known]
        if not len(x):
            continue
        thin_x, thin_y = _thin(x, y)
        panel.plot(thin_x, thin_y, **style.look(index), markevery=_marks(len(thin_x)))
        late.append(y[x >= _EARLY * x[-1]])
        farthest = max(farthest, float(x[-1]))
        drawn.append((run.name, style.look(index)))
        table += [[run.name, *point] for point in zip(x.tolist(), y.tolist(), strict=True)]
    if not drawn:
        return None
    _y_range(panel, np.concatenate(late))
    panel.set_xlim(-0.02 * farthest, 1.03 * farthest)
    panel.xaxis.set_major_locator(MaxNLocator(5))
    if what == "flops":
        power = math.floor(math.log10(farthest)) if farthest > 0 else 0
        panel.xaxis.set_major_formatter(lambda value, _: f"{value / 10.0**power:g}")
        panel.set_xlabel(f"training FLOPs ($10^{{{power}}}$)")
    else:
        style.amounts(panel, "x")
        panel.set_xlabel(_UNITS[what][0])
    panel.set_ylabel(f"{'validation' if validated else 'training'} loss (nats/token)")
    style.legend(figure, [name for name, _ in drawn], looks=[look for _, look in drawn])
    return Drawing(name=f"loss_by_{what}", figure=figure, columns=("model", what, "loss"), table=table)


@styled
def recovered(runs: Sequence[RunCurves]) -> Drawing | None:
    """Loss above that of the model that each run's was made from, over training tokens; runs that do not know theirs
    are left out.
    """
    figure, (panel,) = style.panels(1)
    table: list[list[Any]] = []
    drawn: list[tuple[str, dict[str, Any]]] = []
    for index, run in enumerate(runs):
        if run.source_loss is None or not len(run.validation["step"]):
            continue
        x, loss = run.against("tokens", "validation")
        panel.plot(x, loss - run.source_loss, **style.look(index), markevery=_marks(len(x)))
        drawn.append((run.name, style.look(index)))
        table += [[run.name, *point] for point in np.stack([x, loss, loss - run.source_loss], axis=1).tolist()]
    if not drawn:
        return None
    panel.axhline(0.0, color="#777777", linewidth=0.7, linestyle=(0, (4, 3)), zorder=1)
    style.amounts(panel, "x")
    panel.set_xlabel(_UNITS["tokens"][0])
    panel.set_ylabel("nats/token above source")
    style.legend(figure, [name for name, _ in drawn], looks=[look for _, look in drawn])
    columns = ("model", "tokens", "loss", "above_source")
    return Drawing(name="recovered", figure=figure, columns=columns, table=table)


@styled
def gradient_norms(runs: Sequence[RunCurves], *, window: int | None = None) -> Drawing | None:
    """Smoothed norms of the watched parameters' gradients over the step, a panel a parameter, at most six."""
    names = sorted({name for run in runs for name in run.gradient_norms})[:_MOST_PANELS]
    if not names:
        return None
    figure, axes = style.panels(len(names), height=1.5)
    size, table, drawn = _window(runs, window), [], set()
    for panel, name in zip(axes, names, strict=True):
        for index, run in enumerate(runs):
            norms = run.gradient_norms.get(name, np.empty(0))
            known = np.isfinite(norms)
            x, y = moving_average(run.train["step"][: len(norms)][known], size), moving_average(norms[known], size)
            if not len(x):
                continue
            panel.plot(*_thin(x, y), **style.look(index), markevery=_marks(min(len(x), _MOST_POINTS)))
            drawn.add(index)
            table += [[run.name, name, size, *point] for point in zip(x.tolist(), y.tolist(), strict=True)]
        log_y(panel)
        panel.xaxis.set_major_locator(MaxNLocator(6))
        style.amounts(panel, "x")
        style.panel_name(panel, name, most=44)
        panel.set_ylabel("gradient norm")
    if not drawn:
        return None
    axes[-1].set_xlabel("training step")
    style.legend(figure, [runs[i].name for i in sorted(drawn)], looks=[style.look(i) for i in sorted(drawn)])
    columns = ("model", "parameter", "window", "step", "gradient_norm")
    return Drawing(name="gradient_norms", figure=figure, columns=columns, table=table)


@styled
def scaling(
    curves: Mapping[str, tuple[ArrayLike, ArrayLike]],
    found: Sequence[Saving] = (),
    *,
    what: str = "parameters",
    name: str = "scaling",
) -> Drawing:
    """Loss over size, straight lines in logarithms, the first curve being the baseline. `found` are savings against it:
    each is marked at the baseline's loss, dashed and with a star where it is extrapolated.

    curves: method -> (sizes, losses). what: "parameters" or "training tokens", the name of the axis.
    """
    figure, (panel,) = style.panels(1, height=2.3)
    table: list[list[Any]] = []
    sizes: list[float] = []
    for index, (method, (x, y)) in enumerate(curves.items()):
        order = np.argsort(np.asarray(x, dtype=np.float64))
        xs, ys = np.asarray(x, dtype=np.float64)[order], np.asarray(y, dtype=np.float64)[order]
        dense = np.geomspace(xs[0], xs[-1], 200)
        looks = style.look(index)
        panel.plot(xs, ys, **{**looks, "linestyle": "none"})
        line = np.exp(np.interp(np.log(dense), np.log(xs), np.log(ys)))
        panel.plot(dense, line, color=looks["color"], linestyle=looks["linestyle"])
        sizes += xs.tolist()
        table += [[method, a, b, None, None, None, None, None] for a, b in zip(xs.tolist(), ys.tolist(), strict=True)]
    panel.set_xscale("log")
    for one in found:
        _mark_saving(panel, one)
        table.append(["saving", one.x, one.loss, one.needed, one.share, one.low, one.high, one.extrapolated])
    needed = [one.needed for one in found if math.isfinite(one.needed) and one.needed < 3 * max(sizes)]
    low, high = min(sizes + needed), max(sizes + needed)
    spread = max(high / low, 1.5)
    loses = any(one.share < 0 for one in found)
    panel.set_xlim(low / spread ** (0.35 if loses else 0.12), high * spread**0.3)
    panel.xaxis.set_major_locator(FixedLocator(_round_sizes(*panel.get_xlim())))
    panel.xaxis.set_minor_locator(NullLocator())
    style.amounts(panel, "x")
    panel.margins(y=0.12)
    panel.set_xlabel(what + (" (* extrapolated)" if any(one.extrapolated for one in found) else ""))
    panel.set_ylabel("validation loss (nats/token)")
    style.legend(figure, list(curves))
    columns = ("what", "x", "loss", "needed", "share_saved", "low", "high", "extrapolated")
    return Drawing(name=name, figure=figure, columns=columns, table=table)


def _mark_saving(panel: Axes, one: Saving) -> None:
    """A horizontal line from the baseline's size to the method's, and the share: right above where the method wins,
    left below where it loses, where no curve runs.
    """
    dashes: Any = (0, (1.5, 1.2)) if one.extrapolated else "-"
    if math.isfinite(one.needed):
        panel.plot([one.x, one.needed], [one.loss] * 2, color="#222222", linewidth=0.9, linestyle=dashes, zorder=4)
    text = f"{100 * one.share:+.1f} %".replace("+", "").replace("-", "\u2212") + ("*" if one.extrapolated else "")
    wins = one.share >= 0
    panel.annotate(
        text,
        (one.x, one.loss),
        xytext=(4, 3) if wins else (-4, -3),
        textcoords="offset points",
        ha="left" if wins else "right",
        va="bottom" if wins else "top",
        fontsize=7,
    )


def _round_sizes(low: float, high: float) -> list[float]:
    """Round numbers inside `low..high`, at most 7."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for parts in ((1, 1.5, 2, 3, 4, 5, 7), (1, 2, 5), (1, 3), (1,)):
        found = [m * 10.0**p for p in powers for m in parts if low <= m * 10.0**p <= high]
        if len(found) <= 7:
            return found
    return found[:: math.ceil(len(found) / 7)]


@styled
def critical_points(points: Mapping[str, Sequence[tuple[float, CriticalPoint]]]) -> Drawing | None:
    """The critical point over the training sequence length, both logarithmic (v1, fig. 14). An extrapolated point is
    hollow; an interval without an upper end is an arrow. Points that will never come are in the CSV only.

    points: method -> (length in tokens, its critical point).
    """
    figure, (panel,) = style.panels(1)
    table: list[list[Any]] = []
    lengths: set[float] = set()
    hollow = False
    shown = {m: sorted(found, key=lambda p: p[0]) for m, found in points.items() if found}
    for index, (method, found) in enumerate(shown.items()):
        table += [[method, n, p.step, p.low, p.high, p.kind] for n, p in found]
        drawn = [(n, p) for n, p in found if math.isfinite(p.step) and p.step > 0]
        looks = style.look(index)
        panel.plot([n for n, _ in drawn], [p.step for _, p in drawn], **{**looks, "marker": "none"})
        for n, p in drawn:
            lengths.add(n)
            filled = p.kind == "crossed"
            hollow = hollow or not filled
            low, high = (p.low if p.low > 0 else p.step / 3), p.high if math.isfinite(p.high) else p.step * 3
            panel.errorbar(
                n,
                p.step,
                yerr=[[p.step - low], [high - p.step]],
                color=looks["color"],
                marker=looks["marker"],
                markerfacecolor=looks["color"] if filled else "white",
                capsize=2,
                linewidth=0.8,
                lolims=not math.isfinite(p.high),
            )
    if not lengths:
        return None
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.xaxis.set_major_locator(FixedLocator(sorted(lengths)))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(lambda n, _: f"{n:.0f}" if n % 1000 else style.amount(n))
    panel.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    panel.yaxis.set_minor_locator(NullLocator())
    style.amounts(panel, "y")
    low, high = panel.get_xlim()
    panel.set_xlim(low / 1.1, high * 1.1)
    panel.set_xlabel("training sequence length (tokens)")
    panel.set_ylabel("critical point (step)" + ("\n(hollow: extrapolated)" if hollow else ""))
    style.legend(figure, list(shown))
    columns = ("model", "sequence_length", "step", "low", "high", "kind")
    return Drawing(name="critical_point", figure=figure, columns=columns, table=table)
