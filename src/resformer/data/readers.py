"""Text files as sources: jsonl, where a line is a document, and plain text or code, where a file is one.

Compression is by suffix (.gz, .zst, .xz, .bz2). What cannot be read is an error that names file and line, or with
`on_bad_line="skip"` is counted.
"""

from __future__ import annotations

import codecs
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from resformer.data.archives import BROKEN, CHUNK_BYTES, chunks, opened, suffixes
from resformer.data.documents import Document, domain_name
from resformer.data.layouts import LLMC_MAGICS
from resformer.data.reading import BLOCK_BYTES, BadBlock, Block, Reading, Report, row_document
from resformer.errors import UserError

JSON_LINES = frozenset({".jsonl", ".ndjson", ".json"})
_TEXT = (".txt", ".text", ".md", ".rst", ".tex", ".html", ".css", ".yaml", ".yml", ".toml", ".cmake", ".sql")
_CODE = (
    ".py",
    ".pyi",
    ".c",
    ".h",
    ".cc",
    ".cpp",
    ".cxx",
    ".hpp",
    ".cu",
    ".cuh",
    ".js",
    ".jsx",
    ".ts",
    ".tsx",
    ".java",
    ".go",
)
_MORE_CODE = (
    ".rs",
    ".rb",
    ".php",
    ".sh",
    ".bash",
    ".pl",
    ".lua",
    ".r",
    ".jl",
    ".m",
    ".swift",
    ".kt",
    ".scala",
    ".cs",
    ".hs",
    ".ml",
)
PLAIN_TEXT = frozenset({*_TEXT, *_CODE, *_MORE_CODE})
TABLES_AND_TOKENS = frozenset({".parquet", ".bin", ".ds"})
_NUMBERED = re.compile(r"[-_]\d+(?:[-_]of[-_]\d+)?$")
# Names that only say "a piece of it": such a file takes its directory's name as domain.
_PIECE = re.compile(r"(?:part|chunk|shard|train|data|file|split)?[-_]?\d*", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class JsonBlock:
    """Whole lines of a jsonl file. `first` is the number of the first one; None: `offset` bytes of the file come before
    it, in which lines are counted when somebody asks.
    """

    file: Path
    data: bytes
    first: int | None
    offset: int
    domain: str
    reading: Reading
    opens: bool
    size: int

    def documents(self, report: Report) -> Iterator[Document]:
        report.totals["files"] += self.opens
        first = self.first
        for i, line in enumerate(self.data.split(b"\n")):  # U+2028 and friends inside a string are no line ends
            if not line.strip():
                continue
            if line.startswith(codecs.BOM_UTF8):  # at the start of a file, or where files were joined
                report.totals["byte_order_mark"] += 1
            try:
                yield _parse(line, f"{self.file}:{'' if first is None else first + i}", self.domain, self.reading)
            except ValueError as error:
                first = _lines_before(self.file, self.offset) + 1 if first is None else first
                report.bad(self.file, first + i, str(error))


@dataclass(frozen=True, kw_only=True)
class JsonLines:
    """A jsonl file, or the lines that begin in the bytes `start` to `stop` of one that is not compressed."""

    file: Path
    domain: str
    reading: Reading
    start: int = 0
    stop: int | None = None
    called: str = ""

    @property
    def name(self) -> str:
        return self.called or str(self.file)

    @property
    def size(self) -> int:
        return (self.file.stat().st_size if self.stop is None else self.stop) - self.start

    def identity(self) -> list[Any]:
        return [*file_identity(self.file), self.start, self.stop]

    def blocks(self) -> Iterator[Block]:
        number: int | None = 1 if self.start == 0 else None
        offset, opens, on_disk = self._begin(), self.start == 0, 0
        waiting: list[bytes] = []
        size = 0

        def count(amount: int) -> None:
            nonlocal on_disk
            on_disk += amount

        def block(data: bytes) -> JsonBlock:
            return JsonBlock(
                file=self.file,
                data=data,
                first=number,
                offset=offset,
                domain=self.domain,
                reading=self.reading,
                opens=opens,
                size=on_disk,
            )

        try:
            for data in self._pieces(offset, count):
                waiting.append(data)
                size += len(data)
                if size < BLOCK_BYTES or b"\n" not in data:  # the pieces of a long line are joined once
                    continue
                data = b"".join(waiting)
                end = data.rfind(b"\n") + 1
                whole, rest = data[:end], data[end:]
                waiting, size = [rest], len(rest)
                yield block(whole)
                number = None if number is None else number + whole.count(b"\n")
                offset, opens, on_disk = offset + len(whole), False, 0
        except BROKEN as error:
            rest = b"".join(waiting)
            whole = rest[: rest.rfind(b"\n") + 1]
            if whole or opens:
                yield block(whole)
            line = (number or 1) + whole.count(b"\n")
            reason = f"the archive ends or breaks here ({error})"
            yield BadBlock(file=self.file, line=line, reason=reason, kind="truncated_files")
            return
        if size or opens:
            yield block(b"".join(waiting))

    def _begin(self) -> int:
        """Where the first line that begins in the range begins."""
        if not self.start:
            return 0
        with opened(self.file) as handle:
            handle.seek(self.start - 1)
            handle.readline()  # the line that the range before ends with
            return int(handle.tell())

    def _pieces(self, begin: int, count: Callable[[int], None]) -> Iterator[bytes]:
        """The bytes of the lines that begin in the range."""
        if self.stop is None:
            yield from chunks(self.file, count)
            return
        with opened(self.file) as handle:
            handle.seek(begin)
            while (at := handle.tell()) < self.stop and (data := handle.read(min(CHUNK_BYTES, self.stop - at))):
                count(len(data))
                yield data if handle.tell() < self.stop or data.endswith(b"\n") else data + handle.readline()


@dataclass(frozen=True, kw_only=True)
class PlainBlock:
    """One file that is a document, not read yet."""

    file: Path
    domain: str
    size: int

    def documents(self, report: Report) -> Iterator[Document]:
        report.totals["files"] += 1
        try:
            data = b"".join(chunks(self.file))
        except BROKEN as error:
            # Half a document is no document: a cut text would be split, hashed and scored as something nobody wrote.
            report.bad(self.file, None, f"cannot be read to its end ({error})", kind="truncated_files")
            return
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            report.bad(self.file, None, f"is not UTF-8 (byte {error.start}: {error.reason})", kind="bad_files")
            return
        yield Document(text=text, domain=self.domain, name=str(self.file))


@dataclass(frozen=True, kw_only=True)
class PlainFile:
    """A file that is one document."""

    file: Path
    domain: str
    size: int = field(default=0)

    @property
    def name(self) -> str:
        return str(self.file)

    def identity(self) -> list[Any]:
        return file_identity(self.file)

    def blocks(self) -> Iterator[Block]:
        yield PlainBlock(file=self.file, domain=self.domain, size=self.size)


def file_identity(file: Path) -> list[Any]:
    """What says that a file is still the same without reading it: where it lies, its size and time."""
    stat = file.stat()
    return [str(file), stat.st_size, stat.st_mtime_ns]


def readable(path: Path, token_dtype: str | None = None) -> bool:
    """Whether a file found in a directory is taken. A bare .json is not (package.json ...); .json.gz and .json.zst
    are (C4). A .bin is taken where something says that it holds token ids.
    """
    form, compression = suffixes(path)
    if form == ".bin" and not compression:
        with opened(path) as handle:
            header = handle.read(4)
        known = int.from_bytes(header, "little") in LLMC_MAGICS
        return known or token_dtype is not None or path.with_suffix(".idx").exists()
    if form in (".ds", ".parquet"):
        return not compression
    return form in PLAIN_TEXT or form in (".jsonl", ".ndjson") or (form == ".json" and compression != "")


def companion(path: Path) -> bool:
    """Whether a file only says something of another one."""
    return (path.suffix == ".idx" and path.with_suffix(".bin").exists()) or (
        path.suffix in (".index", ".metadata") and path.with_suffix("").suffix == ".ds"
    )


def list_files(path: Path, report: Report | None = None, *, token_dtype: str | None = None) -> list[Path]:
    """The files of one input in a fixed order (by path); hidden files and directories are passed over."""
    if not path.is_dir():
        if not path.is_file():
            raise UserError(f"{path}: is no regular file; pipe it to standard input (--input -), or write it to a file")
        form, compression = suffixes(path)
        if form not in PLAIN_TEXT and form not in JSON_LINES and (form not in TABLES_AND_TOKENS or compression):
            raise UserError(
                f"{path}: cannot read the file type '{form or path.name}'; expected .jsonl (also .gz, .zst, .xz, "
                ".bz2), .parquet, .txt, .md, source code, or token files (.bin, .ds)"
            )
        return [path]
    found = []

    def unreadable(error: OSError) -> None:
        raise UserError(f"{error.filename}: cannot be read ({error.strerror}); give access or leave it out of --input")

    for root, directories, names in os.walk(path, onerror=unreadable):
        directories[:] = sorted(d for d in directories if not d.startswith("."))
        links = sum(Path(root, d).is_symlink() for d in directories)
        if report is not None and links:  # they may lead in a circle, or to text that is there already
            report.passed_over["(link to a directory)"] += links
        for name in sorted(names):
            file = Path(root, name)
            if name.startswith(".") or companion(file):
                continue
            if not file.is_file():
                if report is not None:
                    report.passed_over["(broken link)" if file.is_symlink() else "(no regular file)"] += 1
                continue
            if readable(file, token_dtype):
                found.append(file)
            elif report is not None:
                report.passed_over["".join(suffixes(file)) or "(none)"] += 1
    return sorted(found, key=lambda file: file.relative_to(path).as_posix())


def file_domain(file: Path, top: Path) -> str:
    """Domain of a file of the input `top`: its stem; for one-document files in a directory the first directory below
    `top`, else `top`.
    """
    form, _ = suffixes(file)
    if form in JSON_LINES or form in TABLES_AND_TOKENS or file == top:
        stem = file.name.split(".")[0]
        stem = _NUMBERED.sub("", stem)
        return domain_name(file.parent.resolve().name if _PIECE.fullmatch(stem) else stem)
    inner = file.relative_to(top).parts
    return domain_name(inner[0] if len(inner) > 1 else top.resolve().name)


def _parse(line: bytes, name: str, domain: str, reading: Reading) -> Document:
    """The document of one line; ValueError says in words what is wrong with it."""
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte {error.start} of the line)") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON ({error.msg} at column {error.colno})") from error
    except RecursionError as error:
        raise ValueError("JSON nested too deeply") from error
    except ValueError as error:  # a number of thousands of digits
        raise ValueError(f"not valid JSON ({error})") from error
    return row_document(row, domain=domain, name=name, reading=reading)


def _lines_before(file: Path, offset: int) -> int:
    """Line ends in the first `offset` bytes of a file."""
    count, left = 0, offset
    with opened(file) as handle:
        while left and (data := handle.read(min(1 << 20, left))):
            count, left = count + data.count(b"\n"), left - len(data)
    return count
