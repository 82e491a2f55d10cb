"""Which domain, and which chunk of it, the g-th sample of a run is: pure functions of integers, O(1) at any g.

Shape legend: S = domains with a weight, P = period of the table, n = samples asked for at once.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import numpy as np

RESOLUTION = 10_000
_ROUNDS = 6


def quantise(weights: dict[str, float]) -> dict[str, int]:
    """Weights -> integers that sum to 10,000 (largest remainders; a positive weight gets at least 1), domains of
    weight 0 left out.
    """
    positive = {name: float(weight) for name, weight in weights.items() if weight > 0}
    assert positive, "at least one weight must be positive"
    assert len(positive) <= RESOLUTION, f"at most {RESOLUTION} domains"
    total = math.fsum(positive.values())
    exact = {name: weight / total * RESOLUTION for name, weight in positive.items()}
    parts = {name: max(1, math.floor(value)) for name, value in exact.items()}
    # The largest shortfall gains first, the largest excess loses first; ties by name, so that the order of the dict
    # does not matter.
    while (missing := RESOLUTION - sum(parts.values())) != 0:
        step = 1 if missing > 0 else -1
        candidates = [name for name in parts if step > 0 or parts[name] > 1]
        by_need = sorted(candidates, key=lambda name: (-step * (exact[name] - parts[name]), name))
        for name in by_need[: abs(missing)]:
            parts[name] += step
    return parts


@dataclass(frozen=True, kw_only=True)
class Table:
    """One period of the sequence of domains.

    choice[P]: domain of each sample; rank[P]: how often that domain came before in the period; share[S]: samples of
    each domain a period.
    """

    names: tuple[str, ...]
    choice: np.ndarray
    rank: np.ndarray
    share: np.ndarray
    before: np.ndarray  # [P + 1, S]: samples of each domain among the first p

    def locate(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Global sample indices `[n]` -> (domain `[n]`, how many samples of that domain came before `[n]`)."""
        period, place = np.divmod(index, len(self.choice))
        domain = self.choice[place]
        return domain, period * self.share[domain] + self.rank[place]

    def consumed(self, samples: int) -> np.ndarray:
        """Samples of each domain among the first `samples`, int64 `[S]`."""
        period, place = divmod(samples, len(self.choice))
        return period * self.share + self.before[place]


def table(parts: dict[str, int]) -> Table:
    """The periodic table for integer weights, by Tijdeman's rule (R. Tijdeman, "The chairman assignment problem",
    Discrete Math. 32, 1980).

    After t samples each domain has had its share t * weight to within 1 - 1/(2S - 2) < 1, the best bound there is.
    """
    names = tuple(sorted(parts))
    divisor = math.gcd(*parts.values())
    weight = [parts[name] // divisor for name in names]
    period, size = sum(weight), len(names)
    count = [0] * size
    choice, rank = np.zeros(period, np.int64), np.zeros(period, np.int64)
    before = np.zeros((period + 1, size), np.int64)
    scale = max(2 * size - 2, 1)
    for t in range(1, period + 1):
        best, best_slack = -1, 0
        for s in range(size):
            debt = weight[s] * t - period * count[s]  # `period` times what domain s is owed after t samples
            if debt * scale < period:
                continue
            # The time until the debt reaches its bound is slack / weight; compared by cross products, exact in
            # integers.
            slack = (scale - 1) * period - scale * debt
            if best < 0 or slack * weight[best] < best_slack * weight[s]:
                best, best_slack = s, slack
        assert best >= 0, "Tijdeman's rule always has a candidate"
        choice[t - 1], rank[t - 1] = best, count[best]
        count[best] += 1
        before[t] = count
    return Table(names=names, choice=choice, rank=rank, share=np.asarray(weight, np.int64), before=before)


def round_keys(seed: int, domain: str, epoch: int) -> np.ndarray:
    """Keys of the permutation of one domain in one epoch, uint64 `[rounds]`. Keyed by name: another domain more
    changes nothing here.
    """
    digest = hashlib.shake_256(f"{seed}\n{epoch}\n{domain}".encode()).digest(8 * _ROUNDS)
    return np.frombuffer(digest, dtype="<u8")


def permute(place: np.ndarray, size: int, keys: np.ndarray) -> np.ndarray:
    """A keyed permutation of range(size), evaluated at `place` (int64 `[n]`): no table, so no memory and no start-up
    at any size.

    A balanced Feistel network on the next even power of two; values that land outside walk on until they are inside
    (cycle walking), which keeps it a bijection. Only integer arithmetic of our own, so the order cannot change with a
    NumPy release.
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    value = _feistel(place.astype(np.uint64), keys, half, mask)
    outside = np.flatnonzero(value >= size)
    while outside.size:
        value[outside] = _feistel(value[outside], keys, half, mask)
        outside = outside[value[outside] >= size]
    return value.astype(np.int64)


def _feistel(value: np.ndarray, keys: np.ndarray, half: np.uint64, mask: np.uint64) -> np.ndarray:
    left, right = value >> half, value & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << half) | right


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64: each input bit changes about half of the output bits."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
