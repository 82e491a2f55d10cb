"""The texts on which models are compared: windows of equal length, each model's own tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from resformer.errors import UserError
from resformer.evaluate.text_source import TextSource


def read_texts(inputs: Sequence[str], *, enough: int) -> list[str]:
    """The texts of files, directories and patterns that hold text, in order, until there are `enough` characters."""
    found, size = [], 0
    for document, _ in TextSource(inputs).documents():
        found.append(document.text)
        size += len(document.text)
        if size >= enough:
            break
    return found


def windows(tokenizer: Any, texts: Sequence[str], *, length: int, count: int, source: str) -> Tensor:
    """`count` windows of `length` tokens, int64 `[count, length]`; fewer where the text ends before.

    source: "documents" (the beginnings of documents that are long enough, as the paper's scripts take them), "joined"
    (documents after one another, an end-of-text token between them, cut into windows), or "auto": documents where
    there are enough of them, else joined. UserError where not even one window comes out.
    """
    found: list[list[int]] = []
    if source in ("documents", "auto"):
        for text in texts:
            # A token has a character at least, and hardly more than 64: shorter and much longer texts need no look.
            ids = tokenizer(text[: 64 * length], add_special_tokens=False)["input_ids"] if len(text) >= length else []
            if len(ids) >= length:
                found.append(ids[:length])
                if len(found) == count:
                    break
    if source == "joined" or (source == "auto" and len(found) < count):
        found = list(_joined(tokenizer, texts, length, count))
    if not found:
        raise UserError(
            f"--text: gives not one window of {length} tokens; give more text or a shorter --sequence-length"
        )
    return torch.tensor(found, dtype=torch.long)


def _joined(tokenizer: Any, texts: Sequence[str], length: int, count: int) -> Iterator[list[int]]:
    end = tokenizer.eos_token_id
    rest: list[int] = []
    made = 0
    for text in texts:
        rest += tokenizer(text, add_special_tokens=False)["input_ids"] + ([] if end is None else [end])
        while len(rest) >= length:
            yield rest[:length]
            rest, made = rest[length:], made + 1
            if made == count:
                return
