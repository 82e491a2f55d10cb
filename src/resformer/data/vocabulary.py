"""A tokenizer ready to encode, with special tokens NOT parsed: text that looks like one stays text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_LOCAL = ("NFC", "NFD", "NFKC", "NFKD")  # normalizers that change no character because of one beyond a line end


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """A tokenizer ready to encode, with what the index records of it."""

    tokenizer: Tokenizer
    vocab_size: int
    eos_token: str
    eos_token_id: int
    bos_token: str | None
    bos_token_id: int | None
    special: tuple[str, ...]
    unknown_id: int | None

    def encode(self, texts: Sequence[str]) -> list[np.ndarray | None]:
        """Token ids of each text (int64), without any special token; None for a text that spells one and that this
        tokenizer cannot write otherwise.
        """
        if not texts:
            return []
        encodings = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        found: list[np.ndarray | None] = []
        for encoding, text in zip(encodings, texts, strict=True):
            ids = np.asarray(encoding.ids, dtype=np.int64)
            found.append(self._spelled(text, ids) if self.control[ids].any() else ids)
        return found

    def _spelled(self, text: str, ids: np.ndarray) -> np.ndarray | None:
        """Spell the literals of special tokens by their characters, by cutting each after its first one.

        For tokens that are found in text whatever one asks for: added ones that are not marked as special, and entries
        of a Unigram or word vocabulary. None where something else than these literals would come out, such as a space
        that the tokenizer puts in front of each piece.
        """
        pieces, start = [], 0
        for match in self._literals.finditer(text):
            pieces.append(text[start : match.start() + 1])
            start = match.start() + 1
        pieces.append(text[start:])
        encodings = self.tokenizer.encode_batch_fast(pieces, add_special_tokens=False)
        spelled = np.concatenate([np.asarray(encoding.ids, dtype=np.int64) for encoding in encodings])
        exact = not self.control[spelled].any() and self.decode(spelled) == self.decode(ids)
        return spelled if exact else None

    @cached_property
    def control(self) -> np.ndarray:
        """Whether each id is a special token that no text may become, bool `[vocab_size]`."""
        found = np.zeros(self.vocab_size, dtype=bool)
        for token in self.special:
            token_id = self.tokenizer.token_to_id(token)
            if token_id is not None and token_id != self.unknown_id:
                found[token_id] = True
        return found

    @cached_property
    def _literals(self) -> re.Pattern[str]:
        longest_first = sorted(self.special, key=len, reverse=True)
        return re.compile("|".join(re.escape(token) for token in longest_first))

    def losses(self) -> str:
        """What this tokenizer does not keep, in words: some text that it does not give back; "" for a lossless one."""
        for text in ("line\nline", "Case", "caf\u00e9", "\u6f22\u5b57", "\U0001f600", "a  b"):
            (ids,) = self.encode([text])
            back = "" if ids is None else self.decode(ids)
            if back.strip() != text:
                return f"{text!r} comes back as {back!r}"
        return ""

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of `ids`, special tokens included."""
        return self.tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)

    @cached_property
    def cuts_safely(self) -> bool:
        """Whether a text can be encoded in pieces (`encode.cut_safely`): words are encoded each by itself, and
        nothing is put in front of a text.
        """
        probe = [
            ["one two\n", "three  four"],
            ["{}\n", "x"],
            ["1.\n", "2"],
            ["a\n", "'s"],
            ["one", " two"],
            ["one", ", two"],
            ["\u5b57", "\u3002\u5b57"],
        ]
        normalizer = self.tokenizer.normalizer
        if self.tokenizer.pre_tokenizer is None or not (normalizer is None or type(normalizer).__name__ in _LOCAL):
            return False

        def ids(texts: list[str]) -> list[int]:
            encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            return [number for encoding in encodings for number in encoding.ids]

        return all(ids(pieces) == ids(["".join(pieces)]) for pieces in probe)

    def token_bytes(self) -> np.ndarray:
        """UTF-8 bytes that each id stands for, int64 `[vocab_size]`; the end-of-text token stands for none.

        True for byte-level vocabularies, where each character of a token is one byte. Whoever cuts a document by it
        first checks that the sum over the whole document is its byte count (a normalizer may have changed the text).
        """
        lengths = np.zeros(self.vocab_size, dtype=np.int64)
        for token, token_id in self.tokenizer.get_vocab(with_added_tokens=False).items():
            lengths[token_id] = len(token)
        for token_id, added in self.tokenizer.get_added_tokens_decoder().items():
            lengths[token_id] = 0 if added.special else len(added.content.encode())
        lengths[self.eos_token_id] = 0
        return lengths
