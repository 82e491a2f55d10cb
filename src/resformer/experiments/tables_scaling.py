"""Two optional parts of the report: what is saved (the paper's figure 6), and where SVFormer is overtaken (its figure
14).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from resformer.experiments.axis import Frame, decimals, spread, ticks
from resformer.experiments.chart import FAINT, SLOTS, dash, ink, marker
from resformer.experiments.markup import DASH, Markup, breakable, compact, join, number, percent, signed, tag
from resformer.experiments.sections import Colours, sub, swatch

_LABELS = {"parameters": "parameters", "tokens": "training tokens"}
_ROOM = 1.12  # how far the axis reaches beyond the outermost points, as a factor
_FIT_POINTS = 60


def scaling_section(results: dict[str, Any], colours: Colours) -> Markup | None:
    """None for a suite that has no method at three sizes, or three numbers of tokens, beside the baseline's."""
    found = results["scaling"]
    if not found:
        return None
    panels = [*found["parameters"], *found["tokens"]]
    text = (
        "How large a method has to be, or how many tokens it needs, for the loss that the baseline has at each of its "
        "points: read off straight lines between the method's own points in ln(loss) over ln(size). Extrapolated: "
        "beyond the sizes that the method was trained at, a guess. The fit behind the paper's figures is not known, "
        "so that a difference to them may be one of method."
    )
    slots = _slots(panels, colours)
    parts = [join(tag("h3", _title(panel)), _savings_table(panel, slots)) for panel in panels]
    return tag(
        "section",
        tag("h2", "What is saved"),
        tag("p", text, class_="intro"),
        tag("div", *(_figure(panel, i, slots) for i, panel in enumerate(panels)), class_="charts"),
        *parts,
        tag("h3", "What the paper claims (arXiv 2410.17897)"),
        _paper_table(found["paper"]),
    )


def _slots(panels: Sequence[dict[str, Any]], colours: Colours) -> dict[str, int]:
    """The colours that methods have on the rest of the page, where each has one of its own there; the baseline's first
    everywhere.
    """
    bases = {panel["baseline"] for panel in panels}
    others = list(dict.fromkeys(one["name"] for panel in panels for one in panel["curves"] if one["name"] not in bases))
    page = [colours.get(name, FAINT) for name in others]
    if {0, FAINT} & set(page) or len(set(page)) < len(page):
        page = [min(i, SLOTS - 1) for i in range(1, len(others) + 1)]
    return dict.fromkeys(bases, 0) | dict(zip(others, page, strict=True))


def _title(panel: dict[str, Any]) -> str:
    if panel["axis"] == "parameters":
        return f"Parameters saved, at {compact(panel['tokens'])} training tokens"
    return f"Data saved, at {compact(panel['parameters'])} parameters"


def _savings_table(panel: dict[str, Any], slots: Mapping[str, int]) -> Markup:
    label = _LABELS[panel["axis"]]
    heads = ("Method", f"{panel['baseline']}: {label}", "its loss", f"{label} for that loss", "Saved")
    body = []
    for saved in panel["savings"]:
        name = tag("th", swatch(slots[saved["method"]]), breakable(saved["method"]), scope="row")
        if saved["reason"]:
            body.append(
                tag(
                    "tr",
                    name,
                    tag("td", f"No number: {saved['reason']}.", colspan=4, class_="left", style="grid-column:1/-1"),
                )
            )
        body += [_savings_row(one, name, len(saved["seeds"]), heads) for one in saved["points"]]
    head = tag("tr", *(tag("th", text, scope="col") for text in heads))
    return tag("div", tag("table", tag("thead", head), tag("tbody", *body), class_="results"), class_="card scroll")


def _savings_row(one: dict[str, Any], name: Markup, seeds: int, heads: Sequence[str]) -> Markup:
    share = one["share"]
    if share is None:
        saved = join(DASH, sub("the method's curve is too flat to tell"))
    else:
        words = tag("b", percent(share)) if share >= 0 else tag("b", f"needs {percent(-share)} more")
        low, high = (DASH if end is None else signed(100 * end, 1) for end in (one["low"], one["high"]))
        inside = sub(f"95\u202f% interval {low} to {high}\u202f%, {seeds} seeds") if seeds > 1 else sub("one seed")
        if seeds > 1 and one["low"] is None:
            inside = sub(f"{seeds} seeds do not bound it")
        saved = join(words, sub("extrapolated") if one["extrapolated"] else None, inside)
    cells = [join(compact(one["x"]), sub(one["run"])), number(one["loss"]), compact(one["needed"]), saved]
    return tag("tr", name, *(tag("td", c, data_label=text) for c, text in zip(cells, heads[1:], strict=True)))


def _paper_table(paper: Sequence[dict[str, Any]]) -> Markup:
    heads = ("Version", "Parameters saved", "Data saved", "Source")
    body = [
        tag(
            "tr",
            tag("th", one["version"], sub(one["of"]), scope="row"),
            *(tag("td", _claimed(one[key])) for key in ("parameters", "tokens")),
            tag("td", one["source"], class_="left"),
        )
        for one in paper
    ]
    head = tag("tr", *(tag("th", text, scope="col", class_="left" if text == "Source" else None) for text in heads))
    return tag("div", tag("table", tag("thead", head), tag("tbody", *body), class_="compact"), class_="card scroll")


def _claimed(share: float | None) -> str:
    """With the digits that the paper prints."""
    if share is None:
        return DASH
    return f"{100 * share:g}\u202f%" if share >= 0 else f"needs {-100 * share:g}\u202f% more"


def _figure(panel: dict[str, Any], index: int, slots: Mapping[str, int]) -> Markup:
    """Points, fitted laws, and from each of the baseline's points a line to where the method has that loss."""
    names = [tag("li", swatch(slots[one["name"]]), one["name"], class_="said") for one in panel["curves"]]
    held = f"{compact(panel['tokens'])} tokens" if panel["axis"] == "parameters" else None
    title = f"Loss over {_LABELS[panel['axis']]}, at {held or compact(panel['parameters']) + ' parameters'}"
    return tag(
        "figure",
        tag("h3", title),
        tag("ul", *names, class_="legend"),
        tag("div", _draw(panel, slots, narrow=False), _draw(panel, slots, narrow=True), class_="plot"),
        tag("figcaption", _caption(panel)),
        class_="chart",
        id=f"chart-scaling-{index}",
    )


def _caption(panel: dict[str, Any]) -> Markup:
    left_out = [name for one in panel["curves"] for name in one["left_out"]]
    gaps = any(not one["extrapolated"] for saved in panel["savings"] for one in saved["points"])
    lines = "Dotted: from a point of the baseline to where a method has its loss. " if gaps else ""
    laws = [join("; " if i else None, _law_in_words(one)) for i, one in enumerate(panel["curves"])]
    also = f" Left out, as large as another run of the same method: {', '.join(left_out)}." if left_out else None
    return join(f"Smooth curves are fitted power laws. {lines}", *laws, ".", also)


def _law_in_words(one: dict[str, Any]) -> Markup:
    fit = one["fit"]
    if fit is None:
        return join(f"{one['name']}: no law fitted", f", as {one['reason']}" if one["reason"] else None)
    v, (low, high) = fit["values"], fit["intervals"]["b"]
    level = f" {signed(v['c'])[0]} {number(abs(v['c']))}" if v.get("c") else None
    ends = f"{number(low)} to {number(high)}" if math.isfinite(high) else f"from {number(low)}, open above"
    power = join("L = ", f"{v['a']:.3g} x", tag("sup", number(-v["b"])), level)
    return join(f"{one['name']}: ", power, f" (exponent, 95\u202f% interval: {ends})")


def _draw(panel: dict[str, Any], slots: Mapping[str, int], *, narrow: bool) -> Markup:
    """One drawing; its frame is in log10 of the size."""
    f = _frame(panel, narrow=narrow)
    curves = sorted(panel["curves"], key=lambda one: slots[one["name"]] == 0)
    parts = [_axes(panel, f), *(_gaps(saved, f, slots[saved["method"]]) for saved in panel["savings"])]
    for one in curves:
        slot = slots[one["name"]]
        points = [(f.x(math.log10(x)), f.y(y)) for x, y in zip(one["x"], one["loss"], strict=True)]
        parts.append(
            tag("path", d=_path(_law(one, f) or points), class_=f"line {ink(slot)}", stroke_dasharray=dash(slot))
        )
        parts += [marker(slot, x, y) for x, y in points]
    return tag(
        "svg",
        tag("title", _title(panel)),
        *parts,
        None if narrow else _names(curves, slots, f),
        viewBox=f"0 0 {f.width} {f.height}",
        role="img",
        class_="narrow" if narrow else "wide",
    )


def _frame(panel: dict[str, Any], *, narrow: bool) -> Frame:
    xs = [x for one in panel["curves"] for x in one["x"]]
    ys = [y for one in panel["curves"] for y in one["loss"]]
    pad = 0.08 * (max(ys) - min(ys)) or 0.05
    width, height, right = (358, 300, 14) if narrow else (512, 340, 112)
    x0, x1 = math.log10(min(xs) / _ROOM), math.log10(max(xs) * _ROOM)
    y0, y1 = min(ys) - pad, max(ys) + pad
    return Frame(width=width, height=height, left=44, right=right, upper=26, lower=40, x0=x0, x1=x1, y0=y0, y1=y1)


def _axes(panel: dict[str, Any], f: Frame) -> Markup:
    bottom, end = f.height - f.lower, f.width - f.right
    parts = []
    values = ticks(f.y0, f.y1, 5)
    for value, text in zip(values, decimals(values, least=1), strict=True):
        y = f"{f.y(value):.1f}"
        parts.append(tag("line", x1=f.left, x2=end, y1=y, y2=y, class_="grid"))
        parts.append(tag("text", text, x=f.left - 7, y=f"{f.y(value) + 4:.1f}", text_anchor="end", class_="tick"))
    for value in round_sizes(10**f.x0, 10**f.x1):
        x = f"{f.x(math.log10(value)):.1f}"
        parts.append(tag("line", x1=x, x2=x, y1=bottom, y2=bottom + 4, class_="axis"))
        parts.append(tag("text", _round(value), x=x, y=bottom + 18, text_anchor="middle", class_="tick"))
    parts.append(tag("line", x1=f.left, x2=end, y1=bottom, y2=bottom, class_="axis"))
    parts.append(tag("text", "nats per token, mean of the domains", x=0, y=12, class_="label"))
    label = f"{_LABELS[panel['axis']]}, logarithmic"
    parts.append(tag("text", label, x=end, y=f.height - 4, text_anchor="end", class_="label"))
    return join(*parts)


def round_sizes(low: float, high: float, most: int = 7) -> list[float]:
    """Round numbers inside `low..high` for a logarithmic axis, at most `most` of them."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found: list[float] = []
    for parts in ((1, 1.5, 2, 3, 4, 5, 7), (1, 2, 5), (1, 3), (1,)):
        found = [part * 10.0**power for power in powers for part in parts if low <= part * 10.0**power <= high]
        if len(found) <= most:
            break
    return found[:: math.ceil(len(found) / most) or 1]


def _round(value: float) -> str:
    size, letter = next(((s, n) for s, n in ((1e9, "B"), (1e6, "M"), (1e3, "k")) if value >= s), (1.0, ""))
    return f"{value / size:g}{letter}"


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _law(one: dict[str, Any], f: Frame) -> list[tuple[float, float]] | None:
    """The fitted law between the outermost points; None where there is none that can be drawn."""
    if one["fit"] is None:
        return None
    v = one["fit"]["values"]
    xs = np.geomspace(one["x"][0], one["x"][-1], _FIT_POINTS)
    ys = v["a"] * xs ** -v["b"] + v.get("c", 0.0)
    if not np.isfinite(ys).all():
        return None
    return [(f.x(math.log10(x)), f.y(y)) for x, y in zip(xs.tolist(), ys.tolist(), strict=True)]


def _gaps(saved: dict[str, Any], f: Frame, slot: int) -> Markup:
    parts = []
    for one in saved["points"]:
        if one["extrapolated"] or one["needed"] is None:
            continue
        y, ends = f"{f.y(one['loss']):.1f}", [f"{f.x(math.log10(x)):.1f}" for x in (one["x"], one["needed"])]
        told = f"{saved['method']}: {percent(one['share'])} at {compact(one['x'])}"
        parts.append(tag("line", x1=ends[0], x2=ends[1], y1=y, y2=y, class_=f"drop {ink(slot)}"))
        parts.append(tag("circle", tag("title", told), cx=ends[1], cy=y, r=3, class_=f"cross {ink(slot)}"))
    return join(*parts)


def _names(curves: Sequence[dict[str, Any]], slots: Mapping[str, int], f: Frame) -> Markup:
    at = spread([f.y(one["loss"][-1]) for one in curves], 15, f.upper + 4, f.height - f.lower - 2)
    x = f.width - f.right + 8
    texts = [one["name"] if len(one["name"]) <= 15 else one["name"][:14] + "\u2026" for one in curves]
    return join(
        *(
            tag("text", text, x=x, y=f"{y + 4:.1f}", class_=f"end {ink(slots[one['name']])}")
            for one, text, y in zip(curves, texts, at, strict=True)
        )
    )


_KINDS = {"crossed": "crossed", "extrapolated": "extrapolated", "never": "not in sight", "behind": "behind throughout"}


def critical_section(results: dict[str, Any], colours: Colours) -> Markup | None:
    """None for a suite without a run that reads one value for all layers."""
    found = results["critical_points"]
    if not found:
        return None
    text = (
        "From which step a model that reads one value for all layers stays behind: where its training loss minus the "
        f"other run's, as the mean of {found[0]['window']} steps, turns positive for good (95\u202f% interval). "
        "The paper finds it ahead early and overtaken later at every length of sequences, the later the longer they "
        f"are (v1 figure 14). Extrapolated: by the straight line through the last {found[0]['last']} steps. Not in "
        "sight: ahead at the end, and that line does not surely rise; a run of few steps ends in the lead."
    )
    heads = ("Run", "Sequence length", "Overtaken", "At step")
    lefts = {"Run", "Overtaken"}
    head = tag("tr", *(tag("th", h, scope="col", class_="left" if h in lefts else None) for h in heads))
    body = [_critical_row(one, colours, several=len(results["seeds"]) > 1) for one in found]
    table = tag("table", tag("thead", head), tag("tbody", *body), class_="compact")
    return tag(
        "section",
        tag("h2", "Where one value for all layers is overtaken"),
        tag("p", text, class_="intro"),
        tag("div", table, class_="card scroll"),
    )


def _critical_row(one: dict[str, Any], colours: Colours, *, several: bool) -> Markup:
    shown, rate = one["kind"] in ("crossed", "extrapolated"), one["tokens_per_step"]
    at = join(DASH)
    if shown:
        low, high = (DASH if end is None else number(end, 0) for end in (one["low"], one["high"]))
        tokens = None if rate is None else sub(f"{compact(one['tokens'])} tokens")
        at = join(tag("b", number(one["step"], 0)), sub(f"{low} to {high}"), tokens)
    seeds = None
    if several:
        each = [f"{s['seed']} {_KINDS[s['kind']]}{_at_step(s)}" for s in one["by_seed"]]
        seeds = sub(f"mean of {len(one['seeds'])}; seed {', '.join(each)}")
    return tag(
        "tr",
        tag("th", swatch(colours[one["run"]]), breakable(one["run"]), sub(f"against {one['against']}"), scope="row"),
        tag("td", number(one["sequence_length"], 0)),
        tag("td", _KINDS[one["kind"]], sub(f"in {number(one['steps'], 0)} steps"), seeds, class_="left verdict"),
        tag("td", at),
    )


def _at_step(found: dict[str, Any]) -> str:
    return f" at {number(found['step'], 0)}" if found["kind"] in ("crossed", "extrapolated") else ""
