"""Scaling laws fitted to the losses of a few models, with intervals that hold for few points.

Losses are nats per token; N is parameters, D training tokens. A law is linear in all but its exponents, so that for
given exponents the best other parameters are a projection. An exponent's interval is its profile: all values at which
the best sum of squares is no larger than Fisher's F for one parameter allows. `docs/analysis.md` has how often they
held in simulation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from resformer.analyze.savings import checked

Floats = NDArray[np.float64]
Noise = Literal["relative", "nats"]
Interval = tuple[float, float]

_LOW, _HIGH = 0.003, 60.0  # exponents looked at, times the range of ln(size): below a straight line, above a step
_ROWS, _ZOOMS, _ZOOM_POINTS, _EDGE_ZOOMS, _STEPS = 81, 7, 15, 3, 6
_TINY = 1e-11  # relative residual below which points lie on the law as well as numbers can say


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A law and its parameters. form: the law in words; intervals: parameter -> ends, infinite or 0 where the points
    do not bound it; rms: root of the residuals' mean square by degrees of freedom, relative or in nats as `noise` says.
    """

    form: str
    values: dict[str, float]
    intervals: dict[str, Interval]
    confidence: float
    points: int
    noise: Noise
    rms: float

    def loss(self, parameters: ArrayLike, tokens: ArrayLike | None = None) -> Floats:
        """The law's loss at sizes `[n]` (and, for the two-variable law, tokens)."""
        v, x = self.values, np.asarray(parameters, dtype=np.float64)
        if "alpha" not in v:
            return v["a"] * x ** -v["b"] + v.get("c", 0.0)
        if tokens is None:
            raise ValueError(f"tokens: not given, but {self.form} needs them")
        return v["E"] + v["A"] * x ** -v["alpha"] + v["B"] * np.asarray(tokens, dtype=np.float64) ** -v["beta"]

    def size_for(self, loss: float) -> float:
        """The size at which a law of one variable has this loss; infinite where it never falls so low."""
        if "alpha" in self.values:
            raise ValueError(f"{self.form} has two variables; a loss has no single size")
        a, b, rest = self.values["a"], self.values["b"], loss - self.values.get("c", 0.0)
        return float((a / rest) ** (1 / b)) if rest > 0 and b > 0 else float("inf")


def fit_power_law(
    x: ArrayLike, loss: ArrayLike, *, offset: bool = False, noise: Noise = "relative", confidence: float = 0.95
) -> Fit:
    """L = a x^-b, or with `offset` L = a x^-b + c, by least squares.

    noise: whether equal deviations are equal shares of the loss ("relative") or equal nats. Without offset the fit is a
    straight line in logarithms with Student's t intervals; with it, profile intervals.

    Raises:
        ValueError: fewer than 3 points (4 with offset), other than finite positive numbers, or two equal sizes; with
            offset also losses that do not fall with size, which no such law describes.
    """
    _check(noise, confidence)
    sizes, losses = checked(x, loss, least=4 if offset else 3, name="power law")
    t, weights = np.log(sizes), _weights(losses, noise)
    if offset:
        return _offset_law(t, losses, weights, noise, confidence)
    design = np.stack((np.ones_like(t), -t), axis=1)
    # Deviations of ln(loss) are relative ones; of equal nats, they are smaller where the loss is larger.
    scale = losses * weights
    (ln_a, b), covariance, sse = _least_squares(design * scale[:, None], np.log(losses) * scale)
    free = len(t) - 2
    wide = float(stats.t.ppf(0.5 + confidence / 2, free)) * np.sqrt(np.diag(covariance) * sse / free)
    return Fit(
        form="L = a x^-b",
        values={"a": float(np.exp(ln_a)), "b": float(b)},
        intervals={
            "a": (float(np.exp(ln_a - wide[0])), float(np.exp(ln_a + wide[0]))),
            "b": (float(b - wide[1]), float(b + wide[1])),
        },
        confidence=confidence,
        points=len(t),
        noise=noise,
        rms=float(np.sqrt(sse / free)),
    )


def fit_chinchilla(
    parameters: ArrayLike,
    tokens: ArrayLike,
    loss: ArrayLike,
    *,
    noise: Noise = "relative",
    confidence: float = 0.95,
) -> Fit:
    """L = E + A N^-alpha + B D^-beta (Hoffmann et al., arXiv 2203.15556, eq. 2), by least squares with profile
    intervals; they fit Huber's loss of logarithms, which gives the same for points without outliers.

    Raises:
        ValueError: fewer than 6 points, lists of different lengths, other than finite positive numbers, or N and D that
            say the same, so that the two exponents cannot be told apart.
    """
    _check(noise, confidence)
    n, d, losses = (np.asarray(v, dtype=np.float64) for v in (parameters, tokens, loss))
    if not n.ndim == 1 or not n.shape == d.shape == losses.shape:
        raise ValueError(f"got N {n.shape}, D {d.shape} and losses {losses.shape}, expected lists of one length")
    if len(n) < 6:
        raise ValueError(f"got {len(n)} point(s), expected at least 6 for the five parameters of the law")
    for name, values in (("N", n), ("D", d), ("loss", losses)):
        bad = values[~(np.isfinite(values) & (values > 0))]
        if len(bad):
            raise ValueError(f"{name}: got {bad[0]:g}, expected finite positive numbers; leave that point out")
    u, v = np.log(n), np.log(d)
    if min(len(set(n.tolist())), len(set(d.tolist()))) < 3 or abs(np.corrcoef(u, v)[0, 1]) > 0.999:
        raise ValueError(
            "N and D must each take at least 3 values and vary independently, or the exponents cannot be told apart"
        )
    weights = _weights(losses, noise)
    y, one = losses * weights, weights
    return _Chinchilla(u, v, y, one).fit(noise, confidence)


def _check(noise: str, confidence: float) -> None:
    if noise not in ("relative", "nats"):
        raise ValueError(f"noise: got {noise!r}, expected 'relative' or 'nats'")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence: got {confidence:g}, expected a share between 0 and 1")


def _weights(losses: Floats, noise: Noise) -> Floats:
    return 1.0 / losses if noise == "relative" else np.ones_like(losses)


def _least_squares(design: Floats, target: Floats) -> tuple[Floats, Floats, float]:
    """Solution, (X^T X)^-1 and sum of squares."""
    q, r = np.linalg.qr(design)
    inverse = np.linalg.inv(r)
    solution = inverse @ (q.T @ target)
    residual = target - design @ solution
    return solution, inverse @ inverse.T, float(residual @ residual)


def _shape(t: Floats, exponents: Floats) -> Floats:
    """(1 - e^(-b t)) / b, `[..., n]`: e^(-b t) but for a constant and a factor, and -> t for b -> 0."""
    return -np.expm1(-exponents[..., None] * t) / exponents[..., None]


def _grid(t: Floats) -> Floats:
    """Exponents worth a look, evenly in logarithms."""
    return np.geomspace(_LOW, _HIGH, _ROWS) / np.ptp(t)


def _bound(sse: float, free: int, target: Floats, confidence: float) -> tuple[float, float]:
    """(largest sum of squares that an interval allows, the least that numbers can tell)."""
    least = max(sse, len(target) * (_TINY * float(np.abs(target).max())) ** 2)
    return least * (1.0 + float(stats.f.ppf(confidence, 1, free)) / free), least


def _minimum(profile: Callable[[Floats], Floats], grid: Floats) -> float:
    """Where a profile is lowest: the best of a grid, and ever finer grids around it."""
    for _ in range(_ZOOMS):
        i = int(np.argmin(profile(grid)))
        low, high = grid[max(i - 1, 0)], grid[min(i + 1, len(grid) - 1)]
        best, grid = float(grid[i]), np.geomspace(low, high, _ZOOM_POINTS)
    return best


def _ends(profile: Callable[[Floats], Floats], grid: Floats, best: float, limit: float) -> Interval:
    """The outermost exponents whose profile is within `limit`; 0 or infinity where that reaches the grid's end."""
    inside = np.flatnonzero(profile(grid) <= limit)
    first, last = (int(inside[0]), int(inside[-1])) if len(inside) else (-1, -1)
    low = min(best, float(grid[first])) if len(inside) else best
    high = max(best, float(grid[last])) if len(inside) else best
    below, above = grid[grid < low], grid[grid > high]

    def edge(outside: float, within: float) -> float:
        for _ in range(_EDGE_ZOOMS):
            points = np.geomspace(outside, within, _ZOOM_POINTS)
            ok = profile(points) <= limit
            ok[-1] = True
            k = max(int(np.argmax(ok)), 1)
            outside, within = float(points[k - 1]), float(points[k])
        return outside

    return (
        0.0 if first == 0 or not len(below) else edge(float(below[-1]), low),
        float("inf") if last == len(grid) - 1 or not len(above) else edge(float(above[0]), high),
    )


def _offset_law(t: Floats, losses: Floats, weights: Floats, noise: Noise, confidence: float) -> Fit:
    """L = a x^-b + c with profile intervals."""
    centre, free = float(t.mean()), len(t) - 3
    s, y, one = t - centre, losses * weights, weights
    y_rest = y - one * (one @ y) / (one @ one)

    def columns(exponents: Floats) -> tuple[Floats, Floats]:
        shape = _shape(s, exponents) * weights
        return shape, shape - one * ((shape @ one) / (one @ one))[:, None]

    def profile(exponents: Floats) -> Floats:
        rest = columns(exponents)[1]
        slope = (rest @ y_rest) / np.einsum("en,en->e", rest, rest)
        return np.square(y_rest - slope[:, None] * rest).sum(axis=1)

    if float(np.polyfit(s, losses, 1)[0]) >= 0:
        raise ValueError("power law: the losses do not fall with size, expected a falling curve")
    grid = _grid(t)
    b = _minimum(profile, grid)
    limit, least = _bound(float(profile(np.array([b]))[0]), free, y, confidence)
    ends = _ends(profile, grid, b, limit)
    # For a given exponent the other two are linear: their ends are the outermost over all exponents allowed.
    allowed = np.append(np.geomspace(max(ends[0], grid[0]), min(ends[1], grid[-1]), 401), b)
    shape, rest = columns(allowed)
    power = np.einsum("en,en->e", rest, rest)
    slope = (rest @ y_rest) / power
    level = ((y - slope[:, None] * shape) @ one) / (one @ one)
    left = np.sqrt(np.clip(limit - profile(allowed), 0.0, None))
    # loss = level + slope (1 - e^(-b s)) / b: c is where that ends, level + slope / b.
    d_c = np.sqrt(1.0 / (one @ one) + np.square(1.0 / allowed - (shape @ one) / (one @ one)) / power)
    c, a = level + slope / allowed, -slope / allowed
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        ln_scale = allowed * centre
        ln_a = [np.log(np.clip(a + k * left / np.sqrt(power) / allowed, 0.0, None)) + ln_scale for k in (-1, 1)]
        intervals = {
            "a": (float(np.exp(ln_a[0].min())), float(np.exp(ln_a[1].max())) if np.isfinite(ends[1]) else float("inf")),
            "b": ends,
            "c": (float((c - left * d_c).min()) if ends[0] > 0 else -float("inf"), float((c + left * d_c).max())),
        }
        values = {"a": float(np.exp(np.log(a[-1]) + ln_scale[-1])), "b": b, "c": float(c[-1])}
    return Fit(
        form="L = a x^-b + c",
        values=values,
        intervals=intervals,
        confidence=confidence,
        points=len(t),
        noise=noise,
        rms=float(np.sqrt(least / free)),
    )


class _Chinchilla:
    """The sum of squares of the two-variable law as a function of its exponents. u, v: ln N and ln D `[n]`; y: losses
    and one: the constant, both weighted.
    """

    def __init__(self, u: Floats, v: Floats, y: Floats, one: Floats) -> None:
        self.u, self.v, self.y, self.one = u - u.mean(), v - v.mean(), y, one
        self.centres = float(u.mean()), float(v.mean())
        self.y_rest = self.rest(y)

    def rest(self, columns: Floats) -> Floats:
        """What of columns `[..., n]` the constant does not explain."""
        return columns - self.one * ((columns @ self.one) / (self.one @ self.one))[..., None]

    def inner(self, exponents: Floats, *, of: Literal["alpha", "beta"]) -> tuple[Floats, Floats]:
        """For each value of one exponent `[e]`: the best of the other, and its sum of squares."""
        own, other = (self.u, self.v) if of == "alpha" else (self.v, self.u)
        p = self.rest(np.exp(-exponents[:, None] * own) * self.one)
        grid = _grid(other)[::2]
        q = self.rest(np.exp(-grid[:, None] * other) * self.one)
        residual = _project(p[:, None], q[None], self.y_rest)[1]
        i = np.square(residual).sum(axis=-1).argmin(axis=1)
        low, high = grid[np.maximum(i - 1, 0)], grid[np.minimum(i + 1, len(grid) - 1)]
        best, trial, step = grid[i], grid[i], np.zeros(len(exponents))
        least = np.full(len(exponents), np.inf)
        for _ in range(_STEPS):  # of Gauss and Newton; where one did not help, a quarter of it from the best so far
            raw = np.exp(-trial[:, None] * other) * self.one
            slope, residual = _project(p, self.rest(raw), self.y_rest)
            found = np.square(residual).sum(axis=-1)
            better = found < least
            best, least = np.where(better, trial, best), np.where(better, found, least)
            change = _project(p, self.rest(raw), self.rest(-slope[:, None] * other * raw))[1]
            ahead = (change * residual).sum(axis=-1) / np.maximum(np.square(change).sum(axis=-1), 1e-300)
            step = np.where(better, ahead, step / 4)
            trial = np.clip(best + step, low, high)
        return best, least

    def linear(self, alpha: float, beta: float) -> tuple[Floats, Floats, float]:
        """E, A, B in units of N and D as centred, (X^T X)^-1, and the sum of squares."""
        design = np.stack((np.ones_like(self.u), np.exp(-alpha * self.u), np.exp(-beta * self.v)), axis=1)
        return _least_squares(design * self.one[:, None], self.y)

    def fit(self, noise: Noise, confidence: float) -> Fit:
        """The law with its intervals."""
        free = len(self.y) - 5
        alpha = _minimum(lambda e: self.inner(e, of="alpha")[1], _grid(self.u)[::2])
        beta = float(self.inner(np.array([alpha]), of="alpha")[0][0])
        (e, a, b), _, sse = self.linear(alpha, beta)
        limit, least = _bound(sse, free, self.y, confidence)
        ends = {
            "alpha": _ends(lambda x: self.inner(x, of="alpha")[1], _grid(self.u)[::2], alpha, limit),
            "beta": _ends(lambda x: self.inner(x, of="beta")[1], _grid(self.v)[::2], beta, limit),
        }
        a, b = a * np.exp(alpha * self.centres[0]), b * np.exp(beta * self.centres[1])
        return Fit(
            form="L = E + A N^-alpha + B D^-beta",
            values={"E": float(e), "A": float(a), "B": float(b), "alpha": alpha, "beta": beta},
            intervals={**self.linear_ends(ends, limit), **ends},
            confidence=confidence,
            points=len(self.y),
            noise=noise,
            rms=float(np.sqrt(least / free)),
        )

    def linear_ends(self, ends: dict[str, Interval], limit: float) -> dict[str, Interval]:
        """The outermost E, A and B over a grid of the exponents that the limit allows."""
        columns, grids = [], []
        for name, t in (("alpha", self.u), ("beta", self.v)):
            grid = _grid(t)
            grids.append(np.geomspace(max(ends[name][0], grid[0]), min(ends[name][1], grid[-1]), 61))
            columns.append(np.exp(-grids[-1][:, None] * t) * self.one)
        one, p, q = self.one, columns[0][:, None], columns[1][None]
        factors = 1.0, np.exp(grids[0] * self.centres[0])[:, None], np.exp(grids[1] * self.centres[1])[None]
        found: dict[str, Interval] = {}
        for name, of, others, factor in zip("EAB", (one, p, q), ((p, q), (one, q), (one, p)), factors, strict=True):
            first, second = np.broadcast_arrays(*others)
            own = _project(first, second, of)[1]
            rest = _project(first, second, self.y)[1]
            power = np.square(own).sum(axis=-1)
            best = (own * rest).sum(axis=-1) / power
            left = limit - np.square(rest - best[..., None] * own).sum(axis=-1)
            wide = np.sqrt(np.clip(left, 0.0, None) / power)
            ok = left >= 0
            found[name] = (
                float(np.min((best - wide) * factor, where=ok, initial=np.inf)),
                float(np.max((best + wide) * factor, where=ok, initial=-np.inf)),
            )
        if min(ends["alpha"][0], ends["beta"][0]) == 0:
            found["E"] = (-float("inf"), found["E"][1])
        return found


def _project(p: Floats, q: Floats, y: Floats) -> tuple[Floats, Floats]:
    """y on p and q, all `[..., n]`: the weight of q, and what is left; all of y where p and q say the same."""
    pp, qq, pq, py, qy = (np.einsum("...n,...n->...", i, j) for i, j in ((p, p), (q, q), (p, q), (p, y), (q, y)))
    determinant = pp * qq - pq * pq
    determinant = np.where(determinant > 1e-10 * pp * qq, determinant, np.inf)
    a, b = (py * qq - qy * pq) / determinant, (qy * pp - py * pq) / determinant
    return b, y - a[..., None] * p - b[..., None] * q
