"""batch(step): a pure function of (seed, global sample index). No state, so a resume needs the step and nothing else.

Shape legend: B = sequences of the global batch, T = sequence length, n = samples asked for.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from resformer.data import mixture
from resformer.data.packing import PACKINGS, Chunks, Packed, documents_of
from resformer.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from resformer.data.dataset import Dataset


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Samples of a run.

    tokens `[B, T+1]` int64 (inputs are `tokens[:, :-1]`, targets `tokens[:, 1:]`); domains `[B]` int64, index into
    `dataset.domains`; indices `[B]` int64, global sample index, counted from 0 over the whole run.

    Where documents are kept apart: positions `[B, T]` int64, from 0 in each. Where some targets do not count: mask
    `[B, T]` bool, False for those. Else None.
    """

    tokens: np.ndarray
    domains: np.ndarray
    indices: np.ndarray
    positions: np.ndarray | None = None
    mask: np.ndarray | None = None


class Sampler:
    """The order of training data.

    The domain of sample g follows the mixture to within one sample of its share at any g (`mixture.table`). An epoch of
    a domain runs through its rows in a permutation of its own. The world size and the number of micro-batches do not
    enter: a rank or micro-batch takes rows of the global batch.

    Rows have T+1 tokens. With packing "chunks" they are cut from the stream with stride T, so a token is a target once
    an epoch (the first token of a split and a tail shorter than T are not). With "best_fit" they are whole documents
    and padding (`packing.Packed`).

    With `document_mask` documents are kept apart: positions restart at 0 in each, and a target whose input is the
    end-of-text id, the first token of the next document, does not count.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        sequence_length: int,
        batch_size: int,
        seed: int,
        weights: dict[str, float] | None,
        split: str,
        packing: str = "chunks",
        document_mask: bool = False,
    ) -> None:
        for name, value in (("sequence_length", sequence_length), ("batch_size", batch_size)):
            if value < 1:
                raise UserError(f"{name}: got {value}, expected at least 1")
        if packing not in PACKINGS:
            raise UserError(
                f"packing: got '{packing}', expected one of {', '.join(PACKINGS)}{did_you_mean(packing, PACKINGS)}"
            )
        self.sequence_length, self.batch_size, self.seed, self.split = sequence_length, batch_size, seed, split
        self.packing, self.document_mask = packing, document_mask
        self.weights = check_weights(dataset.weights if weights is None else weights, dataset.domains)
        self._table = mixture.table(mixture.quantise(self.weights))
        self._eos = dataset.eos_token_id
        self._domain_index = np.array([dataset.domains.index(name) for name in self._table.names], np.int64)
        self._documents = {name: dataset.documents(split, name) for name in self._table.names}
        self._sources = [self._source(dataset, name) for name in self._table.names]
        if (
            sum(source.at_least for source in self._sources) < batch_size
            and (rows := int(self._rows.sum())) < batch_size
        ):
            raise UserError(
                f"{dataset.directory}: the corpus has {rows} sequences of {sequence_length} tokens, fewer than one "
                f"batch of {batch_size}; lower train.batch_size or data.sequence_length, or add text"
            )

    def _source(self, dataset: Dataset, name: str) -> Chunks | Packed:
        """The rows of a domain, of which there must be some."""
        stream, where = dataset.stream(self.split, name), f"{dataset.directory}: domain '{name}'"
        if self.packing == "best_fit":
            if not len(stream):
                raise UserError(f"{where} has no {self.split} documents; add text or give it weight 0")
            ends = functools.partial(dataset.document_ends, self.split, name)
            return Packed(stream, ends, self.sequence_length, self._eos)
        chunks = Chunks(stream, self.sequence_length)
        if not chunks.rows:
            raise UserError(
                f"{where} has {len(stream)} {self.split} tokens, fewer than one sequence of {self.sequence_length} + "
                "1; shorten data.sequence_length, add text or give it weight 0"
            )
        return chunks

    @property
    def masked(self) -> bool:
        """Whether batches say which targets count."""
        return self.document_mask or self.packing != "chunks"

    @functools.cached_property
    def _rows(self) -> np.ndarray:
        """Rows of each domain; packs them where that has not been done."""
        return np.array([source.rows for source in self._sources], np.int64)

    def batch(self, step: int) -> Batch:
        """The global batch of `step`, counted from 1."""
        if step < 1:
            raise ValueError(f"step: got {step}, steps count from 1")
        return self.samples(np.arange((step - 1) * self.batch_size, step * self.batch_size, dtype=np.int64))

    def samples(self, indices: np.ndarray) -> Batch:
        """The samples at any global indices `[n]`; `batch(step)` is the rows `(step-1)*B .. step*B-1` of it."""
        indices = np.asarray(indices, dtype=np.int64)
        tokens = np.empty((len(indices), self.sequence_length + 1), dtype=np.int64)
        mask = np.ones((len(indices), self.sequence_length), dtype=np.bool_) if self.masked else None
        domain = np.empty(len(indices), dtype=np.int64)
        for place, d, row in self._located(indices):
            domain[place] = d
            self._sources[d].fill(row, tokens[place], None if mask is None else mask[place])
        positions = None
        if self.document_mask:
            positions, same = documents_of(tokens[:, :-1], self._eos)
            mask &= same
        return Batch(tokens=tokens, domains=self._domain_index[domain], indices=indices, positions=positions, mask=mask)

    def targets(self, indices: np.ndarray) -> int:
        """How many targets count in the samples at `indices` `[n]`: the sum of their `mask`, without keeping them."""
        if not self.masked:
            return len(indices) * self.sequence_length
        tokens, mask = np.empty(self.sequence_length + 1, np.int64), np.empty(self.sequence_length, np.bool_)
        total = 0
        for _, d, row in self._located(np.asarray(indices, dtype=np.int64)):
            mask[:] = True
            self._sources[d].fill(row, tokens, mask)
            if self.document_mask:
                mask &= tokens[:-1] != self._eos
            total += int(np.count_nonzero(mask))
        return total

    def epochs(self, step: int, *, samples: int = 0) -> dict[str, float]:
        """How often each domain has been gone through after `samples` samples and `step` steps more (1.0 = every row
        once).
        """
        consumed = self._table.consumed(samples + step * self.batch_size)
        return {name: float(consumed[i] / self._rows[i]) for i, name in enumerate(self._table.names)}

    def shares(self) -> tuple[float, float]:
        """Share of a run's tokens that are padding, and share of its targets that count (0..1): exact for packed rows
        over whole epochs; the latter is computed from the number of documents where rows are chunks.
        """
        known = self._documents if self.document_mask else {}
        counted = [source.targets(known.get(n)) for n, source in zip(self._table.names, self._sources, strict=True)]
        padding, weights = [source.padding for source in self._sources], self._table.share / self._table.share.sum()
        return float(np.dot(weights, padding)), float(np.dot(weights, counted))

    def _located(self, indices: np.ndarray) -> Iterator[tuple[int, int, int]]:
        """Place in `indices`, domain and row of it for each sample; samples of a domain and an epoch together, since
        they share a permutation.
        """
        domain, position = self._table.locate(indices)
        epoch, place = np.divmod(position, self._rows[domain])
        for d, e in sorted(set(zip(domain.tolist(), epoch.tolist(), strict=True))):
            those = np.flatnonzero((domain == d) & (epoch == e))
            keys = mixture.round_keys(self.seed, self._table.names[d], e)
            rows = mixture.permute(place[those], int(self._rows[d]), keys)
            for number, row in zip(those.tolist(), rows.tolist(), strict=True):
                yield number, d, row


def check_weights(weights: dict[str, float], domains: list[str], *, name: str = "weights") -> dict[str, float]:
    """Weights that sum to 1 for known domains; a domain that is not named has weight 0. UserError for unknown names
    and impossible values; `name` is what messages call the weights.
    """
    known = ", ".join(domains)
    for domain, value in weights.items():
        if domain not in domains:
            raise UserError(f"{name}: unknown domain '{domain}'{did_you_mean(domain, domains)}; the corpus has {known}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            raise UserError(f"{name}: got {domain}={value!r}, expected a number of at least 0")
    total = math.fsum(weights.values())
    if total <= 0:
        raise UserError(f"{name}: all are 0, expected at least one positive weight for {known}")
    return {domain: float(value) / total for domain, value in weights.items()}
