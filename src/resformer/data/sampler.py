"""batch(step): a pure function of (seed, global sample index). No state, so a resume needs the step and nothing else.

Shape legend: B = sequences of the global batch, T = sequence length, n = samples asked for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from resformer.data import mixture
from resformer.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from resformer.data.dataset import Dataset


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Samples of a run.

    tokens `[B, T+1]` int64 (inputs are `tokens[:, :-1]`, targets `tokens[:, 1:]`); domains `[B]` int64, index into
    `dataset.domains`; indices `[B]` int64, global sample index, counted from 0 over the whole run.
    """

    tokens: np.ndarray
    domains: np.ndarray
    indices: np.ndarray


class Sampler:
    """The order of training data.

    The domain of sample g follows the mixture to within one sample of its share at any g (`mixture.table`). Each
    domain is cut into chunks of T+1 tokens with stride T, so a token is a target once an epoch (the first token of a
    split and a tail shorter than T are not), and an epoch of a domain runs through its chunks in a permutation of its
    own. The world size and the number of micro-batches do not enter: a rank or micro-batch takes rows of the global
    batch.
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
    ) -> None:
        for name, value in (("sequence_length", sequence_length), ("batch_size", batch_size)):
            if value < 1:
                raise UserError(f"{name}: got {value}, expected at least 1")
        self.sequence_length, self.batch_size, self.seed, self.split = sequence_length, batch_size, seed, split
        self.weights = check_weights(dataset.weights if weights is None else weights, dataset.domains)
        self._table = mixture.table(mixture.quantise(self.weights))
        self._streams = [dataset.stream(split, name) for name in self._table.names]
        self._chunks = np.array([max(0, (len(s) - 1) // sequence_length) for s in self._streams], np.int64)
        self._domain_index = np.array([dataset.domains.index(name) for name in self._table.names], np.int64)
        for name, chunks, stream in zip(self._table.names, self._chunks, self._streams, strict=True):
            if chunks == 0:
                raise UserError(
                    f"{dataset.directory}: domain '{name}' has {len(stream)} {split} tokens, fewer than one sequence "
                    f"of {sequence_length} + 1; "
                    "shorten data.sequence_length, add text or give it weight 0"
                )
        if int(self._chunks.sum()) < batch_size:
            raise UserError(
                f"{dataset.directory}: the corpus has {int(self._chunks.sum())} sequences of {sequence_length} "
                "tokens, fewer than one batch of "
                f"{batch_size}; lower train.batch_size or data.sequence_length, or add text"
            )

    def batch(self, step: int) -> Batch:
        """The global batch of `step`, counted from 1."""
        if step < 1:
            raise ValueError(f"step: got {step}, steps count from 1")
        return self.samples(np.arange((step - 1) * self.batch_size, step * self.batch_size, dtype=np.int64))

    def samples(self, indices: np.ndarray) -> Batch:
        """The samples at any global indices `[n]`; `batch(step)` is the rows `(step-1)*B .. step*B-1` of it."""
        indices = np.asarray(indices, dtype=np.int64)
        domain, position = self._table.locate(indices)
        epoch, place = np.divmod(position, self._chunks[domain])
        tokens = np.empty((len(indices), self.sequence_length + 1), dtype=np.int64)
        # Rows that share a domain and an epoch share one permutation.
        for d, e in sorted(set(zip(domain.tolist(), epoch.tolist(), strict=True))):
            rows = np.flatnonzero((domain == d) & (epoch == e))
            keys = mixture.round_keys(self.seed, self._table.names[d], e)
            chunks = mixture.permute(place[rows], int(self._chunks[d]), keys)
            for row, chunk in zip(rows.tolist(), chunks.tolist(), strict=True):
                start = chunk * self.sequence_length
                tokens[row] = self._streams[d][start : start + self.sequence_length + 1]
        return Batch(tokens=tokens, domains=self._domain_index[domain], indices=indices)

    def epochs(self, step: int) -> dict[str, float]:
        """How often each domain has been gone through after `step` steps (1.0 = every chunk once)."""
        consumed = self._table.consumed(step * self.batch_size)
        return {name: float(consumed[i] / self._chunks[i]) for i, name in enumerate(self._table.names)}


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
