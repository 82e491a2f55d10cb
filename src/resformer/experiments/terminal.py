"""The results as a table for the terminal, ending with the path of the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from resformer.experiments.markup import compact, finite, number, percent, signed
from resformer.experiments.results import more_tokens


def results_table(results: dict[str, Any]) -> Table:
    """One row a run, the same numbers as in the report."""
    title = Text(f"suite {results['suite']}: validation loss in nats per token ({results['evidence']})")
    table = Table(
        title=title, title_justify="left", title_style="", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1)
    )
    table.add_column("run", overflow="fold", min_width=14)
    for column in ("loss", "nats", "%", "tokens", "params", "KV B/tok", "tok/s"):
        table.add_column(column, justify="right", no_wrap=True)
    best = min((r["validation"]["loss"] for r in results["runs"] if r["validation"]), default=None)
    for r in results["runs"]:
        validation, difference = r["validation"] or {}, r["difference"] if r["name"] != results["baseline"] else None
        style = "bold" if validation and validation["loss"] == best else ""
        name = r["name"] if r["state"] == "finished" else f"{r['name']} ({r['step']}/{r['steps'] or '?'} steps)"
        table.add_row(
            Text(name),
            number(validation.get("loss")),
            signed(difference["nats"]) if difference else "",
            signed(100 * difference["share"], 1) if difference else "",
            _tokens(r),
            compact(r["parameters"]),
            number(r["kv_bytes_per_token"], 0),
            number(r["tokens_per_second"], 0),
            style=style,
        )
    return table


def _tokens(r: dict[str, Any]) -> str:
    """Training tokens for the same loss, against the baseline: less than it needs, or more."""
    saved = r["data_saved"] or {}
    share = finite(saved.get("share"))
    if share is None:
        return ""
    return percent(-share if share >= 0 else more_tokens(saved, r["train_tokens"]), 0, sign=True)


def print_results(results: dict[str, Any], report: Path, console: Console | None = None) -> None:
    """The table, the headline, and the path of the report as the last line, never folded so that it can be copied."""
    console = console or Console()
    console.print()
    console.print(results_table(results))
    if any(_tokens(r) for r in results["runs"]):
        console.print(Text(f"tokens: training tokens for the same loss, against the {results['baseline']}"))
    if results["loss_note"]:
        console.print(Text(results["loss_note"]), style="bold red", soft_wrap=True)
    console.print(Text(results["headline"]), style="bold", soft_wrap=True)
    console.print(Text("Curves, samples and the limits of all this, as a page:"))
    console.print(Text(str(report)), soft_wrap=True)
