"""The results as a table for the terminal, ending with the path of the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from resformer.experiments.markup import compact, finite, number, percent, signed


def results_table(results: dict[str, Any]) -> Table:
    """One row a run, the same numbers as in the report."""
    title = Text(f"suite {results['suite']}: validation loss in nats per token ({results['evidence']})")
    table = Table(
        title=title, title_justify="left", title_style="", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1)
    )
    table.add_column("run", overflow="fold", min_width=14)
    for column in ("loss", "nats", "%", "saved", "params", "KV B/tok", "tok/s"):
        table.add_column(column, justify="right", no_wrap=True)
    best = min((r["validation"]["loss"] for r in results["runs"] if r["validation"]), default=None)
    for r in results["runs"]:
        validation, difference = r["validation"] or {}, r["difference"] if r["name"] != results["baseline"] else None
        style = "bold" if validation and validation["loss"] == best else ""
        saved = (r["data_saved"] or {}).get("share")
        name = r["name"] if r["state"] == "finished" else f"{r['name']} ({r['step']}/{r['steps'] or '?'} steps)"
        table.add_row(
            Text(name),
            number(validation.get("loss")),
            signed(difference["nats"]) if difference else "",
            signed(100 * difference["share"], 1) if difference else "",
            percent(saved, 0, sign=True) if finite(saved) is not None else "",
            compact(r["parameters"]),
            number(r["kv_bytes_per_token"], 0),
            number(r["tokens_per_second"], 0),
            style=style,
        )
    return table


def print_results(results: dict[str, Any], report: Path, console: Console | None = None) -> None:
    """The table, the headline, and the path of the report as the last line, never folded so that it can be copied."""
    console = console or Console()
    console.print()
    console.print(results_table(results))
    console.print(Text(results["headline"]), style="bold", soft_wrap=True)
    console.print(Text("Curves, samples and the limits of all this, as a page:"))
    console.print(Text(str(report)), soft_wrap=True)
