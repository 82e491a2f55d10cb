"""Fits give back what was planted, their intervals hold as often as they say, and savings are the paper's."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import pytest

from resformer.analyze.savings import FEW, bootstrap, sampled_savings, savings, size_for
from resformer.analyze.scaling import fit_chinchilla, fit_power_law

SIZES = [81_901_056, 179_874_048, 467_921_920]
TRANSFORMER = [2.7389, 2.5015, 2.2806]
RESFORMER = [2.7117, 2.4692, 2.2537]


def test_the_paper_s_table_gives_the_paper_s_savings() -> None:
    found = savings(SIZES, RESFORMER, SIZES, TRANSFORMER)
    assert [round(100 * one.share, 2) for one in found] == [8.04, 10.34, 11.68]
    assert [one.extrapolated for one in found] == [True, False, False]
    # The order of the points does not matter, nor does one baseline point change another.
    assert savings(SIZES[::-1], RESFORMER[::-1], SIZES[1:2], TRANSFORMER[1:2]) == found[1:2]


def test_a_method_that_loses_has_a_negative_saving() -> None:
    law = 20.0 * np.array(SIZES, dtype=float) ** -0.11
    needs_more = 20.0 * (np.array(SIZES) / 1.122) ** -0.11
    found = savings(SIZES, needs_more, SIZES, law)
    assert [one.share for one in found] == pytest.approx([-0.122] * 3)
    assert [one.extrapolated for one in found] == [False, False, True]
    assert savings(SIZES, law, SIZES, needs_more)[0].share == pytest.approx(1 - 1 / 1.122)
    assert all(abs(one.share) < 1e-12 and not one.extrapolated for one in savings(SIZES, law, SIZES, law))


@pytest.mark.parametrize(
    ("x", "loss", "words"),
    [
        ([1e8], [2.5], "at least 2"),
        ([1e8, 2e8, 3e8], [2.5, 2.3, 2.4], "does not fall"),
        ([1e8, 2e8], [2.5, 2.5], "does not fall"),
        ([1e8, 1e8], [2.5, 2.3], "size 1e\\+08"),
        ([1e8, 2e8], [2.5, math.nan], "loss nan"),
        ([1e8, math.inf], [2.5, 2.3], "size inf"),
        ([1e8, -2e8], [2.5, 2.3], "size -2e\\+08"),
        ([1e8, 2e8], [2.5], "one length"),
    ],
)
def test_mistakes_of_curves_are_one_line(x: Any, loss: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        savings(x, loss, SIZES, TRANSFORMER)
    assert "\n" not in str(caught.value)


def test_mistakes_of_a_level_and_a_baseline() -> None:
    with pytest.raises(ValueError, match="loss: got nan"):
        size_for(math.nan, SIZES, TRANSFORMER)
    with pytest.raises(ValueError, match="baseline: got loss inf"):
        savings(SIZES, RESFORMER, [1e8], [math.inf])


def test_a_flat_method_needs_endless_size() -> None:
    (found,) = savings([1e8, 2e8], [3.0, 3.0 - 1e-12], [1e8], [2.0])
    assert found.needed == math.inf and found.share == -math.inf and found.extrapolated


@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("noise", ["relative", "nats"])
def test_an_exact_power_law_comes_back(offset: bool, noise: Any) -> None:
    x = np.geomspace(1e7, 1e9, 6)
    fit = fit_power_law(x, 400.0 * x**-0.33 + (1.7 if offset else 0.0), offset=offset, noise=noise)
    assert fit.values == pytest.approx({"a": 400.0, "b": 0.33, **({"c": 1.7} if offset else {})}, rel=2e-3)
    assert fit.loss(x) == pytest.approx(400.0 * x**-0.33 + (1.7 if offset else 0.0), rel=1e-6)
    assert fit.size_for(float(fit.loss([3e8])[0])) == pytest.approx(3e8, rel=1e-3)
    for name, (low, high) in fit.intervals.items():
        assert low <= fit.values[name] <= high


def test_an_exact_chinchilla_law_comes_back() -> None:
    n, d = (v.ravel() for v in np.meshgrid(np.geomspace(5e7, 2e9, 4), np.geomspace(2e9, 1e11, 4)))
    fit = fit_chinchilla(n, d, 1.69 + 406.4 * n**-0.34 + 410.7 * d**-0.28)
    assert fit.values == pytest.approx({"E": 1.69, "A": 406.4, "B": 410.7, "alpha": 0.34, "beta": 0.28}, rel=5e-3)
    with pytest.raises(ValueError, match="needs them"):
        fit.loss(n)
    with pytest.raises(ValueError, match="two variables"):
        fit.size_for(2.0)


def test_what_points_do_not_bound_has_an_open_interval() -> None:
    x = np.geomspace(1e8, 4e8, 4)
    fit = fit_power_law(x, [2.50, 2.45, 2.33, 2.31], offset=True)
    low, high = fit.intervals["b"]
    assert low == 0.0 and high == math.inf and fit.intervals["c"][0] == -math.inf
    assert (
        fit_power_law(x, [2.5, 2.4, 2.5, 2.4]).intervals["b"][0] < 0 < fit_power_law(x, [3, 2.6, 2.3, 2.1]).values["b"]
    )


def held(points: int, *, offset: bool, additive: bool, draws: int = 500) -> float:
    """How often the 95 % interval of the exponent holds the planted one."""
    x = np.geomspace(2e7, 2e9, points)
    b = 0.3 if offset else 0.08
    law = 1.3 * (x / x[0]) ** -b + 1.7 if offset else 3.5 * (x / x[0]) ** -b
    generator = np.random.default_rng(1)
    found = 0
    for _ in range(draws):
        noise = generator.standard_normal(points) * 0.003
        low, high = fit_power_law(x, law + 2.5 * noise if additive else law * np.exp(noise), offset=offset).intervals[
            "b"
        ]
        found += low <= b <= high
    return found / draws


@pytest.mark.parametrize("points", [4, 6, 12])
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("additive", [False, True])
def test_intervals_of_exponents_hold_as_often_as_they_say(points: int, offset: bool, additive: bool) -> None:
    started = time.process_time()
    assert 0.93 <= held(points, offset=offset, additive=additive) <= 0.985
    assert time.process_time() - started < 20


def test_intervals_of_the_chinchilla_exponents_hold() -> None:
    n, d = (v.ravel() for v in np.meshgrid(np.geomspace(5e7, 2e9, 3), np.geomspace(2e9, 1e11, 3)))
    law = 1.69 + 406.4 * n**-0.34 + 410.7 * d**-0.28
    generator = np.random.default_rng(5)
    found = np.zeros(3)
    for _ in range(200):
        fit = fit_chinchilla(n, d, law * np.exp(0.003 * generator.standard_normal(9)))
        for i, (name, value) in enumerate((("alpha", 0.34), ("beta", 0.28), ("E", 1.69))):
            low, high = fit.intervals[name]
            found[i] += low <= value <= high
    assert (found / 200 >= 0.91).all(), found  # 0.95 less 2.6 standard errors of 200 draws


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: fit_power_law([1, 2], [3, 2]), "at least 3"),
        (lambda: fit_power_law([1, 2, 4], [3, 2.5, 2.2], offset=True), "at least 4"),
        (lambda: fit_power_law([1, 2, 2], [3, 2.5, 2.2]), "two points of size 2"),
        (lambda: fit_power_law([1, 2, 4], [3, math.nan, 2.2]), "loss nan"),
        (lambda: fit_power_law([1, 2, 4, 8], [2, 3, 4, 5], offset=True), "do not fall"),
        (lambda: fit_power_law([1, 2, 4], [3, 2.5, 2.2], noise="log"), "noise: got 'log'"),  # type: ignore[arg-type]
        (lambda: fit_power_law([1, 2, 4], [3, 2.5, 2.2], confidence=95), "confidence: got 95"),
        (lambda: fit_chinchilla([1, 2, 3], [1, 2, 3], [3, 2, 1]), "at least 6"),
        (lambda: fit_chinchilla(range(1, 8), range(1, 8), range(9, 2, -1)), "cannot be told apart"),
        (lambda: fit_chinchilla([1, 2, 3, 1, 2, 3], [1, 1, 1, 2, 2, 0], [6, 5, 4, 3, 2, 1]), "D: got 0"),
        (lambda: fit_chinchilla([1, 2], [1, 2, 3], [3, 2, 1]), "one length"),
    ],
)
def test_mistakes_of_fits_are_one_line(call: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)


def documents(generator: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Losses [sizes, documents] of method and baseline; documents differ far more than models do."""
    hard = generator.normal(0.0, 0.5, count)
    own, base = (
        np.array(losses)[:, None] + hard + generator.normal(0.0, 0.05, (3, count))
        for losses in (RESFORMER, TRANSFORMER)
    )
    return own, base


def test_savings_have_intervals_over_documents_and_seeds() -> None:
    own, base = documents(np.random.default_rng(0), 400)
    found = sampled_savings(SIZES, own, SIZES, base, over="documents", draws=300)
    apart = sampled_savings(SIZES, own, SIZES, base, over="seeds", draws=300)
    for one, other in zip(found, apart, strict=True):
        assert one.low is not None and one.high is not None and one.low < one.share < one.high
        assert one.confidence == 0.95 and other.low is not None and other.high is not None
        assert one.high - one.low < (other.high - other.low) / 2  # documents are the same for all models
    assert found == sampled_savings(SIZES, own, SIZES, base, over="documents", draws=300)


@pytest.mark.parametrize("seeds", [3, 5, 40])
def test_the_intervals_of_savings_hold(seeds: int) -> None:
    assert (seeds < FEW) == (seeds != 40)
    truth = savings(SIZES, RESFORMER, SIZES, TRANSFORMER)[1].share
    generator = np.random.default_rng(seeds)
    found = 0
    for _ in range(200):
        own = np.array(RESFORMER)[:, None] + generator.normal(0.0, 0.004, (3, seeds))
        base = TRANSFORMER[1] + generator.normal(0.0, 0.004, (1, seeds))
        (one,) = sampled_savings(SIZES, own, SIZES[1:2], base, over="seeds", draws=100)
        assert one.low is not None and one.high is not None
        found += one.low <= truth <= one.high
    assert found / 200 >= 0.91


def test_samples_that_fit_nothing_have_an_open_interval() -> None:
    generator = np.random.default_rng(0)
    own = np.array(RESFORMER)[:, None] + generator.normal(0.0, 2.0, (3, 4))
    own = own - own.mean(axis=1, keepdims=True) + np.array(RESFORMER)[:, None]
    found = sampled_savings(
        SIZES, own, SIZES, np.array(TRANSFORMER)[:, None] + np.zeros((3, 4)), over="seeds", draws=99
    )
    assert found[0].low == -math.inf and found[0].high == 1.0


@pytest.mark.parametrize(
    ("own", "base", "over", "words"),
    [
        ((3, 1), (3, 4), "seeds", "at least 2 samples"),
        ((2, 4), (3, 4), "seeds", "expected \\(3, samples\\)"),
        ((3, 4), (3, 5), "documents", "the same ones"),
        ((3, 4), (3, 4), "runs", "over: got 'runs'"),
    ],
)
def test_mistakes_of_samples_are_one_line(own: Any, base: Any, over: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        sampled_savings(SIZES, np.ones(own), SIZES, np.ones(base), over=over)


def test_a_bootstrap_of_a_mean_is_about_students_t() -> None:
    values = np.random.default_rng(0).normal(3.0, 1.0, 50)
    estimate, low, high = bootstrap(lambda v: float(v.mean()), values)
    assert estimate == pytest.approx(values.mean())
    assert high - low == pytest.approx(2 * 2.01 * values.std(ddof=1) / 50**0.5, rel=0.1)
    with pytest.raises(ValueError, match="at least 2"):
        bootstrap(lambda v: 0.0, [1.0])
