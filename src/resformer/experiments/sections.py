"""The parts of the report, each a function from results to safe HTML. What is shown is in `results`; how it looks is in
`style`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from resformer.experiments import chart, tables_bars
from resformer.experiments.markup import (
    DASH,
    Markup,
    breakable,
    compact,
    finite,
    join,
    number,
    percent,
    signed,
    tag,
    typeset,
)
from resformer.experiments.results import SEED_NOISE_NATS, clearly, comparable, interval

Colours = Mapping[str, int]


def swatch(slot: int) -> Markup:
    """A piece of line with the series' marker, for legends and tables."""
    line = tag("line", x1=0, x2=22, y1=6, y2=6, stroke_dasharray=chart.dash(slot))
    mark = None if slot == chart.FAINT else chart.marker(slot, 11, 6, 4)
    picture = tag("svg", line, mark, width=22, height=12, viewBox="0 0 22 12", aria_hidden="true")
    return tag("span", picture, class_=f"swatch {chart.ink(slot)}")


def legend(rows: list[dict[str, Any]], colours: Colours) -> Markup:
    """A button for each coloured run, and how many are grey."""
    items = [
        tag(
            "li",
            tag(
                "button",
                swatch(colours[r["name"]]),
                r["name"],
                type="button",
                aria_pressed="true",
                data_name=r["name"],
                disabled=True,
            ),
        )
        for r in rows
        if colours[r["name"]] != chart.FAINT
    ]
    grey = sum(colours[r["name"]] == chart.FAINT for r in rows)
    if grey:
        text = f"{grey} other runs, grey: in colour are the lowest and the highest ends"
        items.append(tag("li", swatch(chart.FAINT), text, class_="said"))
    return tag("ul", *items, class_="legend")


def tiles(results: dict[str, Any]) -> Markup | None:
    """The few numbers worth remembering; None before there is a comparison."""
    rows = comparable(results["runs"])
    if not rows:
        return None
    best = min(rows, key=lambda r: r["difference"]["mean"])
    plain = all(r["against"] == results["baseline"] for r in rows)
    below, other = sum(clearly(r["difference"]) == "below" for r in rows), f"the {results['baseline']}"
    inside = interval(best["difference"])
    sure = f" (95\u202f% interval {inside})" if inside else ""
    how = "by its interval" if inside else f"by {SEED_NOISE_NATS} nats or more"
    whom = other if plain else "the run they are compared with"
    found = [
        (signed(best["difference"]["mean"]), f"nats per token, {best['name']} against the {best['against']}{sure}"),
        (f"{below} of {len(rows)}", f"other runs end clearly below {whom} ({how})"),
    ]
    saved = best["data_saved"] or {}
    if (share := finite(saved.get("share"))) is not None:
        text = f"fewer training tokens until {best['name']} has the {best['against']}'s final loss"
        if share < 0:
            text = f"fewer training tokens until the {best['against']} has {best['name']}'s final loss"
        found.append((percent(abs(share), 0), text))
    ratios = [(r["kv_ratio"], r["name"]) for r in rows if finite(r["kv_ratio"]) is not None]
    if ratios and min(ratios)[0] < 0.999:
        ratio, name = min(ratios)
        loss = next(r["difference"]["mean"] for r in rows if r["name"] == name)
        found.append((percent(ratio), f"of the KV cache is what {name} keeps, at {signed(loss)} nats"))
    return tag("ul", *(tag("li", tag("b", value), tag("span", text)) for value, text in found[:4]), class_="tiles")


def results_table(results: dict[str, Any], colours: Colours) -> Markup:
    """One row a run: loss, difference with its interval, perplexity, data saved, parameters, cache."""
    at = tables_bars.range_of([r["difference"] for r in results["runs"]])
    losses = [
        loss for r in results["runs"] if r["validation"] and (loss := finite(r["validation"]["loss"])) is not None
    ]
    domain = perplexity_domain(results)
    # On a phone the rows become cards and the head is hidden; each cell carries its own label for that.
    head = {
        "Run": "",
        "Validation loss": "nats per token; bits per byte",
        f"Against the {results['baseline']}": "nats; percent" + ("; 95\u202f% interval" if _several(results) else ""),
        **({"Perplexity": f"a token, on {domain}"} if domain else {}),
        "Data saved": "training tokens for the same loss",
        "Parameters": "",
        "KV cache": "bytes per token; ratio",
    }
    heads = [tag("th", name, sub(unit) if unit else None, scope="col") for name, unit in head.items()]
    best = min(losses, default=None)
    body = [
        tag(
            "tr",
            _name_cell(r, colours, len(results["seeds"])),
            *_number_cells(r, results["baseline"], at, best, domain),
        )
        for r in results["runs"]
    ]
    table = tag("table", tag("thead", tag("tr", *heads)), tag("tbody", *body), class_="results")
    return tag("div", table, class_="card scroll")


def perplexity_domain(results: dict[str, Any]) -> str | None:
    """The domain whose perplexity is shown: Wikipedia, as in the paper's main table, if the corpus has it."""
    domains = {d for r in results["runs"] if r["validation"] for d in r["validation"]["domains"]}
    return "wikipedia" if "wikipedia" in domains else None


def _several(results: dict[str, Any]) -> bool:
    return any(r["finished"] > 1 for r in results["runs"])


def _name_cell(r: dict[str, Any], colours: Colours, seeds: int) -> Markup:
    note = None
    failures = [one["failure"] for one in r["seeds"] if one["state"] == "failed"]
    if failures:
        note = sub(f"failed{f' with {len(failures)} of {seeds} seeds' if seeds > 1 else ''}: {failures[0]}")
    elif r["state"] != "finished":
        steps = f" at step {r['step']:,} of {r['steps']:,}" if r["step"] and r["steps"] else ""
        if seeds > 1 and r["finished"]:
            steps = f": {r['finished']} of {len(r['seeds'])} seeds are done"
        note = sub(("not finished" if r["step"] else "not run") + steps)
    elif not r["scored"]:
        note = sub("trained, not scored")
    told = [f"variant {r['variant']}"] if r["variant"] != r["name"] else []
    if seeds == 1 and r["variant"] != r["name"]:
        told.append(f"seed {r['seeds'][0]['seed']}")
    return tag(
        "th",
        swatch(colours[r["name"]]),
        r["name"],
        sub(", ".join(told)) if told else None,
        tag("span", typeset(r["formula"]), class_="formula"),
        note,
        scope="row",
    )


def _number_cells(r: dict[str, Any], baseline: str, at: Any, best: float | None, domain: str | None) -> list[Markup]:
    validation, saved = r["validation"] or {}, r["data_saved"]
    is_base = r["name"] == baseline
    marked = "best" if validation and validation["loss"] is not None and validation["loss"] == best else None
    loss = join(tag("b", number(validation.get("loss")), class_=marked))
    if validation and r["finished"] > 1:
        loss = join(loss, sub(f"{number(validation['low'])} to {number(validation['high'])}"))
    if validation:
        loss = join(loss, sub(f"{number(validation['bits_per_byte'])} bpb"))
    if saved is None:
        data = Markup(DASH)
    elif saved["more"] is None:
        data = join(DASH, sub(saved["reason"]))
    else:
        data = _data_cell(saved, r["train_tokens"], r["against"])
    more = r["parameters_difference"]
    extra = None if is_base or more is None else sub("same" if more == 0 else f"{signed(more, 0)}")
    tables = sub(f"{number(r['token_tables'], 0)} in token tables") if r["token_tables"] else None
    ratio = sub(percent(r["kv_ratio"])) if finite(r["kv_ratio"]) is not None else None
    cells = [
        ("Validation loss", loss),
        (f"Against the {baseline}", _against(r, baseline, at)),
        *([("Perplexity", _perplexity(r, domain))] if domain else []),
        ("Data saved", data),
        ("Parameters", join(number(r["parameters"], 0), extra, tables)),
        ("KV bytes per token", join(number(r["kv_bytes_per_token"], 0), ratio)),
    ]
    return [tag("td", content, data_label=label) for label, content in cells]


def _against(r: dict[str, Any], baseline: str, at: Any) -> Markup:
    """The difference, as far as it is sure."""
    found = r["difference"]
    if found is None:
        return join("baseline" if r["name"] == baseline and r["validation"] else DASH)
    parts: list[Markup | None] = [
        tag("b", signed(found["mean"])),
        tag("span", percent(found["share"], sign=True), class_="aside"),
        sub(interval(found)) if interval(found) else None,
        tables_bars.bar(found, at, tables_bars.look(found)),
    ]
    if (noise := r["evaluation_noise"]) is not None:
        parts.append(sub(f"evaluation \u00b1{number(noise['half_width'])}"))
    if r["against"] != baseline:
        parts.append(sub(f"against {r['against']}"))
    return join(*parts)


def _perplexity(r: dict[str, Any], domain: str) -> Markup:
    found = r["validation"]["domains"].get(domain, {}) if r["validation"] else {}
    return join(number(found.get("perplexity"), 2))


def _data_cell(saved: dict[str, Any], total: float, against: str) -> Markup:
    """Data saved in words: a run that ends above the other never reaches its loss, so the roles change."""
    more, tokens = saved["more"], saved["tokens"]
    ends = signed(100 * saved["low"], 0), signed(100 * saved["high"], 0)
    seeds = sub(f"seeds {ends[0]} to {ends[1]}\u202f%") if ends[0] != ends[1] else None
    after = f" after {compact(tokens)} of {compact(total)}"
    if more < 0:
        where = sub(f"has the {against}'s final loss{after}") if tokens is not None else None
        return join(f"{percent(-more, 0)} saved", where, seeds)
    if more == 0:
        return join("none saved", sub(f"the same final loss as the {against}"))
    where = sub(f"the {against} has this run's final loss{after}") if tokens is not None else None
    return join(f"needs {percent(more, 0)} more", where, seeds)


def sub(text: str) -> Markup:
    """A small second line in a cell."""
    return tag("span", text, class_="sub")


def split_table(results: dict[str, Any], colours: Colours, key: str) -> Markup | None:
    """Losses by "domain" or accuracies by "task", each cell tinted by its difference to the run's counterpart; None
    before any run has some.
    """
    rows = [r for r in results["runs"] if _split(r, key)]
    columns = list(dict.fromkeys(name for r in rows for name in _split(r, key)))
    if not columns:
        return None
    found = {r["name"]: r[f"difference_by_{key}"] for r in rows}
    largest = max((abs(d["mean"]) for table in found.values() for d in table.values() if d), default=0.0)
    body = []
    for r in rows:
        cells = [_split_cell(_split(r, key).get(c), found[r["name"]].get(c), largest, key) for c in columns]
        body.append(tag("tr", tag("th", swatch(colours[r["name"]]), breakable(r["name"]), scope="row"), *cells))
    head = tag("tr", tag("th", "Run", scope="col"), *(tag("th", breakable(c), scope="col") for c in columns))
    return tag("div", tag("table", tag("thead", head), tag("tbody", *body), class_="compact"), class_="card scroll")


def _split(r: dict[str, Any], key: str) -> dict[str, Any]:
    if key == "task":
        return dict(r["tasks"])
    return dict(r["validation"]["domains"]) if r["validation"] else {}


def _split_cell(value: Any, difference: dict[str, Any] | None, largest: float, key: str) -> Markup:
    tint = title = None
    bpb = value.get("bits_per_byte") if isinstance(value, dict) else None
    below = sub(f"{number(bpb, 2)} bpb") if bpb is not None else None
    if difference is not None:
        below = sub(signed(difference["mean"]))
        title = f"95 % interval {interval(difference)}" if interval(difference) else None
        if difference["mean"] and largest:
            side = "better" if (difference["mean"] < 0) == (key == "domain") else "worse"
            tint = f"background:rgba(var(--{side}),calc(var(--tint)*{abs(difference['mean']) / largest:.2f}))"
    shown = value.get("loss") if isinstance(value, dict) else value
    return tag("td", tag("b", number(shown)), below, style=tint, title=title)


def samples(results: dict[str, Any], colours: Colours) -> Markup | None:
    """A continuation by each run, of its first seed."""
    found = []
    for r in results["runs"]:
        text, prompt = (r["sample"] or {}).get("text"), (r["sample"] or {}).get("prompt")
        if isinstance(text, str):
            quote = tag("blockquote", tag("mark", prompt or ""), text)
            found.append(tag("div", tag("h3", swatch(colours[r["name"]]), r["name"]), quote, class_="card sample"))
    return tag("div", *found, class_="samples") if found else None
