"""What a row of training data is: a chunk of the stream, or whole documents packed together; and where documents end.

Shape legend: T = sequence length (a row has T + 1 tokens: T inputs, T targets), B = rows, D = documents, P = pieces of
them, R = rows of a domain.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np

PACKINGS = ("chunks", "best_fit")


class Chunks:
    """Contiguous rows with stride T: row i starts at token i * T. A tail shorter than a row is in none."""

    def __init__(self, stream: Any, length: int) -> None:
        self._stream, self._length = stream, length
        self.rows = self.at_least = max(0, (len(stream) - 1) // length)
        self.padding = 0.0

    def fill(self, row: int, tokens: np.ndarray, mask: np.ndarray | None) -> None:
        """Write a row into `tokens` `[T+1]`; all its targets count, so `mask` `[T]` stays as it is."""
        start = row * self._length
        tokens[:] = self._stream[start : start + self._length + 1]

    def targets(self, documents: int | None) -> float:
        """Share of targets that count, 0..1; `documents`: how many the stream has, where the first token of each is
        not to count.
        """
        return 1.0 if documents is None else 1.0 - documents / max(1, len(self._stream))


class Packed:
    """Whole documents, packed into rows by best-fit decreasing (`best_fit`).

    A document of more than T + 1 tokens is cut into pieces first; each piece starts with the last token of the one
    before, so that every token but the document's first is a target once. The rest of a row is end-of-text, and does
    not count.

    The packing is made when it is first asked for. A million documents take 0.2 s of one core (mean length 500 or
    1,400, rows of 2,049 tokens), more documents in proportion; 13 bytes for each piece are kept.
    """

    def __init__(self, stream: Any, ends: Callable[[], np.ndarray], length: int, eos_token_id: int) -> None:
        """`ends()`: where each document ends in the stream, tokens, int64 `[D]`."""
        self._stream, self._ends, self._length, self._eos = stream, ends, length, eos_token_id
        self.at_least = -(-len(stream) // (length + 1))
        """Rows that there are at least, known without packing."""

    @cached_property
    def _pieces(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Start in the stream `[P]`, length `[P]` and whether it continues a document `[P]`, by row; and the first
        piece of each row `[R+1]`.
        """
        starts, lengths, continues = cut(self._ends(), self._length)
        order, offsets = best_fit(lengths, self._length + 1)
        return starts[order], lengths[order].astype(np.int32), continues[order], offsets

    @property
    def rows(self) -> int:
        return len(self._pieces[3]) - 1

    @property
    def padding(self) -> float:
        """Share of tokens that are padding, 0..1."""
        lengths = self._pieces[1]
        return 1.0 - int(lengths.sum(dtype=np.int64)) / max(1, self.rows * (self._length + 1))

    def fill(self, row: int, tokens: np.ndarray, mask: np.ndarray | None) -> None:
        """Write a row into `tokens` `[T+1]`, and False into `mask` `[T]` where the target does not count."""
        assert mask is not None, "packed rows have padding"
        starts, lengths, continues, offsets = self._pieces
        pieces, place = slice(offsets[row], offsets[row + 1]), 0
        for start, length, goes_on in zip(
            starts[pieces].tolist(), lengths[pieces].tolist(), continues[pieces].tolist(), strict=True
        ):
            tokens[place : place + length] = self._stream[start : start + length]
            if goes_on and place:
                mask[place - 1] = False  # this token is a target of the piece before
            place += length
        tokens[place:] = self._eos
        mask[place - 1 :] = False

    def targets(self, documents: int | None) -> float:
        """Share of targets that count, 0..1; `documents` None: the first token of a document counts, unless it is the
        row's first.
        """
        _, lengths, continues, offsets = self._pieces
        inner = int(continues.sum()) - int(continues[offsets[:-1]].sum())
        lost = len(lengths) if documents is not None else self.rows + inner
        return (int(lengths.sum(dtype=np.int64)) - lost) / max(1, self.rows * self._length)


def cut(ends: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Documents that end at `ends` `[D]` -> their pieces of at most `length` + 1 tokens: starts, lengths, and whether
    each goes on with the document of the piece before; `[P]`.
    """
    starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]]) if len(ends) else ends
    count = np.maximum(1, -(-(ends - starts - 1) // length))
    if len(count) == int(count.sum()):
        return starts, ends - starts, np.zeros(len(ends), np.bool_)
    document = np.repeat(np.arange(len(ends)), count)
    number = np.arange(len(document)) - np.repeat(np.cumsum(count) - count, count)
    begin = starts[document] + number * length
    return begin, np.minimum(length + 1, ends[document] - begin), number > 0


def best_fit(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Put items of 1 to `capacity` tokens into as few rows as best-fit decreasing needs (H. Ding et al., "Fewer
    Truncations Improve Language Modeling", 2024, arXiv 2404.10830): the longest first, each into the fullest row that
    has room for it.

    Rows with equal room are interchangeable, and items of equal length too, so both are handled by their number: of the
    n items of a length as many as fit go into all rows of the smallest sufficient room at once. A row's room more than
    halves whenever its class is taken, so there are O(capacity log capacity) such moves whatever the number of items.

    Args:
        lengths: int64 `[P]`.
        capacity: tokens of a row.

    Returns:
        The items by row `[P]`, and the place of each row's first item in it `[R+1]`. A function of its arguments alone.
    """
    small = capacity <= np.iinfo(np.uint16).max  # NumPy sorts those by radix
    order = np.argsort((capacity - lengths).astype(np.uint16 if small else np.int64), kind="stable")
    counts = np.bincount(lengths, minlength=capacity + 1)
    free: dict[int, list[np.ndarray]] = {}  # rows by the room they have left, the ones that came first first
    rooms: list[int] = []  # the keys of `free`, sorted
    row_of: list[np.ndarray] = []
    rows = 0

    def put(room: int, some: np.ndarray) -> None:
        if room and len(some):
            if room not in free:
                insort(rooms, room)
                free[room] = []
            free[room].append(some)

    for length in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[length])
        while left:
            at = bisect_left(rooms, length)
            if at < len(rooms):
                room = rooms.pop(at)
                some = np.concatenate(free.pop(room))
            else:
                room, new = capacity, -(-left // (capacity // length))
                some = np.arange(rows, rows + new)
                rows += new
            fit = room // length
            full = min(len(some), left // fit)
            row_of.append(np.repeat(some[:full], fit))
            put(room - fit * length, some[:full])
            left -= full * fit
            if left and full < len(some):  # the last row takes what is left
                row_of.append(np.repeat(some[full : full + 1], left))
                put(room - left * length, some[full : full + 1])
                left, full = 0, full + 1
            put(room, some[full:])
    where = np.concatenate(row_of) if row_of else np.zeros(0, np.int64)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.bincount(where, minlength=rows))])
    return order[np.argsort(where, kind="stable")], offsets


def documents_of(inputs: np.ndarray, eos_token_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Positions `[B, T]` int64 that restart after each end-of-text id of the inputs `[B, T]`, and whether the target
    belongs to the input's document `[B, T]`: a document ends with its end-of-text id.
    """
    ends = inputs == eos_token_id
    place = np.broadcast_to(np.arange(inputs.shape[1]), inputs.shape)
    starts = np.zeros(inputs.shape, np.int64)
    np.multiply(place[:, 1:], ends[:, :-1], out=starts[:, 1:])
    return place - np.maximum.accumulate(starts, axis=1), ~ends
