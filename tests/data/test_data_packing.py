"""Rows of whole documents, and documents that are kept apart. The corpora here are arrays: nothing is prepared."""

from __future__ import annotations

import time
from collections import Counter
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resformer.data import Sampler, packing
from resformer.data.packing import best_fit, cut, documents_of
from resformer.errors import UserError

EOS = 0
LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=40)


class Slices:
    """What a stream promises: a length, and slices that are arrays."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, which: slice) -> np.ndarray:
        assert isinstance(which, slice)
        return self._array[which]


class Corpus:
    """Stands in for a prepared corpus: documents of these lengths, in which no id but end-of-text comes twice."""

    directory = Path("corpus")
    eos_token_id = EOS

    def __init__(self, **lengths: list[int]) -> None:
        self.domains = list(lengths)
        self.weights = dict.fromkeys(lengths, 1.0)
        self.lengths = lengths
        self.tables = 0

    def text(self, domain: str) -> list[list[int]]:
        texts, token = [], 1
        for length in self.lengths[domain]:
            texts.append([*range(token, token + length - 1), EOS])
            token += length - 1
        return texts

    def documents(self, split: str, domain: str) -> int:
        return len(self.lengths[domain])

    def stream(self, split: str, domain: str) -> Slices:
        return Slices(np.array([token for text in self.text(domain) for token in text], dtype="<u4"))

    def document_ends(self, split: str, domain: str) -> np.ndarray:
        self.tables += 1
        return np.cumsum(self.lengths[domain])

    def sampler(self, **how: Any) -> Sampler:
        base: dict[str, Any] = {"sequence_length": 8, "batch_size": 1, "seed": 3, "weights": None, "split": "train"}
        return Sampler(self, **{**base, **how})  # type: ignore[arg-type]


def naive_best_fit(lengths: list[int], capacity: int) -> list[int]:
    """The room that is left in each row, sorted; item by item, with a list."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms.remove(min(fitting))
            rooms.append(min(fitting) - length)
        else:
            rooms.append(capacity - length)
    return sorted(rooms)


@given(st.lists(st.integers(1, 24), max_size=120), st.integers(24, 40))
@settings(max_examples=150, deadline=None)
def test_rows_are_those_of_best_fit_decreasing(lengths: list[int], capacity: int) -> None:
    items, offsets = best_fit(np.array(lengths, np.int64), capacity)
    assert sorted(items.tolist()) == list(range(len(lengths)))
    filled = [sum(lengths[i] for i in items[a:b]) for a, b in pairwise(offsets)]
    assert all(0 < total <= capacity for total in filled)
    assert sorted(capacity - total for total in filled) == naive_best_fit(lengths, capacity)
    again, _ = best_fit(np.array(lengths, np.int64), capacity)
    np.testing.assert_array_equal(items, again)


def test_the_packing_is_pinned() -> None:
    """A run resumed with a later release must see the same rows: they are part of the format."""
    items, offsets = best_fit(np.array([3, 9, 1, 4, 4, 7, 2, 3, 10, 1]), 10)
    assert [items[a:b].tolist() for a, b in pairwise(offsets)] == [
        [8],
        [1, 2],
        [5, 0],
        [3, 4, 6],
        [7, 9],
    ]


def test_packing_is_fast_and_tight() -> None:
    draw = np.random.default_rng(0)
    lengths = np.clip(draw.lognormal(5.5, 1.2, 200_000), 1, 2049).astype(np.int64)
    start = time.process_time()
    items, offsets = best_fit(lengths, 2049)
    assert time.process_time() - start < 2
    assert len(items) == len(lengths)
    assert lengths.sum() / ((len(offsets) - 1) * 2049) > 0.995


@given(LENGTHS, st.integers(1, 12))
@settings(max_examples=100, deadline=None)
def test_pieces_overlap_by_one_token(lengths: list[int], length: int) -> None:
    starts, sizes, continues = cut(np.cumsum(lengths), length)
    expected = []
    for begin, size in zip(np.cumsum([0, *lengths]).tolist(), lengths, strict=False):
        place = 0
        while place == 0 or place < size - 1:
            expected.append((begin + place, min(length + 1, size - place), place > 0))
            place += length
    assert list(zip(starts.tolist(), sizes.tolist(), continues.tolist(), strict=True)) == expected


@given(LENGTHS, st.integers(1, 12), st.booleans())
@settings(max_examples=150, deadline=None)
def test_every_token_is_a_target_once_an_epoch(lengths: list[int], length: int, document_mask: bool) -> None:
    corpus = Corpus(a=lengths)
    sampler = corpus.sampler(sequence_length=length, packing="best_fit", document_mask=document_mask)
    rows = round(1 / sampler.epochs(1)["a"])
    batch = sampler.samples(np.arange(2 * rows))
    assert batch.mask is not None and (batch.positions is not None) == document_mask
    pairs = Counter(
        (int(a), int(b))
        for tokens, mask in zip(batch.tokens, batch.mask, strict=True)
        for a, b in zip(tokens[:-1][mask], tokens[1:][mask], strict=True)
    )
    within = Counter((a, b) for text in corpus.text("a") for a, b in pairwise(text))
    firsts = Counter(text[0] for text in corpus.text("a"))
    assert {pair: n for pair, n in pairs.items() if pair[0] != EOS} == {pair: 2 * n for pair, n in within.items()}
    across = {pair: n for pair, n in pairs.items() if pair[0] == EOS}
    assert not (document_mask and across)
    assert all(n <= 2 * firsts[token] for (_, token), n in across.items())
    # An epoch goes through every row once.
    one, two = batch.tokens[:rows].tolist(), batch.tokens[rows:].tolist()
    assert sorted(one) == sorted(two)
    counted = int(batch.mask[:rows].sum())
    padding, share = sampler.shares()
    assert share * rows * length == pytest.approx(counted)
    tokens = sum(lengths) + sum(-(-(n - 1) // length) - 1 for n in lengths if n > 1)  # overlaps are there twice
    assert padding == pytest.approx(1 - tokens / (rows * (length + 1)))


@given(st.lists(st.lists(st.integers(0, 2), min_size=5, max_size=5), min_size=1, max_size=6))
def test_positions_and_mask_are_those_of_a_plain_loop(rows: list[list[int]]) -> None:
    positions, same = documents_of(np.array(rows), EOS)
    for row, found, counts in zip(rows, positions.tolist(), same.tolist(), strict=True):
        place = 0
        for i, token in enumerate(row):
            assert found[i] == place
            assert counts[i] == (token != EOS)
            place = 0 if token == EOS else place + 1


@given(LENGTHS, st.integers(1, 9))
@settings(max_examples=50, deadline=None)
def test_chunks_are_the_same_rows_with_documents_apart(lengths: list[int], length: int) -> None:
    corpus = Corpus(a=[*lengths, 30])
    plain = corpus.sampler(sequence_length=length).samples(np.arange(12))
    apart = corpus.sampler(sequence_length=length, document_mask=True).samples(np.arange(12))
    assert plain.positions is None and plain.mask is None
    np.testing.assert_array_equal(plain.tokens, apart.tokens)
    positions, same = documents_of(plain.tokens[:, :-1], EOS)
    np.testing.assert_array_equal(apart.positions, positions)
    np.testing.assert_array_equal(apart.mask, same)


@pytest.mark.parametrize("kind", packing.PACKINGS)
@pytest.mark.parametrize("document_mask", [False, True])
@pytest.mark.parametrize(("world", "micro"), [(1, 3), (2, 2), (3, 1), (4, 3), (12, 1)])
def test_any_world_size_sees_the_same_batch_and_counts_the_same(
    kind: str, document_mask: bool, world: int, micro: int
) -> None:
    draw = np.random.default_rng(1)
    corpus = Corpus(a=draw.integers(1, 40, 90).tolist(), b=draw.integers(1, 20, 50).tolist())
    how = {"batch_size": 12, "packing": kind, "document_mask": document_mask}
    whole = corpus.sampler(**how)
    expected = whole.batch(5)
    got = [corpus.sampler(**how).samples(piece) for piece in np.array_split(expected.indices, world * micro)]
    for name in ("tokens", "domains", "positions", "mask"):
        if (value := getattr(expected, name)) is None:
            assert all(getattr(part, name) is None for part in got)
        else:
            np.testing.assert_array_equal(np.concatenate([getattr(part, name) for part in got]), value)
    counted = 12 * 8 if expected.mask is None else int(expected.mask.sum())
    assert whole.targets(expected.indices) == counted
    assert sum(whole.targets(piece) for piece in np.array_split(expected.indices, world)) == counted


def test_documents_are_packed_when_somebody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = packing.best_fit
    monkeypatch.setattr(packing, "best_fit", lambda *a: (calls.append(1), real(*a))[1])
    corpus = Corpus(a=[5, 9, 30, 2] * 20, b=[4] * 20)
    corpus.sampler(batch_size=2, document_mask=True).batch(1)
    assert corpus.tables == 0
    sampler = corpus.sampler(batch_size=2, packing="best_fit")
    assert (corpus.tables, calls) == (0, [])
    for step in (1, 2, 1):
        sampler.batch(step)
    sampler.epochs(7)
    assert (corpus.tables, len(calls)) == (2, 2)


@pytest.mark.parametrize(
    ("corpus", "options", "message"),
    [
        (Corpus(a=[9]), {"packing": "bestfit"}, "packing: got 'bestfit', expected one of chunks, best_fit; did you"),
        (Corpus(a=[9], b=[]), {"packing": "best_fit"}, "corpus: domain 'b' has no train documents; add text or give"),
        (Corpus(a=[9, 3, 3]), {"packing": "best_fit", "batch_size": 3}, "corpus has 2 sequences of 8 tokens, fewer"),
    ],
)
def test_mistakes_are_named(corpus: Corpus, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        corpus.sampler(**options)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_less_than_a_row_is_enough_for_packed_documents() -> None:
    batch = Corpus(a=[3]).sampler(packing="best_fit", document_mask=True).batch(1)
    assert batch.tokens.tolist() == [[1, 2, EOS, EOS, EOS, EOS, EOS, EOS, EOS]]
    assert batch.mask.tolist() == [[True, True, *[False] * 6]]  # type: ignore[union-attr]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 0, 0, 0, 0]]  # type: ignore[union-attr]


def test_share_of_targets_of_chunks_is_known_without_reading() -> None:
    corpus = Corpus(a=[10] * 200)
    assert corpus.sampler().shares() == (0.0, 1.0)
    padding, counted = corpus.sampler(document_mask=True).shares()
    everything = partial(corpus.sampler(document_mask=True).targets, np.arange(1999 // 8))
    assert (padding, counted) == (0.0, pytest.approx(0.9))
    assert everything() / (1999 // 8 * 8) == pytest.approx(counted, abs=0.01)
