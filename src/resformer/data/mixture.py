"""Which domain, and which chunk of it, the g-th sample of a run is: pure functions of integers, O(1) at any g.

Shape legend: S = domains with a weight, P = period of the table, n = samples asked for at once.
"""

from __future__ import annotations

import hashlib
import heapq
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

    def locate(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Global sample indices `[n]` -> (domain `[n]`, how many samples of that domain came before `[n]`)."""
        period, place = np.divmod(index, len(self.choice))
        domain = self.choice[place]
        return domain, period * self.share[domain] + self.rank[place]

    def consumed(self, samples: int) -> np.ndarray:
        """Samples of each domain among the first `samples`, int64 `[S]`."""
        period, place = divmod(samples, len(self.choice))
        return period * self.share + np.bincount(self.choice[:place], minlength=len(self.share))


def table(parts: dict[str, int]) -> Table:
    """The periodic table for integer weights, by Tijdeman's rule (R. Tijdeman, "The chairman assignment problem",
    Discrete Math. 32, 1980).

    After t samples each domain has had its share t * weight to within 1 - 1/(2S - 2) < 1, the best bound there is.

    The rule: among the domains that are owed enough, take the one whose debt reaches its bound first. Sample j of a
    domain is owed enough from a time on and reaches its bound at a time, neither of which depends on what else was
    taken; so it is scheduling by the earliest deadline, O(P log S): 10,000 samples of any number of domains take about
    10 ms.
    """
    names = tuple(sorted(parts))
    divisor = math.gcd(*parts.values())
    weight = np.array([parts[name] // divisor for name in names], np.int64)
    period, scale = int(weight.sum()), max(2 * len(names) - 2, 1)
    assert period <= RESOLUTION, "larger deadlines would not be exact in float64"
    domain = np.repeat(np.arange(len(names)), weight)  # one entry for each sample of the period, by domain
    count = np.arange(period) - np.repeat(np.cumsum(weight) - weight, weight)
    # weight * t - period * count, `period` times what a domain is owed after t samples, must be period / scale or more.
    release = -(-period * (scale * count + 1) // (scale * weight[domain]))
    # Different deadlines differ by 1 / RESOLUTION^2 at least, which float64 resolves; equal ones are equal to the bit.
    deadline = (scale * (count + 1) - 1) / weight[domain]
    by_deadline = np.lexsort((domain, deadline))
    urgency = np.empty(period, np.int64)
    urgency[by_deadline] = np.arange(period)
    by_release = np.argsort(release, kind="stable")
    first = np.searchsorted(release[by_release], np.arange(1, period + 2)).tolist()
    waiting, order = urgency[by_release].tolist(), []
    heap: list[int] = waiting[: first[0]]
    heapq.heapify(heap)
    for t in range(period):
        for rank in waiting[first[t] : first[t + 1]]:
            heapq.heappush(heap, rank)
        assert heap, "Tijdeman's rule always has a candidate"
        order.append(heapq.heappop(heap))
    taken = by_deadline[np.array(order)]
    return Table(names=names, choice=domain[taken], rank=count[taken], share=weight)


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
