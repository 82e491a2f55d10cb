"""The final differences of all runs in one figure: what a suite of many runs is read by."""

from __future__ import annotations

from typing import Any

from resformer.experiments import tables_bars
from resformer.experiments.markup import Markup, breakable, signed, tag
from resformer.experiments.results import interval
from resformer.experiments.sections import Colours, sub, swatch

FEWEST = 5  # other runs from which the figure is worth its place beside the table
_SWEEP = 3  # values of one setting that make a sweep


def order(rows: list[dict[str, Any]], baseline: str) -> list[dict[str, Any]]:
    """The other runs with a difference: in the suite's order when they sweep a setting, else from the lowest."""
    known = [r for r in rows if r["difference"] and r["name"] != baseline]
    return known if is_sweep(known) else sorted(known, key=lambda r: r["difference"]["mean"])


def is_sweep(rows: list[dict[str, Any]]) -> bool:
    """Whether at least three runs of one variant differ in the value of one setting and in nothing else."""
    flat = [(r["variant"], _flat(r["overrides"])) for r in rows]
    for variant, settings in flat:
        for key in settings:
            rest = {k: v for k, v in settings.items() if k != key}
            values = {
                repr(other[key])
                for kind, other in flat
                if kind == variant and key in other and {k: v for k, v in other.items() if k != key} == rest
            }
            if len(values) >= _SWEEP:
                return True
    return False


def _flat(overrides: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in overrides.items():
        if isinstance(value, dict):
            found |= {f"{key}.{name}": inner for name, inner in value.items()}
        else:
            found[key] = value
    return found


def figure(results: dict[str, Any], colours: Colours) -> Markup | None:
    """None for fewer than `FEWEST` other runs."""
    rows = order(results["runs"], results["baseline"])
    at = tables_bars.range_of([r["difference"] for r in rows])
    if len(rows) < FEWEST or at is None:
        return None
    plain = all(r["against"] == results["baseline"] for r in rows)
    body = [
        tag("tr", tag("td", ""), tag("td", tables_bars.axis(at, "nats per token")), tag("td", ""), class_="axis-row")
    ]
    for r in rows:
        found = r["difference"]
        body.append(
            tag(
                "tr",
                tag(
                    "th",
                    swatch(colours[r["name"]]),
                    breakable(r["name"]),
                    None if plain else sub(f"against {r['against']}"),
                    scope="row",
                ),
                tag("td", tables_bars.bar(found, at, tables_bars.look(found)), class_="bars"),
                tag("td", tag("b", signed(found["mean"])), sub(interval(found)) if interval(found) else None),
            )
        )
    several = any(len(r["difference"]["by_seed"]) > 1 for r in rows)
    intervals = "Dot: mean over seeds. Bar: its 95\u202f% interval. Ticks: each seed. " if several else ""
    sorting = "In the suite's order." if is_sweep(rows) else "From the lowest to the highest."
    whom = f"the {results['baseline']}" if plain else "the run that each is compared with"
    return tag(
        "figure",
        tag("h3", f"Final validation loss minus that of {whom}"),
        tag("table", tag("tbody", *body), class_="dots"),
        tag(
            "figcaption",
            f"{intervals}{sorting} Blue is below zero{' with its whole interval' if several else ''}, "
            f"orange above{', grey is neither' if several else ''}.",
        ),
        class_="chart hero",
        id="chart-dots",
    )
