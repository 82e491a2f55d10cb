"""The line charts of the report: losses over training tokens, the paper's relative loss, and measures by layer.

With several seeds a line is their mean and the band around it reaches from the lowest to the highest of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from resformer.experiments.chart import FAINT, SLOTS, Chart, Cross, Series
from resformer.experiments.curves import Band, Floats, moving_average, over_seeds, relative_loss, smoothing_window, thin
from resformer.experiments.markup import compact, percent
from resformer.experiments.report_rows import MEASURES
from resformer.experiments.runs import Run

_BEST, _WORST = 5, 2  # runs in colour, by their final difference, where there are more runs than colours


def slots(rows: Sequence[dict[str, Any]], baseline: str) -> dict[str, int]:
    """Run name -> colour slot: 0 is the baseline, the others follow in the suite's order. Where there are more runs
    than colours, the lowest and the highest ends have them, and all others are `FAINT`.
    """
    others = [r for r in rows if r["name"] != baseline]
    chosen = {r["name"] for r in others}
    if len(others) >= SLOTS:
        ended = sorted((r for r in others if r["difference"]), key=lambda r: r["difference"]["mean"])
        first = [*ended[:_BEST], *ended[_BEST:][-_WORST:], *(r for r in others if not r["difference"])]
        chosen = {r["name"] for r in first[: SLOTS - 1]}
    names = [r["name"] for r in others if r["name"] in chosen]
    faint = {r["name"]: FAINT for r in others if r["name"] not in chosen}
    return {baseline: 0} | {name: i + 1 for i, name in enumerate(names)} | faint


def build_charts(runs: Sequence[Run], results: dict[str, Any], colours: Mapping[str, int]) -> dict[str, Chart]:
    """The three charts: "validation", "training" (smoothed) and "relative"."""
    by_name: dict[str, list[Run]] = {}
    for run in runs:
        by_name.setdefault(run.name, []).append(run)
    baseline = by_name.get(results["baseline"], [])
    against = {r["name"]: by_name.get(r["against"] or results["baseline"], []) for r in results["runs"]}
    window = smoothing_window(max((run.steps or run.step for run in runs), default=0))
    validation = [_series(name, _validation(found), colours) for name, found in by_name.items()]
    training = [_series(name, _training(found, window), colours) for name, found in by_name.items()]
    relative = [
        _series(name, _relative(found, against[name], window), colours)
        for name, found in by_name.items()
        if name != results["baseline"]
    ]
    plain = all(r["against"] in (None, results["baseline"]) for r in results["runs"])
    other = f"the {results['baseline']}" if plain else "the run it is compared with"
    level, crosses = _level(baseline, results, colours)
    shared: dict[str, Any] = {
        "x_label": "training tokens",
        "x_end": max((run.train.last("tokens") or 0.0 for run in runs), default=0.0) or None,
    }
    return {
        "validation": Chart(
            key="validation",
            title="Validation loss",
            y_label="nats per token, mean of the domains",
            series=validation,
            markers=True,
            level=level,
            crosses=crosses,
            top=_cut(validation),
            size="hero",
            **shared,
        ),
        "training": Chart(
            key="training",
            title=f"Training loss, mean of {window} steps",
            y_label="nats per token",
            series=training,
            top=_cut(training),
            **shared,
        ),
        "relative": Chart(
            key="relative",
            title=f"Training loss minus that of {other}",
            y_label="nats per token; below zero is better",
            series=relative,
            signed=True,
            include_zero=True,
            **shared,
        ),
    }


def _series(name: str, band: Band, colours: Mapping[str, int]) -> Series:
    x, y = thin(band.x, band.mean)
    low: Floats | None = None
    high: Floats | None = None
    if band.seeds > 1:
        (_, low), (_, high) = thin(band.x, band.low), thin(band.x, band.high)
    return Series(name=name, x=x, y=y, low=low, high=high, slot=colours[name])


def _validation(runs: Sequence[Run]) -> Band:
    found = [curve for run in runs if (curve := run.validation.get("all")) is not None]
    return over_seeds([(curve["train_tokens"], curve["loss"]) for curve in found])


def _training(runs: Sequence[Run], window: int) -> Band:
    return over_seeds(
        [(moving_average(r.train["tokens"], window), moving_average(r.train["loss"], window)) for r in runs]
    )


def _relative(runs: Sequence[Run], baseline: Sequence[Run], window: int) -> Band:
    """Each seed against the other's run of that seed, which saw the same batches."""
    others, curves = {run.seed: run for run in baseline}, []
    for run in runs:
        base = others.get(run.seed)
        if base is None:
            continue
        steps, difference = relative_loss(
            run.train["step"], run.train["loss"], base.train["step"], base.train["loss"], window=window
        )
        if len(steps):
            curves.append((np.interp(steps, run.train["step"], run.train["tokens"]), difference))
    return over_seeds(curves)


def _cut(series: Sequence[Series]) -> float | None:
    """Where to cut the y axis: the highest value after the first quarter, so that the steep beginning does not flatten
    what differs.
    """
    ends = [float(s.x[-1]) for s in series if len(s.x)]
    if not ends:
        return None
    later = [
        float(np.nanmax(kept)) for s in series if len(kept := s.y[s.x >= 0.25 * max(ends)]) and np.isfinite(kept).any()
    ]
    return max(later, default=None)


def _level(
    baseline: Sequence[Run], results: dict[str, Any], colours: Mapping[str, int]
) -> tuple[tuple[float, str] | None, list[Cross]]:
    """The baseline's final loss as a dashed line, and where the better runs cross it."""
    ends = [run.validation["all"].last("loss") for run in baseline if run.trained]
    finals = [loss for loss in ends if loss is not None]
    if not finals or len(finals) < len(baseline):
        return None, []
    final = sum(finals) / len(finals)
    crosses = []
    for r in results["runs"]:
        saved = r["data_saved"] or {}
        if r["against"] != results["baseline"] or colours[r["name"]] == FAINT:
            continue
        if (saved.get("share") or 0) > 0 and saved["tokens"] is not None:
            text = f"{r['name']} is here after {compact(saved['tokens'])} tokens: {percent(saved['share'], 0)} saved"
            crosses.append(Cross(name=r["name"], slot=colours[r["name"]], x=saved["tokens"], y=final, label=text))
    return (final, f"the {results['baseline']}'s final loss"), crosses


def layer_charts(results: dict[str, Any], colours: Mapping[str, int]) -> list[Chart]:
    """A small chart for each measure by layer that an analysis of the runs has left."""
    charts = []
    for name, title in MEASURES.items():
        series = [_by_layer(r, name, colours[r["name"]]) for r in results["runs"] if name in r["measures"]]
        if not series:
            continue
        charts.append(
            Chart(
                key=name,
                title=title,
                x_label="layer",
                y_label="",
                series=series,
                markers=True,
                size="small",
                x_start=0.5,
                x_end=max(float(s.x[-1]) for s in series) + 0.5,
                x_unit="layer",
            )
        )
    return charts


def _by_layer(r: dict[str, Any], measure: str, slot: int) -> Series:
    found = {key: np.asarray(values, dtype=np.float64) for key, values in r["measures"][measure].items()}
    several = r["finished"] > 1
    low, high = (found["low"], found["high"]) if several else (None, None)
    return Series(name=r["name"], x=found["layers"], y=found["mean"], low=low, high=high, slot=slot)
