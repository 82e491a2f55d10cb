"""Parts -> shards: exact duplicates removed, documents split, everything in the order of the input.

Memory: one byte a document (kept or not), and in turns the hashes of a share of the documents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from resformer.data import shards
from resformer.data.files import Files
from resformer.data.parts import Part
from resformer.data.reading import Report
from resformer.errors import UserError

_SORTED_DOCUMENTS = 1 << 22  # hashes held at a time: 24 bytes each, and as many again to sort
_SPAN = 1 << 64


@dataclass(kw_only=True)
class Split:
    """What decides on the documents of one domain: the number of kept ones, of those below the threshold, and the
    extreme ranks, which decide where chance gives one of the splits nothing.
    """

    documents: int = 0
    below: int = 0
    smallest: int = _SPAN
    largest: int = -1
    threshold: int = 0

    def settle(self, validation_share: float, domain: str) -> None:
        """Set the threshold so that each split gets at least one document (share 0: no validation at all).

        Where the share is so small that chance gives none, the document with the smallest rank is taken: still a
        function of texts and seed only. UserError for a domain of one document, which cannot be in both splits.
        """
        if validation_share == 0:
            self.threshold, self.below = 0, 0
            return
        if self.documents < 2:
            raise UserError(
                f"domain '{domain}' has one document, expected at least two for a split by document: cut it into "
                "several files (or jsonl lines), or pass --validation-share 0 for a corpus without validation"
            )
        if self.below == 0:
            self.threshold, self.below = self.smallest + 1, 1
        elif self.below == self.documents:
            self.threshold, self.below = self.largest, self.documents - 1


def merge(
    parts: Sequence[Part],
    work: Path,
    *,
    validation_share: float,
    dtype: np.dtype,
    advance: Callable[[int], None] = lambda amount: None,
) -> tuple[dict[str, dict[str, Any]], Report]:
    """Write the shards of all domains into `work`; return their index entries by domain and split, and the report.

    parts: all of them, in the order of the input. advance: is told the tokens that were written.
    """
    report = Report()
    for part in parts:
        report.add(part.report)
    keep = first_ones(parts, report)
    splits = plan_splits(parts, keep, validation_share)
    files = Files()
    writers = {
        (domain, split): shards.ShardWriter(work, domain, split, documents=documents, dtype=dtype, files=files)
        for domain, found in sorted(splits.items())
        for split, documents in (("train", found.documents - found.below), ("validation", found.below))
    }
    for part, kept in with_kept(parts, keep):
        rows, ids = part.rows(), part.ids(dtype)
        to = np.where(kept, 2 * rows["domain"].astype(np.int64), -1)
        for number, domain in enumerate(part.domains):
            if domain in splits:
                mine = to == 2 * number
                to[mine] += rows["rank"][mine] < np.uint64(splits[domain].threshold)
        write_part(rows, ids, to, [writers.get((d, s)) for d in part.domains for s in shards.SPLITS])
        advance(part.tokens)
    entries: dict[str, dict[str, Any]] = {}
    for (domain, split), writer in writers.items():
        entries.setdefault(domain, {})[split] = writer.close()
    return entries, report


def write_part(rows: np.ndarray, ids: np.ndarray, to: np.ndarray, writers: Sequence[shards.ShardWriter | None]) -> None:
    """Hand the documents to the writers that `to` names, neighbours with the same one at once."""
    ends = np.cumsum(rows["tokens"].astype(np.int64))
    edges = np.flatnonzero(np.diff(to)) + 1
    for start, stop in zip([0, *edges.tolist()], [*edges.tolist(), len(to)], strict=True):
        if start == stop or to[start] < 0:
            continue
        writer, some = writers[int(to[start])], rows[start:stop]
        assert writer is not None, "a domain with a kept document has writers"
        begin = int(ends[start - 1]) if start else 0
        writer.add(ids[begin : int(ends[stop - 1])], some["tokens"], some["bytes"], some["identity"])


def with_kept(parts: Sequence[Part], keep: np.ndarray) -> Iterator[tuple[Part, np.ndarray]]:
    """Each part that has documents, and which of them are kept."""
    at = 0
    for part in parts:
        count = len(part.rows())
        if count:
            yield part, keep[at : at + count]
        at += count


def first_ones(parts: Sequence[Part], report: Report) -> np.ndarray:
    """Which documents, of all in order, are the first with their text; the others are counted in `report`."""
    counts = [len(part.rows()) for part in parts]
    total = sum(counts)
    keep = np.ones(total, dtype=bool)
    buckets = -(-total // _SORTED_DOCUMENTS)
    for bucket in range(buckets):
        low, high = _SPAN * bucket // buckets, _SPAN * (bucket + 1) // buckets - 1
        places, first, more = [], [], []
        at = 0
        for part, count in zip(parts, counts, strict=True):
            rows = part.rows()
            mine = np.flatnonzero((rows["identity"] >= np.uint64(low)) & (rows["identity"] <= np.uint64(high)))
            places.append(mine + at)
            first.append(rows["identity"][mine])
            more.append(rows["more"][mine])
            at += count
        place, identity, rest = (np.concatenate(x) for x in (places, first, more))
        order = np.lexsort((place, rest, identity))
        again = (np.diff(identity[order]) == 0) & (np.diff(rest[order]) == 0)
        keep[place[order[1:][again]]] = False
    for part, kept in with_kept(parts, keep):
        for number, count in zip(*np.unique(part.rows()["domain"][~kept], return_counts=True), strict=True):
            report.domain(part.domains[int(number)])["duplicate"] += int(count)
    return keep


def plan_splits(parts: Sequence[Part], keep: np.ndarray, validation_share: float) -> dict[str, Split]:
    """By domain with a kept document, how it is split."""
    threshold = int(validation_share * _SPAN)
    splits: dict[str, Split] = {}
    for part, kept in with_kept(parts, keep):
        rows = part.rows()[kept]
        for number in np.unique(rows["domain"]):
            ranks = rows["rank"][rows["domain"] == number]
            split = splits.setdefault(part.domains[int(number)], Split(threshold=threshold))
            split.documents += len(ranks)
            split.below += int((ranks < np.uint64(threshold)).sum()) if threshold else 0
            split.smallest = min(split.smallest, int(ranks.min()))
            split.largest = max(split.largest, int(ranks.max()))
    for domain, split in sorted(splits.items()):
        split.settle(validation_share, domain)
    return splits
