"""The inputs of a build as a list of sources, in a fixed order."""

from __future__ import annotations

import glob
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from resformer.data import embedded
from resformer.data.archives import suffixes
from resformer.data.documents import Document
from resformer.data.readers import JSON_LINES, JsonLines, PlainFile, file_domain, list_files
from resformer.data.reading import BLOCK_BYTES, Block, DocumentsBlock, Reading, Report, Source
from resformer.data.tables import DATASET, DatasetSource, ParquetSource
from resformer.errors import UserError, did_you_mean

STDIN = "-"
_RANGE_BYTES = 1 << 28  # a long jsonl file is several sources, so that tasks can share it
_GROUP_BYTES = 1 << 24  # small files are one source together
_MAGIC = set("*?[")


@dataclass(frozen=True, kw_only=True)
class TokenKind:
    """What a reader of token files has to know."""

    vocab_size: int
    eos_token_id: int
    token_dtype: str | None


def is_path(name: str) -> bool:
    """Whether an input is a path or a pattern of paths."""
    return name not in (embedded.NAME, STDIN) and not name.startswith(DATASET)


def check_inputs(names: Sequence[str]) -> None:
    """UserError for inputs that name nothing."""
    if not names:
        raise UserError("--input: got none, expected 'embedded' or the paths of files or directories")
    for name in names:
        if not name.strip():  # Path("") is the current directory, with everything in it
            raise UserError("--input: got an empty path, expected 'embedded' or a file or directory ('.' for this one)")
        if is_path(name):
            expand(name)
    if len(set(names)) < len(names):
        twice = ", ".join(sorted({name for name in names if names.count(name) > 1}))
        raise UserError(f"--input: named twice: {twice}; name each once")


def expand(name: str) -> list[Path]:
    """The files and directories that a path or pattern (`*`, `?`, `[...]`, `**`) names, in order."""
    path = Path(name)
    try:
        if path.exists():
            return [path]
    except OSError as error:
        raise UserError(f"--input: {name!r:.80} cannot be looked up ({error.strerror})") from error
    if _MAGIC & set(name):
        found = [Path(p) for p in sorted(glob.glob(name, recursive=True))]
        # A directory holds what ** finds below it as well.
        found = [p for p in found if not any(q != p and q in p.parents for q in found)]
        if found:
            return found
        raise UserError(f"--input: no file matches the pattern '{name}'")
    raise UserError(
        f"--input: no file or directory '{name}'{did_you_mean(name, [embedded.NAME])}; expected a path, a pattern, "
        f"'embedded', '{DATASET}NAME' or '{STDIN}' for standard input"
    )


def input_files(name: str, token_dtype: str | None, report: Report | None = None) -> list[tuple[Path, Path]]:
    """(file, what of the input it was found under), in order."""
    from resformer.data.tokenised import refuse_foreign_index

    found = []
    for top in expand(name):
        if top.is_dir():
            refuse_foreign_index(top)
        found += [(file, top) for file in list_files(top, report, token_dtype=token_dtype)]
    return found


def is_token_file(file: Path) -> bool:
    """Whether a file holds token ids."""
    from resformer.data.tokenised import is_tokenised

    return is_tokenised(file)


@lru_cache(maxsize=1)
def collected(max_bytes: int | None) -> tuple[list[Document], dict[str, Any], Report]:
    """The embedded corpus: documents, where they come from, and what was met; read once in a process."""
    report = Report()
    documents, origin = embedded.collect(report, max_bytes=max_bytes)
    return documents, origin, report


@dataclass(frozen=True, kw_only=True)
class EmbeddedSource:
    """One domain of the corpus that comes with the installation (`embedded`). The first one reports for all."""

    max_bytes: int | None
    domain: str
    size: int
    first: bool

    @property
    def name(self) -> str:
        return f"{embedded.NAME} {self.domain}"

    def identity(self) -> list[Any]:
        return [embedded.NAME, embedded.REVISION, self.max_bytes, self.domain, self.size]

    def blocks(self) -> Iterator[Block]:
        documents, _, report = collected(self.max_bytes)
        if self.first:
            yield DocumentsBlock(items=[], size=0, report=report)
        yield from in_blocks([document for document in documents if document.domain == self.domain])


def embedded_sources(max_bytes: int | None) -> list[Source]:
    """A source for each domain of the embedded corpus."""
    sizes: dict[str, int] = {}
    for document in collected(max_bytes)[0]:
        sizes[document.domain] = sizes.get(document.domain, 0) + len(document.text)
    return [
        EmbeddedSource(max_bytes=max_bytes, domain=domain, size=size, first=i == 0)
        for i, (domain, size) in enumerate(sizes.items())
    ]


def in_blocks(documents: Sequence[Document]) -> Iterator[Block]:
    """Documents in blocks of the usual size."""
    items: list[Document] = []
    size = 0
    for document in documents:
        items.append(document)
        size += len(document.text)
        if size >= BLOCK_BYTES:
            yield DocumentsBlock(items=items, size=size)
            items, size = [], 0
    if items:
        yield DocumentsBlock(items=items, size=size)


@dataclass(frozen=True, kw_only=True)
class Group:
    """Small sources as one."""

    members: tuple[Source, ...]

    @property
    def name(self) -> str:
        return self.members[0].name

    @property
    def domain(self) -> str:
        return self.members[0].domain

    @property
    def size(self) -> int:
        return sum(member.size for member in self.members)

    def identity(self) -> list[Any]:
        return [member.identity() for member in self.members]

    def blocks(self) -> Iterator[Block]:
        for member in self.members:
            yield from member.blocks()


def grouped(sources: Sequence[Source]) -> list[Source]:
    """Neighbours of one domain that are small together, as groups; the order of the documents stays."""
    result: list[Source] = []
    waiting: list[Source] = []

    def flush() -> None:
        if waiting:
            result.append(waiting[0] if len(waiting) == 1 else Group(members=tuple(waiting)))
            waiting.clear()

    size = 0
    for source in sources:
        if waiting and (size + source.size > _GROUP_BYTES or source.domain != waiting[0].domain):
            flush()
            size = 0
        waiting.append(source)
        size += source.size
    flush()
    return result


def list_sources(
    names: Sequence[str],
    reading: Reading,
    *,
    kind: TokenKind | None,
    token_dtype: str | None,
    max_bytes: int | None,
    stdin: Path | None = None,
    report: Report | None = None,
) -> list[Source]:
    """All sources of the inputs `names`, in order.

    Args:
        names: as a user gives them.
        reading: how rows become documents.
        kind: of token files, where a tokenizer is given.
        token_dtype: of headerless token files.
        max_bytes: bound on the text of the embedded corpus, which chooses by its own weights.
        stdin: file that holds what came from standard input.
        report: takes the count of files passed over.
    """
    found: list[Source] = []
    for name in names:
        if name == embedded.NAME:
            found += embedded_sources(max_bytes)
        elif name == STDIN:
            assert stdin is not None, "standard input is kept in a file first"
            found.append(_stdin_source(stdin, reading))
        elif name.startswith(DATASET):
            found.append(DatasetSource(name, reading))
        else:
            for file, top in input_files(name, token_dtype, report):
                found += _file_sources(file, top, reading, kind)
    return grouped(found)


def _file_sources(file: Path, top: Path, reading: Reading, kind: TokenKind | None) -> list[Source]:
    domain = file_domain(file, top)
    form, compression = suffixes(file)
    if form in JSON_LINES:
        whole = JsonLines(file=file, domain=domain, reading=reading)
        if compression or whole.size <= _RANGE_BYTES:
            return [whole]
        starts = range(0, whole.size, _RANGE_BYTES)
        return [replace(whole, start=start, stop=min(start + _RANGE_BYTES, whole.size)) for start in starts]
    if form == ".parquet" and not compression:
        return [ParquetSource(file, top, domain, reading)]
    if is_token_file(file):
        from resformer.data.tokenised import tokenised_source

        assert kind is not None, "checked with the request"
        return [
            tokenised_source(
                file,
                domain=domain,
                vocab_size=kind.vocab_size,
                eos_token_id=kind.eos_token_id,
                token_dtype=kind.token_dtype,
                form="auto",
            )
        ]
    return [PlainFile(file=file, domain=domain, size=file.stat().st_size)]


def _stdin_source(kept: Path, reading: Reading) -> Source:
    """jsonl where the first character is that of an object, else one document."""
    with open(kept, "rb") as handle:
        start = handle.read(1 << 16).lstrip(b"\xef\xbb\xbf \t\r\n")
    if start.startswith(b"{"):
        return JsonLines(file=kept, domain="stdin", reading=reading, called="standard input")
    return PlainFile(file=kept, domain="stdin", size=kept.stat().st_size)


def inputs_digest(names: Sequence[str], token_dtype: str | None, stdin: Path | None = None) -> str:
    """Identity of the inputs by names, sizes and times of their files; reading terabytes would not be "at once"."""
    digest = hashlib.sha256()
    for name in names:
        if name == embedded.NAME:
            digest.update(f"{embedded.NAME} {embedded.REVISION}\n".encode())
        elif name == STDIN:
            assert stdin is not None
            with open(stdin, "rb") as handle:
                digest.update(hashlib.file_digest(handle, "sha256").digest())
        elif name.startswith(DATASET):
            digest.update(json.dumps(DatasetSource(name, Reading()).identity()).encode())
        else:
            for file, top in input_files(name, token_dtype):
                stat = file.stat()
                relative = file.relative_to(top).as_posix() if file != top else file.name
                digest.update(json.dumps([relative, stat.st_size, stat.st_mtime_ns]).encode())
    return digest.hexdigest()


def manifest(names: Sequence[str], token_dtype: str | None, max_bytes: int | None) -> dict[str, Any]:
    """Where the text comes from, for manifest.json."""
    entries: list[dict[str, Any]] = []
    for name in names:
        if name == embedded.NAME:
            entries.append(collected(max_bytes)[1])
        elif is_path(name):
            entries.append({"path": name, "files": len(input_files(name, token_dtype))})
        else:
            entries.append({"path": name})
    return {"inputs": entries}
