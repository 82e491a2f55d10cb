"""Files and directories -> documents.

A jsonl line is a document (`text`; the domain is `meta.redpajama_set_name` if there, else the file's stem); any other
file is one document. Compression is by suffix (.gz, .zst). What cannot be read is an error that names file and line,
or with `on_bad_line="skip"` is counted.
"""

from __future__ import annotations

import codecs
import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from resformer.data.documents import Document, domain_name
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
COMPRESSED = frozenset({".gz", ".zst"})
_CHUNK_BYTES = 1 << 16
_MAX_PROBLEMS = 20
_NUMBERED = re.compile(r"[-_]\d+(?:[-_]of[-_]\d+)?$")
# Names that only say "a piece of it": such a file takes its directory's name as domain.
_PIECE = re.compile(r"(?:part|chunk|shard|train|data|file|split)?[-_]?\d*", re.IGNORECASE)


@dataclass(kw_only=True)
class Report:
    """What the readers met: totals by kind, files with problems (with a sample of bad lines), suffixes passed over."""

    on_bad_line: str = "error"
    totals: Counter[str] = field(default_factory=Counter)
    by_domain: dict[str, Counter[str]] = field(default_factory=dict)
    problems: dict[str, dict[str, Any]] = field(default_factory=dict)
    passed_over: Counter[str] = field(default_factory=Counter)

    def domain(self, name: str) -> Counter[str]:
        """Counts of the domain `name`."""
        return self.by_domain.setdefault(name, Counter())

    def bad(self, file: Path, line: int | None, reason: str, *, kind: str = "bad_lines") -> None:
        """A line or file that cannot be used: an error, or with on_bad_line="skip" a count and a sample."""
        where = f"{file}:{line}" if line is not None else str(file)
        if self.on_bad_line == "error":
            raise UserError(f"{where}: {reason}; mend the file or pass --on-bad-line skip")
        self.totals[kind] += 1
        entry = self.problems.setdefault(str(file), {"sample": []})
        entry[kind] = entry.get(kind, 0) + 1
        if len(entry["sample"]) < 3 or entry[kind] == 1:  # each kind is shown at least once
            entry["sample"].append(f"{where}: {reason}")

    def asdict(self, kept: Collection[str]) -> dict[str, Any]:
        """JSON-able summary for the index; `kept` are the domains that have documents, whose counts are theirs."""
        return {
            "totals": dict(sorted(self.totals.items())),
            "files_with_problems": len(self.problems),
            "problems": dict(list(self.problems.items())[:_MAX_PROBLEMS]),
            "passed_over_suffixes": dict(sorted(self.passed_over.items())),
            "domains_left_out": {
                name: dict(sorted(counts.items()))
                for name, counts in sorted(self.by_domain.items())
                if name not in kept
            },
        }


def suffixes(path: Path) -> tuple[str, str]:
    """(suffix that says the format, compression suffix or ""), lower case: a.jsonl.gz -> (".jsonl", ".gz")."""
    last = path.suffix.lower()
    if last in COMPRESSED:
        return path.with_suffix("").suffix.lower(), last
    return last, ""


def readable(path: Path) -> bool:
    """Whether a file found in a directory is taken. A bare .json is not (package.json ...); .json.gz and .json.zst
    are (C4).
    """
    form, compression = suffixes(path)
    return form in PLAIN_TEXT or form in (".jsonl", ".ndjson") or (form == ".json" and compression != "")


def list_files(path: Path, report: Report | None = None) -> list[Path]:
    """The files of one input in a fixed order (by path); hidden files and directories are passed over."""
    if not path.is_dir():
        form, _ = suffixes(path)
        if form not in PLAIN_TEXT and form not in JSON_LINES:
            raise UserError(
                f"{path}: cannot read the file type '{form or path.name}'; expected .jsonl (also .gz, .zst), .txt, "
                ".md or source code"
            )
        return [path]
    found = []

    def unreadable(error: OSError) -> None:
        raise UserError(f"{error.filename}: cannot be read ({error.strerror}); give access or leave it out of --input")

    for root, directories, names in os.walk(path, onerror=unreadable):
        directories[:] = sorted(d for d in directories if not d.startswith("."))
        for name in sorted(names):
            file = Path(root, name)
            if name.startswith(".") or not file.is_file():
                continue
            if readable(file):
                found.append(file)
            elif report is not None:
                report.passed_over["".join(suffixes(file)) or "(none)"] += 1
    return sorted(found, key=lambda file: file.relative_to(path).as_posix())


def file_domain(file: Path, top: Path) -> str:
    """Domain of a file of the input `top`: its stem; for one-document files in a directory the first directory below
    `top`, else `top`.
    """
    form, _ = suffixes(file)
    if form in JSON_LINES or file == top:
        stem = file.name.split(".")[0]
        stem = _NUMBERED.sub("", stem)
        return domain_name(file.resolve().parent.name if _PIECE.fullmatch(stem) else stem)
    inner = file.relative_to(top).parts
    return domain_name(inner[0] if len(inner) > 1 else top.resolve().name)


def read(path: Path, report: Report) -> Iterator[Document]:
    """All documents of one input (file or directory), in a fixed order."""
    for file in list_files(path, report):
        report.totals["files"] += 1
        domain = file_domain(file, path)
        if suffixes(file)[0] in JSON_LINES:
            yield from _read_json_lines(file, domain, report)
        else:
            yield from _read_plain(file, domain, report)


def _read_plain(file: Path, domain: str, report: Report) -> Iterator[Document]:
    pieces = []
    try:
        for chunk in _chunks(file):
            pieces.append(chunk)
    except (EOFError, zlib.error, OSError) as error:
        # Half a document is no document: a cut text would be split, hashed and scored as something nobody wrote.
        report.bad(file, None, f"cannot be read to its end ({error})", kind="truncated_files")
        return
    try:
        text = b"".join(pieces).decode("utf-8")
    except UnicodeDecodeError as error:
        report.bad(file, None, f"is not UTF-8 (byte {error.start}: {error.reason})", kind="bad_files")
        return
    yield Document(text=text, domain=domain, name=str(file))


def _read_json_lines(file: Path, domain: str, report: Report) -> Iterator[Document]:
    number = 0
    lines = _lines(file)
    while True:
        try:
            line = next(lines, None)
        except (EOFError, zlib.error, OSError) as error:
            report.bad(file, number + 1, f"the archive ends or breaks here ({error})", kind="truncated_files")
            return
        if line is None:
            return
        number += 1
        if not line.strip():
            continue
        if line.startswith(codecs.BOM_UTF8):  # at the start of a file, or where files were joined
            report.totals["byte_order_mark"] += 1
        try:
            text, meta_domain = _parse(line)
        except ValueError as error:
            report.bad(file, number, str(error))
            continue
        yield Document(text=text, domain=meta_domain or domain, name=f"{file}:{number}")


def _parse(line: bytes) -> tuple[str, str | None]:
    """(text, domain from meta or None) of one line; ValueError says in words what is wrong with it."""
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte {error.start} of the line)") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON ({error.msg} at column {error.colno})") from error
    except RecursionError as error:
        raise ValueError("JSON nested too deeply") from error
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object with a 'text' field, got {type(row).__name__}")
    if not isinstance(row.get("text"), str):
        got = type(row["text"]).__name__ if "text" in row else f"keys {sorted(row)[:6]}"
        raise ValueError(f"expected a string in the field 'text', got {got}")
    meta = row.get("meta")
    if isinstance(meta, str):
        try:
            meta = json.loads(meta)
        except (json.JSONDecodeError, RecursionError):
            meta = None
    name = meta.get("redpajama_set_name") if isinstance(meta, dict) else None
    return row["text"], domain_name(name) if isinstance(name, str) and name.strip() else None


def _lines(file: Path) -> Iterator[bytes]:
    """Lines by b"\\n" alone: U+2028 and friends inside a JSON string are no line ends."""
    rest: list[bytes] = []
    for chunk in _chunks(file):
        first, *others = chunk.split(b"\n")
        rest.append(first)
        if others:
            yield b"".join(rest)
            yield from others[:-1]
            rest = [others[-1]]
    last = b"".join(rest)
    if last:
        yield last


def _chunks(file: Path) -> Iterator[bytes]:
    """The decompressed bytes; EOFError when the archive is cut, zlib.error or OSError when it is broken."""
    compression = suffixes(file)[1]
    try:
        handle = open(file, "rb")  # noqa: SIM115 - closed below; only the opening itself may fail here
    except OSError as error:
        raise UserError(f"{file}: cannot be opened ({error.strerror})") from error
    with handle:
        raw = iter(lambda: handle.read(_CHUNK_BYTES), b"")
        if compression == ".gz":
            yield from _inflate(raw, lambda: zlib.decompressobj(wbits=31), zlib.error)
        elif compression == ".zst":
            try:
                import zstandard
            except ImportError as error:
                raise UserError(f"{file}: .zst needs the package zstandard; type: pip install zstandard") from error
            # 2^31: frames written with --long=31 are legal and met in the wild.
            decoder = zstandard.ZstdDecompressor(max_window_size=2**31)
            yield from _inflate(raw, decoder.decompressobj, zstandard.ZstdError)
        else:
            yield from raw


def _inflate(raw: Iterator[bytes], new: Any, broken: type[Exception]) -> Iterator[bytes]:
    """Decompress members or frames one after the other. The stream readers of both libraries take a cut at some
    places for the end.
    """
    decoder, data, started = new(), b"", False
    for data in raw:
        while data:
            started = True
            try:
                piece = decoder.decompress(data)
            except broken as error:
                raise OSError(f"broken archive: {error}") from error
            if piece:
                yield piece
            data = b""
            if decoder.eof:
                # gzip allows zero padding between and after members.
                data = decoder.unused_data.lstrip(b"\0")
                decoder, started = new(), False
    if started:
        raise EOFError("archive cut short")
