"""Which claims of a suite its runs bear out, and how surely.

A seed fixes initial weights and data order in all runs of a suite, so that runs are compared seed by seed: what a seed
does to all of them cancels in the difference. Differences are always left minus right, in the unit of the measure
(nats per token for losses). The number of seeds has to be chosen before the runs: adding seeds until a claim is decided
decides false ones as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from resformer.analyze.savings import interval
from resformer.experiments.spec import Claim

Floats = NDArray[np.float64]
Seeds = Mapping[int, float]
"""A measure of one run by seed."""
Documents = Mapping[str, tuple[ArrayLike, ArrayLike]]
"""Summed losses in nats and scored tokens of each document, by domain."""

CONFIDENCE = 0.95
LEVEL = 0.05
"""Of all claims of a suite together: the chance that any of them is decided though there is nothing to decide."""
POWER = 0.8
MOST_SEEDS_NEEDED = 1000
FEWEST_EXACT, MOST_EXACT = 6, 40
"""Seeds between which sign patterns are counted. With n seeds p cannot go below 2 / 2^n: 0.25 for 3, 0.03 for 6."""

_ROUNDING = 1e-12  # of the values; a difference below that is an error of subtraction
_CELLS = 1 << 20  # documents drawn at a time, for memory


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two runs, seed by seed.

    seeds: those that both sides have; unpaired: those of one side only, which nothing here takes in.
    differences: left - right by seed. mean, sd: of them; None without any, sd with fewer than two seeds.
    low, high: the 95 % Student-t interval of the mean difference, not corrected for the number of claims.
    margin: p, p_exact and seeds_needed are about how far the mean is from -margin.
    p: of the paired t-test, two-sided; it takes differences to be normal, which few seeds cannot show.
    p_exact: the share of all 2^n sign patterns of (differences + margin) whose mean is as far from 0 or farther; None
        but for 6 to 40 seeds.
    seeds_needed: the fewest seeds that would show a difference of the observed mean and sd at `level` with 80 % power
        (noncentral t); None where it is unknown or above 1000. As rough as mean and sd are.

    Where all differences are equal, as coarse measures make them, their sd says nothing about the next seed: there is
    no interval and no seeds_needed, and p is the one of the signs, 2 / 2^n (the t-test would have 0).
    """

    seeds: tuple[int, ...]
    unpaired: tuple[int, ...] = ()
    differences: tuple[float, ...]
    mean: float | None = None
    sd: float | None = None
    low: float | None = None
    high: float | None = None
    margin: float = 0.0
    p: float | None = None
    p_exact: float | None = None
    level: float = LEVEL
    seeds_needed: int | None = None


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the runs say about a claim; see `judge`.

    comparison: None where a side has no value, or one that is not finite. p: two-sided, of the mean difference being
    -margin (0 for `Less`). p_adjusted: by Holm's method over all claims that have a p. reason: why, in a short
    sentence. points: where the mean lies, whether or not that is sure; "" when at the border or unknown.
    """

    claim: Claim
    comparison: Comparison | None = None
    p: float | None = None
    p_adjusted: float | None = None
    verdict: Literal["held", "not held", "undecided", "not run"]
    reason: str
    points: Literal["as claimed", "against", ""] = ""


def compare(left: Seeds, right: Seeds, *, margin: float = 0.0, level: float = LEVEL) -> Comparison:
    """Two runs, seed by seed; see `Comparison`.

    Raises:
        ValueError: a value or the margin is not finite.
    """
    if not np.isfinite(margin):
        raise ValueError(f"margin: got {margin}, expected a finite number")
    for side, values in (("left", left), ("right", right)):
        for seed, value in values.items():
            if not np.isfinite(value):
                raise ValueError(f"{side}: got {value} for seed {seed}, expected finite numbers; leave that seed out")
    seeds = tuple(sorted(left.keys() & right.keys()))
    a, b = (np.array([float(side[seed]) for seed in seeds]) for side in (left, right))
    differences = a - b
    found = Comparison(
        seeds=seeds,
        unpaired=tuple(sorted(left.keys() ^ right.keys())),
        differences=tuple(differences.tolist()),
        margin=margin,
        level=level,
    )
    n = len(seeds)
    if n == 0:
        return found
    mean = float(differences.mean())
    found = replace(found, mean=mean)
    if n == 1:
        return found
    rounding = _ROUNDING * float(np.abs([a, b]).max())
    from_border = differences + margin
    from_border[np.abs(from_border) <= rounding] = 0.0
    exact = sign_flip(from_border) if FEWEST_EXACT <= n <= MOST_EXACT else None
    if float(np.ptp(differences)) <= rounding:
        return replace(found, sd=0.0, p=2.0 ** (1 - n) if from_border.all() else 1.0, p_exact=exact)
    sd = float(differences.std(ddof=1))
    error = sd / n**0.5
    width = float(special.stdtrit(n - 1, 0.5 + CONFIDENCE / 2)) * error
    return replace(
        found,
        sd=sd,
        low=mean - width,
        high=mean + width,
        p=float(2 * special.stdtr(n - 1, -abs(mean + margin) / error)),
        p_exact=exact,
        seeds_needed=seeds_needed(mean + margin, sd, level=level),
    )


def sign_flip(differences: ArrayLike) -> float:
    """The share of all 2^n sign patterns under which the mean of `differences` `[n]` is as far from 0 or farther: the
    exact two-sided p of the differences being symmetric about 0. n is at most `MOST_EXACT`.
    """
    sizes = np.abs(np.asarray(differences, dtype=np.float64))
    n = len(sizes)
    assert n <= MOST_EXACT, n
    # Every sum of the whole is one of the first half plus one of the second: 2 * 2^(n/2) sums to make, not 2^n.
    halves = []
    for part in (sizes[: n // 2], sizes[n // 2 :]):
        sums = np.zeros(1)
        for size in part:
            sums = np.concatenate([sums + size, sums - size])
        halves.append(np.sort(sums))
    # Patterns that tie with the observed one must count, whatever the order in which their sums were rounded.
    border = abs(float(np.sum(differences))) - _ROUNDING * float(sizes.sum())
    above = int((len(halves[1]) - np.searchsorted(halves[1], border - halves[0])).sum())
    return min(1.0, 2 * above / 2**n)


def seeds_needed(mean: float, sd: float, *, level: float = LEVEL, power: float = POWER) -> int | None:
    """The fewest seeds with which a two-sided paired t-test at `level` finds a mean difference, on its side, with this
    power; None where there is no difference or no sd, or where it takes more than `MOST_SEEDS_NEEDED`.
    """
    if not (mean and sd):
        return None

    def enough(n: int) -> bool:
        critical = special.stdtrit(n - 1, 1 - level / 2)
        return bool(1 - special.nctdtr(n - 1, abs(mean) / sd * n**0.5, critical) >= power)

    low, high = 1, MOST_SEEDS_NEEDED
    if not enough(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """p-values adjusted for their number (Holm, 1979): deciding those below a level errs in any of them with at most
    that chance, however they depend on each other. None stays None and counts for nothing.

    Raises:
        ValueError: a p outside 0..1.
    """
    known = [(p, i) for i, p in enumerate(p_values) if p is not None]
    for p, i in known:
        if not 0 <= p <= 1:
            raise ValueError(f"p_values: got {p} at {i}, expected numbers from 0 to 1, or None")
    adjusted: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, i) in enumerate(sorted(known)):
        largest = max(largest, min(1.0, (len(known) - rank) * p))
        adjusted[i] = largest
    return adjusted


def judge(
    claims: Sequence[Claim], values: Callable[[str, str], Seeds] | Mapping[tuple[str, str], Seeds]
) -> list[Verdict]:
    """A verdict on each claim, with at most 5 % chance that any claim of the suite is decided for no reason.

    `values` gives the measure of a run by seed, from (run name, claim.on); nothing for a run that has none.

    Both kinds of claim are decided by the two-sided paired t-test of the mean difference being -margin, which is 0 for
    `Less`; Holm's method corrects its p for the number of claims that have one, and below 0.05 the side decides:

    - `Less`: below 0 "held", above 0 "not held";
    - `NotLess`: above -margin "held" (left is not below right by the margin or more), below it "not held".

    All else is "undecided": that nothing was found shows nothing. That Holm's method also keeps decisions for the wrong
    side below 5 % is proven for independent claims (Shaffer, 1980); the tests measure it for claims that share a run.

    `comparison.seeds_needed` is at the level of Holm's first step, 0.05 by the number of claims: what one claim needs
    whatever becomes of the others. A value that is not finite (a run that diverged) leaves its claims undecided.
    """
    look_up = values if callable(values) else lambda run, on: values.get((run, on), {})
    sides = [(look_up(claim.left, claim.on), look_up(claim.right, claim.on)) for claim in claims]
    known = [_not_comparable(claim, *both) for claim, both in zip(claims, sides, strict=True)]
    family = sum(not k and len(a.keys() & b.keys()) > 1 for k, (a, b) in zip(known, sides, strict=True))
    level = LEVEL / max(family, 1)
    found = [
        None if k else compare(*both, margin=claim.margin, level=level)
        for claim, k, both in zip(claims, known, sides, strict=True)
    ]
    adjusted = holm([None if one is None else one.p for one in found])
    return [
        k or _decide(claim, one, p, family) for claim, k, one, p in zip(claims, known, found, adjusted, strict=True)
    ]


def _not_comparable(claim: Claim, left: Seeds, right: Seeds) -> Verdict | None:
    """The verdict on a claim whose values cannot be compared, else None."""
    sides = ((claim.left, left), (claim.right, right))
    missing = [name for name, values in sides if not values]
    if missing:
        reason = f"no value of {claim.on} for {' and '.join(dict.fromkeys(missing))}"
        return Verdict(claim=claim, verdict="not run", reason=reason)
    for name, values in sides:
        for seed, value in values.items():
            if not np.isfinite(value):
                return Verdict(
                    claim=claim, verdict="undecided", reason=f"{claim.on} of {name}, seed {seed}, is {value}"
                )
    if not left.keys() & right.keys():
        return Verdict(claim=claim, verdict="not run", reason=f"no seed that {claim.left} and {claim.right} share")
    return None


def _decide(claim: Claim, found: Comparison | None, adjusted: float | None, family: int) -> Verdict:
    assert found and found.mean is not None, "without a shared seed there is a verdict already"
    from_border, p = found.mean + claim.margin, found.p
    points: Literal["as claimed", "against", ""] = ""
    if abs(from_border) > _ROUNDING:
        points = "as claimed" if (from_border < 0) == (claim.kind == "less") else "against"
    verdict: Literal["held", "not held", "undecided"] = "undecided"
    corrected = f"after Holm's correction for {family} claims"
    if p is None or adjusted is None:
        reason = "one seed: no interval"
    elif adjusted < LEVEL:
        verdict = "held" if points == "as claimed" else "not held"
        reason = f"{p_text(adjusted)} {corrected}" if family > 1 else p_text(adjusted)
    elif p < LEVEL:
        reason = f"{p_text(p)}, but {_significant(adjusted)} {corrected}"
    elif found.low is None:
        reason = f"all {len(found.seeds)} differences are equal: no interval, and {p_text(p)} by their signs"
    else:
        reason = f"the {100 * CONFIDENCE:g} % interval contains {0.0 - claim.margin:g}"
    return Verdict(
        claim=claim, comparison=found, p=p, p_adjusted=adjusted, verdict=verdict, reason=reason, points=points
    )


def document_interval(
    left: Documents, right: Documents, confidence: float = CONFIDENCE, draws: int = 2000, seed: int = 0
) -> tuple[float, float, float]:
    """The mean over domains of the difference in loss per token (left - right, nats) of two trained models, and the
    ends of its bootstrap interval over documents.

    It tells how much another draw of validation documents would change the difference of these two models, and nothing
    of what another seed of training would. Documents are drawn within each domain, the same ones for both models, so
    that what makes a document hard for both cancels; those without scored tokens do not count. The rule for the ends is
    `savings.interval`, for as many samples as the smallest domain has documents.

    Raises:
        ValueError: the two are not about the same documents; values that are not finite; or a domain of fewer than two.
    """
    if left.keys() != right.keys() or not left:
        raise ValueError(f"domains: got {sorted(left)} and {sorted(right)}, expected the same ones on both sides")
    generator = np.random.default_rng(seed)
    estimates, sampled, fewest = [], np.zeros(draws), None
    for domain in sorted(left):
        difference, tokens = _documents(domain, left[domain], right[domain])
        count = len(tokens)
        estimates.append(float(difference.sum() / tokens.sum()))
        step = max(1, _CELLS // count)
        for start in range(0, draws, step):
            picked = generator.integers(count, size=(min(step, draws - start), count))
            drawn = np.take(difference, picked).sum(axis=1) / np.take(tokens, picked).sum(axis=1)
            sampled[start : start + step] += drawn / len(left)
        fewest = min(count, fewest or count)
    assert fewest is not None
    mean = float(np.mean(estimates))
    return (mean, *interval(sampled.tolist(), mean, fewest, confidence))


def _documents(
    domain: str, left: tuple[ArrayLike, ArrayLike], right: tuple[ArrayLike, ArrayLike]
) -> tuple[Floats, Floats]:
    """Differences of summed loss `[D]` and tokens `[D]` of the documents that were scored."""
    (a, tokens), (b, others) = ([np.asarray(part, dtype=np.float64) for part in side] for side in (left, right))
    shapes = [part.shape for part in (a, tokens, b, others)]
    if a.ndim != 1 or len(set(shapes)) > 1:
        raise ValueError(
            f"{domain}: got losses and tokens {shapes}, expected lists of one length for the same documents"
        )
    different = np.flatnonzero(tokens != others)
    if len(different):
        k = int(different[0])
        raise ValueError(
            f"{domain}: document {k} has {tokens[k]:g} tokens on the left and {others[k]:g} on the right, expected the "
            "same documents; score both models on one corpus"
        )
    scored = tokens != 0
    tokens, difference = tokens[scored], (a - b)[scored]
    if not (np.isfinite(difference).all() and np.isfinite(tokens).all() and (tokens > 0).all()):
        raise ValueError(f"{domain}: got losses or numbers of tokens that are negative or not finite")
    if len(tokens) < 2:
        raise ValueError(f"{domain}: got {len(tokens)} scored document(s), expected at least 2 for an interval")
    return difference, tokens


def p_text(p: float | None) -> str:
    """A p for tables: "p = 0.031", "p < 0.001" or "no p". Rounding never moves it across 0.05."""
    if p is None:
        return "no p"
    return "p < 0.001" if p < 0.001 else f"p = {_significant(p)}"


def _significant(p: float) -> str:
    texts = (f"{p:.{digits}g}" for digits in range(2, 17))
    return next((text for text in texts if (float(text) < LEVEL) == (p < LEVEL)), repr(p))


def difference_text(found: Comparison | None, digits: int = 4) -> str:
    """A comparison for tables: "-0.0260 (-0.0410 to -0.0110, 3 seeds)"; without the interval where there is none."""
    if found is None or found.mean is None:
        return ""
    seeds = f"{len(found.seeds)} seed{'s' * (len(found.seeds) != 1)}"
    if found.low is None or found.high is None:
        return f"{found.mean:+.{digits}f} ({seeds})"
    return f"{found.mean:+.{digits}f} ({found.low:+.{digits}f} to {found.high:+.{digits}f}, {seeds})"
