"""The map of learned coefficients: a table coloured by value, as in the figure of arXiv 2410.17897v5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from resformer.experiments.markup import Markup, finite, join, number, tag, typeset
from resformer.experiments.sections import swatch

_PALEST = 0.05  # so that a coefficient of 0 still is a cell
# From here on the page's style sheet gives a cell the text colour of full cells: in the dark scheme, and in both.
_MIDDLE, _FULL = 0.55, 0.72


def _cell_look(value: float, largest: float) -> tuple[str, str | None]:
    """Style and class of a cell: an opacity over the page's own card colour, so that it fits the light and the dark
    scheme.
    """
    share = min(abs(value) / largest, 1.0) ** 0.8 if largest else 0.0
    opacity = _PALEST + (1 - _PALEST) * share
    hue = "heat" if value >= 0 else "heat-negative"
    named = "full" if opacity >= _FULL else "middle" if opacity >= _MIDDLE else None
    return f"background:rgba(var(--{hue}),{opacity:.2f})", named


def lambda_maps(results: dict[str, Any], colours: Mapping[str, int]) -> Markup | None:
    """Both coefficients by layer (numbered from 1) for every run that mixes, as means over its seeds."""
    rows = [r for r in results["runs"] if r["lambdas"]]
    if not rows:
        return None
    values = [v for r in rows for key in ("first", "own") for c in r["lambdas"][key] if (v := finite(c)) is not None]
    largest = max((abs(v) for v in values), default=1.0)
    maps = [_lambda_map(r, largest, colours[r["name"]]) for r in rows]
    scale = tag("p", "0", _scale("heat"), number(largest, 2), class_="scale")
    if any(v < 0 for v in values):
        scale = join(scale, tag("p", "0", _scale("heat-negative"), number(-largest, 2), class_="scale"))
    return join(tag("div", *maps, class_="maps"), scale)


def _scale(hue: str) -> Markup:
    return tag("i", style=f"background:linear-gradient(90deg,rgba(var(--{hue}),{_PALEST}),rgb(var(--{hue})))")


def _lambda_map(r: dict[str, Any], largest: float, slot: int) -> Markup:
    found = r["lambdas"]
    count = max(int(r["layers"] or 0), *found["layers"])
    at = {layer: i for i, layer in enumerate(found["layers"])}
    body = []
    for key, label, spoken in (("first", "V_1", "first value"), ("own", "V_n", "own value")):
        cells = []
        for layer in range(1, count + 1):
            values = found[key]
            value = finite(values[at[layer]]) if layer in at and at[layer] < len(values) else None
            if value is None:
                cells.append(tag("td", "\u00b7", class_="raw", title=f"layer {layer} is not mixed"))
                continue
            style, named = _cell_look(value, largest)
            cells.append(
                tag("td", number(value, 2), style=style, class_=named, title=f"layer {layer}, {spoken}: {value:.4f}")
            )
        body.append(tag("tr", tag("th", typeset(label), scope="row"), *cells))
    head = tag("tr", tag("th", "layer"), *(tag("th", n, scope="col") for n in range(1, count + 1)))
    table = tag("table", tag("thead", head), tag("tbody", *body), class_="heat")
    step = f" after step {found['step']:,}" if isinstance(found.get("step"), int) and r["state"] != "finished" else ""
    seeds = tag("span", f"mean of {found['seeds']} seeds", class_="aside") if found["seeds"] > 1 else None
    return tag(
        "div", tag("h3", swatch(slot), r["name"], step, seeds), tag("div", table, class_="scroll"), class_="card map"
    )
