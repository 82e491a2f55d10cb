"""Layers and strength of a Sparse-ResFormer, proposed from the lambdas of a short learned run.

The paper finds Sparse's layers by hand (8 layers: 6 to 8, strength 5) and observes that learned weights put more of V_1
into deeper layers. What is learned thus says where V_1 is wanted. The rule, on each layer's strength of V_1 relative to
the layer's own value, averaged over the last quarter of the run:

- **layers**: the fewest that hold 5/9 of all strength above the weakest layer's. Where strength rises evenly over depth
  these are the last third, the paper's choice at 8 layers; where it is more concentrated, they are fewer.
- **first**: the sum of all layers' strengths, spread over the chosen ones: they take over the whole budget of V_1.
  Learnable-Plus as it starts (8 layers, budget 8, own weight 0.5) on three layers gives 5.3, near the paper's 5. No
  more than 5 is proposed, the largest that the paper tried.

How far the last quarter agrees with itself is part of the proposal. Whether it is any good only training it can say.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from resformer.errors import UserError

Floats = NDArray[np.float64]

LATE = 0.25
"""Share of the run whose rows are averaged."""
HELD = 5 / 9
"""Share of the strength above the weakest that the chosen layers hold; see the module's text."""
LEAST_OWN = 0.1
"""Own weights below this count as this: a layer that drops its own value would have a strength beyond all others."""
PAPER_FIRST = 5.0
_FEW = 3  # rows below which nothing can be said of how stable a proposal is
_HARDLY = 0.2  # share of the largest strength within which all of them hardly differ
_MOVES = 0.10  # share of a strength by which it moves over the rows averaged, and is called still moving

Confidence = Literal["stable", "moving", "unclear", "unknown"]


@dataclass(frozen=True, kw_only=True)
class LayerStrength:
    """A mixing layer in the rows averaged. first, own: mean weights; strength: mean of first / own; spread: its
    standard deviation over rows; trend: what it gains over these rows, by a straight line; chosen: the share of rows
    in which, alone, the rule takes it. The last three are None for a single row.
    """

    layer: int
    first: float
    own: float
    strength: float
    spread: float | None
    trend: float | None
    chosen: float | None


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A Sparse model's layers and strength. layers: numbers from 1; variant_options: for the variant "sparse".

    confidence: "stable" (the rows give these layers, strengths have settled), "moving" (the layers hold, but strengths
    still move), "unclear" (rows disagree on the layers, or strengths hardly differ), "unknown" (too few rows).
    agreement: overlap (common layers over all named) of what single rows give with `layers`, in the mean.
    rank_correlation: Spearman's, of the strengths in the first and the last of the rows. first_learned: mean strength
    of these layers as it was learned, beside others that mix as well. notes: what to know before trusting it.
    """

    layers: tuple[int, ...]
    first: float
    first_learned: float
    variant_options: dict[str, Any]
    confidence: Confidence
    agreement: float | None
    rank_correlation: float | None
    steps: tuple[int, int]
    rows: int
    table: tuple[LayerStrength, ...]
    notes: tuple[str, ...] = ()

    def asdict(self) -> dict[str, Any]:
        """As plain JSON-able values."""
        return asdict(self)


def strengths(first: Sequence[float], own: Sequence[float]) -> Floats:
    """V_1's weight relative to the own value's, by layer; 0 where V_1 is subtracted."""
    return np.maximum(np.asarray(first, dtype=np.float64), 0.0) / np.maximum(
        np.asarray(own, dtype=np.float64), LEAST_OWN
    )


def choose(layers: Sequence[int], strength: Floats) -> tuple[int, ...]:
    """The fewest layers that hold `HELD` of all strength above the weakest; of equal ones the deepest. The last third
    where no layer is above another.
    """
    excess = strength - strength.min()
    total = float(excess.sum())
    if total <= 1e-9 * max(float(strength.max()), 1e-9) or len(layers) == 1:
        return tuple(layers)[-max(1, round((max(layers)) / 3)) :]
    order = sorted(range(len(layers)), key=lambda i: (-excess[i], -layers[i]))
    held = np.cumsum([excess[i] for i in order])
    count = int(np.searchsorted(held, HELD * total - 1e-12)) + 1
    return tuple(sorted(layers[i] for i in order[:count]))


def as_option(layers: Sequence[int], depth: int) -> str | list[int]:
    """Layers as the option takes them: "last:k" where they are the last ones, else a list."""
    if list(layers) == list(range(depth - len(layers) + 1, depth + 1)):
        return f"last:{len(layers)}"
    return list(layers)


def propose(
    rows: Sequence[Mapping[str, Any]], *, depth: int | None = None, source: Any = None, name: str = "the run"
) -> Proposal:
    """A proposal from lambda rows {"step", "layers", "first", "own"} in the order of their steps.

    depth: the model's layers, the last mixing one when not given. source: the variant's option of that name.

    Raises:
        UserError: no rows, rows that are not alike, too few mixing layers, or weights that never move.
    """
    rows = list(rows)
    layers, steps, first, own = _tables(rows, name)
    if len(rows) > 1 and float(np.ptp(first, axis=0).max() + np.ptp(own, axis=0).max()) == 0:
        raise UserError(f"{name}: its lambdas are the same at all steps; give a run that trains them (learnable, ...)")
    begin = steps[0] + (1 - LATE) * (steps[-1] - steps[0])
    late = steps >= begin
    late[-min(_FEW, len(rows)) :] = True
    steps, first, own = steps[late], first[late], own[late]
    each = strengths(first, own)
    mean = each.mean(axis=0)
    chosen = choose(layers, mean)
    alone = [choose(layers, row) for row in each]
    enough = len(each) >= _FEW
    agreement = float(np.mean([_overlap(found, chosen) for found in alone])) if enough else None
    slope = np.polyfit(np.arange(len(each)), each, 1)[0] * (len(each) - 1) if len(each) > 1 else None
    table = tuple(
        LayerStrength(
            layer=n,
            first=float(first[:, i].mean()),
            own=float(own[:, i].mean()),
            strength=float(mean[i]),
            spread=float(each[:, i].std(ddof=1)) if len(each) > 1 else None,
            trend=None if slope is None else float(slope[i]),
            chosen=sum(n in found for found in alone) / len(each) if len(each) > 1 else None,
        )
        for i, n in enumerate(layers)
    )
    budget = float(mean.sum()) / len(chosen)
    value = _rounded(min(budget, PAPER_FIRST))
    options: dict[str, Any] = {"layers": as_option(chosen, max(depth or 0, layers[-1])), "first": value}
    if source not in (None, 1):
        options["source"] = source
    correlation = _rank_correlation(each[0], each[-1]) if enough and len(layers) > 2 else None
    return Proposal(
        layers=chosen,
        first=value,
        first_learned=float(np.mean([row.strength for row in table if row.layer in chosen])),
        variant_options=options,
        confidence=_confidence(table, chosen, agreement),
        agreement=agreement,
        rank_correlation=correlation,
        steps=(int(steps[0]), int(steps[-1])),
        rows=len(each),
        table=table,
        notes=tuple(_notes(table, chosen, max(depth or 0, layers[-1]), len(each), budget)),
    )


def _tables(rows: Sequence[Mapping[str, Any]], name: str) -> tuple[list[int], Floats, Floats, Floats]:
    """(layers, steps `[r]`, first `[r, layers]`, own likewise)."""
    if not rows:
        raise UserError(f"{name}: holds no lambdas; give a run of learnable, learnable_plus or dense with a validation")
    layers = [int(n) for n in rows[-1].get("layers") or []]
    try:
        first, own = (np.array([row[kind] for row in rows], dtype=np.float64) for kind in ("first", "own"))
        steps = np.array([row.get("step", 0) for row in rows], dtype=np.float64)
        whole = first.shape == own.shape == (len(rows), len(layers)) and np.isfinite(first).all()
    except (KeyError, TypeError, ValueError):
        whole = False
    if not whole or not np.isfinite(own).all() or any(list(row["layers"]) != layers for row in rows):
        raise UserError(
            f"{name}: its rows of lambdas are not alike; expected finite numbers of the same layers in each"
        )
    if len(layers) < 2:
        raise UserError(f"{name}: {len(layers)} layer mixes; expected at least 2 to choose among, train a deeper model")
    return layers, steps, first, own


def _overlap(a: Sequence[int], b: Sequence[int]) -> float:
    return len({*a} & {*b}) / len({*a} | {*b})


def _rounded(value: float) -> float:
    """Two significant digits: more would pretend to a precision that a short run has not."""
    return 0.0 if value <= 0 else round(value, 1 - math.floor(math.log10(value)))


def _rank_correlation(a: Floats, b: Floats) -> float | None:
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return None
    return float(stats.spearmanr(a, b).statistic)


def _flat(table: Sequence[LayerStrength]) -> bool:
    """Whether the layers differ by less than each one does over the rows, or by less than a fifth."""
    values = np.array([row.strength for row in table])
    noise = max((row.spread or 0.0) for row in table)
    return float(np.ptp(values)) <= max(2 * noise, _HARDLY * float(values.max()))


def _confidence(table: Sequence[LayerStrength], chosen: Sequence[int], agreement: float | None) -> Confidence:
    if agreement is None:
        return "unknown"
    if agreement < 0.8 or _flat(table):
        return "unclear"
    moving = any(abs(row.trend or 0.0) > _MOVES * max(row.strength, 1e-9) for row in table if row.layer in chosen)
    return "moving" if moving else "stable"


def _notes(table: Sequence[LayerStrength], chosen: Sequence[int], depth: int, rows: int, budget: float) -> list[str]:
    found = []
    if budget > PAPER_FIRST:
        found.append(f"the budget asks for first = {budget:.2g}; {PAPER_FIRST:g} is the most that the paper tried")
    if rows < _FEW:
        found.append(f"only {rows} row(s) of lambdas: how stable this is cannot be told; validate more often")
    if _flat(table):
        found.append("strengths hardly differ between layers: the run is too short to tell, or the data do not care")
    third = tuple(row.layer for row in table)[-max(1, round(depth / 3)) :]
    same = "the paper's choice for 8 layers, taken by share" if tuple(chosen) == third else "not what was learned here"
    found.append(f"the last third would be {', '.join(map(str, third))}: {same}")
    negative = [row.layer for row in table if row.first < 0]
    if negative:
        found.append(f"V_1 is subtracted in layer(s) {', '.join(map(str, negative))}: counted as strength 0")
    small = [row.layer for row in table if row.own < LEAST_OWN]
    if small:
        found.append(
            f"own weight below {LEAST_OWN:g} in layer(s) {', '.join(map(str, small))}: counted as {LEAST_OWN:g}"
        )
    return found
