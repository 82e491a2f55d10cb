"""The results as a table for the terminal, ending with the path of the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from resformer.experiments.markup import compact, finite, number, percent, signed
from resformer.experiments.results import interval

_SHORT = 16  # characters of a name beside which there is room for all columns


def results_table(results: dict[str, Any]) -> Table:
    """One row a run, the same numbers as in the report; with several seeds the interval takes the place of cache and
    speed, and long names that of speed, so that it fits 80 columns.
    """
    several = len(results["seeds"]) > 1
    names = [_name(r) for r in results["runs"]]
    last = ["95 % of nats"] if several else ["KV B/tok", "tok/s"] if max(map(len, names)) <= _SHORT else ["KV B/tok"]
    title = Text(f"suite {results['suite']}: validation loss in nats per token ({results['evidence']})")
    table = Table(
        title=title, title_justify="left", title_style="", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1)
    )
    table.add_column("run", overflow="fold", min_width=14)
    for column in ("loss", "nats", "%", "tokens", "params", *last):
        table.add_column(column, justify="right", no_wrap=True)
    losses = [
        loss for r in results["runs"] if r["validation"] and (loss := finite(r["validation"]["loss"])) is not None
    ]
    best = min(losses, default=None)
    for name, r in zip(names, results["runs"], strict=True):
        validation, difference = r["validation"] or {}, r["difference"]
        style = "bold" if validation and validation["loss"] is not None and validation["loss"] == best else ""
        shown = {
            "95 % of nats": interval(difference) if difference else "",
            "KV B/tok": number(r["kv_bytes_per_token"], 0),
            "tok/s": number(r["tokens_per_second"], 0),
        }
        table.add_row(
            Text(name),
            number(validation.get("loss")),
            signed(difference["mean"]) if difference else "",
            signed(100 * difference["share"], 1) if difference else "",
            _tokens(r),
            compact(r["parameters"]),
            *(Text(shown[column]) for column in last),
            style=style,
        )
    return table


def _name(r: dict[str, Any]) -> str:
    if r["state"] == "finished":
        return str(r["name"])
    if any(one["state"] == "failed" for one in r["seeds"]):
        return f"{r['name']} (failed)"
    if len(r["seeds"]) > 1:
        return f"{r['name']} ({r['finished']}/{len(r['seeds'])} seeds)"
    return f"{r['name']} ({r['step']}/{r['steps'] or '?'} steps)"


def _tokens(r: dict[str, Any]) -> str:
    """Training tokens for the same loss, against the run it is compared with: less than it needs, or more."""
    more = finite((r["data_saved"] or {}).get("more"))
    return "" if more is None else percent(more, 0, sign=True)


def print_results(results: dict[str, Any], report: Path, console: Console | None = None) -> None:
    """The table, the claims, the headline, and the path of the report as the last line, never folded so that it can be
    copied.
    """
    console = console or Console()
    console.print()
    console.print(results_table(results))
    if any(_tokens(r) for r in results["runs"]):
        console.print(Text(f"tokens: training tokens for the same loss, against the {results['baseline']}"))
    _print_claims(results, console)
    if results["loss_note"]:
        console.print(Text(results["loss_note"]), style="bold red", soft_wrap=True)
    console.print(Text(results["headline"]), style="bold", soft_wrap=True)
    console.print(Text("Curves, samples and the limits of all this, as a page:"))
    console.print(Text(str(report)), soft_wrap=True)


def _print_claims(results: dict[str, Any], console: Console) -> None:
    """How many claims have each verdict; what did not hold, by name."""
    counts = ", ".join(f"{count} {verdict}" for verdict, count in results["verdicts"].items() if count)
    if not counts:
        return
    console.print(Text(f"claims: {counts}"), soft_wrap=True)
    for claim in results["claims"]:
        if claim["verdict"] == "not held":
            found = claim["difference"]
            text = f"not held: {claim['statement']} on {claim['on']}: {signed(found['mean'])} ({claim['reason']})"
            console.print(Text(text), style="bold red", soft_wrap=True)
