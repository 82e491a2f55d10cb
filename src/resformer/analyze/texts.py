"""The texts on which models are compared: windows of equal length, each model's own tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, zip_longest

import numpy as np
import torch
from torch import Tensor

from resformer.errors import UserError
from resformer.evaluate.encoding import Start, TextEncoder
from resformer.evaluate.text_source import TextSource

_BATCH = 32


def read_texts(inputs: Sequence[str], *, enough: int) -> list[str]:
    """Texts of files, directories and patterns, `enough` characters in all: of each source the first ones, in turns, so
    that the first texts come from all of them.
    """
    sources = TextSource(inputs).each()
    found: list[list[str]] = []
    for source in sources:
        texts, size = [], 0
        for document, _ in source:
            texts.append(document.text)
            size += len(document.text)
            if size >= enough / len(sources):
                break
        found.append(texts)
    return [text for text in chain.from_iterable(zip_longest(*found)) if text is not None]


def windows(
    encoder: TextEncoder, start: Start, end: int | None, texts: Sequence[str], *, length: int, count: int, source: str
) -> Tensor:
    """`count` windows of `length` tokens, int64 `[count, length]`; fewer where the text ends before.

    Each begins with `start`, what stands before a document for this model, so that the first token is common to all.

    Args:
        encoder: of the model's tokenizer.
        start: see `evaluate.encoding.start_of_documents`.
        end: the end-of-text id, None where there is none.
        texts: where the windows come from.
        length, count: as above.
        source: "documents" (the beginnings of documents that are long enough, as the paper's scripts take them),
            "joined" (documents after one another, `end` between them), or "auto": documents where there are enough of
            them, else joined.

    Raises:
        UserError: not even one window comes out, or a token that the model does not know.
    """
    room = length - len(start.ids)
    if room < 1:
        raise UserError(f"--sequence-length: got {length}, but {len(start.ids)} tokens stand before a document")
    found: list[np.ndarray] = []
    if source in ("documents", "auto"):
        for ids in _encoded(encoder, [text[: 64 * room] for text in texts]):  # a token has hardly more characters
            if len(ids) >= room:
                found.append(ids[:room])
                if len(found) == count:
                    break
    if source == "joined" or (source == "auto" and len(found) < count):
        found = list(_joined(encoder, texts, end, room, count))
    if not found:
        raise UserError(
            f"--text: gives not one window of {length} tokens; give more text or a shorter --sequence-length"
        )
    rows = np.stack([np.concatenate([np.array(start.ids, dtype=np.int64), ids]) for ids in found])
    return torch.from_numpy(rows)


def _encoded(encoder: TextEncoder, texts: Sequence[str]) -> Iterator[np.ndarray]:
    for at in range(0, len(texts), _BATCH):
        yield from encoder.encode(texts[at : at + _BATCH])


def _joined(encoder: TextEncoder, texts: Sequence[str], end: int | None, room: int, count: int) -> Iterator[np.ndarray]:
    rest, made = np.zeros(0, np.int64), 0
    for ids in _encoded(encoder, texts):
        rest = np.concatenate([rest, ids] + ([] if end is None else [np.array([end])]))
        while len(rest) >= room:
            yield rest[:room]
            rest, made = rest[room:], made + 1
            if made == count:
                return
