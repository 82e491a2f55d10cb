"""What all readers share: how a row becomes a document, what is said of what could not be read, and the interface.

A source is one unit of the input, a file most often. It yields raw blocks in a fixed order, which is cheap and happens
in one thread; a block gives its documents, which is done by as many threads as there are cores. So the order of the
documents is that of the input, whatever the number of threads.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from resformer.data.documents import Document, domain_name
from resformer.errors import UserError

BLOCK_BYTES = 1 << 18
_MAX_PROBLEMS = 20
_SAMPLE = 3
_PAJAMA = ("meta", "redpajama_set_name")


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How rows become documents.

    on_bad_line: "error" or "skip". text_column: name of the column with the text, `a.b` for a field of an object.
    domain_from: "auto" (`meta.redpajama_set_name` where a row has it, else the file's), "file", or a column.
    """

    on_bad_line: str = "error"
    text_column: str = "text"
    domain_from: str = "auto"


@dataclass(kw_only=True)
class Report:
    """What the readers met: totals by kind, files with problems (with a sample of bad lines), suffixes passed over."""

    on_bad_line: str = "error"
    can_skip: bool = True  # the user has the flag --on-bad-line
    totals: Counter[str] = field(default_factory=Counter)
    by_domain: dict[str, Counter[str]] = field(default_factory=dict)
    problems: dict[str, dict[str, Any]] = field(default_factory=dict)
    passed_over: Counter[str] = field(default_factory=Counter)

    def domain(self, name: str) -> Counter[str]:
        """Counts of the domain `name`."""
        return self.by_domain.setdefault(name, Counter())

    def bad(self, file: Path | str, line: int | None, reason: str, *, kind: str = "bad_lines") -> None:
        """A line or file that cannot be used: an error, or with on_bad_line="skip" a count and a sample."""
        where = f"{file}:{line}" if line is not None else str(file)
        if self.on_bad_line == "error":
            way_out = "mend the file or pass --on-bad-line skip" if self.can_skip else "mend the file, or leave it out"
            raise UserError(f"{where}: {reason}; {way_out}")
        self.totals[kind] += 1
        entry = self.problems.setdefault(str(file), {"sample": {}})
        entry[kind] = entry.get(kind, 0) + 1
        shown = entry["sample"].setdefault(kind, [])
        if len(shown) < _SAMPLE:
            shown.append(f"{where}: {reason}")

    def add(self, other: Report) -> None:
        """Take in the report of what was read after this."""
        self.totals.update(other.totals)
        self.passed_over.update(other.passed_over)
        for name, counts in other.by_domain.items():
            self.domain(name).update(counts)
        for file, theirs in other.problems.items():
            entry = self.problems.setdefault(file, {"sample": {}})
            for kind, sample in theirs["sample"].items():
                entry[kind] = entry.get(kind, 0) + theirs[kind]
                shown = entry["sample"].setdefault(kind, [])
                shown += sample[: _SAMPLE - len(shown)]

    def state(self) -> dict[str, Any]:
        """JSON-able, for `from_state`."""
        return {
            "totals": dict(self.totals),
            "by_domain": {name: dict(counts) for name, counts in self.by_domain.items()},
            "problems": self.problems,
            "passed_over": dict(self.passed_over),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Report:
        """The report that `state` was made of."""
        return cls(
            totals=Counter(state["totals"]),
            by_domain={name: Counter(counts) for name, counts in state["by_domain"].items()},
            problems=dict(state["problems"]),
            passed_over=Counter(state["passed_over"]),
        )

    def asdict(self, kept: Collection[str]) -> dict[str, Any]:
        """JSON-able summary for the index; `kept` are the domains that have documents, whose counts are theirs."""
        return {
            "totals": dict(sorted(self.totals.items())),
            "files_with_problems": len(self.problems),
            "problems": {
                file: {**entry, "sample": [line for lines in entry["sample"].values() for line in lines]}
                for file, entry in list(self.problems.items())[:_MAX_PROBLEMS]
            },
            "passed_over_suffixes": dict(sorted(self.passed_over.items())),
            "domains_left_out": {
                name: dict(sorted(counts.items()))
                for name, counts in sorted(self.by_domain.items())
                if name not in kept
            },
        }


class Block(Protocol):
    """A piece of a source, as read."""

    @property
    def size(self) -> int:
        """Bytes on the disk that it stands for (for progress)."""

    def documents(self, report: Report) -> Iterator[Document]:
        """The documents, in order; called once, in some thread."""


class Source(Protocol):
    """One unit of the input."""

    @property
    def name(self) -> str:
        """For messages."""

    @property
    def size(self) -> int:
        """Bytes on the disk, 0 where that is not known."""

    @property
    def domain(self) -> str:
        """Domain of its documents where they name none."""

    def blocks(self) -> Iterator[Block]:
        """Blocks of about `BLOCK_BYTES`, a larger document being one of its own; always cut in the same way."""

    def identity(self) -> list[Any]:
        """JSON-able; what decides the content without reading it."""


@dataclass(frozen=True, kw_only=True)
class DocumentsBlock:
    """Documents that are there already, and what was to be said of them."""

    items: list[Document]
    size: int
    report: Report | None = None

    def documents(self, report: Report) -> Iterator[Document]:
        if self.report is not None:
            report.add(self.report)
        yield from self.items


@dataclass(frozen=True, kw_only=True)
class BadBlock:
    """The place where a source could not be read on; none = only a file to be counted."""

    file: Path | str
    line: int | None
    reason: str | None
    kind: str = "bad_lines"
    size: int = 0
    opens: bool = False

    def documents(self, report: Report) -> Iterator[Document]:
        report.totals["files"] += self.opens
        if self.reason is not None:
            report.bad(self.file, self.line, self.reason, kind=self.kind)
        yield from ()


def row_document(row: Any, *, domain: str, name: str, reading: Reading) -> Document:
    """The document of a row (an object of a jsonl file, a row of a table); ValueError says what is wrong with it."""
    if not isinstance(row, Mapping):
        raise ValueError(f"expected a JSON object with a {reading.text_column!r} field, got {type(row).__name__}")
    text = look_up(row, reading.text_column)
    if not isinstance(text, str):
        keys = sorted(str(key) for key in row)[:6]
        got = f"keys {keys}" if text is None and reading.text_column not in row else type(text).__name__
        raise ValueError(f"expected a string in the field {reading.text_column!r}, got {got}")
    return Document(text=text, domain=row_domain(row, domain, reading), name=name)


def row_domain(row: Mapping[str, Any], domain: str, reading: Reading) -> str:
    """The domain that a row names; `domain`, the file's, where it names none and need not."""
    if reading.domain_from == "file":
        return domain
    if reading.domain_from == "auto":
        meta = row.get(_PAJAMA[0])
        if isinstance(meta, str) and meta.startswith("{"):
            try:
                meta = json.loads(meta)
            except (json.JSONDecodeError, RecursionError):
                meta = None
        named = meta.get(_PAJAMA[1]) if isinstance(meta, Mapping) else None
        return domain_name(named) if isinstance(named, str) and named.strip() else domain
    named = look_up(row, reading.domain_from)
    if not isinstance(named, str) or not named.strip():
        raise ValueError(f"expected the domain's name in the field {reading.domain_from!r}, got {named!r:.40}")
    return domain_name(named)


def look_up(row: Mapping[str, Any], path: str) -> Any:
    """The value of a column, `a.b` being the field b of the object a (which may be JSON in a string); None: absent."""
    if path in row:
        return row[path]
    head, dot, rest = path.partition(".")
    if not dot or head not in row:
        return None
    inner = row[head]
    if isinstance(inner, str):
        try:
            inner = json.loads(inner)
        except (json.JSONDecodeError, RecursionError):
            return None
    return look_up(inner, rest) if isinstance(inner, Mapping) else None
