"""Windows over token sequences: each token is a target once, whatever the length of the windows and their stride.

Shapes: T tokens of a window, N of a sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import numpy as np

from resformer.errors import UserError

Item = TypeVar("Item")
GROUP_BATCHES = 32
"""So many batches are sorted by length at a time, so that rows of a batch need little padding."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """What one row of a forward pass is made of.

    Attributes:
        tokens: `[T+1]` int64: inputs `[:-1]`, targets `[1:]`.
        mask: `[T]` bool, False where the target is not scored here.
        positions: `[T]` int64 that restart in each document, where several in one window are kept apart.
        item: number of the document (or whatever the caller counts by).
        start: index of `tokens[0]` in its sequence.
        work: share of the whole work, in the caller's units, for progress.
    """

    tokens: np.ndarray
    mask: np.ndarray
    positions: np.ndarray | None = None
    item: int = 0
    start: int = 0
    work: float = 0.0


def slide(
    pieces: Iterable[np.ndarray], *, first: int, length: int, stride: int | None = None, item: int = 0
) -> Iterator[Window]:
    """Windows of at most `length` inputs over a sequence that comes in pieces; each target from index `first` on is
    scored once.

    Args:
        pieces: parts of one sequence, int64.
        first: index of the first target that counts, at least 1; what comes before it is context only.
        length: inputs of a window (T).
        stride: targets that a window adds; none = `length`, windows that do not overlap. A target has at least
            `length - stride` tokens of context where its sequence has so many.
        item: for the windows' field.
    """
    stride = length if stride is None else stride
    left = iter(pieces)
    buffer, start, ended = np.zeros(0, dtype=np.int64), 0, False
    while True:
        while len(buffer) <= length and not ended:
            piece = next(left, None)
            ended = piece is None
            if piece is not None:
                buffer = np.concatenate([buffer, piece]) if len(buffer) else piece
        tokens = buffer[: length + 1]
        if len(tokens) > max(first, 1):
            mask = np.arange(1, len(tokens)) >= first
            yield Window(tokens=tokens, mask=mask, item=item, start=start)
        elif ended:
            return
        if ended and len(buffer) <= length + 1:
            return
        # The next window begins `stride` later, and the targets up to here are done.
        first = max(first, len(tokens)) - stride
        buffer, start = buffer[stride:], start + stride


def by_length(windows: Iterable[Window], batch_size: int) -> Iterator[Window]:
    """The same windows, long ones first within groups of a few batches. The order depends on nothing but the windows
    and the batch size.
    """
    left = iter(windows)
    while group := list(islice(left, GROUP_BATCHES * batch_size)):
        yield from sorted(group, key=lambda window: -len(window.tokens))


def check_stride(stride: int | None, length: int) -> None:
    """UserError unless windows of `length` inputs can be `stride` apart."""
    if stride is not None and not 1 <= stride <= length:
        raise UserError(
            f"--stride is {stride}; expected 1 to the sequence length ({length}), whose windows do not overlap"
        )


def padded(rows: Iterable[np.ndarray], fill: int | bool) -> np.ndarray:
    """Rows of different lengths as one array, filled up on the right."""
    rows = list(rows)
    longest = max(map(len, rows))
    if all(len(row) == longest for row in rows):
        return np.stack(rows)
    whole = np.full((len(rows), longest), fill, dtype=rows[0].dtype)
    for i, row in enumerate(rows):
        whole[i, : len(row)] = row
    return whole
