"""The step from which a model that reads one value for all layers stays behind (the paper's figure 14).

Losses in nats per token; what is not known is None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from resformer.analyze.critical import PAPER_LAST, CriticalPoint, critical_point
from resformer.experiments.curves import Floats, smoothing_window
from resformer.experiments.markup import finite
from resformer.experiments.runs import Run

_SHARE_OF_RUN = 10  # the paper prolongs by the last 1,000 of 10,000 steps
_FEWEST_LAST = 4


def reads_one_value(variant: str, options: Mapping[str, Any]) -> bool:
    """Whether all layers read the first one's value: SVFormer without anchors and not only in some layers."""
    everywhere = list(options.get("anchors") or (1,)) == [1] and options.get("layers", "all") == "all"
    return variant.startswith("svformer") and everywhere


def critical_points(
    rows: Sequence[Mapping[str, Any]], by_name: Mapping[str, Sequence[Run]]
) -> list[dict[str, Any]] | None:
    """One entry a run that reads one value for all layers and has a counterpart trained alike, by sequence length;
    None where there is none.

    The point is that of the mean losses of the seeds that both have; `by_seed` has each seed's own. An end of an
    interval that the points leave open is None, and so is a step that never comes.
    """
    window = smoothing_window(max((run.steps or run.step for runs in by_name.values() for run in runs), default=0))
    found = []
    for r in rows:
        options = r["overrides"].get("model.variant_options") or {}
        if r["against"] is None or r["against"] == r["name"] or not reads_one_value(r["variant"], options):
            continue
        pairs = _pairs(by_name[r["name"]], by_name[r["against"]])
        if pairs and (one := _entry(pairs, window)) is not None:
            found.append({"run": r["name"], "against": r["against"], **one})
    return sorted(found, key=lambda one: one["sequence_length"] or 0) or None


def _pairs(runs: Sequence[Run], others: Sequence[Run]) -> list[tuple[Run, Run]]:
    """Seeds that both have ended, trained alike: another schedule or batch would move the curves as well."""
    by_seed = {run.seed: run for run in others}
    pairs = [(run, by_seed[run.seed]) for run in runs if run.seed in by_seed]
    return [(a, b) for a, b in pairs if a.trained and b.trained and _training(a) == _training(b)]


def _training(run: Run) -> object:
    train = run.config.get("train", {})
    return (
        [train.get(key) for key in ("steps", "batch_size")],
        run.config.get("data", {}).get("sequence_length"),
        run.config.get("optim", {}),
    )


def _entry(pairs: Sequence[tuple[Run, Run]], window: int) -> dict[str, Any] | None:
    steps = pairs[0][0].train["step"]
    for run in (run for pair in pairs for run in pair):
        steps = np.intersect1d(steps, run.train["step"])
    last = min(PAPER_LAST, max(_FEWEST_LAST, len(steps) // _SHARE_OF_RUN))
    losses = [(_at(own, steps), _at(base, steps)) for own, base in pairs]
    own, base = (np.mean([pair[i] for pair in losses], axis=0) for i in (0, 1))
    whole = _point(steps, own, base, window, last)
    if whole is None:
        return None
    seeds = [run.seed for run, _ in pairs]
    each = [_point(steps, a, b, window, last) for a, b in losses]
    first = pairs[0][0]
    tokens, step = first.train.last("tokens"), first.train.last("step")
    rate = tokens / step if tokens and step else None
    return {
        "sequence_length": first.config.get("data", {}).get("sequence_length"),
        "steps": first.steps,
        "window": window,
        "last": last,
        "seeds": seeds,
        **_told(whole),
        "tokens": None if rate is None or finite(whole.step) is None else whole.step * rate,
        "tokens_per_step": rate,
        "by_seed": [{"seed": s, **_told(p)} for s, p in zip(seeds, each, strict=True) if p is not None],
    }


def _at(run: Run, steps: Floats) -> Floats:
    return run.train["loss"][np.isin(run.train["step"], steps)]


def _point(steps: Floats, own: Floats, base: Floats, window: int, last: int) -> CriticalPoint | None:
    """None where the losses cannot tell: too few, or not finite."""
    try:
        return critical_point(steps, own, steps, base, window=window, last=last)
    except ValueError:
        return None


def _told(point: CriticalPoint) -> dict[str, Any]:
    return {"kind": point.kind, "step": finite(point.step), "low": finite(point.low), "high": finite(point.high)}
