"""One self-contained `report.html` for a suite, with `results.json` for machines and `report.png` for a README.

The report can be written at any time: runs that are missing or half done are shown as what they are. The page loads
nothing from anywhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from resformer.experiments import provenance, sections
from resformer.experiments.chart import Chart, Cross, Series, figure
from resformer.experiments.curves import PAPER_WINDOW_STEPS, moving_average, relative_loss, smoothing_window, thin
from resformer.experiments.heat import lambda_maps
from resformer.experiments.markup import Markup, compact, percent, tag, typeset
from resformer.experiments.results import SEED_NOISE_NATS, clean, collect
from resformer.experiments.runs import Run, read_runs
from resformer.experiments.style import CSS, JS
from resformer.train.files import write_atomic, write_json

REPORT_FILE, RESULTS_FILE, PICTURE_FILE = "report.html", "results.json", "report.png"


def write_report(out: Path | str) -> Path:
    """Write report.html, results.json and report.png for the suite in `out` and return the path of report.html.

    Raises UserError when `out` holds no suite.
    """
    from resformer.experiments.picture import write_picture

    out = Path(out)
    runs = read_runs(out)
    results = collect(out, runs)
    colours = sections.slots(results["runs"], results["baseline"])
    charts = build_charts(runs, results, colours)
    write_json(out / RESULTS_FILE, clean(results))
    write_picture(out / PICTURE_FILE, charts)
    write_atomic(out / REPORT_FILE, page(runs, results, charts, colours))
    return out / REPORT_FILE


def build_charts(runs: list[Run], results: dict[str, Any], colours: dict[str, int]) -> dict[str, Chart]:
    """The three charts: "validation", "training" (smoothed) and "relative"."""
    by_name = {run.name: run for run in runs}
    baseline = by_name.get(results["baseline"])
    window = smoothing_window(max((run.steps or run.step for run in runs), default=0))
    validation = [
        Series(name=r.name, x=c["train_tokens"], y=c["loss"], slot=colours[r.name])
        for r in runs
        if (c := r.validation.get("all")) is not None
    ]
    training = [_smoothed(run, window, colours[run.name]) for run in runs]
    relative = [
        _relative(run, baseline, window, colours[run.name])
        for run in runs
        if baseline is not None and run is not baseline
    ]
    level, crosses = _level(baseline, results, by_name, colours)
    x_label = "training tokens"
    x_end = max((run.train.last("tokens") or 0.0 for run in runs), default=0.0) or None
    return {
        "validation": Chart(
            key="validation",
            title="Validation loss",
            x_label=x_label,
            x_end=x_end,
            y_label="nats per token, mean of the domains",
            series=validation,
            markers=True,
            level=level,
            crosses=crosses,
            top=_cut(validation),
            hero=True,
        ),
        "training": Chart(
            key="training",
            title=f"Training loss, mean of {window} steps",
            x_label=x_label,
            x_end=x_end,
            y_label="nats per token",
            series=training,
            top=_cut(training),
        ),
        "relative": Chart(
            key="relative",
            title=f"Training loss minus that of the {results['baseline']}",
            x_label=x_label,
            x_end=x_end,
            y_label="nats per token; below zero is better",
            series=relative,
            signed=True,
            include_zero=True,
        ),
    }


def _smoothed(run: Run, window: int, slot: int) -> Series:
    x, y = thin(moving_average(run.train["tokens"], window), moving_average(run.train["loss"], window))
    return Series(name=run.name, x=x, y=y, slot=slot)


def _relative(run: Run, baseline: Run, window: int, slot: int) -> Series:
    steps, difference = relative_loss(
        run.train["step"], run.train["loss"], baseline.train["step"], baseline.train["loss"], window=window
    )
    tokens = np.interp(steps, run.train["step"], run.train["tokens"]) if len(steps) else steps
    x, y = thin(tokens, difference)
    return Series(name=run.name, x=x, y=y, slot=slot)


def _cut(series: list[Series]) -> float | None:
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
    baseline: Run | None, results: dict[str, Any], by_name: dict[str, Run], colours: dict[str, int]
) -> tuple[tuple[float, str] | None, list[Cross]]:
    """The baseline's final loss as a dashed line, and where the better runs cross it."""
    if baseline is None or not baseline.trained:
        return None, []
    final = baseline.validation["all"].last("loss")
    if final is None:
        return None, []
    crosses = []
    for r in results["runs"]:
        saved = r["data_saved"] or {}
        if (saved.get("share") or 0) > 0:
            text = f"{r['name']} is here after {compact(saved['tokens'])} tokens: {percent(saved['share'], 0)} saved"
            crosses.append(Cross(name=r["name"], slot=colours[r["name"]], x=saved["tokens"], y=final, label=text))
    return (final, f"the {baseline.name}'s final loss"), crosses


def page(runs: list[Run], results: dict[str, Any], charts: dict[str, Chart], colours: dict[str, int]) -> str:
    """The whole document."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", f"{results['suite']} - resformer"),
        tag("style", Markup(CSS)),
    )
    main = tag(
        "main",
        _opening(runs, results),
        _notice(results),
        sections.tiles(results),
        _results(results, colours),
        _curves(results, charts, colours),
        _domains(results, colours),
        _claims(results),
        _mixing(runs, results, colours),
        _texts(results, colours),
        tag("section", tag("h2", "What this does not prove"), sections.limits(results)),
        provenance.section(runs, results),
    )
    body = tag("body", main, tag("script", Markup(JS)))
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _opening(runs: list[Run], results: dict[str, Any]) -> Markup:
    kind = results["title"] or f"Suite {results['suite']}"
    return tag(
        "header",
        tag("p", f"resformer \u00b7 {kind}", class_="eyebrow"),
        tag("h1", results["headline"]),
        tag(
            "p",
            f"{sections.cost(results)}. {provenance.fairness(runs)} Verdict: {results['evidence']}.",
            class_="lead",
        ),
    )


def _notice(results: dict[str, Any]) -> Markup | None:
    if results["complete"]:
        return None
    parts = []
    if results["missing"]:
        done = len(results["runs"]) - len(results["missing"])
        named = f"Still open: {', '.join(results['missing'])}."
        parts.append(tag("p", tag("b", f"{done} of {len(results['runs'])} runs are finished. "), named))
        if results["command"]:
            parts.append(tag("p", "Finish with ", tag("code", results["command"]), "."))
    if results["loss_note"]:
        parts.append(tag("p", tag("b", "Not scored. "), results["loss_note"]))
    return tag("div", *parts, class_="notice", role="note")


def _results(results: dict[str, Any], colours: dict[str, int]) -> Markup:
    scored = "the whole validation split" if _full(results) else "what the training loop validates, for every run"
    base = results["baseline"]
    text = (
        f"Loss on {scored}, as the plain mean of the domains. Lower is better; bpb is bits per byte of raw text. "
        f"Data saved: a run that ends below the {base} had its final loss earlier, and saves the tokens after that; "
        f"one that ends above never has it, and needs more tokens than the {base} for the loss that it ends with."
    )
    return tag(
        "section", tag("h2", "Results"), tag("p", text, class_="intro"), sections.results_table(results, colours)
    )


def _full(results: dict[str, Any]) -> bool:
    return any((r["validation"] or {}).get("full") for r in results["runs"])


def _domains(results: dict[str, Any], colours: dict[str, int]) -> Markup | None:
    table = sections.domain_table(results, colours)
    if table is None:
        return None
    text = (
        f"Validation loss in nats per token, with the difference to the {results['baseline']} below. "
        "Blue cells are better than it, orange ones worse."
    )
    return tag("section", tag("h2", "By domain"), tag("p", text, class_="intro"), table)


def _claims(results: dict[str, Any]) -> Markup | None:
    table = sections.claims_table(results)
    if table is None:
        return None
    text = (
        "The suite states these before anything runs. "
        f"With one seed, a difference below {SEED_NOISE_NATS} nats decides nothing."
    )
    return tag("section", tag("h2", "Claims"), tag("p", text, class_="intro"), table)


def _curves(results: dict[str, Any], charts: dict[str, Chart], colours: dict[str, int]) -> Markup:
    base = results["baseline"]
    window = charts["training"].title.removeprefix("Training loss, ")
    short = (
        "" if f" {PAPER_WINDOW_STEPS} " in window else f" (the paper takes {PAPER_WINDOW_STEPS}; these runs are short)"
    )
    part = (
        " Validations on the way use part of the split, so the ends differ a little from the table."
        if _full(results)
        else ""
    )
    texts = {
        "validation": f"Circles mark where a run reaches the {base}'s final loss: the tokens to the right of its "
        f"circle are saved.{part}",
        "relative": f"Both curves as the {window}{short}, subtracted at equal steps. "
        "The paper compares methods by this figure.",
        "training": "The steep beginning is cut off.",
    }
    return tag(
        "section",
        tag("h2", "Curves"),
        tag("p", "Point at a chart to read values; press a name to hide its curve.", class_="intro needs-js"),
        sections.legend(results["runs"], colours),
        tag("div", *(figure(charts[key], texts[key]) for key in texts), class_="charts"),
    )


def _mixing(runs: list[Run], results: dict[str, Any], colours: dict[str, int]) -> Markup | None:
    layers = {run.name: int(run.config.get("model", {}).get("num_hidden_layers") or 0) for run in runs}
    maps = lambda_maps(results, layers, colours)
    if maps is None:
        return None
    text = (
        "How much of the first layer's value V_1 (or of the source that a run's options name) and of its own value V_n "
        "each layer puts into attention, after training. Layer 1 has nothing to mix; runs without such a pair are not "
        "shown."
    )
    return tag("section", tag("h2", "What each layer mixes"), tag("p", typeset(text), class_="intro"), maps)


def _texts(results: dict[str, Any], colours: dict[str, int]) -> Markup | None:
    found = sections.samples(results, colours)
    if found is None:
        return None
    text = (
        "The same prompt, the same sampling seed, one continuation each and no picking. "
        "Models of this size do not write sense."
    )
    return tag("section", tag("h2", "In their own words"), tag("p", text, class_="intro"), found)
