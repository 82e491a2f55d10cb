"""What the commands print: plain numbers in, tables on the terminal out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from resformer.evaluate.contract.suite import Result

Item = TypeVar("Item")


def show(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a table; numbers are aligned to the right."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    cells = [list(row) for row in rows]
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        numeric = all(isinstance(row[index], int | float) for row in cells)
        table.add_column(column, justify="right" if numeric else "left")
    for row in cells:
        table.add_row(*(text(cell) for cell in row))
    Console(soft_wrap=True).print(table)


def text(cell: Any) -> str:
    """A cell as text: thousands separated, four decimals (digits from a million on), lists joined; empty becomes a
    dash.
    """
    if isinstance(cell, bool) or cell is None:
        return {True: "yes", False: "no", None: "-"}[cell]
    if isinstance(cell, int):
        return f"{cell:,}"
    if isinstance(cell, float):
        return f"{cell:,.4f}" if abs(cell) < 1e6 else f"{cell:.4g}"
    if isinstance(cell, str):
        return cell or "-"
    return ", ".join(map(str, cell)) or "-"


def show_rows(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows with equal keys; the keys are the columns."""
    columns = list(rows[0])
    show(title, [column.replace("_", " ") for column in columns], [[row[column] for column in columns] for row in rows])


def show_plan(head: Mapping[str, Any], totals: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a plan: what the model costs, then what each layer owns, reads, sends and stores."""
    groups = totals["parameters_by_group"]
    parts = ", ".join(f"{name} {count:,}" for name, count in groups.items() if count)
    print(f"{head['recipe']}, variant {head['variant']}: {head['formula']}")
    print(f"  parameters          {totals['parameters']:,} ({parts})")
    if totals["active_parameters"] != totals["parameters"]:
        print(f"  active parameters   {totals['active_parameters']:,} (a token's own experts only)")
    print(f"  FLOPs per token     {totals['flops_per_token']:,} forward, at {totals['sequence_length']:,} tokens")
    print(
        f"  KV bytes per token  {totals['kv_bytes_per_token']:,} in fp32, {totals['kv_ratio']:.4f} of the Transformer's"
    )
    if totals["kv_bytes"] != totals["kv_bytes_per_token"] * totals["sequence_length"]:
        print(f"  KV bytes            {totals['kv_bytes']:,} at {totals['sequence_length']:,} tokens, windows included")
    if totals["token_kv_bytes"] is not None:
        per_token, table = totals["token_kv_bytes"] / totals["sequence_length"], totals["token_table_bytes"]
        print(f"  of a 'tokens' cache {per_token:,.0f} per token, and one table of {table:,} bytes (docs/serving.md)")
    print()
    show_rows("", rows)


def show_corpus(found: Mapping[str, Any]) -> None:
    """Print what `resformer.data.inspect` returned."""
    about = f"vocabulary {found['vocab_size']:,}, {found['dtype']} tokens; verified: {found['verify']}"
    print(f"{found['directory']}: {about}")
    rows = [
        (
            name,
            domain["weight"],
            domain["documents"],
            domain["splits"]["train"]["tokens"],
            domain["splits"]["validation"]["tokens"],
            domain["bytes_per_token"],
        )
        for name, domain in found["domains"].items()
    ]
    show("", ["domain", "weight", "documents", "training tokens", "validation tokens", "bytes per token"], rows)
    steps = [0, 6, 9, 12, 15, 18, 64]  # powers of two; all of them do not fit a terminal
    columns = ["under 64", "64 +", "512 +", "4,096 +", "32,768 +", "262,144 +"]
    lengths = [
        (name, *(sum(domain["lengths"]["histogram"][low:high]) for low, high in pairwise(steps)))
        for name, domain in found["domains"].items()
    ]
    show("documents by their length in tokens", ["domain", *columns], lengths)
    print(f"fingerprint {found['fingerprint']}")
    for line in found["losses"]:
        print(line)
    for name, domain in found["domains"].items():
        for sample in domain["samples"]:
            print(f"\n[{name}, document {sample['document']}, {sample['tokens']:,} tokens]\n{sample['text'].strip()}")


def with_progress(items: Iterable[Item], doing: str) -> list[Item]:
    """The items as a list; on a terminal a line says how many there are so far."""
    from rich.console import Console

    found: list[Item] = []
    with Console(stderr=True).status(doing) as status:
        for item in items:
            found.append(item)
            status.update(f"{doing}: {len(found)} done")
    return found


def show_checks(name: str, results: Sequence[Result]) -> None:
    """Print what `resformer.evaluate.contract.suite.run` gave, and what a failed check is about."""
    show(f"{name}: contract", ["check", "result", "detail"], [(one.check, one.result, one.detail) for one in results])
    for one in results:
        if one.result == "failed":
            print(f"{one.check}: {one.about}")
