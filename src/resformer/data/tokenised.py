"""Corpora of token ids as sources, in the formats that others write.

| format | files | ids | documents |
|---|---|---|---|
| nanogpt | `.bin` | headerless, little-endian; the dtype must be given | between end-of-text ids |
| llmc (llm.c, modded-nanogpt) | `.bin` | after 256 int32: magic, version, number of ids | between end-of-text ids |
| megatron | `.bin` and `.idx` | dtype in the index | by the index |
| datatrove | `.ds` and `.ds.index` | uint16 or uint32, by the size | by the index, of uint64 ends in ids |

An end-of-text id always ends a document, one that an index does not know of as well: it stands in a shard only where a
document ends. Empty documents are dropped. A file without end-of-text ids (and without index) is one document. Nothing
is repaired: sizes, indices and ids that do not fit are a UserError with file, got and expected.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from resformer.data.archives import opened
from resformer.data.documents import Document
from resformer.data.layouts import LAYOUTS, LLMC_MAGICS
from resformer.data.readers import file_identity
from resformer.data.reading import BadBlock, Block, Report
from resformer.errors import UserError, did_you_mean

FORMS = ("auto", "nanogpt", "llmc", "megatron", "datatrove")
TOKEN_DTYPES = ("uint16", "uint32")
BLOCK_TOKENS = 1 << 16  # about 256 KB of text
MAX_DOCUMENT_TOKENS = 1 << 27  # 1 GiB of int64 ids
_CHUNK_DOCUMENTS = 4096


def is_tokenised(path: Path) -> bool:
    """Whether a file is one of token ids by its name; an index beside it is none."""
    return path.suffix.lower() in (".bin", ".ds")


def refuse_foreign_index(directory: Path) -> None:
    """UserError that says how to convert a directory of MosaicML streaming (MDS) or litdata; else nothing."""
    try:
        index = json.loads((directory / "index.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return
    if not isinstance(index, dict):
        return
    shards = index.get("shards")
    if isinstance(shards, list) and any(isinstance(shard, dict) and shard.get("format") == "mds" for shard in shards):
        kind, package = "MosaicML streaming (MDS)", "streaming"
        rows = f"streaming.StreamingDataset(local={str(directory)!r}, batch_size=1)"
    elif isinstance(index.get("chunks"), list):
        kind, package = "litdata", "litdata"
        rows = f"litdata.StreamingDataset({str(directory)!r})"
    else:
        return
    raise UserError(
        f"{directory}: a dataset of {kind}, which is not read; write it as jsonl and pass that: "
        f"import json, {package}; [print(json.dumps({{'text': row['text']}})) for row in {rows}]"
    )


def tokenised_source(
    path: Path, *, domain: str, vocab_size: int, eos_token_id: int, token_dtype: str | None, form: str = "auto"
) -> TokenSource:
    """A file of token ids as a source.

    Args:
        path: the `.bin` or `.ds`.
        domain: of its documents.
        vocab_size: ids must be below it.
        eos_token_id: the end-of-text id of the tokenizer that made the file.
        token_dtype: "uint16" or "uint32" of a file that does not say it (nanogpt); else not needed.
        form: one of `FORMS`; "auto" goes by suffix, a `.idx` beside it, and llm.c's magic.

    UserError where files, header and index do not fit together; ids are checked as they are read.
    """
    assert form in FORMS, form
    assert 0 <= eos_token_id < vocab_size, (eos_token_id, vocab_size)
    if token_dtype is not None and token_dtype not in TOKEN_DTYPES:
        raise UserError(
            f"--token-dtype: got '{token_dtype}', expected {' or '.join(TOKEN_DTYPES)}"
            f"{did_you_mean(token_dtype, TOKEN_DTYPES)}"
        )
    if form == "auto":
        form = _form(path)
    return TokenSource(path, form, domain, vocab_size, eos_token_id, token_dtype)


def _form(path: Path) -> str:
    if path.suffix.lower() == ".ds":
        return "datatrove"
    if path.with_suffix(".idx").exists():
        return "megatron"
    with opened(path) as handle:
        magic = int.from_bytes(handle.read(4), "little")
    return "llmc" if magic in LLMC_MAGICS else "nanogpt"


class TokenSource:
    """A file of token ids; made by `tokenised_source`."""

    def __init__(
        self, path: Path, form: str, domain: str, vocab_size: int, eos_token_id: int, token_dtype: str | None
    ) -> None:
        self.path, self.form, self.domain = path, form, domain
        self.vocab_size, self.eos_token_id = vocab_size, eos_token_id
        self.name = str(path)
        opened(path).close()
        self.size = path.stat().st_size
        self.layout = LAYOUTS[form](path, self.size, token_dtype)

    def identity(self) -> list[Any]:
        index = [] if self.layout.index is None else file_identity(self.layout.index)
        ids = [self.form, self.layout.dtype.str, self.vocab_size, self.eos_token_id]
        return [*file_identity(self.path), *index, *ids]

    def blocks(self) -> Iterator[Block]:
        if not self.layout.tokens:
            yield BadBlock(file=self.path, line=None, reason=None, size=self.size, opens=True)
            return
        numbered = self._by_end_of_text() if self.layout.documents is None else self._by_index()
        at, opens = 0, True
        for first, ends in numbered:
            start, at = at, int(ends[-1])
            yield TokenBlock(
                source=self,
                start=start,
                ends=ends,
                first=first,
                size=self._bytes_before(at) - self._bytes_before(start),
                opens=opens,
            )
            opens = False

    def _bytes_before(self, token: int) -> int:
        """Bytes on the disk that the ids before `token` stand for; of all, the whole file."""
        return self.size if token == self.layout.tokens else token * self.layout.dtype.itemsize

    def read(self, start: int, stop: int) -> np.ndarray:
        """The ids `start` to `stop` as they are in the file."""
        dtype = self.layout.dtype
        with opened(self.path) as handle:
            handle.seek(self.layout.offset + start * dtype.itemsize)
            data = handle.read((stop - start) * dtype.itemsize)
        if len(data) != (stop - start) * dtype.itemsize:
            raise UserError(f"{self.path}: has become shorter while it was read; wait until it is written")
        return np.frombuffer(data, dtype)

    def _by_end_of_text(self) -> Iterator[tuple[int | None, np.ndarray]]:
        """Blocks that end after an end-of-text id, or with the file."""
        start = 0
        while start < self.layout.tokens:
            at = start
            while True:
                stop = min(at + BLOCK_TOKENS, self.layout.tokens)
                found = np.flatnonzero(self.read(at, stop) == self.eos_token_id)
                if len(found):
                    # A long document ends its block, so that little else has to wait for it.
                    stop = at + int(found[-1] if at == start else found[0]) + 1
                if len(found) or stop == self.layout.tokens:
                    break
                at = stop
                self._check_length(start, at)
            yield None, np.array([stop])
            start = stop

    def _by_index(self) -> Iterator[tuple[int | None, np.ndarray]]:
        """Blocks of whole documents of the index: (number of the first from 1, their ends)."""
        assert self.layout.documents is not None
        start, first = 0, 1
        waiting = np.zeros(0, np.int64)
        for at in range(0, len(self.layout.documents), _CHUNK_DOCUMENTS):
            chunk = self.layout.documents.ends(at, min(at + _CHUNK_DOCUMENTS, len(self.layout.documents)))
            waiting = np.concatenate((waiting, chunk))
            while len(waiting) and waiting[-1] - start >= BLOCK_TOKENS:
                count = max(1, int(np.searchsorted(waiting, start + BLOCK_TOKENS, side="right")))
                self._check_length(start, int(waiting[0]))
                yield first, waiting[:count]
                start, first, waiting = int(waiting[count - 1]), first + count, waiting[count:]
        if len(waiting):
            yield first, waiting

    def _check_length(self, start: int, stop: int) -> None:
        if stop - start > MAX_DOCUMENT_TOKENS:
            raise UserError(
                f"{self.path}: more than {MAX_DOCUMENT_TOKENS} tokens from token {start} on without the end-of-text id "
                f"{self.eos_token_id}; check --tokenizer and --token-dtype, or cut the file into several"
            )


@dataclass(frozen=True, kw_only=True)
class TokenBlock:
    """Consecutive documents, not read yet: they end before the tokens `ends`; `first` is the number of the first one,
    None where only end-of-text ids tell them apart.
    """

    source: TokenSource
    start: int
    ends: np.ndarray
    first: int | None
    size: int
    opens: bool

    def documents(self, report: Report) -> Iterator[Document]:
        report.totals["files"] += self.opens
        source, eos = self.source, self.source.eos_token_id
        ids = source.read(self.start, int(self.ends[-1])).astype(np.int64)
        wrong = (ids < 0) | (ids >= source.vocab_size)
        if wrong.any():
            at = int(wrong.argmax())
            causes = "--token-dtype and --tokenizer" if source.form == "nanogpt" else "--tokenizer and the file"
            raise UserError(
                f"{source.path}: token {self.start + at} is {ids[at]}, expected 0 to {source.vocab_size - 1} for a "
                f"vocabulary of {source.vocab_size}; check {causes}"
            )
        marks = np.flatnonzero(ids == eos)
        begin = 0
        for i, end in enumerate((self.ends - self.start).tolist()):
            low, high = np.searchsorted(marks, (begin, end))
            for stop in (*marks[low:high].tolist(), end):
                if stop > begin:
                    place = f"token {self.start + begin}" if self.first is None else str(self.first + i)
                    yield Document(text="", domain=source.domain, name=f"{source.path}:{place}", ids=ids[begin:stop])
                begin = stop + 1
            begin = end
