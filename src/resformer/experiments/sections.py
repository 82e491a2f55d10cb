"""The parts of the report, each a function from results to safe HTML. What is shown is in `results`; how it looks is in
`style`.
"""

from __future__ import annotations

from typing import Any

from resformer.experiments import chart
from resformer.experiments.markup import (
    DASH,
    Markup,
    breakable,
    compact,
    duration,
    finite,
    join,
    number,
    percent,
    signed,
    tag,
    typeset,
)
from resformer.experiments.results import SEED_NOISE_NATS, more_tokens


def slots(rows: list[dict[str, Any]], baseline: str) -> dict[str, int]:
    """Run name -> colour slot: 0 is the baseline, the others follow in the suite's order."""
    others = [r["name"] for r in rows if r["name"] != baseline]
    return {baseline: 0} | {name: i + 1 for i, name in enumerate(others)}


def swatch(slot: int) -> Markup:
    """A piece of line with the series' marker, for legends and tables."""
    line = tag("line", x1=0, x2=22, y1=6, y2=6, stroke_dasharray=chart.dash(slot))
    picture = tag(
        "svg", line, chart.marker(slot, 11, 6, 4), width=22, height=12, viewBox="0 0 22 12", aria_hidden="true"
    )
    return tag("span", picture, class_=f"swatch s{chart.paint(slot)}")


def legend(rows: list[dict[str, Any]], colours: dict[str, int]) -> Markup:
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
    ]
    return tag("ul", *items, class_="legend")


def tiles(results: dict[str, Any]) -> Markup | None:
    """The few numbers worth remembering; None before there is a comparison."""
    rows = [r for r in results["runs"] if r["difference"] and r["name"] != results["baseline"]]
    if not rows:
        return None
    best = min(rows, key=lambda r: r["difference"]["nats"])
    below = sum(r["difference"]["nats"] <= -SEED_NOISE_NATS for r in rows)
    found = [
        (signed(best["difference"]["nats"]), f"nats per token, {best['name']} against the {results['baseline']}"),
        (
            f"{below} of {len(rows)}",
            f"other runs end clearly below the {results['baseline']} (by {SEED_NOISE_NATS} nats or more)",
        ),
    ]
    saved = best["data_saved"] or {}
    if (share := finite(saved.get("share"))) is not None:
        text = f"fewer training tokens until {best['name']} has the {results['baseline']}'s final loss"
        if share < 0:
            text = f"fewer training tokens until the {results['baseline']} has {best['name']}'s final loss"
        found.append((percent(abs(share), 0), text))
    ratios = [(r["kv_ratio"], r["name"]) for r in rows if finite(r["kv_ratio"]) is not None]
    if ratios and min(ratios)[0] < 0.999:
        ratio, name = min(ratios)
        loss = next(r["difference"]["nats"] for r in rows if r["name"] == name)
        found.append((percent(ratio), f"of the KV cache is what {name} keeps, at {signed(loss)} nats"))
    return tag("ul", *(tag("li", tag("b", value), tag("span", text)) for value, text in found[:4]), class_="tiles")


def _bar(nats: float | None, low: float, high: float) -> Markup | None:
    """A bar from zero to the difference on a scale shared by all rows."""
    span = high - low
    if nats is None or span <= 0:
        return None
    start, end = (min(nats, 0.0) - low) / span, (max(nats, 0.0) - low) / span
    fill = tag(
        "i", class_="worse" if nats > 0 else None, style=f"left:{100 * start:.1f}%;width:{100 * (end - start):.1f}%"
    )
    return tag("span", fill, class_="bar", style=f"--zero:{-100 * low / span:.1f}%")


def results_table(results: dict[str, Any], colours: dict[str, int]) -> Markup:
    """One row a run: loss, difference, data saved, parameters, cache, speed."""
    differences = [d["nats"] for r in results["runs"] if (d := r["difference"])]
    low, high = min([0.0, *differences]), max([0.0, *differences])
    losses = [r["validation"]["loss"] for r in results["runs"] if r["validation"]]
    head = (
        "Run",
        "Validation loss",
        f"Against the {results['baseline']}",
        "Data saved",
        "Parameters",
        "KV cache",
        "Speed",
    )
    body = []
    for r in results["runs"]:
        body.append(
            tag(
                "tr",
                _name_cell(r, colours),
                *_number_cells(r, results["baseline"], low, high, min(losses, default=None)),
            )
        )
    # On a phone the rows become cards and the head is hidden; each cell carries its own label for that.
    units = (
        "",
        "nats per token; bits per byte",
        "nats; percent",
        "training tokens for the same loss",
        "",
        "bytes per token; ratio",
        "tokens per second",
    )
    heads = [
        tag("th", name, tag("span", unit, class_="sub") if unit else None, scope="col")
        for name, unit in zip(head, units, strict=True)
    ]
    return tag(
        "div",
        tag("table", tag("thead", tag("tr", *heads)), tag("tbody", *body), class_="results"),
        class_="card scroll",
    )


def _name_cell(r: dict[str, Any], colours: dict[str, int]) -> Markup:
    note = None
    if r["state"] != "finished":
        steps = f" at step {r['step']:,} of {r['steps']:,}" if r["step"] and r["steps"] else ""
        note = tag("span", ("not finished" if r["step"] else "not run") + steps, class_="sub")
    elif not r["scored"]:
        note = tag("span", "trained, not scored", class_="sub")
    variant = (
        tag("span", f"variant {r['variant']}, seed {r['seed']}", class_="sub") if r["variant"] != r["name"] else None
    )
    return tag(
        "th",
        swatch(colours[r["name"]]),
        r["name"],
        variant,
        tag("span", typeset(r["formula"]), class_="formula"),
        note,
        scope="row",
    )


def _number_cells(r: dict[str, Any], baseline: str, low: float, high: float, best: float | None) -> list[Markup]:
    validation, difference, saved = r["validation"] or {}, r["difference"], r["data_saved"]
    is_base = r["name"] == baseline
    loss = tag(
        "b", number(validation.get("loss")), class_="best" if validation and validation["loss"] == best else None
    )
    if is_base or difference is None:
        against = join("baseline" if is_base and validation else DASH)
    else:
        against = join(
            tag("b", signed(difference["nats"])), tag("span", percent(difference["share"], sign=True), class_="aside")
        )
        against = join(against, _bar(difference["nats"], low, high))
    if saved is None:
        data = Markup(DASH)
    elif saved["share"] is None:
        data = join(DASH, tag("span", saved["reason"], class_="sub"))
    else:
        data = _data_cell(saved, r["train_tokens"], baseline)
    more = r["parameters_difference"]
    extra = None if is_base or more is None else "same" if more == 0 else f"{signed(more, 0)}"
    tables = f"{number(r['token_tables'], 0)} in token tables" if r["token_tables"] else None
    cells = [
        ("Validation loss", join(loss, _sub(f"{number(validation['bits_per_byte'])} bpb" if validation else None))),
        (f"Against the {baseline}", against),
        ("Data saved", data),
        ("Parameters", join(number(r["parameters"], 0), _sub(extra), _sub(tables))),
        (
            "KV bytes per token",
            join(number(r["kv_bytes_per_token"], 0), _sub(percent(r["kv_ratio"]) if finite(r["kv_ratio"]) else None)),
        ),
        ("Tokens per second", join(number(r["tokens_per_second"], 0))),
    ]
    return [tag("td", content, data_label=label) for label, content in cells]


def _data_cell(saved: dict[str, Any], total: float, baseline: str) -> Markup:
    """Data saved in words: a run that ends above the baseline never reaches its loss, so the roles change."""
    at = compact(saved["tokens"])
    if saved["share"] > 0:
        return join(
            f"{percent(saved['share'], 0)} saved",
            _sub(f"has the {baseline}'s final loss after {at} of {compact(total)}"),
        )
    if saved["share"] == 0:
        return join("none saved", _sub(f"the same final loss as the {baseline}"))
    more = percent(more_tokens(saved, total), 0)
    return join(f"needs {more} more", _sub(f"the {baseline} has this run's final loss after {at} of {compact(total)}"))


def _sub(text: str | None) -> Markup | None:
    return None if text is None else tag("span", text, class_="sub")


def domain_table(results: dict[str, Any], colours: dict[str, int]) -> Markup | None:
    """Validation loss by domain, each cell tinted by its difference to the baseline; None before any run has
    finished.
    """
    rows = [r for r in results["runs"] if r["validation"]]
    domains = list(dict.fromkeys(d for r in rows for d in r["validation"]["domains"]))
    if not domains:
        return None
    largest = max((abs(v) for r in rows for v in r["difference_by_domain"].values() if v), default=0.0)
    body = []
    for r in rows:
        cells = []
        for domain in domains:
            found = r["validation"]["domains"].get(domain, {})
            nats = r["difference_by_domain"].get(domain) if r["name"] != results["baseline"] else None
            tint = None
            if nats and largest:
                side = "better" if nats < 0 else "worse"
                tint = f"background:rgba(var(--{side}),calc(var(--tint)*{abs(nats) / largest:.2f}))"
            sub = _sub(signed(nats) if nats is not None else f"{number(found.get('bits_per_byte'), 2)} bpb")
            cells.append(tag("td", tag("b", number(found.get("loss"))), sub, style=tint))
        body.append(tag("tr", tag("th", swatch(colours[r["name"]]), breakable(r["name"]), scope="row"), *cells))
    head = tag("tr", tag("th", "Run", scope="col"), *(tag("th", d, scope="col") for d in domains))
    return tag("div", tag("table", tag("thead", head), tag("tbody", *body), class_="compact"), class_="card scroll")


def claims_table(results: dict[str, Any]) -> Markup | None:
    if not results["claims"]:
        return None
    body = []
    for claim in results["claims"]:
        statement = tag("th", f"{claim['left']} < {claim['right']}", scope="row")
        body.append(
            tag(
                "tr",
                statement,
                tag("td", signed(claim["difference"])),
                tag("td", claim["verdict"], _sub(claim["evidence"]), class_="verdict"),
            )
        )
    head = tag(
        "tr", *(tag("th", text, scope="col") for text in ("Claim, on validation loss", "Difference in nats", "Verdict"))
    )
    return tag("div", tag("table", tag("thead", head), tag("tbody", *body), class_="compact"), class_="card scroll")


def samples(results: dict[str, Any], colours: dict[str, int]) -> Markup | None:
    found = []
    for r in results["runs"]:
        text, prompt = (r["sample"] or {}).get("text"), (r["sample"] or {}).get("prompt")
        if isinstance(text, str):
            quote = tag("blockquote", tag("mark", prompt or ""), text)
            found.append(tag("div", tag("h3", swatch(colours[r["name"]]), r["name"]), quote, class_="card sample"))
    return tag("div", *found, class_="samples") if found else None


def limits(results: dict[str, Any]) -> Markup:
    """What a reader must not conclude; the numbers in it are the measured ones."""
    sizes = [r["parameters"] for r in results["runs"] if finite(r["parameters"])]
    tokens = [r["train_tokens"] for r in results["runs"] if finite(r["train_tokens"])]
    scale = "Small models and little text."
    if sizes and tokens:
        scale = f"{compact(max(sizes))} parameters and {compact(max(tokens))} training tokens."
    items = [
        join(
            tag("b", "Scale. "),
            scale,
            " The paper's figures are for 82M to 1.6B parameters and 20B tokens and more; gaps between such small and "
            "early runs are usually several times larger, and orders can change (in the paper SVFormer leads early "
            "and is overtaken later).",
        ),
        join(
            tag("b", "One seed. "),
            "There is no interval here. In an earlier trial of about this size another seed moved the final loss by "
            f"0.007 to 0.027 nats, so differences below {SEED_NOISE_NATS} nats are called undecided.",
        ),
        join(
            tag("b", "One learning rate. "),
            "All runs use the recipe's learning rate; none was tuned for its own, the baseline included.",
        ),
        join(
            tag("b", "Data saved "),
            "is read off validations on the way, while the learning rate was still meant for the full length: runs "
            "planned for fewer tokens would do better, for the method and for the baseline.",
        ),
        join(tag("b", "Speed "), "was measured while other runs shared the machine. It is not a benchmark."),
    ]
    return tag("ul", *(tag("li", item) for item in items), class_="limits")


def cost(results: dict[str, Any]) -> str:
    """ "4 runs, 1.02M training tokens each, 16 min of training in all"."""
    tokens = sorted({r["train_tokens"] for r in results["runs"] if r["state"] == "finished" and r["train_tokens"]})
    each = f", {compact(tokens[0])} training tokens each" if len(tokens) == 1 else ""
    spent = f", {duration(results['seconds_total'])} of training in all" if results["seconds_total"] else ""
    return f"{len(results['runs'])} runs{each}{spent}"
