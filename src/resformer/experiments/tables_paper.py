"""The paper's table beside ours, and what differs between its setting and this one."""

from __future__ import annotations

from typing import Any

from resformer.experiments import tables_bars
from resformer.experiments.axis import Range
from resformer.experiments.markup import DASH, Markup, breakable, compact, finite, join, number, signed, tag
from resformer.experiments.report_claims import unit, what
from resformer.experiments.results import interval
from resformer.experiments.sections import Colours, sub, swatch

_LOOKS = {"same sign": "better", "other sign": "worse", "open": "open"}


def section(results: dict[str, Any], colours: Colours) -> Markup | None:
    """None for a suite that says nothing of the paper."""
    groups = [_table(results, colours, on) for on in dict.fromkeys(one["on"] for one in results["paper"])]
    notes = [tag("li", note) for note in results["notes"]]
    if not groups and not notes:
        return None
    return tag(
        "section",
        tag("h2", "Beside the paper" if groups else "How this differs from the paper"),
        tag("p", _intro(results), class_="intro") if groups else None,
        _settings(results) if groups or results["paper_setting"] else None,
        *groups,
        tag("ul", *notes, class_="limits") if notes else None,
    )


def _intro(results: dict[str, Any]) -> str:
    found = [one["agrees"] for one in results["paper"] if one["agrees"]]
    counts = ", ".join(
        f"{count} {word}" for word in ("same sign", "other sign", "open") if (count := found.count(word))
    )
    tally = f" Of {len(found)} differences that the paper reports: {counts}." if counts else ""
    return (
        "What the paper reports, and what was measured here. The scales differ (model, tokens, corpus, tokenizer), so "
        "losses themselves are not to be compared, and differences only in sign and order: gaps of small and short "
        f"runs are usually several times larger. Open: our interval holds zero, or one seed gives none.{tally}"
    )


def _settings(results: dict[str, Any]) -> Markup:
    facts = [("Paper", results["paper_setting"] or "not stated"), ("Here", ours(results))]
    return tag("dl", *(join(tag("dt", key), tag("dd", value)) for key, value in facts), class_="facts")


def ours(results: dict[str, Any]) -> str:
    """Our setting in the terms in which the paper's is told."""
    sizes = sorted({size for r in results["runs"] if (size := finite(r["parameters"])) is not None})
    tokens = sorted({t for r in results["runs"] if r["finished"] and (t := finite(r["train_tokens"])) is not None})
    domains = list(dict.fromkeys(d for r in results["runs"] if r["validation"] for d in r["validation"]["domains"]))
    parts = []
    if sizes:
        parts.append(f"{_span(sizes)} parameters")
    if tokens:
        parts.append(f"{_span(tokens)} training tokens")
    if domains:
        parts.append(f"loss is the mean of {', '.join(domains)}")
    count = len(results["seeds"])
    parts.append(f"{count} seed{'s' * (count != 1)}")
    return "; ".join(parts)


def _span(values: list[float]) -> str:
    low, high = compact(values[0]), compact(values[-1])
    return low if low == high else f"{low} to {high}"


def _table(results: dict[str, Any], colours: Colours, on: str) -> Markup:
    rows = [one for one in results["paper"] if one["on"] == on]
    reported = [d for one in rows if (d := one["paper_difference"]) is not None]
    at = tables_bars.range_of([one["difference"] for one in rows], reported)
    heads = ("Run", "Paper", "its difference", "Here", "our difference", "", "", "Source")
    cells = [tag("th", text, scope="col", class_="left" if text == "Source" else None) for text in heads]
    if at is not None:
        legend = f"{unit(on)}; dot: ours, diamond: the paper's"
        cells[5] = tag("th", tables_bars.axis(at, legend), scope="col", class_="left bars")
    body = [_row(one, results["baseline"], colours[one["run"]], at, on) for one in rows]
    table = tag("table", tag("thead", tag("tr", *cells)), tag("tbody", *body), class_="results paper-table")
    title = tag("h3", what(on)[:1].upper() + what(on)[1:])
    return join(title, tag("div", table, class_="card scroll"))


def _row(one: dict[str, Any], baseline: str, slot: int, at: Range | None, on: str) -> Markup:
    digits = 2 if unit(on) == "perplexity" else 3
    found, word = one["difference"], one["agrees"]
    apart = sub(f"against {one['against']}") if one["against"] not in (None, baseline) else None
    ours_is = join(DASH)
    if found:
        ours_is = join(tag("b", signed(found["mean"], digits)), sub(interval(found, digits) or "no interval"))
    look = tables_bars.look(found, higher=on.startswith("tasks/")) if found else "open"
    bar = tables_bars.bar(found, at, look, paper=one["paper_difference"])
    return tag(
        "tr",
        tag("th", swatch(slot), breakable(one["run"]), apart, scope="row"),
        tag("td", number(one["paper"], digits), data_label="Paper"),
        tag("td", signed(one["paper_difference"], digits), data_label="its difference"),
        tag("td", number(one["ours"], digits), data_label="Here"),
        tag("td", ours_is, data_label="our difference", class_="number"),
        tag("td", bar, class_="bars"),
        tag("td", tag("span", word, class_=f"chip {_LOOKS[word]}") if word else "", _points(one), class_="left"),
        tag("td", one["source"], class_="left source"),
    )


def _points(one: dict[str, Any]) -> Markup | None:
    """Which way an open difference points."""
    if one["agrees"] != "open" or not one["difference"]["mean"] or not one["paper_difference"]:
        return None
    same = (one["difference"]["mean"] < 0) == (one["paper_difference"] < 0)
    return sub(f"points the {'same' if same else 'other'} way")
