"""One self-contained `report.html` for a suite, with `results.json` for machines and `report.png` for a README.

The report can be written at any time: runs that are missing or half done are shown as what they are. The page loads
nothing from anywhere. It begins with what was found, and with what did not hold; how it was made comes last.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from resformer.experiments import (
    provenance,
    sections,
    tables_claims,
    tables_cost,
    tables_dots,
    tables_paper,
    tables_scaling,
)
from resformer.experiments.chart import Chart, figure
from resformer.experiments.curves import PAPER_WINDOW_STEPS
from resformer.experiments.heat import lambda_maps
from resformer.experiments.markup import Markup, tag, typeset
from resformer.experiments.report_curves import build_charts, layer_charts, slots
from resformer.experiments.results import SEED_NOISE_NATS, clean, collect
from resformer.experiments.runs import Run, read_runs
from resformer.experiments.sections import Colours
from resformer.experiments.style import CSS, JS
from resformer.train.files import write_atomic, write_json

REPORT_FILE, RESULTS_FILE, PICTURE_FILE = "report.html", "results.json", "report.png"
_LONG = 100  # characters of a headline that is set smaller
_MOST_TEXTS = 4  # samples that are shown without being asked for


def write_report(out: Path | str) -> Path:
    """Write report.html, results.json and report.png for the suite in `out` and return the path of report.html.

    Raises UserError when `out` holds no suite.
    """
    from resformer.experiments.picture import write_picture

    out = Path(out)
    runs = read_runs(out)
    results = collect(out, runs)
    colours = slots(results["runs"], results["baseline"])
    charts = build_charts(runs, results, colours)
    write_json(out / RESULTS_FILE, clean(results))
    write_picture(out / PICTURE_FILE, charts, results)
    write_atomic(out / REPORT_FILE, page(runs, results, charts, colours))
    return out / REPORT_FILE


def page(runs: Sequence[Run], results: dict[str, Any], charts: dict[str, Chart], colours: Colours) -> str:
    """The whole document."""
    scale = f" at {results['scale']}" if results["scale"] else ""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", f"{results['suite']}{scale} - resformer"),
        tag("style", Markup(CSS)),
    )
    main = tag(
        "main",
        _opening(runs, results),
        _notice(results),
        sections.tiles(results),
        _claims(results),
        tables_paper.section(results, colours),
        _results(results, colours),
        tables_scaling.scaling_section(results, colours),
        _curves(results, charts, colours),
        tables_scaling.critical_section(results, colours),
        _mixing(results, colours),
        _measures(results, colours),
        _split(results, colours, "domain"),
        _split(results, colours, "task"),
        _cost(results, colours),
        tag("section", tag("h2", "What this does not prove"), tables_cost.limits(results)),
        provenance.section(runs, results),
        _texts(results, colours),
    )
    body = tag("body", main, tag("script", Markup(JS)))
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _opening(runs: Sequence[Run], results: dict[str, Any]) -> Markup:
    scale = f" at scale {results['scale']}" if results["scale"] else ""
    title = f" \u00b7 {results['title']}" if results["title"] else ""
    cost = f"{tables_cost.in_words(results)}. {provenance.fairness(runs)} Evidence: {results['evidence']}."
    return tag(
        "header",
        tag("p", f"resformer \u00b7 suite {results['suite']}{scale}{title}", class_="eyebrow"),
        tag("h1", results["headline"], class_="long" if len(results["headline"]) > _LONG else None),
        tag("p", results["question"], class_="question") if results["question"] else None,
        tag("p", cost, class_="lead"),
        tables_claims.verdict_chips(results),
    )


def _notice(results: dict[str, Any]) -> Markup | None:
    if results["complete"]:
        return None
    parts = []
    if results["missing"]:
        total = results["cost"]["runs"]
        named = f"Still open: {', '.join(_open(results))}."
        parts.append(tag("p", tag("b", f"{total - len(results['missing'])} of {total} runs are finished. "), named))
        if results["command"]:
            parts.append(tag("p", "Finish with ", tag("code", results["command"]), "."))
    failed = [(r["name"], one) for r in results["runs"] for one in r["seeds"] if one["state"] == "failed"]
    for name, one in failed:
        seed = f", seed {one['seed']}" if len(results["seeds"]) > 1 else ""
        parts.append(tag("p", tag("b", f"Failed: {name}{seed}, at step {one['step']:,}. "), one["failure"]))
    if results["loss_note"]:
        parts.append(tag("p", tag("b", "Not scored. "), results["loss_note"]))
    return tag("div", *parts, class_="notice", role="note")


def _open(results: dict[str, Any]) -> list[str]:
    """Runs that are not finished; with their seeds where others of them are."""
    found = []
    for r in results["runs"]:
        seeds = [str(one["seed"]) for one in r["seeds"] if one["state"] != "finished"]
        if seeds:
            which = f" (seed{'s' * (len(seeds) > 1)} {', '.join(seeds)})" if len(seeds) < len(r["seeds"]) else ""
            found.append(f"{r['name']}{which}")
    return found


def _section(title: str, text: object, *content: object) -> Markup:
    return tag("section", tag("h2", title), tag("p", text, class_="intro") if text else None, *content)


def _claims(results: dict[str, Any]) -> Markup | None:
    table = tables_claims.table(results)
    if table is None:
        return None
    text = "The suite states these before anything runs; what did not hold stands first. "
    if len(results["seeds"]) > 1:
        text += (
            "A verdict is a paired t-test over seeds at 5\u202f% for all claims together (Holm); the interval is for "
            "each difference alone, and a claim may be undecided though its interval is free of zero. Undecided means "
            "that nothing was shown, either way."
        )
    else:
        text += (
            "One seed gives no interval, so all are undecided: what is said is which way they point, and whether by "
            f"more than the {SEED_NOISE_NATS} nats that another seed may change."
        )
    return _section("Claims", text, table)


def _results(results: dict[str, Any], colours: Colours) -> Markup:
    scored = "the whole validation split" if _full(results) else "what the training loop validates, for every run"
    base, several = results["baseline"], len(results["seeds"]) > 1
    with_seeds = (
        "With several seeds all numbers are means; differences are taken seed by seed, and the bar is their 95\u202f% "
        "interval with a tick for each seed. "
        if several
        else ""
    )
    apart = (
        "Where a run differs from the baseline in more than the variant (size, window, learning rate, ...), it is "
        "compared with the run of the baseline's variant that shares all that, as its row says. "
        if any(r["against"] not in (None, base) for r in results["runs"])
        else ""
    )
    noise = (
        "Evaluation \u00b1 is how far another draw of validation documents would move a difference, and no word on "
        "another seed. "
        if any(r["evaluation_noise"] for r in results["runs"])
        else ""
    )
    text = (
        f"Loss on {scored}, as the plain mean of the domains. Lower is better; bpb is bits per byte of raw text. "
        f"{with_seeds}{noise}{apart}"
        f"Data saved: a run that ends below the {base} had its final loss earlier, and saves the tokens after that; "
        f"one that ends above never has it, and needs more tokens than the {base} for the loss that it ends with."
    )
    return _section("Results", text, sections.results_table(results, colours))


def _full(results: dict[str, Any]) -> bool:
    return any((r["validation"] or {}).get("full") for r in results["runs"])


def _curves(results: dict[str, Any], charts: dict[str, Chart], colours: Colours) -> Markup:
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
    bands = " Line: mean over seeds; band: from the lowest to the highest of them." if len(results["seeds"]) > 1 else ""
    texts = {
        "validation": f"Circles mark where a run reaches the {base}'s final loss: the tokens to the right of its "
        f"circle are saved.{part}{bands}",
        "relative": f"Both curves as the {window}{short}, subtracted at equal steps"
        f"{' of the same seed' if bands else ''}. The paper compares methods by this figure.",
        "training": "The steep beginning is cut off.",
    }
    return tag(
        "section",
        tag("h2", "Curves"),
        tag("p", "Point at a chart to read values; press a name to hide its curve.", class_="intro needs-js"),
        sections.legend(results["runs"], colours),
        tag(
            "div",
            tables_dots.figure(results, colours),
            *(figure(charts[key], texts[key]) for key in texts),
            class_="charts",
        ),
    )


def _mixing(results: dict[str, Any], colours: Colours) -> Markup | None:
    maps = lambda_maps(results, colours)
    if maps is None:
        return None
    text = (
        "How much of the first layer's value V_1 (or of the source that a run's options name) and of its own value V_n "
        "each layer puts into attention, after training. Layer 1 has nothing to mix; runs without such a pair are not "
        "shown."
    )
    return _section("What each layer mixes", typeset(text), maps)


def _measures(results: dict[str, Any], colours: Colours) -> Markup | None:
    charts = layer_charts(results, colours)
    if not charts:
        return None
    text = (
        "What an analysis of the trained models found, by layer, on texts of the validation split "
        "(docs/analysis.md says how each is defined)."
    )
    return _section(
        "Inside the models",
        text,
        sections.legend(results["runs"], colours),
        tag("div", *(figure(chart) for chart in charts), class_="charts small"),
    )


def _split(results: dict[str, Any], colours: Colours, key: str) -> Markup | None:
    table = sections.split_table(results, colours, key)
    if table is None:
        return None
    whom = f"the {results['baseline']}"
    if any(r["against"] not in (None, results["baseline"]) for r in results["runs"]):
        whom = "the run that each is compared with"
    if key == "domain":
        text = f"Validation loss in nats per token, with the difference to {whom} below."
        return _section("By domain", f"{text} Blue cells are better than it, orange ones worse.", table)
    text = f"Zero-shot accuracy on lm-eval's tasks and their plain mean, with the difference to {whom} below."
    return _section("Tasks", f"{text} Blue cells are better than it, orange ones worse.", table)


def _cost(results: dict[str, Any], colours: Colours) -> Markup | None:
    table = tables_cost.table(results, colours)
    if table is None:
        return None
    text = (
        "FLOPs are three forward passes a training token, by the model's own accounting. Hours are those of training "
        "steps alone, on a machine that other runs may have shared."
    )
    return _section("Cost", text, table)


def _texts(results: dict[str, Any], colours: Colours) -> Markup | None:
    found = sections.samples(results, colours)
    if found is None:
        return None
    seed = ", all of the first seed" if len(results["seeds"]) > 1 else ""
    text = (
        f"The same prompt, the same sampling seed, one continuation each{seed} and no picking. "
        "Models of this size do not write sense."
    )
    count = sum(bool(r["sample"]) for r in results["runs"])
    if count > _MOST_TEXTS:
        found = tag("details", tag("summary", f"Texts of {count} runs"), found)
    return _section("In their own words", text, found)
