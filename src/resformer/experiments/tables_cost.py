"""What the runs took, and what a reader must not conclude from them."""

from __future__ import annotations

from typing import Any

from resformer.experiments.markup import Markup, breakable, compact, duration, finite, join, number, tag
from resformer.experiments.results import SEED_NOISE_NATS
from resformer.experiments.sections import Colours, swatch


def in_words(results: dict[str, Any]) -> str:
    """ "12 runs (4 of 3 seeds each), 1.02M training tokens each, 16 min of training in all"."""
    rows, seeds = results["runs"], len(results["seeds"])
    tokens = sorted({r["train_tokens"] for r in rows if r["finished"] and r["train_tokens"]})
    each = f", {compact(tokens[0])} training tokens each" if len(tokens) == 1 else ""
    spent = f", {duration(results['seconds_total'])} of training in all" if results["seconds_total"] else ""
    split = f" ({len(rows)} with {seeds} seeds)" if seeds > 1 and results["cost"]["runs"] == seeds * len(rows) else ""
    return f"{results['cost']['runs']} runs{split}{each}{spent}"


def table(results: dict[str, Any], colours: Colours) -> Markup | None:
    """Tokens, FLOPs, hours and speed of one run of each name, and of all runs; None before any step."""
    cost, rows = results["cost"], [r for r in results["runs"] if r["train_tokens"]]
    if not rows:
        return None
    heads = ("Run", "Runs", "Tokens each", "FLOPs each", "Hours each", "Tokens/s")
    head = tag("tr", *(tag("th", text, scope="col") for text in heads))
    body = [
        tag(
            "tr",
            tag("th", swatch(colours[r["name"]]), breakable(r["name"]), scope="row"),
            tag("td", len(r["seeds"])),
            tag("td", compact(r["train_tokens"])),
            tag("td", _flops(r["train_flops"])),
            tag("td", _hours(r["train_seconds"])),
            tag("td", number(r["tokens_per_second"], 0)),
        )
        for r in rows
    ]
    whole = cost["hours"] * 3600 if finite(cost["hours"]) is not None else None
    cells = (cost["runs"], compact(cost["tokens"]), _flops(cost["flops"]), _hours(whole), "")
    together = tag("th", "All together", scope="row")
    every = tag("tr", together, *(tag("td", cell) for cell in cells), class_="total")
    return tag(
        "div", tag("table", tag("thead", head), tag("tbody", *body, every), class_="compact cost"), class_="card scroll"
    )


def _flops(value: object) -> str:
    known = finite(value)
    return "\u2013" if known is None else f"{known:.2e}".replace("e+", "e")


def _hours(seconds: object) -> str:
    known = finite(seconds)
    return "\u2013" if known is None else f"{known / 3600:,.3g}"


def limits(results: dict[str, Any]) -> Markup:
    """What a reader must not conclude; the numbers in it are the measured ones."""
    sizes = [r["parameters"] for r in results["runs"] if finite(r["parameters"])]
    tokens = [r["train_tokens"] for r in results["runs"] if finite(r["train_tokens"])]
    scale = "Small models and little text."
    if sizes and tokens:
        scale = f"{compact(max(sizes))} parameters and {compact(max(tokens))} training tokens at most."
    items = [
        join(
            tag("b", "Scale. "),
            scale,
            " The paper's figures are for 82M to 1.6B parameters and 20B tokens and more; gaps between such small and "
            "early runs are usually several times larger, and orders can change (in the paper SVFormer leads early "
            "and is overtaken later).",
        ),
        _seeds(results),
        _many(results),
        _noise(results),
        join(
            tag("b", "One learning rate. "),
            "All runs use the recipe's learning rate unless their settings below say another; none was tuned for its "
            "own, the baseline included.",
        ),
        join(
            tag("b", "Data saved "),
            "is read off validations on the way, while the learning rate was still meant for the full length: runs "
            "planned for fewer tokens would do better, for the method and for the baseline.",
        ),
        join(tag("b", "Speed "), "was measured while other runs shared the machine. It is not a benchmark."),
    ]
    return tag("ul", *(tag("li", item) for item in items if item is not None), class_="limits")


def _seeds(results: dict[str, Any]) -> Markup:
    count = len(results["seeds"])
    if count < 2:
        return join(
            tag("b", "One seed. "),
            "There is no interval here, and so no claim can be held or refuted. In runs of "
            "2.7M parameters with three seeds a difference moved from seed to seed with a standard deviation of 0.038 "
            f"nats, so one below {SEED_NOISE_NATS} nats shows nothing.",
        )
    return join(
        tag("b", f"{count} seeds. "),
        "A seed changes initial weights and data order in all runs alike, and runs are compared seed by seed. The "
        f"interval is Student's t over {count} differences: it takes them for roughly normal, and says nothing of "
        "another corpus, size or learning rate. Verdicts allow for the number of claims (Holm), intervals do not.",
    )


def _many(results: dict[str, Any]) -> Markup | None:
    others = sum(r["name"] != results["baseline"] for r in results["runs"])
    if others < 5:
        return None
    return join(
        tag("b", "The best of many. "),
        f"The lowest of {others} runs is lowest partly by luck: run again, it may end higher, and another may be the "
        "lowest.",
    )


def _noise(results: dict[str, Any]) -> Markup | None:
    found = [noise for r in results["runs"] if (noise := r["evaluation_noise"])]
    if not found:
        return None
    return join(
        tag("b", "Evaluation noise "),
        f"is how far another draw of the {found[0]['documents']:,} validation documents would move a difference "
        "between two trained models (95\u202f%). It is not the noise of training: it cannot tell whether another seed "
        "would turn the difference round.",
    )
