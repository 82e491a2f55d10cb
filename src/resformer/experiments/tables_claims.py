"""The claims as a table with a forest plot: what did not hold first, then what is undecided, then what held."""

from __future__ import annotations

from typing import Any

from resformer.experiments import tables_bars
from resformer.experiments.axis import Range
from resformer.experiments.markup import Markup, breakable, join, signed, tag
from resformer.experiments.report_claims import VERDICTS, what
from resformer.experiments.results import SEED_NOISE_NATS, interval

_COLOURS = {"held": "better", "not held": "worse", "undecided": "open", "not run": "open"}


def verdict_chips(results: dict[str, Any]) -> Markup | None:
    """How many claims have each verdict, as a line under the headline; None without claims."""
    counts = {verdict: count for verdict, count in results["verdicts"].items() if count}
    if not counts:
        return None
    total = sum(counts.values())
    head = tag("li", f"{total} claim{'s' * (total != 1)} stated before the runs:", class_="said")
    chips = [
        tag("li", tag("b", count), f" {verdict}", class_=f"chip {_COLOURS[verdict]}")
        for verdict, count in counts.items()
    ]
    return tag("ul", head, *chips, class_="chips")


def table(results: dict[str, Any]) -> Markup | None:
    """All claims; None without any. A row with the axis stands wherever the unit changes."""
    if not results["claims"]:
        return None
    ranges = {unit: _range(results["claims"], unit) for unit in {claim["unit"] for claim in results["claims"]}}
    body: list[Markup] = []
    unit = None
    for verdict in VERDICTS:
        found = [claim for claim in results["claims"] if claim["verdict"] == verdict]
        units = list(dict.fromkeys(claim["unit"] for claim in found))
        for claim in sorted(found, key=lambda claim: units.index(claim["unit"])):
            at = ranges[claim["unit"]]
            if claim["unit"] != unit and at is not None and claim["difference"]:
                unit = claim["unit"]
                body.append(_axis_row(at, unit))
            body.append(_row(claim, at))
    difference = "Difference, 95 % interval" if len(results["seeds"]) > 1 else "Difference"
    paper = any(claim["paper"] for claim in results["claims"])
    heads = ("Claim", difference, "", "Verdict", "What the paper reports" if paper else "")
    head = tag("tr", *(tag("th", text, scope="col", class_="left" if text else None) for text in heads))
    return tag(
        "div",
        tag("table", tag("thead", head), tag("tbody", *body), class_="claims"),
        class_="card scroll",
    )


def _range(claims: list[dict[str, Any]], unit: str) -> Range | None:
    of_unit = [claim for claim in claims if claim["unit"] == unit]
    borders = [-claim["margin"] for claim in of_unit if claim["margin"] and claim["difference"]]
    return tables_bars.range_of([claim["difference"] for claim in of_unit], borders)


def _axis_row(at: Range, unit: str) -> Markup:
    words = f"{unit}; left of zero: the first named is lower"
    return tag("tr", tag("td", ""), tag("td", tables_bars.axis(at, words)), *(tag("td", "") for _ in range(3)),
               class_="axis-row")  # fmt: skip


def _row(claim: dict[str, Any], at: Range | None) -> Markup:
    found, digits = claim["difference"], 3
    cells = [
        tag("th", *_statement(claim), scope="row"),
        tag("td", tables_bars.bar(found, at, _COLOURS[claim["verdict"]], border=-claim["margin"]), class_="bars"),
        tag("td", *_number(found, digits), class_="number"),
        tag("td", tag("span", claim["verdict"], class_=f"chip {_COLOURS[claim['verdict']]}"), _sub(_reason(claim)),
            class_="verdict left"),
        tag("td", claim["paper"] or "", class_="left paper", data_label="Paper" if claim["paper"] else None),
    ]  # fmt: skip
    return tag("tr", *cells)


def _statement(claim: dict[str, Any]) -> list[Markup | None]:
    relation = " ends below " if claim["kind"] == "less" else " does not end below "
    margin = f"by {claim['margin']:g} {claim['unit']} or more; " if claim["margin"] else ""
    if claim["on"].startswith("tasks/"):
        relation = relation.replace("end", "score")
    text = join(breakable(claim["left"]), tag("span", relation, class_="relation"), breakable(claim["right"]))
    return [text, _sub(f"{margin}{what(claim['on'])}")]


def _number(found: dict[str, Any] | None, digits: int) -> list[Markup | None]:
    if found is None:
        return [_sub("not measured")]
    count = len(found["by_seed"])
    seeds = f"{count} seed{'s' * (count != 1)}"
    inside = interval(found, digits)
    return [tag("b", signed(found["mean"], digits)), _sub(inside or "no interval"), _sub(seeds)]


def _reason(claim: dict[str, Any]) -> str:
    """Why the verdict is what it is, and for an undecided claim which way it points and how far, or what it takes."""
    parts = [claim["reason"]]
    found = claim["difference"]
    if claim["verdict"] == "undecided" and found:
        if claim["points"]:
            parts.append(f"points {claim['points']}")
        if len(found["by_seed"]) == 1 and claim["unit"] == "nats":
            size = abs(found["mean"] + claim["margin"])
            parts.append(
                f"{size / SEED_NOISE_NATS:.1f} times the {SEED_NOISE_NATS} nats that another seed may change"
                if size >= SEED_NOISE_NATS
                else f"less than the {SEED_NOISE_NATS} nats that another seed may change"
            )
        elif found["seeds_needed"]:
            parts.append(f"about {found['seeds_needed']} seeds would show a difference of this size")
    return "; ".join(parts)


def _sub(text: str) -> Markup:
    return tag("span", text, class_="sub")
