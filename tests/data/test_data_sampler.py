"""batch(step) is a pure function of (seed, global sample index)."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from resformer.data import Sampler, open_dataset
from resformer.errors import UserError

T = 16


def sampler(directory: Path, **options: Any) -> Sampler:
    return open_dataset(directory, verify="none").sampler(
        **{"sequence_length": T, "batch_size": 6, "seed": 3, **options}
    )


def test_shapes_and_that_each_row_is_a_chunk_of_its_domain(prepared: Path) -> None:
    dataset = open_dataset(prepared)
    batch = sampler(prepared).batch(4)
    assert (batch.tokens.shape, batch.tokens.dtype) == ((6, T + 1), np.int64)
    assert batch.indices.tolist() == list(range(18, 24))
    for row, domain in zip(batch.tokens, batch.domains, strict=True):
        stream = np.asarray(dataset.stream("train", dataset.domains[domain]), dtype=np.int64)
        chunks = [stream[c * T : c * T + T + 1].tolist() for c in range((len(stream) - 1) // T)]
        assert row.tolist() in chunks


def test_every_chunk_is_full_at_any_length(prepared: Path) -> None:
    dataset = open_dataset(prepared)
    tokens = dataset.tokens("train", "book")
    lengths = [tokens - 1, *(n for n in range(1, tokens // 2) if tokens % n == 0)]
    assert len(lengths) >= 2
    for length in lengths:
        one = dataset.sampler(sequence_length=length, batch_size=1, seed=0, weights={"book": 1.0})
        chunks = (tokens - 1) // length
        assert one.epochs(chunks) == {"book": 1.0}
        assert one.samples(np.arange(chunks)).tokens.shape == (chunks, length + 1)
    with pytest.raises(UserError, match="fewer than one sequence"):
        dataset.sampler(sequence_length=tokens, batch_size=1, seed=0, weights={"book": 1.0})


def test_an_epoch_is_without_replacement_and_the_next_one_in_another_order(prepared: Path) -> None:
    dataset = open_dataset(prepared)
    one = dataset.sampler(sequence_length=T, batch_size=1, seed=3, weights={"github": 1.0})
    chunks = (dataset.tokens("train", "github") - 1) // T
    rows = one.samples(np.arange(2 * chunks)).tokens
    first, second = rows[:chunks], rows[chunks:]
    targets = np.concatenate(sorted(map(tuple, first[:, 1:])))
    stream = dataset.stream("train", "github")
    expected = np.concatenate(sorted(tuple(stream[c * T + 1 : c * T + T + 1].tolist()) for c in range(chunks)))
    np.testing.assert_array_equal(targets, expected)
    assert sorted(map(tuple, first)) == sorted(map(tuple, second))
    assert first.tolist() != second.tolist()
    assert one.epochs(chunks) == {"github": 1.0}
    assert one.epochs(chunks // 2)["github"] == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize(("world", "micro"), [(1, 1), (1, 4), (2, 3), (3, 2), (4, 1), (12, 1)])
def test_any_world_size_and_accumulation_sees_the_same_global_batch(prepared: Path, world: int, micro: int) -> None:
    whole = sampler(prepared, batch_size=12)
    expected = whole.batch(5)
    pieces = np.array_split(expected.indices, world * micro)
    got = [sampler(prepared, batch_size=12).samples(piece) for piece in pieces]
    np.testing.assert_array_equal(np.concatenate([p.tokens for p in got]), expected.tokens)
    np.testing.assert_array_equal(np.concatenate([p.domains for p in got]), expected.domains)


def test_the_order_of_samples_does_not_depend_on_the_batch_size(prepared: Path) -> None:
    small, large = sampler(prepared, batch_size=4), sampler(prepared, batch_size=12)
    joined = np.concatenate([small.batch(step).tokens for step in (4, 5, 6)])
    np.testing.assert_array_equal(joined, large.batch(2).tokens)


def test_no_state_is_kept_between_batches(prepared: Path) -> None:
    one, other = sampler(prepared), sampler(prepared)
    for step in (9, 1, 5, 9):
        one.batch(step)
    np.testing.assert_array_equal(one.batch(7).tokens, other.batch(7).tokens)
    assert not np.array_equal(one.batch(7).tokens, one.batch(8).tokens)
    assert not np.array_equal(sampler(prepared, seed=4).batch(7).tokens, one.batch(7).tokens)


def test_domains_follow_the_weights_within_one_sample(prepared: Path) -> None:
    weights = {"wikipedia": 0.613, "github": 0.25, "book": 0.137}
    dataset = open_dataset(prepared)
    one = dataset.sampler(sequence_length=T, batch_size=10, seed=0, weights=weights)
    count: Counter[str] = Counter()
    for step in range(1, 60):
        count.update(dataset.domains[d] for d in one.batch(step).domains)
        for name, weight in weights.items():
            assert abs(count[name] - weight * 10 * step) <= 1


def test_a_domain_keeps_its_own_order_when_the_mixture_changes(prepared: Path) -> None:
    """Paired comparison: weights decide how much of a domain is seen, not which part of it."""
    dataset = open_dataset(prepared)
    book = dataset.domains.index("book")

    def books(weights: dict[str, float]) -> np.ndarray:
        batch = dataset.sampler(sequence_length=T, batch_size=40, seed=0, weights=weights).batch(1)
        return batch.tokens[batch.domains == book][:5]

    np.testing.assert_array_equal(books({"book": 0.5, "github": 0.5}), books({"book": 0.2, "wikipedia": 0.8}))


def test_step_a_million_is_as_fast_as_step_one(prepared: Path) -> None:
    one = sampler(prepared)
    start = time.perf_counter()
    one.batch(1_000_000)
    assert time.perf_counter() - start < 1
    assert one.epochs(1_000_000)["book"] > 1000


def test_a_gigabyte_is_at_its_millionth_step_at_once(prepared: Path, tmp_path: Path) -> None:
    """From opening to the first batch, 20 domains of 50 MB each in a sparse file: nothing is read but the rows."""
    (tmp_path / "ids").touch()
    os.truncate(tmp_path / "ids", 50_000_000)
    names = [f"d{i}" for i in range(20)]
    spent = []
    for _ in range(3):  # the best of three: other work may run beside
        start = time.process_time()
        dataset = open_dataset(prepared, verify="none")
        dataset.domains = names
        dataset.stream = lambda split, name: np.memmap(tmp_path / "ids", dtype="<u2", mode="r")  # type: ignore[method-assign]
        dataset.documents = lambda split, name: 1  # type: ignore[method-assign]
        weights = {name: 1 / (i + 1.3) for i, name in enumerate(names)}
        one = dataset.sampler(sequence_length=1024, batch_size=32, seed=0, weights=weights)
        one.batch(1_000_000)
        spent.append(time.process_time() - start)
    assert min(spent) < 0.05


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": {"boook": 1.0}}, "unknown domain 'boook'; did you mean 'book'"),
        ({"weights": {"book": float("nan")}}, "weights: got book=nan"),
        ({"weights": {"book": 0.0}}, "all are 0"),
        ({"sequence_length": 100_000}, r"domain 'book' has \d+ train tokens, fewer than one sequence of 100000 \+ 1"),
        ({"batch_size": 100_000}, r"the corpus has \d+ sequences of 16 tokens, fewer than one batch of 100000"),
        ({"batch_size": 0}, "batch_size: got 0, expected at least 1"),
        ({"split": "test"}, "split: got 'test'"),
    ],
)
def test_mistakes_are_named(prepared: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        sampler(prepared, **options)
    assert "\n" not in str(error.value)


def test_steps_count_from_one(prepared: Path) -> None:
    with pytest.raises(ValueError, match="steps count from 1"):
        sampler(prepared).batch(0)


def test_same_data_in_another_place_gives_the_same_batches(
    build: Callable[..., Path], source: Path, copy: Path, prepared: Path
) -> None:
    again = build([source], vocab_size=320, validation_share=0.2)
    datasets = [open_dataset(d) for d in (prepared, copy, again)]
    assert len({d.fingerprint for d in datasets}) == 1
    assert build([source], "other", vocab_size=321) != again
    rows = [d.sampler(sequence_length=T, batch_size=6, seed=3).batch(11).tokens for d in datasets]
    np.testing.assert_array_equal(rows[0], rows[1])
    np.testing.assert_array_equal(rows[0], rows[2])
