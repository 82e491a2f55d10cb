"""All documents of a build on the disk, once, and the decisions over them: duplicates, size bound, split.

A build reads its inputs a single time (archives are slow to read twice, and bad lines would be counted twice); the
tokenizer and the shards are made from the spool.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from resformer.data.documents import Document, clean, draw, text_hash
from resformer.data.readers import Report
from resformer.errors import UserError

_SPAN = 1 << 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A document in the spool: where its UTF-8 bytes lie, and its two draws (`documents.draw`)."""

    offset: int
    size: int
    identity: int
    rank: int
    order: int


@dataclass(kw_only=True)
class Split:
    """The documents of one domain, each split in the order in which it is stored."""

    train: list[Entry] = field(default_factory=list)
    validation: list[Entry] = field(default_factory=list)


class Spool:
    """Append documents, then read them in any order."""

    def __init__(self, file: Path, split_seed: int) -> None:
        self._file, self._seed = file, split_seed
        self._handle = open(file, "wb")  # noqa: SIM115 - closed by close()
        self._seen: set[bytes] = set()
        self._size = 0
        self._map: mmap.mmap | None = None
        self.entries: dict[str, list[Entry]] = {}

    def fill(self, documents: Iterable[Document], report: Report) -> Iterator[int]:
        """Take in documents, cleaned; empty ones and exact duplicates (of any domain) are only counted.

        Yields the bytes of each text that was read.
        """
        for document in documents:
            counts = report.domain(document.domain)
            counts["documents_read"] += 1
            text = clean(document.text, counts)
            if not text or text.isspace():
                counts["empty"] += 1
                continue
            data = text.encode("utf-8")
            identity = text_hash(data)
            yield len(data)
            if identity in self._seen:
                counts["duplicate"] += 1
                continue
            self._seen.add(identity)
            rank, order = draw(identity, self._seed)
            entry = Entry(
                offset=self._size, size=len(data), identity=int.from_bytes(identity[:8], "big"), rank=rank, order=order
            )
            self.entries.setdefault(document.domain, []).append(entry)
            self._handle.write(data)
            self._size += len(data)

    def text(self, entry: Entry) -> str:
        """The text of a document."""
        if self._map is None:
            self._handle.flush()
            with open(self._file, "rb") as handle:
                self._map = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
        return self._map[entry.offset : entry.offset + entry.size].decode("utf-8")

    def close(self) -> None:
        """Close and remove the file."""
        if self._map is not None:
            self._map.close()
        self._handle.close()
        self._file.unlink(missing_ok=True)

    def bound(self, max_bytes: int, report: Report) -> None:
        """Keep a random sample of each domain, so that all of them together have at most `max_bytes`; at least two
        documents a domain stay.
        """
        total = sum(entry.size for entries in self.entries.values() for entry in entries)
        if total <= max_bytes:
            return
        for domain, entries in self.entries.items():
            budget = max_bytes * sum(entry.size for entry in entries) // total
            kept: list[Entry] = []
            used = 0
            for entry in sorted(entries, key=lambda e: e.order):
                used += entry.size
                if used > budget and len(kept) >= 2:
                    break
                kept.append(entry)
            report.domain(domain)["left_out_by_max_bytes"] += len(entries) - len(kept)
            self.entries[domain] = kept


def split_documents(entries: list[Entry], validation_share: float, domain: str) -> Split:
    """Split the documents of one domain by their rank. Each split of a domain gets at least one document (share 0: no
    validation at all).

    Where the share is so small that chance gives none, the document with the smallest rank is taken: still a function
    of texts and seed only. UserError for a domain of one document, which cannot be in both splits.
    """
    if validation_share == 0:
        return Split(train=sorted(entries, key=lambda e: e.order))
    if len(entries) < 2:
        raise UserError(
            f"domain '{domain}' has one document, expected at least two for a split by document: cut it into several "
            "files (or jsonl lines), "
            "or pass --validation-share 0 for a corpus without validation"
        )
    ranked = sorted(entries, key=lambda e: e.rank)
    threshold = int(validation_share * _SPAN)
    count = sum(1 for entry in ranked if entry.rank < threshold)
    count = min(max(count, 1), len(ranked) - 1)
    return Split(
        train=sorted(ranked[count:], key=lambda e: e.order),
        validation=sorted(ranked[:count], key=lambda e: e.order),
    )
