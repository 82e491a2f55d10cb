"""A prepared corpus, opened for reading: batches for training, windows for validation.

Shape legend: T = sequence length, D = documents.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from resformer.data import shards
from resformer.data.packing import documents_of
from resformer.data.remote import Remote, is_address
from resformer.data.sampler import Sampler
from resformer.data.tokenizer import Vocabulary, open_vocabulary
from resformer.errors import UserError, did_you_mean

_BLOCK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ValidationWindow:
    """tokens `[T+1]` int64 (inputs `[:-1]`, targets `[1:]`); mask `[T]` bool, False where the target does not count;
    positions `[T]` int64, from 0 in each document, where documents are kept apart.
    """

    tokens: np.ndarray
    mask: np.ndarray
    positions: np.ndarray | None = None


@dataclass(frozen=True, kw_only=True)
class _Cover:
    """What validation scores: tokens, raw bytes, and the parts of the stream in order (`[n, 2]`, start and end); None =
    the stream as it is.
    """

    tokens: int
    bytes: int
    parts: np.ndarray | None


def open_dataset(directory: str | Path, verify: str = "full") -> Dataset:
    """Open a prepared corpus: a directory, or an address that fsspec opens (`remote`). `verify`: "full" (every byte),
    "sample" (16 blocks a file) or "none" (sizes and tokenizer only). Of a corpus at an address, "full" fetches every
    file; else files are fetched when they are first read, and checked then.

    UserError, naming the file: missing or cut file, flipped byte, another tokenizer, an id outside the vocabulary,
    broken index.
    """
    if is_address(directory):
        corpus = Remote(str(directory))
        corpus.check(verify)
        if verify == "full":
            corpus.place_all()
            shards.verify(corpus.directory, corpus.index, verify)
        return Dataset(corpus.directory, corpus.index, place=corpus.place)
    root = Path(directory)
    index = shards.load_index(root)
    shards.verify(root, index, verify)
    return Dataset(root, index)


class Dataset:
    """A prepared corpus. Shards are memory-mapped; nothing is copied until a batch is made."""

    def __init__(self, directory: Path, index: dict, *, place: Callable[[str], Path] | None = None) -> None:
        self.directory, self.index = directory, index
        self._place = directory.joinpath if place is None else place  # a file of the corpus on the local disk
        self.vocab_size: int = index["vocab_size"]
        self.domains: list[str] = list(index["domains"])
        self.weights: dict[str, float] = dict(index["weights"])
        self.eos_token_id: int = index["tokenizer"]["eos_token_id"]
        self.bos_token_id: int | None = index["tokenizer"]["bos_token_id"]
        self.tokenizer_dir = directory
        self._covers: dict[tuple[str, int], _Cover] = {}  # every validation asks for the same ones
        self._scored_bytes: dict[tuple[str, int | None], int] = {}

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

    def documents(self, split: str, domain: str) -> int:
        """Number of documents."""
        return int(self._entry(split, domain)["documents"])

    def stream(self, split: str, domain: str) -> Any:
        """All token ids of a split of a domain, read-only, in the shard's dtype: has a length, and its slices `[a:b]`
        are arrays.
        """
        return shards.Stream(self._entry(split, domain), np.dtype(self.index["dtype"]), self._place)

    def document_table(self, split: str, domain: str) -> np.ndarray:
        """uint64 `[documents, 3]`: cumulative token end, cumulative byte end, identity of the text."""
        entry = self._entry(split, domain)
        return shards.read_table(self._place(entry["document_table"]), entry)

    def document_ends(self, split: str, domain: str) -> np.ndarray:
        """Where each document ends in the stream, tokens, int64 `[D]`."""
        return self.document_table(split, domain)[:, 0].astype(np.int64)

    def sampler(
        self,
        *,
        sequence_length: int,
        batch_size: int,
        seed: int,
        weights: dict[str, float] | None = None,
        split: str = "train",
        packing: str = "chunks",
        document_mask: bool = False,
    ) -> Sampler:
        """The order of training data as a pure function of `seed` and the sample index; `weights` replaces the
        corpus's own, `packing` and `document_mask` are explained at `Sampler`.

        UserError: unknown domain in `weights`, a weighted domain without one full sequence, a corpus smaller than one
        batch.
        """
        return Sampler(
            self,
            sequence_length=sequence_length,
            batch_size=batch_size,
            seed=seed,
            weights=weights,
            split=split,
            packing=packing,
            document_mask=document_mask,
        )

    def validation(
        self, domain: str, *, sequence_length: int, max_tokens: int | None = None, document_mask: bool = False
    ) -> Iterator[ValidationWindow]:
        """Non-overlapping windows over the validation documents of `domain`; each covered token is a target exactly
        once.

        The very first token has the end-of-text id as its context, as every later document has. The last window is
        filled up with end-of-text under a False mask. `max_tokens`: whole documents, in the order of their hash,
        until the cap is reached; the last one is cut at the cap where the bytes of the kept part are known exactly
        (see `covered`), and kept whole where they are not.

        `document_mask`: windows have positions that restart in each document, and the first token of a document is no
        target.
        """
        if sequence_length < 1:
            raise UserError(f"sequence_length: got {sequence_length}, expected at least 1")
        return self._windows(domain, self._cover(domain, max_tokens), sequence_length, document_mask)

    def validation_bytes(
        self, domain: str, *, sequence_length: int, max_tokens: int | None = None, document_mask: bool = False
    ) -> int:
        """Raw UTF-8 bytes of the text that `validation` scores with the same arguments (its length does not change the
        cover).

        With `document_mask` the bytes of the documents' first tokens are not among them, where the vocabulary says how
        many these are: where its tokens' bytes add up to the raw bytes of the covered text. Elsewhere all bytes are
        counted, which makes bits per byte a little too small.
        """
        cover = self._cover(domain, max_tokens)
        if not document_mask:
            return cover.bytes
        key = (domain, max_tokens)
        if key not in self._scored_bytes:
            self._scored_bytes[key] = self._without_first_tokens(domain, cover)
        return self._scored_bytes[key]

    def covered(self, domain: str, *, max_tokens: int | None = None) -> tuple[int, int]:
        """(tokens, raw bytes) of the text that validation covers: the whole split; with a cap, documents in the order
        of their hash, since the order in which they lie is that of the input and its beginning is no fair sample.

        A document is cut only if its tokens' bytes add up to its raw bytes, which holds for byte-level vocabularies
        without a normalizer.
        """
        cover = self._cover(domain, max_tokens)
        return cover.tokens, cover.bytes

    def _cover(self, domain: str, max_tokens: int | None) -> _Cover:
        entry = self._entry("validation", domain)
        if entry["documents"] == 0:
            raise UserError(
                f"{self.directory}: domain '{domain}' has no validation documents; prepare it with a "
                "validation_share above 0"
            )
        if max_tokens is not None and max_tokens < 1:
            raise UserError(f"max_tokens: got {max_tokens}, expected at least 1")
        if max_tokens is None or max_tokens >= entry["tokens"]:
            return _Cover(tokens=entry["tokens"], bytes=entry["bytes"], parts=None)
        if (domain, max_tokens) not in self._covers:
            self._covers[domain, max_tokens] = self._first_by_hash(domain, max_tokens)
        return self._covers[domain, max_tokens]

    def _first_by_hash(self, domain: str, max_tokens: int) -> _Cover:
        table = self.document_table("validation", domain)
        ends = table[:, :2].astype(np.int64)
        starts = np.concatenate([np.zeros((1, 2), np.int64), ends[:-1]])
        order = np.argsort(table[:, 2], kind="stable")
        total = np.cumsum((ends - starts)[order], axis=0)
        last = int(np.searchsorted(total[:, 0], max_tokens))  # the document in which the cap lies
        taken = order[: last + 1]
        parts = np.stack([starts[taken, 0], ends[taken, 0]], axis=1)
        tokens, size = int(total[last, 0]), int(total[last, 1])
        start, end = parts[-1].tolist()
        kept = max_tokens - (tokens - (end - start))
        lengths = self._token_bytes[np.asarray(self.stream("validation", domain)[start:end], dtype=np.int64)]
        whole = int(ends[order[last], 1] - starts[order[last], 1])
        if kept < end - start and int(lengths.sum()) == whole:
            parts[-1, 1] = start + kept
            tokens, size = max_tokens, size - whole + int(lengths[:kept].sum())
        return _Cover(tokens=tokens, bytes=size, parts=parts)

    @cached_property
    def _token_bytes(self) -> np.ndarray:
        return self.vocabulary.token_bytes()

    def _text(self, domain: str, cover: _Cover) -> Any:
        """The covered tokens, with a length and slices as `stream` has them; in memory only if there is a cap."""
        stream = self.stream("validation", domain)
        if cover.parts is None:
            return stream
        return np.concatenate([stream[start:end] for start, end in cover.parts.tolist()])

    def _without_first_tokens(self, domain: str, cover: _Cover) -> int:
        text, total, first, after_end = self._text(domain, cover), 0, 0, True
        for start in range(0, cover.tokens, _BLOCK):
            ids = np.asarray(text[start : min(start + _BLOCK, cover.tokens)], dtype=np.int64)
            lengths, ends = self._token_bytes[ids], ids == self.eos_token_id
            total += int(lengths.sum())
            first += int(lengths[1:][ends[:-1]].sum()) + after_end * int(lengths[0])
            after_end = bool(ends[-1])
        return cover.bytes - first if total == cover.bytes else cover.bytes

    def _windows(
        self, domain: str, cover: _Cover, sequence_length: int, document_mask: bool
    ) -> Iterator[ValidationWindow]:
        text, count = self._text(domain, cover), cover.tokens
        for start in range(0, count, sequence_length):
            tokens = np.full(sequence_length + 1, self.eos_token_id, dtype=np.int64)
            stop = min(start + sequence_length, count)
            # Window i has targets [iT, iT + T) and the token before them as its first input.
            before = min(start, 1)
            tokens[1 - before : 1 + stop - start] = text[start - before : stop]
            mask = np.zeros(sequence_length, dtype=np.bool_)
            mask[: stop - start] = True
            positions = None
            if document_mask:
                (positions,), (same,) = documents_of(tokens[None, :-1], self.eos_token_id)
                mask &= same
            yield ValidationWindow(tokens=tokens, mask=mask, positions=positions)

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
