"""The map of learned coefficients: a table coloured by value, as in the figure of arXiv 2410.17897v5."""

from __future__ import annotations

from typing import Any

from resformer.experiments.markup import Markup, finite, join, number, tag, typeset
from resformer.experiments.sections import swatch

_SCALE_ENDS = ((238, 243, 247), (0, 84, 140))  # coefficient 0 -> the largest; negative ones take the second pair
_NEGATIVE_ENDS = ((249, 240, 232), (186, 76, 0))


def _heat_colour(value: float, largest: float) -> tuple[str, str]:
    """Background and text colour of a cell."""
    pale, full = _SCALE_ENDS if value >= 0 else _NEGATIVE_ENDS
    share = min(abs(value) / largest, 1.0) ** 0.8 if largest else 0.0
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(pale, full, strict=True))
    luminance = 0.299 * red + 0.587 * green + 0.114 * blue
    return f"rgb({red},{green},{blue})", "#ffffff" if luminance < 140 else "#1d2024"


def lambda_maps(results: dict[str, Any], layers: dict[str, int], colours: dict[str, int]) -> Markup | None:
    """Both coefficients by layer (numbered from 1) for every run that mixes; `layers` is run name -> layers of the
    model.
    """
    rows = [r for r in results["runs"] if r["lambdas"] and r["lambdas"].get("layers")]
    if not rows:
        return None
    values = [
        abs(v) for r in rows for key in ("first", "own") for v in r["lambdas"].get(key, []) if finite(v) is not None
    ]
    largest = max(values, default=1.0)
    maps = [
        _lambda_map(r, max(layers.get(r["name"], 0), *r["lambdas"]["layers"]), largest, colours[r["name"]])
        for r in rows
    ]
    pale, full = (f"rgb({','.join(map(str, end))})" for end in _SCALE_ENDS)
    scale = tag(
        "p", "0", tag("i", style=f"background:linear-gradient(90deg,{pale},{full})"), number(largest, 2), class_="scale"
    )
    return join(tag("div", *maps, class_="maps"), scale)


def _lambda_map(r: dict[str, Any], count: int, largest: float, slot: int) -> Markup:
    found = r["lambdas"]
    at = {layer: i for i, layer in enumerate(found["layers"])}
    body = []
    for key, label, spoken in (("first", "V_1", "first value"), ("own", "V_n", "own value")):
        cells = []
        for layer in range(1, count + 1):
            values = found.get(key) or []
            value = finite(values[at[layer]]) if layer in at and at[layer] < len(values) else None
            if value is None:
                cells.append(tag("td", "\u00b7", class_="raw", title=f"layer {layer} is not mixed"))
                continue
            background, text = _heat_colour(value, largest)
            style = f"background:{background};color:{text}"
            cells.append(tag("td", number(value, 2), style=style, title=f"layer {layer}, {spoken}: {value:.4f}"))
        body.append(tag("tr", tag("th", typeset(label), scope="row"), *cells))
    head = tag("tr", tag("th", "layer"), *(tag("th", n, scope="col") for n in range(1, count + 1)))
    table = tag("table", tag("thead", head), tag("tbody", *body), class_="heat")
    step = f" after step {found['step']:,}" if isinstance(found.get("step"), int) and r["state"] != "finished" else ""
    return tag("div", tag("h3", swatch(slot), r["name"], step), tag("div", table, class_="scroll"), class_="card map")
