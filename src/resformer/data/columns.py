"""Columns of Arrow tables -> blocks of documents, for parquet files and the datasets package.

Of a table only the columns with the text and the domain are read, a few rows at a time, so that the size of a row group
bounds nothing. Rows travel as Arrow arrays and become Python objects in the thread that encodes them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from resformer.data.documents import Document
from resformer.data.reading import BLOCK_BYTES, Reading, Report, row_document
from resformer.errors import UserError, did_you_mean

_AUTO = "meta.redpajama_set_name"


@dataclass(frozen=True, kw_only=True)
class Column:
    """A place in the rows of a table.

    parts: names of nested fields. inside: the rest of the path is within JSON, which the column holds. kind: its Arrow
    type.
    """

    parts: tuple[str, ...]
    inside: bool
    kind: Any

    @property
    def path(self) -> str:
        return ".".join(self.parts)

    def array(self, batch: Any) -> Any:
        """The values in a record batch, as one array; null where a parent is null."""
        import pyarrow.compute as pc

        array = batch.column(self.parts[0])
        array = pc.struct_field(array, list(self.parts[1:])) if len(self.parts) > 1 else array
        return array.storage if _is_json(self.kind) else array

    def value(self, data: bytes | None) -> Any:
        """What a value of `array` says; ValueError in words where it cannot be."""
        try:
            text = None if data is None else data.decode("utf-8")
            return json.loads(text) if text is not None and _is_json(self.kind) else text
        except UnicodeDecodeError as error:
            raise ValueError(f"'{self.path}' is not UTF-8 (byte {error.start} of it)") from error
        except RecursionError as error:
            raise ValueError(f"'{self.path}' holds JSON nested too deeply") from error

    def put(self, row: dict[str, Any], value: Any) -> None:
        """Enter a value in a row as `reading.look_up` finds it."""
        if not self.inside:
            row[self.path] = value
            return
        *outer, last = self.path.split(".")
        for part in outer:
            row = row.setdefault(part, {})
        row[last] = value


@dataclass(frozen=True, kw_only=True)
class Columns:
    """What is read of a table."""

    text: Column
    domain: Column | None

    @classmethod
    def of(cls, schema: Any, reading: Reading, called: str) -> Columns:
        """The columns that `reading` asks for; UserError where the table `called` lacks them."""
        text = _needed(schema, reading.text_column, "--text-column", called)
        if reading.domain_from == "file":
            domain = None
        elif reading.domain_from == "auto":
            domain = _find(schema, _AUTO)
        else:
            domain = _needed(schema, reading.domain_from, "--domain-from", called)
        if domain is not None and reading.domain_from == "auto":
            domain = replace(domain, inside=True)  # `row_domain` looks into `meta`
        return cls(text=text, domain=domain)

    @property
    def encoded(self) -> bool:
        """Whether the texts stand in a dictionary, which every batch of rows brings along."""
        import pyarrow as pa

        return pa.types.is_dictionary(self.text.kind)

    def paths(self) -> list[str]:
        """Dotted names."""
        return [column.path for column in (self.text, self.domain) if column is not None]

    def tops(self) -> list[str]:
        """Names of the columns of the table, each once."""
        return list(dict.fromkeys(column.parts[0] for column in (self.text, self.domain) if column is not None))


def _find(schema: Any, path: str) -> Column | None:
    """Where a name, dotted or not, stands in an Arrow schema."""
    import pyarrow as pa

    names = path.split(".")
    for n in range(len(names), 0, -1):  # a column may have a dot in its name
        top = ".".join(names[:n])
        if top not in schema.names:
            continue
        parts, kind = [top], schema.field(top).type
        for name in names[n:]:
            if not pa.types.is_struct(kind):
                return Column(parts=tuple(parts), inside=True, kind=kind) if n == 1 and _holds_text(kind) else None
            if kind.get_field_index(name) < 0:
                return None
            parts, kind = [*parts, name], kind.field(name).type
        return Column(parts=tuple(parts), inside=False, kind=kind) if _holds_text(kind) else None
    return None


def _needed(schema: Any, path: str, flag: str, called: str) -> Column:
    found = _find(schema, path)
    if found is not None:
        return found
    usable = list(_texts(schema))
    if path in schema.names:
        problem = f"the column '{path}' holds {schema.field(path).type}, not text"
    else:
        problem = f"no column '{path}'"
    columns = f"its text columns are {', '.join(usable)}" if usable else f"it has {', '.join(schema.names) or 'none'}"
    raise UserError(f"{called}: {problem}{did_you_mean(path, usable)}; {columns}; name one with {flag}")


def _texts(schema: Any, before: str = "") -> Iterator[str]:
    """Dotted names of what can hold text."""
    import pyarrow as pa

    for field in schema:
        if pa.types.is_struct(field.type):
            yield from _texts(field.type, f"{before}{field.name}.")
        elif _holds_text(field.type):
            yield before + field.name


def _is_json(kind: Any) -> bool:
    """Whether a type is Arrow's JSON, which the datasets package makes of values that differ in kind."""
    return getattr(kind, "extension_name", "") == "arrow.json"


def _holds_text(kind: Any) -> bool:
    import pyarrow.types as types

    if _is_json(kind):
        return True
    if types.is_dictionary(kind):
        kind = kind.value_type
    tests = (types.is_string, types.is_large_string, types.is_string_view, types.is_binary, types.is_large_binary)
    return any(test(kind) for test in (*tests, types.is_binary_view, types.is_null))


def _lengths(array: Any) -> np.ndarray:
    """Bytes of each value (0 for null)."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_dictionary(array.type):
        # Of the values in use: a dictionary holds those of a whole row group, and stands in each of its batches.
        used, places = np.unique(pc.fill_null(array.indices, -1).to_numpy(zero_copy_only=False), return_inverse=True)
        return _lengths(array.dictionary.take(pa.array(used, mask=used < 0)))[places]
    if pa.types.is_null(array.type):
        return np.zeros(len(array), np.int64)
    return pc.fill_null(pc.binary_length(_as_bytes(array)), 0).to_numpy(zero_copy_only=False).astype(np.int64)


def _as_bytes(array: Any) -> Any:
    import pyarrow as pa

    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    return array if pa.types.is_null(array.type) else array.cast(pa.large_binary())


@dataclass(frozen=True, kw_only=True)
class TableBlock:
    """Consecutive rows. `first`: number of the first one, from 1. pieces: pairs of arrays (text, domain or None)."""

    called: str
    first: int
    pieces: list[tuple[Any, Any]]
    columns: Columns
    domain: str
    reading: Reading
    size: int
    opens: bool

    def documents(self, report: Report) -> Iterator[Document]:
        report.totals["files"] += self.opens
        number = self.first
        for texts, domains in self.pieces:
            # As bytes: readers of parquet do not look whether a string is UTF-8.
            names = _as_bytes(domains).to_pylist() if domains is not None else [None] * len(texts)
            for text, name in zip(_as_bytes(texts).to_pylist(), names, strict=True):
                try:
                    yield self._document(text, name, f"{self.called}:{number}")
                except ValueError as error:
                    report.bad(self.called, number, str(error))
                number += 1

    def _document(self, text: bytes | None, name: bytes | None, called: str) -> Document:
        row: dict[str, Any] = {}
        for column, value in ((self.columns.text, text), (self.columns.domain, name)):
            if column is not None:
                column.put(row, column.value(value))
        return row_document(row, domain=self.domain, name=called, reading=self.reading)


def cut(
    batches: Iterable[tuple[Columns, Any]], called: str, domain: str, reading: Reading, size: int, rows: int | None
) -> Iterator[TableBlock]:
    """Record batches -> blocks. size, rows: of the whole table, to share the bytes on the disk out; rows None: not
    known, bytes of text then.
    """
    pieces: list[tuple[Any, Any]] = []
    first, number, taken, waiting = 1, 1, 0, None

    def block() -> TableBlock:
        nonlocal pieces, first, taken
        # Slices of the bytes on the disk that add up to all of them.
        share = taken if not rows else size * (number - 1) // rows - size * (first - 1) // rows
        assert waiting is not None
        made = TableBlock(
            called=called,
            first=first,
            pieces=pieces,
            columns=waiting,
            domain=domain,
            reading=reading,
            size=share,
            opens=first == 1,
        )
        pieces, first, taken = [], number, 0
        return made

    for columns, batch in batches:
        if pieces and columns != waiting:
            yield block()
        waiting = columns
        texts = columns.text.array(batch)
        domains = columns.domain.array(batch) if columns.domain is not None else None
        ends, at = np.concatenate(([0], np.cumsum(_lengths(texts)))), 0
        while at < len(texts):
            stop = int(np.searchsorted(ends, ends[at] + BLOCK_BYTES - taken, side="right")) - 1
            if stop <= at and pieces:
                yield block()
                continue
            stop = max(stop, at + 1)
            count = stop - at
            pieces.append((texts.slice(at, count), domains.slice(at, count) if domains is not None else None))
            taken, number, at = taken + int(ends[stop] - ends[at]), number + count, stop
            if taken >= BLOCK_BYTES:
                yield block()
    if pieces:
        yield block()
