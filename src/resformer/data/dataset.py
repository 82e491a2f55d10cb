"""A prepared corpus, opened for reading: batches for training, windows for validation.

Shape legend: T = sequence length, M = tokens of the covered documents.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from resformer.data import shards
from resformer.data.sampler import Sampler
from resformer.data.tokenizer import Vocabulary, open_vocabulary
from resformer.errors import UserError, did_you_mean


@dataclass(frozen=True, kw_only=True)
class ValidationWindow:
    """tokens `[T+1]` int64 (inputs `[:-1]`, targets `[1:]`); mask `[T]` bool, False where the target is padding."""

    tokens: np.ndarray
    mask: np.ndarray


def open_dataset(directory: str | Path, verify: str = "full") -> Dataset:
    """Open a prepared corpus. `verify`: "full" (every byte), "sample" (16 blocks a file) or "none" (sizes and
    tokenizer only).

    UserError, naming the file: missing or cut file, flipped byte, another tokenizer, an id outside the vocabulary,
    broken index.
    """
    root = Path(directory)
    index = shards.load_index(root)
    shards.verify(root, index, verify)
    return Dataset(root, index)


class Dataset:
    """A prepared corpus. Shards are memory-mapped; nothing is copied until a batch is made."""

    def __init__(self, directory: Path, index: dict) -> None:
        self.directory, self.index = directory, index
        self.vocab_size: int = index["vocab_size"]
        self.domains: list[str] = list(index["domains"])
        self.weights: dict[str, float] = dict(index["weights"])
        self.eos_token_id: int = index["tokenizer"]["eos_token_id"]
        self.bos_token_id: int | None = index["tokenizer"]["bos_token_id"]
        self.tokenizer_dir = directory

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over the tokenizer and every shard: equal fingerprints mean equal tokens, wherever the directory
        lies.
        """
        parts = [self.index["tokenizer"]["sha256"], self.index["dtype"]]
        parts += [
            f"{name} {entry['sha256']}"
            for name, entry in sorted(self.index["files"].items())
            if name.startswith("shards/")
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The tokenizer, loaded on first use."""
        return open_vocabulary(self.directory)

    def tokens(self, split: str, domain: str) -> int:
        """Number of tokens, end-of-text ids included."""
        return int(self._entry(split, domain)["tokens"])

    def stream(self, split: str, domain: str) -> np.ndarray:
        """All token ids of a split of a domain, read-only memory map `[tokens]` of the shard's dtype."""
        return shards.read_ids(self.directory, self.index, self._entry(split, domain))

    def document_table(self, split: str, domain: str) -> np.ndarray:
        """uint64 `[documents, 3]`: cumulative token end, cumulative byte end, identity of the text."""
        return shards.read_table(self.directory, self._entry(split, domain))

    def sampler(
        self,
        *,
        sequence_length: int,
        batch_size: int,
        seed: int,
        weights: dict[str, float] | None = None,
        split: str = "train",
    ) -> Sampler:
        """The order of training data as a pure function of `seed` and the sample index; `weights` replaces the
        corpus's own.

        UserError: unknown domain in `weights`, a weighted domain without one full sequence, a corpus smaller than one
        batch.
        """
        return Sampler(
            self, sequence_length=sequence_length, batch_size=batch_size, seed=seed, weights=weights, split=split
        )

    def validation(
        self, domain: str, *, sequence_length: int, max_tokens: int | None = None
    ) -> Iterator[ValidationWindow]:
        """Non-overlapping windows over the validation documents of `domain`; each covered token is a target exactly
        once.

        The very first token has the end-of-text id as its context, as every later document has. The last window is
        filled up with end-of-text under a False mask. `max_tokens`: whole documents, in the order of their hash,
        until the cap is reached; the last one is cut at the cap where the bytes of the kept part are known exactly
        (see `covered`), and kept whole where they are not.
        """
        if sequence_length < 1:
            raise UserError(f"sequence_length: got {sequence_length}, expected at least 1")
        count, _ = self.covered(domain, max_tokens=max_tokens)
        return self._windows(self.stream("validation", domain), count, sequence_length)

    def validation_bytes(self, domain: str, *, sequence_length: int, max_tokens: int | None = None) -> int:
        """Raw UTF-8 bytes of exactly the text that `validation` covers with the same arguments (its length does not
        change the cover).
        """
        return self.covered(domain, max_tokens=max_tokens)[1]

    def covered(self, domain: str, *, max_tokens: int | None = None) -> tuple[int, int]:
        """(tokens, raw bytes) that validation scores: a prefix of the validation split.

        A document is cut only if its tokens' bytes add up to its raw bytes, which holds for byte-level vocabularies
        without a normalizer.
        """
        entry = self._entry("validation", domain)
        if entry["documents"] == 0:
            raise UserError(
                f"{self.directory}: domain '{domain}' has no validation documents; prepare it with a "
                "validation_share above 0"
            )
        if max_tokens is not None and max_tokens < 1:
            raise UserError(f"max_tokens: got {max_tokens}, expected at least 1")
        if max_tokens is None or max_tokens >= entry["tokens"]:
            return entry["tokens"], entry["bytes"]
        table = self.document_table("validation", domain).astype(np.int64)
        last = int(np.searchsorted(table[:, 0], max_tokens))  # the document in which the cap lies
        if int(table[last, 0]) == max_tokens:
            return max_tokens, int(table[last, 1])
        start_token, start_byte = (int(table[last - 1, 0]), int(table[last - 1, 1])) if last else (0, 0)
        end_token, end_byte = int(table[last, 0]), int(table[last, 1])
        ids = np.asarray(self.stream("validation", domain)[start_token:end_token], dtype=np.int64)
        lengths = self._token_bytes[ids]
        if int(lengths.sum()) != end_byte - start_byte:
            return end_token, end_byte
        return max_tokens, start_byte + int(lengths[: max_tokens - start_token].sum())

    @cached_property
    def _token_bytes(self) -> np.ndarray:
        return self.vocabulary.token_bytes()

    def _windows(self, stream: np.ndarray, count: int, sequence_length: int) -> Iterator[ValidationWindow]:
        for start in range(0, count, sequence_length):
            tokens = np.full(sequence_length + 1, self.eos_token_id, dtype=np.int64)
            stop = min(start + sequence_length, count)
            # Window i has targets [iT, iT + T) and the token before them as its first input.
            if start:
                tokens[0] = stream[start - 1]
            tokens[1 : 1 + stop - start] = stream[start:stop]
            mask = np.zeros(sequence_length, dtype=np.bool_)
            mask[: stop - start] = True
            yield ValidationWindow(tokens=tokens, mask=mask)

    def _entry(self, split: str, domain: str) -> dict:
        if domain not in self.index["domains"]:
            known = ", ".join(self.domains)
            raise UserError(
                f"{self.directory}: no domain '{domain}'{did_you_mean(domain, self.domains)}; the corpus has {known}"
            )
        if split not in shards.SPLITS:
            raise UserError(
                f"split: got '{split}', expected one of {', '.join(shards.SPLITS)}{did_you_mean(split, shards.SPLITS)}"
            )
        return self.index["domains"][domain]["splits"][split]
