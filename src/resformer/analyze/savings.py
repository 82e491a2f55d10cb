"""How much smaller a model, or how much less data, a method needs for the loss of another one.

Losses are nats per token. `x` stands for parameters or for training tokens: the arithmetic is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

Floats = NDArray[np.float64]

FEW = 20
"""Below so many samples a bootstrap's quantiles are too narrow, and its standard error with Student's t is taken."""

_MOST_FAILED = 0.05  # of the bootstrap's draws; with more, the rest would tell of the tame ones only


@dataclass(frozen=True, kw_only=True)
class Saving:
    """What a method saves against a baseline of size `x` with loss `loss`.

    needed: the method's size for the same loss. share: 1 - needed / x, negative where the method needs more.
    extrapolated: `needed` lies outside the sizes that the method was trained at, so that it is a guess.
    low, high: the ends of the interval of `share`, where there are samples to tell it from; infinite where the samples
    are compatible with anything.
    """

    x: float
    loss: float
    needed: float
    share: float
    extrapolated: bool
    low: float | None = None
    high: float | None = None
    confidence: float | None = None


def checked(x: ArrayLike, loss: ArrayLike, *, least: int, name: str) -> tuple[Floats, Floats]:
    """Sizes and losses `[n]`, sorted by size.

    Raises:
        ValueError: fewer than `least` points, other than finite positive numbers, or two equal sizes.
    """
    sizes, losses = np.asarray(x, dtype=np.float64), np.asarray(loss, dtype=np.float64)
    if sizes.ndim != 1 or sizes.shape != losses.shape:
        raise ValueError(f"{name}: got sizes {sizes.shape} and losses {losses.shape}, expected two lists of one length")
    if len(sizes) < least:
        raise ValueError(f"{name}: got {len(sizes)} point(s), expected at least {least}; train more sizes")
    for what, values in (("size", sizes), ("loss", losses)):
        bad = values[~(np.isfinite(values) & (values > 0))]
        if len(bad):
            raise ValueError(f"{name}: got {what} {bad[0]:g}, expected finite positive numbers; leave that point out")
    order = np.argsort(sizes, kind="stable")
    sizes, losses = sizes[order], losses[order]
    equal = sizes[1:][np.diff(sizes) == 0]
    if len(equal):
        raise ValueError(f"{name}: got two points of size {equal[0]:g}, expected different sizes; average them first")
    return sizes, losses


def size_for(loss: float, x: ArrayLike, losses: ArrayLike, *, name: str = "curve") -> tuple[float, bool]:
    """The size at which a curve has a loss, and whether it is extrapolated: straight lines between its points in
    ln(loss) over ln(size), the outer ones prolonged.

    Raises:
        ValueError: fewer than two points, other than finite positive numbers, two equal sizes, or a curve that does not
            fall from each point to the next, which would have several such sizes or none.
    """
    sizes, values = checked(x, losses, least=2, name=name)
    if not (np.isfinite(loss) and loss > 0):
        raise ValueError(f"loss: got {loss:g}, expected a finite positive number")
    rises = np.flatnonzero(np.diff(values) >= 0)
    if len(rises):
        i = int(rises[0])
        raise ValueError(
            f"{name}: the loss does not fall from size {sizes[i]:g} to {sizes[i + 1]:g} "
            f"({values[i]:g} to {values[i + 1]:g}), so that a size for a loss is not defined; "
            "smooth the curve, leave points out or fit a power law"
        )
    logs, levels, wanted = np.log(sizes), np.log(values), np.log(loss)
    # The segment whose losses hold the wanted one; the first or the last where none does.
    i = int(np.clip(np.searchsorted(-levels, -wanted) - 1, 0, len(logs) - 2))
    slope = (levels[i + 1] - levels[i]) / (logs[i + 1] - logs[i])
    # So flat a curve gives a size beyond all numbers: that is what infinity is for.
    with np.errstate(over="ignore"):
        needed = float(np.exp(logs[i] + (wanted - levels[i]) / slope))
    return needed, not bool(values[-1] <= loss <= values[0])


def savings(x: ArrayLike, loss: ArrayLike, baseline_x: ArrayLike, baseline_loss: ArrayLike) -> list[Saving]:
    """What the method `(x, loss)` saves at each point of the baseline, by `size_for` on the method's curve; how the
    paper's text compares parameters and data (arXiv 2410.17897, fig. 6; its own form of fit is not given).

    A method that loses has a negative saving. One point is enough for the baseline, not for the method.

    Raises:
        ValueError: see `size_for`.
    """
    sizes, losses = checked(baseline_x, baseline_loss, least=1, name="baseline")
    found = []
    for size, value in zip(sizes.tolist(), losses.tolist(), strict=True):
        needed, extrapolated = size_for(value, x, loss, name="method")
        found.append(Saving(x=size, loss=value, needed=needed, share=1.0 - needed / size, extrapolated=extrapolated))
    return found


def sampled_savings(
    x: ArrayLike,
    losses: ArrayLike,
    baseline_x: ArrayLike,
    baseline_losses: ArrayLike,
    *,
    over: Literal["documents", "seeds"],
    draws: int = 2000,
    confidence: float = 0.95,
    seed: int = 0,
) -> list[Saving]:
    """`savings` of mean losses, with bootstrap intervals over documents or over seeds.

    losses `[sizes, samples]`, baseline_losses likewise. "documents": column k is the same document in all models, and
    columns are drawn together, so that what makes a document hard for all cancels. "seeds": each model's runs are drawn
    on their own. With at least `FEW` samples the interval is between quantiles of the draws, moved outwards for the
    number of samples (Hesterberg, 2015); with fewer it is Student's t with the standard error of the draws.

    Raises:
        ValueError: see `size_for`; fewer than two samples; or documents that differ in number.
    """
    own, base = np.asarray(losses, dtype=np.float64), np.asarray(baseline_losses, dtype=np.float64)
    for name, table, sizes in (("method", own, x), ("baseline", base, baseline_x)):
        count = len(np.atleast_1d(np.asarray(sizes)))
        if table.ndim != 2 or len(table) != count or table.shape[1] < 2:
            raise ValueError(f"{name}: got losses {table.shape}, expected ({count}, samples) with at least 2 samples")
    if over not in ("documents", "seeds"):
        raise ValueError(f"over: got {over!r}, expected 'documents' or 'seeds'")
    if over == "documents" and own.shape[1] != base.shape[1]:
        raise ValueError(f"documents: got {own.shape[1]} and {base.shape[1]}, expected the same ones for all models")
    points = savings(x, own.mean(axis=1), baseline_x, base.mean(axis=1))
    generator = np.random.default_rng(seed)

    def draw() -> list[float] | None:
        if over == "documents":
            picked = generator.integers(own.shape[1], size=own.shape[1])
            a, b = own[:, picked].mean(axis=1), base[:, picked].mean(axis=1)
        else:
            a, b = (
                np.take_along_axis(t, generator.integers(t.shape[1], size=t.shape), axis=1).mean(axis=1)
                for t in (own, base)
            )
        try:
            return [one.share for one in savings(x, a, baseline_x, b)]
        except ValueError:
            return None  # this draw's curve does not fall

    shares = [found for found in (draw() for _ in range(draws)) if found is not None]
    samples = min(own.shape[1], base.shape[1])
    failed = len(shares) < (1 - _MOST_FAILED) * draws
    result = []
    for i, one in enumerate(points):
        low, high = (-np.inf, 1.0) if failed else interval([s[i] for s in shares], one.share, samples, confidence)
        result.append(replace(one, low=float(low), high=min(float(high), 1.0), confidence=confidence))
    return result


def interval(draws: Sequence[float], estimate: float, samples: int, confidence: float) -> tuple[float, float]:
    """The interval of an estimate from bootstrap draws of it; `samples` is what each draw was drawn from."""
    values = np.asarray(draws, dtype=np.float64)
    t = float(stats.t.ppf(0.5 + confidence / 2, samples - 1)) * float(np.sqrt(samples / (samples - 1)))
    if samples < FEW:
        width = t * float(values.std(ddof=1))
        return estimate - width, estimate + width
    low, high = np.quantile(values, [float(stats.norm.cdf(-t)), float(stats.norm.cdf(t))])
    return float(low), float(high)


def bootstrap(
    statistic: Callable[[Floats], float],
    samples: ArrayLike,
    *,
    draws: int = 2000,
    confidence: float = 0.95,
    seed: int = 0,
) -> tuple[float, float, float]:
    """A statistic of `samples` `[n, ...]` and the ends of its interval over the first axis; the rule of `interval`.

    Raises:
        ValueError: fewer than two samples.
    """
    table = np.asarray(samples, dtype=np.float64)
    if table.ndim < 1 or len(table) < 2:
        raise ValueError(f"samples: got {table.shape}, expected at least 2 along the first axis")
    generator = np.random.default_rng(seed)
    values = [statistic(table[generator.integers(len(table), size=len(table))]) for _ in range(draws)]
    estimate = float(statistic(table))
    return (estimate, *interval(values, estimate, len(table), confidence))
