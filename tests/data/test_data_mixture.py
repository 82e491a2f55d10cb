"""The mixture follows its weights within one sample at every index; permutations are permutations."""

from __future__ import annotations

import time
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resformer.data import mixture

PARTS = st.dictionaries(st.text("abcdef", min_size=1, max_size=3), st.integers(1, 60), min_size=1, max_size=9)


@given(PARTS)
@settings(max_examples=60, deadline=None)
def test_table_is_within_one_sample_of_each_share(parts: dict[str, int]) -> None:
    table = mixture.table(parts)
    total, period = sum(parts.values()), len(table.choice)
    assert total % period == 0
    bound = 1 - 1 / (2 * len(parts) - 2) if len(parts) > 1 else 0
    weight = np.array([parts[name] for name in table.names]) / total
    count = np.zeros(len(parts))
    for t in range(1, period + 1):
        assert table.rank[t - 1] == count[table.choice[t - 1]]
        count[table.choice[t - 1]] += 1
        assert np.abs(weight * t - count).max() <= bound + 1e-9
    # At the end of a period the shares are exact, so the bound holds at any index.
    np.testing.assert_array_equal(count, table.share)
    np.testing.assert_allclose(count / period, weight)


@given(PARTS, st.integers(0, 10**12))
@settings(max_examples=50, deadline=None)
def test_locate_counts_what_came_before_at_any_index(parts: dict[str, int], index: int) -> None:
    table = mixture.table(parts)
    window = np.arange(index, index + 40)
    domain, position = table.locate(window)
    before = table.consumed(index)
    for d, p in zip(domain, position, strict=True):
        assert p == before[d]
        before[d] += 1
    np.testing.assert_array_equal(before, table.consumed(index + 40))


@given(st.dictionaries(st.text("abc", min_size=1, max_size=4), st.floats(1e-9, 1e9), min_size=1, max_size=40))
def test_quantised_weights_sum_to_the_resolution_and_are_near(weights: dict[str, float]) -> None:
    parts = mixture.quantise(weights)
    assert sum(parts.values()) == mixture.RESOLUTION
    assert set(parts) == set(weights)
    total = sum(weights.values())
    # Raising tiny weights to 1 can take up to one part each from the others.
    assert all(part >= 1 for part in parts.values())
    for name, part in parts.items():
        assert abs(part - weights[name] / total * mixture.RESOLUTION) < len(weights) + 1


def test_quantise_leaves_out_weight_zero_and_does_not_depend_on_the_order() -> None:
    weights = {"a": 1 / 3, "b": 1 / 3, "c": 1 / 3, "d": 0.0}
    assert mixture.quantise(weights) == {"a": 3334, "b": 3333, "c": 3333}
    assert mixture.quantise(dict(reversed(weights.items()))) == mixture.quantise(weights)


@given(st.integers(1, 3000), st.integers(0, 2**32), st.integers(0, 5))
@settings(max_examples=150, deadline=None)
def test_permutation_is_a_bijection_at_any_size(size: int, seed: int, epoch: int) -> None:
    keys = mixture.round_keys(seed, "domain", epoch)
    order = mixture.permute(np.arange(size), size, keys)
    np.testing.assert_array_equal(np.sort(order), np.arange(size))
    # The value at one place does not depend on what else is asked for.
    assert mixture.permute(np.array([size - 1]), size, keys)[0] == order[size - 1]


def test_permutations_look_random_and_differ_by_seed_domain_and_epoch() -> None:
    size = 20_000
    place = np.arange(size)
    orders = [
        mixture.permute(place, size, mixture.round_keys(seed, domain, epoch))
        for seed, domain, epoch in [(0, "a", 0), (0, "a", 1), (0, "b", 0), (1, "a", 0)]
    ]
    for i, order in enumerate(orders):
        # Neighbours are unrelated: serial correlation of a random permutation is about 1 / sqrt(size) = 0.007.
        assert abs(np.corrcoef(place, order)[0, 1]) < 0.04
        assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.04
        for other in orders[i + 1 :]:
            assert np.count_nonzero(order == other) < 20  # 1 is expected
            assert abs(np.corrcoef(order, other)[0, 1]) < 0.04


def test_every_order_of_three_appears_about_equally_often() -> None:
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(1800):
        order = tuple(mixture.permute(np.arange(3), 3, mixture.round_keys(seed, "d", 0)).tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 6
    assert min(counts.values()) > 230
    assert max(counts.values()) < 370


def test_order_is_pinned() -> None:
    """A run resumed with a later release must see the same data: this order is part of the format."""
    keys = mixture.round_keys(3, "wikipedia", 2)
    assert mixture.permute(np.arange(10), 10, keys).tolist() == [1, 7, 6, 5, 0, 8, 4, 2, 3, 9]
    table = mixture.table({"a": 3, "b": 2, "c": 1})
    assert "".join(table.names[i] for i in table.choice) == "abacba"


def test_samples_far_away_cost_nothing() -> None:
    table = mixture.table(mixture.quantise({"a": 0.123, "b": 0.4567, "c": 0.4203}))
    start = time.perf_counter()
    table.locate(np.arange(10**15, 10**15 + 1000))
    mixture.permute(np.arange(1000), 10**12, mixture.round_keys(0, "a", 10**6))
    assert time.perf_counter() - start < 2


@given(st.dictionaries(st.text("abcdef", min_size=1, max_size=3), st.integers(1, 500), min_size=1, max_size=12))
@settings(max_examples=40, deadline=None)
def test_table_is_tijdemans_rule_step_by_step(parts: dict[str, int]) -> None:
    """The rule as it is written down: of the domains that are owed enough, the one whose debt is due first."""
    table = mixture.table(parts)
    weight, period = table.share.tolist(), len(table.choice)
    scale, count = max(2 * len(parts) - 2, 1), [0] * len(parts)
    for t in range(1, period + 1):
        debts = [weight[s] * t - period * count[s] for s in range(len(parts))]
        owed = [s for s, debt in enumerate(debts) if debt * scale >= period]
        first = min(owed, key=lambda s: (Fraction((scale - 1) * period - scale * debts[s], weight[s]), s))
        assert table.choice[t - 1] == first
        count[first] += 1


def test_a_table_of_any_number_of_domains_takes_milliseconds() -> None:
    parts = mixture.quantise({f"domain {i}": 1 / (i + 1) for i in range(3000)})
    start = time.process_time()
    mixture.table(parts)
    assert time.process_time() - start < 0.1


@pytest.mark.parametrize("size", [1, 2])
def test_smallest_tables(size: int) -> None:
    table = mixture.table(dict.fromkeys("ab"[:size], 1))
    assert table.choice.tolist() == list(range(size))
