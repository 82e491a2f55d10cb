"""The statistics of claims: against scipy and brute force, and their error rates and power measured on planted runs."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from scipy import stats

from resformer.experiments.spec import Claim, Less, NotLess
from resformer.experiments.statistics import (
    Documents,
    Verdict,
    compare,
    difference_text,
    document_interval,
    holm,
    judge,
    p_text,
    seeds_needed,
    sign_flip,
)

LOSS = "validation/loss"


def by_seed(values: object) -> dict[int, float]:
    return dict(enumerate(np.asarray(values, dtype=float).tolist()))


def one(claim: Claim, left: dict[int, float], right: dict[int, float]) -> Verdict:
    (verdict,) = judge([claim], {("a", LOSS): left, ("b", LOSS): right})
    return verdict


# --- compare


@pytest.mark.parametrize("n", [2, 3, 5, 8, 30])
@pytest.mark.parametrize("margin", [0.0, 0.4])
def test_compare_is_the_paired_t_test_of_scipy(n: int, margin: float) -> None:
    a, b = np.random.default_rng(n).normal(size=(2, n))
    found = compare(by_seed(a), by_seed(b), margin=margin)
    expected = stats.ttest_rel(a + margin, b)
    low, high = stats.ttest_rel(a, b).confidence_interval(0.95)
    assert found.seeds == tuple(range(n)) and found.unpaired == ()
    assert found.differences == pytest.approx(a - b)
    assert found.mean == pytest.approx((a - b).mean()) and found.sd == pytest.approx((a - b).std(ddof=1))
    assert found.p == pytest.approx(expected.pvalue, rel=1e-9)
    assert (found.low, found.high) == pytest.approx((low, high))
    assert (found.p_exact is None) == (n < 6)


def test_only_shared_seeds_are_compared() -> None:
    found = compare({0: 1.0, 2: 1.5, 4: 2.0}, {2: 1.0, 1: 9.0, 0: 1.25})
    assert found.seeds == (0, 2) and found.unpaired == (1, 4)
    assert found.differences == (-0.25, 0.5)


def test_one_seed_has_a_difference_and_no_more() -> None:
    found = compare({7: 2.5}, {7: 2.0})
    assert found.mean == 0.5 and found.differences == (0.5,)
    assert (found.sd, found.low, found.high, found.p, found.p_exact, found.seeds_needed) == (None,) * 6
    assert compare({0: 1.0}, {1: 1.0}).mean is None


@pytest.mark.parametrize("n", [2, 3, 8, 50])
def test_equal_differences_give_the_p_of_their_signs(n: int) -> None:
    base = np.random.default_rng(0).uniform(2, 3, size=n)
    found = compare(by_seed(base - 0.01), by_seed(base))  # equal but for the rounding of the subtraction
    assert found.sd == 0.0 and found.mean == pytest.approx(-0.01)
    assert found.p == 2 / 2**n
    assert (found.low, found.high, found.seeds_needed) == (None, None, None)
    assert found.p_exact == (pytest.approx(2 / 2**n) if n == 8 else None)
    same = compare(by_seed(base), by_seed(base))
    assert same.mean == 0.0 and same.p == 1.0 and same.p_exact == (1.0 if n == 8 else None)
    at_border = compare(by_seed(base - 0.01), by_seed(base), margin=0.01)
    assert at_border.p == 1.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_values_that_are_not_finite_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match=r"left: got (nan|inf) for seed 3, expected finite numbers"):
        compare({0: 1.0, 3: bad}, {0: 1.0})
    with pytest.raises(ValueError, match="right: got"):
        compare({0: 1.0}, {0: bad})
    with pytest.raises(ValueError, match="margin: got"):
        compare({0: 1.0}, {0: 1.0}, margin=bad)


# --- sign flips


@pytest.mark.parametrize("n", [1, 2, 5, 6, 9, 12])
@pytest.mark.parametrize("coarse", [False, True])
def test_sign_flip_is_the_count_over_all_patterns(n: int, coarse: bool) -> None:
    d = np.random.default_rng(n).normal(0.3, 1, size=n)
    if coarse:
        d = np.round(d, 1)  # many ties, which rounding must not lose
    patterns = np.array(list(itertools.product([1, -1], repeat=n)))
    expected = np.mean(np.abs(patterns @ d) >= abs(d.sum()) - 1e-9)
    assert sign_flip(d) == pytest.approx(expected, abs=1e-15)


def test_sign_flip_at_its_extremes() -> None:
    assert sign_flip([1, 2, 3]) == 0.25
    assert sign_flip(np.full(40, -0.1)) == 2 / 2**40
    assert sign_flip(np.zeros(8)) == 1.0
    assert sign_flip([1, -1, 1, -1]) == 1.0
    d = np.random.default_rng(0).normal(0.3, 1, size=30)
    assert sign_flip(d) == pytest.approx(stats.ttest_1samp(d, 0).pvalue, rel=0.2)


# --- seeds needed


@pytest.mark.parametrize("effect", [0.2, 0.5, 1.0, 3.0, 20.0])
@pytest.mark.parametrize("level", [0.05, 0.005])
def test_seeds_needed_is_the_first_number_with_the_power(effect: float, level: float) -> None:
    n = seeds_needed(-0.01 * effect, 0.01, level=level)
    assert n is not None and n >= 2
    power = [stats.nct.sf(stats.t.ppf(1 - level / 2, k - 1), k - 1, effect * k**0.5) for k in range(2, n + 1)]
    assert power[-1] >= 0.8 and all(p < 0.8 for p in power[:-1])


def test_seeds_needed_agrees_with_the_textbook_and_knows_its_limits() -> None:
    assert seeds_needed(0.5, 1.0) == 34  # Cohen's d = 0.5, paired, two-sided 0.05, 80 %
    assert seeds_needed(0.01, 1.0) is None
    assert seeds_needed(0.0, 1.0) is None
    assert seeds_needed(1.0, 0.0) is None
    assert compare(by_seed([0.0, 1.0, 0.5]), by_seed([0, 0, 0])).seeds_needed == 10


# --- Holm


def test_holm_by_hand() -> None:
    # Sorted: 0.005 * 4, 0.01 * 3, 0.03 * 2, and 0.04 * 1, which may not be below the one before.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, None, 0.5, None]) == [1.0, None, 1.0, None]
    assert holm([0.03, None]) == [0.03, None]
    assert holm([]) == [] and holm([None]) == [None]


@pytest.mark.parametrize("bad", [-0.1, 1.1, math.nan])
def test_holm_refuses_what_is_no_p(bad: float) -> None:
    with pytest.raises(ValueError, match=r"p_values: got .* at 1"):
        holm([0.1, bad])


# --- verdicts

NOISE = np.array([0.001, -0.002, 0.001])


@pytest.mark.parametrize(
    ("claim", "difference", "verdict", "points"),
    [
        (Less("a", "b"), -0.05, "held", "as claimed"),
        (Less("a", "b"), 0.05, "not held", "against"),
        (Less("a", "b"), -0.001, "undecided", "as claimed"),
        (Less("a", "b"), 0.001, "undecided", "against"),
        (NotLess("a", "b"), 0.05, "held", "as claimed"),
        (NotLess("a", "b"), -0.05, "not held", "against"),
        (NotLess("a", "b"), 0.001, "undecided", "as claimed"),
        (NotLess("a", "b", margin=0.02), 0.0, "held", "as claimed"),
        (NotLess("a", "b", margin=0.02), -0.01, "held", "as claimed"),
        (NotLess("a", "b", margin=0.02), -0.019, "undecided", "as claimed"),
        (NotLess("a", "b", margin=0.02), -0.021, "undecided", "against"),
        (NotLess("a", "b", margin=0.02), -0.05, "not held", "against"),
    ],
)
def test_verdicts(claim: Claim, difference: float, verdict: str, points: str) -> None:
    base = np.array([2.5, 2.6, 2.4])
    found = one(claim, by_seed(base + difference + NOISE), by_seed(base))
    assert (found.verdict, found.points) == (verdict, points)
    assert found.claim is claim and found.comparison is not None and found.p == found.p_adjusted
    assert found.comparison.mean == pytest.approx(difference)
    if verdict == "undecided":
        border = "-0.02" if claim.margin else "0"
        assert found.reason == f"the 95 % interval contains {border}"
        assert found.comparison.low is not None and found.comparison.high is not None
        assert found.comparison.low < -claim.margin < found.comparison.high
    else:
        assert found.reason == p_text(found.p)


def test_many_claims_need_more_than_one_does() -> None:
    values = {("b", LOSS): by_seed([2.5, 2.6, 2.4]), ("a", LOSS): by_seed([2.48, 2.585, 2.385])}
    assert judge([Less("a", "b")], values)[0].verdict == "held"
    ten = judge([Less("a", "b")] * 10, values)
    assert {v.verdict for v in ten} == {"undecided"}
    assert ten[0].p == pytest.approx(0.01, rel=0.05) and ten[0].p_adjusted == pytest.approx(0.1, rel=0.05)
    assert ten[0].reason == "p = 0.0099, but 0.099 after Holm's correction for 10 claims"
    found = ten[0].comparison
    assert found is not None and found.mean is not None and found.sd is not None
    assert found.level == 0.005 and found.seeds_needed == seeds_needed(found.mean, found.sd, level=0.005)


def test_what_was_not_run_is_no_part_of_the_family() -> None:
    values = {
        ("a", LOSS): by_seed([2.48, 2.585, 2.385]),
        ("b", LOSS): by_seed([2.5, 2.6, 2.4]),
        ("single", LOSS): {0: 2.0},
        ("other", LOSS): {9: 2.0},
        ("broken", LOSS): {0: 2.0, 1: math.nan},
    }
    claims: list[Claim] = [
        Less("a", "b"),
        Less("single", "b"),
        NotLess("single", "b"),
        Less("other", "b"),
        Less("none", "b"),
        Less("none", "nor"),
        Less("broken", "b"),
        Less("a", "b", "tasks/average"),
    ]
    found = judge(claims, values)
    assert [(v.verdict, v.points, v.reason) for v in found] == [
        ("held", "as claimed", "p = 0.0099"),
        ("undecided", "as claimed", "one seed: no interval"),
        ("undecided", "against", "one seed: no interval"),
        ("not run", "", "no seed that other and b share"),
        ("not run", "", "no value of validation/loss for none"),
        ("not run", "", "no value of validation/loss for none and nor"),
        ("undecided", "", "validation/loss of broken, seed 1, is nan"),
        ("not run", "", "no value of tasks/average for a and b"),
    ]
    assert [v.p is None for v in found] == [False] + [True] * 7
    assert judge(claims, lambda run, on: values.get((run, on), {})) == found


def test_equal_differences_are_worded() -> None:
    found = one(Less("a", "b"), by_seed([0.49, 0.50, 0.51]), by_seed([0.50, 0.51, 0.52]))
    assert found.verdict == "undecided" and found.points == "as claimed"
    assert found.reason == "all 3 differences are equal: no interval, and p = 0.25 by their signs"
    same = one(Less("a", "b"), by_seed([0.5, 0.6]), by_seed([0.5, 0.6]))
    assert (same.verdict, same.points, same.p) == ("undecided", "", 1.0)


def test_words() -> None:
    texts = {0.0: "p < 0.001", 0.0312: "p = 0.031", 0.0496: "p = 0.0496", 0.04999: "p = 0.04999", 0.0501: "p = 0.05"}
    assert {p: p_text(p) for p in texts} == texts
    assert p_text(None) == "no p" and p_text(1.0) == "p = 1"
    assert difference_text(None) == "" and difference_text(compare({}, {})) == ""
    assert difference_text(compare({0: 1.0}, {0: 1.5})) == "-0.5000 (1 seed)"
    found = compare(by_seed([0.01, 0.02, 0.03]), by_seed([0, 0, 0]))
    assert difference_text(found, 3) == "+0.020 (-0.005 to +0.045, 3 seeds)"


# --- error rates and power, measured on planted suites

CLAIMS = 10
SEED_SD, RUN_SD = 0.02, 0.005  # nats: what a seed does to all runs alike, and to each on its own
DIFFERENCE_SD = RUN_SD * math.sqrt(2)


def suites(
    differences: Sequence[float],
    make: Sequence[type[Claim]],
    seeds: int,
    count: int,
    *,
    shared: bool = False,
    rng: int = 0,
) -> Iterator[list[Verdict]]:
    """Verdicts on `count` suites whose claims compare a run each with a run of its own, or with one shared by all, from
    which it truly lies `differences[i]`.
    """
    generator = np.random.default_rng(rng)
    claims: list[Claim] = [kind(f"left{i}", "right" if shared else f"right{i}") for i, kind in enumerate(make)]
    names = sorted({name for claim in claims for name in (claim.left, claim.right)})
    offsets = np.array([differences[int(name[4:])] if name.startswith("left") else 0.0 for name in names])
    for _ in range(count):
        noise = SEED_SD * generator.normal(size=(1, seeds)) + RUN_SD * generator.normal(size=(len(names), seeds))
        losses = 3.0 + offsets[:, None] + noise
        yield judge(claims, {(name, LOSS): by_seed(row) for name, row in zip(names, losses, strict=True)})


def within(rate: float, expected: float, count: int, errors: float = 3.0) -> bool:
    """Whether a rate of `count` trials lies within so many standard errors of what it should be."""
    return abs(rate - expected) <= errors * math.sqrt(expected * (1 - expected) / count)


MIXED: list[type[Claim]] = [Less, NotLess] * (CLAIMS // 2)


@pytest.mark.parametrize(("seeds", "shared"), [(3, False), (3, True), (8, False), (8, True)])
def test_without_effects_few_suites_decide_anything(seeds: int, shared: bool) -> None:
    count = 1000
    decided = Counter(
        any(v.verdict != "undecided" for v in verdicts)
        for verdicts in suites([0.0] * CLAIMS, MIXED, seeds, count, shared=shared)
    )
    rate = decided[True] / count
    assert rate <= 0.05 or within(rate, 0.05, count)
    assert rate > 0.02  # nor is it far too strict


@pytest.mark.parametrize("seeds", [3, 8])
def test_decisions_for_the_wrong_side_are_rare(seeds: int) -> None:
    count = 300
    differences = np.random.default_rng(5).normal(size=CLAIMS) * 0.5 * DIFFERENCE_SD
    wrong = 0
    for verdicts in suites(differences.tolist(), MIXED, seeds, count, shared=True):
        truth = [(d < 0) == (v.claim.kind == "less") for d, v in zip(differences, verdicts, strict=True)]
        wrong += any(v.verdict == ("not held" if t else "held") for t, v in zip(truth, verdicts, strict=True))
    assert wrong / count <= 0.05


@pytest.mark.parametrize("seeds", [3, 8])
@pytest.mark.parametrize("kind", [Less, NotLess])
@pytest.mark.parametrize("sds", [1.0, 3.0])
def test_one_planted_claim_is_found_as_often_as_predicted(seeds: int, kind: type[Claim], sds: float) -> None:
    count = 500
    effect = sds * DIFFERENCE_SD * (-1 if kind is Less else 1)
    held = sum(v.verdict == "held" for (v,) in suites([effect], [kind], seeds, count))
    power = stats.nct.sf(stats.t.ppf(0.975, seeds - 1), seeds - 1, sds * seeds**0.5)
    assert within(held / count, power, count)


@pytest.mark.parametrize(("seeds", "sds"), [(3, 10.36), (8, 1.81)])  # 80 % at 0.05 / 10
def test_a_planted_claim_among_nine_empty_ones_is_found_as_often_as_predicted(seeds: int, sds: float) -> None:
    count = 500
    effects = [-sds * DIFFERENCE_SD] + [0.0] * (CLAIMS - 1)
    held = sum(verdicts[0].verdict == "held" for verdicts in suites(effects, MIXED, seeds, count))
    power = stats.nct.sf(stats.t.ppf(1 - 0.05 / CLAIMS / 2, seeds - 1), seeds - 1, sds * seeds**0.5)
    assert power == pytest.approx(0.8, abs=0.01)
    assert within(held / count, power, count)


def test_a_margin_is_shown_as_often_as_predicted() -> None:
    """No true difference, 8 seeds: that left gains less than a margin of 2 standard deviations is found; that it gains
    less than nothing is not.
    """
    count, seeds = 300, 8
    generator = np.random.default_rng(0)
    held: Counter[float] = Counter()
    for _ in range(count):
        left, right = (by_seed(RUN_SD * generator.normal(size=seeds)) for _ in range(2))
        for margin in (0.0, 2 * DIFFERENCE_SD):
            held[margin] += one(NotLess("a", "b", margin=margin), left, right).verdict == "held"
    assert within(held[0.0] / count, 0.025, count)
    power = stats.nct.sf(stats.t.ppf(0.975, seeds - 1), seeds - 1, 2 * seeds**0.5)
    assert within(held[2 * DIFFERENCE_SD] / count, power, count)


# --- intervals over documents


def corpus(
    generator: np.random.Generator, counts: dict[str, int], difference: float, *, noise: float = 0.3
) -> tuple[Documents, Documents]:
    """Two models' losses on documents that are far harder or easier than the models differ: `difference` nats per token
    in truth.
    """
    left, right = {}, {}
    for domain, count in counts.items():
        tokens = generator.integers(20, 400, size=count)
        hard = generator.normal(3.0, 1.0, size=count)
        gain = difference + noise * generator.normal(size=count)
        left[domain], right[domain] = ((hard + gain) * tokens, tokens), (hard * tokens, tokens)
    return left, right


def test_document_interval_is_the_mean_over_domains_with_the_error_of_a_ratio() -> None:
    left, right = corpus(np.random.default_rng(0), {"a": 300, "b": 1000, "c": 80, "d": 500}, -0.05)
    mean, low, high = document_interval(left, right)
    rates, variances = [], []
    for domain in left:
        (a, tokens), (b, _) = ([np.asarray(part) for part in side[domain]] for side in (left, right))
        rates.append((a.sum() - b.sum()) / tokens.sum())
        residual = a - b - rates[-1] * tokens
        variances.append((residual**2).sum() / tokens.sum() ** 2)
    error = math.sqrt(sum(variances)) / len(left)
    assert mean == pytest.approx(np.mean(rates), rel=1e-12)
    assert high - low == pytest.approx(2 * 1.96 * error, rel=0.08)
    assert (low + high) / 2 == pytest.approx(mean, abs=0.2 * error)
    backwards = document_interval(dict(reversed(list(right.items()))), left)
    assert backwards == pytest.approx((-mean, -high, -low), abs=0.1 * error)
    assert document_interval(left, right) == (mean, low, high)
    assert document_interval(left, right, confidence=0.5)[2] < high


def test_chunks_do_not_change_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = corpus(np.random.default_rng(0), {"a": 50, "b": 31}, 0.1)
    expected = document_interval(left, right, draws=201)
    monkeypatch.setattr("resformer.experiments.statistics._CELLS", 1000)
    assert document_interval(left, right, draws=201) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("counts", [{"a": 60, "b": 90}, {"a": 6, "b": 9}])
def test_coverage_of_document_intervals(counts: dict[str, int]) -> None:
    count, generator, inside = 600, np.random.default_rng(1), 0
    for i in range(count):
        _, low, high = document_interval(*corpus(generator, counts, 0.02), draws=300, seed=i)
        inside += low <= 0.02 <= high
    # Few documents: the t of the smallest domain makes the interval rather too wide than too narrow.
    assert within(inside / count, 0.95, count) or (0.95 < inside / count < 0.99 and min(counts.values()) < 20)


def test_documents_must_match() -> None:
    good = {"a": ([1.0, 2.0], [3, 4])}
    with pytest.raises(ValueError, match="domains: got"):
        document_interval(good, {"b": good["a"]})
    with pytest.raises(ValueError, match="domains: got"):
        document_interval({}, {})
    with pytest.raises(ValueError, match=r"a: document 1 has 4 tokens on the left and 5 on the right"):
        document_interval(good, {"a": ([1.0, 2.0], [3, 5])})
    with pytest.raises(ValueError, match="lists of one length"):
        document_interval(good, {"a": ([1.0, 2.0, 3.0], [3, 4, 5])})
    with pytest.raises(ValueError, match="not finite"):
        document_interval(good, {"a": ([1.0, math.nan], [3, 4])})
    with pytest.raises(ValueError, match=r"1 scored document\(s\)"):
        document_interval({"a": ([1.0, 0.0], [3, 0])}, {"a": ([1.0, 0.0], [3, 0])})
