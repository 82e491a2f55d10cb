"""Blocks -> token ids, by threads: the tokenizer and the hash work outside of Python's lock."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from resformer.data.documents import Document, clean, draw, text_hash
from resformer.data.reading import Block, Report
from resformer.data.shards import dtype_for
from resformer.data.tokenizer import Vocabulary
from resformer.errors import UserError

_UNSPELLABLE = "holds the text of a special token, which this tokenizer cannot write in any other way"
T = TypeVar("T")
# One row a document. identity, more: the first 128 bits of the hash of its text. rank: `documents.draw`.
ROWS = np.dtype(
    [("domain", "<u4"), ("tokens", "<u8"), ("bytes", "<u8"), ("identity", "<u8"), ("more", "<u8"), ("rank", "<u8")]
)
# An encoding takes some two hundred bytes of memory a token until its ids are taken out: so much text at a time.
_AT_ONCE = 1 << 16
_MAX_ENCODE = 1 << 18  # characters; longer documents are encoded in pieces
_MAX_UNCUT = 1 << 22
_MARK_SEARCH = 1 << 14
_LETTER_AND_MARK = re.compile(r"[^\W\d_](?=[!-&(-/:-@\[-^{-~\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f])")


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """Documents as token ids.

    ids: of all documents, each ended by the end-of-text id, in the dtype of the shards. rows: `ROWS`, domains as
    indices into `domains`. size: bytes on the disk that the block stands for.
    """

    ids: np.ndarray
    rows: np.ndarray
    domains: list[str]
    report: Report
    size: int

    def within(self, size: int, least: int) -> tuple[Encoded, bool]:
        """The first documents with at most `size` bytes of text, `least` of them in any case, and whether some are
        left out, which the report counts.
        """
        ends = np.cumsum(self.rows["bytes"].astype(np.int64))
        count = max(int(np.searchsorted(ends, size, side="right")), least)
        if count >= len(self.rows):
            return self, False
        rows = self.rows[:count]
        self.report.totals["inputs_cut_by_max_bytes"] += 1
        return replace(self, rows=rows, ids=self.ids[: int(rows["tokens"].sum())]), True


class Encoder:
    """Turns blocks into token ids with `workers` threads, in the order of the blocks."""

    def __init__(
        self, vocabulary: Vocabulary, *, on_bad_line: str, split_seed: int, workers: int, count_bytes: bool = False
    ) -> None:
        self.vocabulary, self.on_bad_line, self.split_seed, self.workers = vocabulary, on_bad_line, split_seed, workers
        self.dtype = dtype_for(vocabulary.vocab_size)
        self.token_bytes = vocabulary.token_bytes() if count_bytes else None

    def run(self, blocks: Iterator[tuple[T, Block]]) -> Iterator[tuple[T, Encoded]]:
        """All blocks, encoded, in order, each with what came beside it; a block's error is raised in its place. Few
        blocks are held at a time.
        """
        waiting: deque[tuple[T, Future[Encoded]]] = deque()
        with ThreadPoolExecutor(self.workers, thread_name_prefix="encode") as pool, serial_tokenizers():
            try:
                for beside, block in blocks:
                    waiting.append((beside, pool.submit(self.encode, block)))
                    if len(waiting) > 2 * self.workers:
                        beside, future = waiting.popleft()
                        yield beside, future.result()
                while waiting:
                    beside, future = waiting.popleft()
                    yield beside, future.result()
            finally:
                for _, future in waiting:
                    future.cancel()

    def encode(self, block: Block) -> Encoded:
        """One block."""
        report = Report(on_bad_line=self.on_bad_line)
        names: dict[str, int] = {}
        read: list[tuple[Document, str, tuple[int, int, int, int, int, int]]] = []
        for document in block.documents(report):
            counts = report.domain(document.domain)
            counts["documents_read"] += 1
            text = "" if document.ids is not None else clean(document.text, counts)
            if (document.ids is None and (not text or text.isspace())) or (
                document.ids is not None and not len(document.ids)
            ):
                counts["empty"] += 1
                continue
            if document.ids is None:
                data = text.encode("utf-8")
                identity, size = text_hash(data), len(data)
            else:
                identity, size = text_hash(b"ids " + document.ids.astype("<u4").tobytes()), self.bytes_of(document.ids)
            domain = names.setdefault(document.domain, len(names))
            first, more = (int.from_bytes(identity[i : i + 8], "big") for i in (0, 8))
            read.append((document, text, (domain, 0, size, first, more, draw(identity, self.split_seed))))
        encoded = iter(self.texts([text for document, text, _ in read if document.ids is None], report))
        parts, rows = [], []
        for document, _, row in read:
            ids = next(encoded) if document.ids is None else document.ids
            if ids is None:
                report.bad(document.name, None, _UNSPELLABLE, kind="bad_documents")
                continue
            if self.vocabulary.unknown_id is not None and document.ids is None:
                report.domain(document.domain)["unknown_tokens"] += int((ids == self.vocabulary.unknown_id).sum())
            parts.append(ids)
            rows.append(row)
        return Encoded(
            ids=self.joined(parts),
            rows=self.table(rows, parts),
            domains=list(names),
            report=report,
            size=block.size,
        )

    def texts(self, texts: list[str], report: Report) -> list[np.ndarray | None]:
        """Token ids of each text, None where it cannot be written."""
        found: list[np.ndarray | None] = []
        group: list[str] = []
        size = 0
        for text in texts:
            if len(text) > _MAX_ENCODE and self.vocabulary.cuts_safely:
                found += self.vocabulary.encode(group)
                report.totals["encoded_in_pieces"] += 1
                found.append(self.pieces(text))
                group, size = [], 0
                continue
            group.append(text)
            size += len(text)
            if size >= _AT_ONCE:
                found += self.vocabulary.encode(group)
                group, size = [], 0
        return found + self.vocabulary.encode(group)

    def pieces(self, text: str) -> np.ndarray | None:
        """Token ids of a long text, piece by piece."""
        found = []
        for piece in cut_safely(text):
            (ids,) = self.vocabulary.encode([piece])
            if ids is None:
                return None
            found.append(ids.astype(self.dtype))
        return np.concatenate(found).astype(np.int64)

    def joined(self, parts: list[np.ndarray]) -> np.ndarray:
        """One array of all ids, checked against the vocabulary, an end-of-text id after each part."""
        end, size = self.vocabulary.eos_token_id, self.vocabulary.vocab_size
        whole = np.concatenate([ids for part in parts for ids in (part, np.array([end]))] or [np.zeros(0, np.int64)])
        if len(whole) and not 0 <= int(whole.min()) <= int(whole.max()) < size:
            wrong = int(whole.min()) if whole.min() < 0 else int(whole.max())
            raise UserError(
                f"token id {wrong} does not fit the vocabulary of {size}; take the tokenizer of these files"
            )
        assert int((whole == end).sum()) == len(parts), "an end-of-text id inside of a document"
        return whole.astype(self.dtype)

    def table(self, rows: list[tuple[int, int, int, int, int, int]], parts: list[np.ndarray]) -> np.ndarray:
        """`rows` with the number of tokens, end-of-text included."""
        table = np.array(rows, dtype=ROWS)
        table["tokens"] = [len(part) + 1 for part in parts]
        return table

    def bytes_of(self, ids: np.ndarray) -> int:
        """UTF-8 bytes of the text of a document that came tokenised."""
        assert self.token_bytes is not None, "asked for with count_bytes"
        if ids.min() < 0 or ids.max() >= len(self.token_bytes):
            return 0  # `joined` says so
        return int(self.token_bytes[ids].sum())


def cut_safely(text: str) -> Iterator[str]:
    """Pieces of about `_MAX_ENCODE` characters, cut where no word of a byte-level tokenizer goes across: after a line
    end between two characters that are no white space, before a single space between two letters, or between a letter
    and a punctuation mark. Only where there is none of them in `_MAX_UNCUT` characters a piece ends elsewhere.
    """
    start = 0
    while len(text) - start > _MAX_ENCODE:
        windows = range(start, min(start + _MAX_UNCUT, len(text)), _MAX_ENCODE)
        found = next((cut for low in windows if (cut := _safe_cut(text, low))), 0)
        stop = found or min(start + _MAX_UNCUT, len(text))
        yield text[start:stop]
        start = stop
    if start < len(text):
        yield text[start:]


def _safe_cut(text: str, low: int) -> int:
    """The last safe cut in the `_MAX_ENCODE` characters from `low` on; 0: there is none."""
    high = min(low + _MAX_ENCODE, len(text) - 1)
    end = text.rfind("\n", low + 1, high)
    while end > 0 and (text[end - 1].isspace() or text[end + 1].isspace()):
        end = text.rfind("\n", low + 1, end)
    if end > 0:
        return end + 1
    end = text.rfind(" ", low + 1, high)
    while end > 0 and not (text[end - 1].isalpha() and text[end + 1].isalpha()):
        end = text.rfind(" ", low + 1, end)
    if end > 0:
        return end
    return next((m.start() + 1 for m in _LETTER_AND_MARK.finditer(text, max(low + 1, high - _MARK_SEARCH), high)), 0)


@contextmanager
def serial_tokenizers() -> Iterator[None]:
    """No threads inside of tokenizers: each of ours encodes on its own."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
