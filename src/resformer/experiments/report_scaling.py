"""What a method saves in parameters and in training data (the paper's figure 6), where a suite's runs can tell.

Losses in nats per token, shares 0..1; what is not known is None.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from resformer.analyze.savings import Saving, sampled_savings, savings
from resformer.analyze.scaling import Fit, fit_power_law
from resformer.experiments.markup import compact, finite
from resformer.experiments.report_rows import by_seed, known

Axis = Literal["parameters", "tokens"]
Row = dict[str, Any]

FEWEST_POINTS = 3
_APART = 1.05  # sizes closer than 5 % are one size, tried twice
_FOR_OFFSET = 4  # points from which the three-parameter law can be fitted

# What makes a model larger; heads of keys and values are not among it, which trade loss for cache.
_SHAPE = (
    "model.hidden_size",
    "model.intermediate_size",
    "model.num_attention_heads",
    "model.num_hidden_layers",
    "model.head_dim",
)
_SCHEDULE = ("train.steps", "optim.warmup_steps")  # a shorter schedule is one of its own, with a warm-up in proportion
_NO_MATTER = ("train.micro_batch_size",)  # how a batch is cut up changes no result
_OPTIONS = "model.variant_options"

PAPER: tuple[dict[str, Any], ...] = (
    {"version": "v2, v3", "of": "ResFormer, to 468M", "parameters": 0.104, "tokens": 0.136, "source": "text [v1]"},
    {"version": "v4", "of": "variant not known", "parameters": 0.133, "tokens": 0.154, "source": "abstract [abs]"},
    {"version": "v5", "of": "variant not known", "parameters": 0.1611, "tokens": 0.203, "source": "abstract [abs]"},
)
"""The paper's claims (arXiv 2410.17897): shares of parameters and of tokens saved, by version."""
PAPER_SVFORMER: dict[str, Any] = {
    "version": "v1, v5",
    "of": "SVFormer",
    "parameters": -0.122,
    "tokens": None,
    "source": "full text [v1], repeated in v5",
}


def scaling(rows: Sequence[Row], baseline: str) -> dict[str, Any] | None:
    """Loss over parameters at equal tokens, and over tokens at equal size, of the baseline's variant and of others,
    with fitted laws and what each method saves; None where no method has three sizes or three numbers of tokens.

    "parameters" and "tokens" are lists of panels, one for each number of tokens, or size, that is held equal.
    """
    base = next((r for r in rows if r["name"] == baseline), None)
    if base is None:
        return None
    done = [r for r in rows if _point(r)]
    found: dict[str, Any] = {
        "parameters": _panels(done, base, "parameters", lambda r: round(r["train_tokens"])),
        "tokens": _panels(done, base, "tokens", lambda r: _key(r["overrides"], only=_SHAPE)),
    }
    variants = {one["variant"] for panel in (*found["parameters"], *found["tokens"]) for one in panel["curves"]}
    if not variants:
        return None
    return found | {"paper": [*PAPER, *([PAPER_SVFORMER] if "svformer" in variants else [])]}


def _point(r: Row) -> bool:
    """Whether the run has ended in a loss at a known size."""
    loss = finite((r["validation"] or {}).get("loss"))
    return bool(loss is not None and loss > 0 and r["parameters"] and r["train_tokens"])


def _key(settings: Mapping[str, Any], *, only: Sequence[str] = (), but: Sequence[str] = ()) -> str:
    kept = {k: v for k, v in settings.items() if k not in but and (not only or k in only)}
    return json.dumps(kept, sort_keys=True, default=str)


def _setting(r: Row) -> str:
    """All that a run sets beside the variant, its size and its schedule: only runs that share it are compared."""
    return _key(r["overrides"], but=(*_SHAPE, *_SCHEDULE, *_NO_MATTER, _OPTIONS))


def _options(r: Row) -> str:
    return json.dumps(r["overrides"].get(_OPTIONS) or {}, sort_keys=True, default=str)


def _panels(rows: Sequence[Row], base: Row, axis: Axis, held: Callable[[Row], object]) -> list[dict[str, Any]]:
    """One panel for each value of what is held equal and each setting that holds both kinds of runs."""
    groups: dict[tuple[object, str], dict[tuple[str, str], list[Row]]] = {}
    for r in rows:
        groups.setdefault((held(r), _setting(r)), {}).setdefault((r["variant"], _options(r)), []).append(r)
    panels = []
    for methods in groups.values():
        curves = [_curve(found, axis) for found in methods.values()]
        curves = [one for one in curves if len(one["runs"]) >= FEWEST_POINTS]
        ours = [one for one in curves if one["variant"] == base["variant"]]
        ours.sort(key=lambda one: _options(one["rows"][0]) != _options(base))
        others = [one for one in curves if one["variant"] != base["variant"]]
        if ours and others:
            panels.append(_panel(ours[0], others, axis))
    return panels


def _curve(rows: Sequence[Row], axis: Axis) -> dict[str, Any]:
    """The runs of a method, by size; of runs that are as large as each other the suite's first."""
    kept: list[Row] = []
    for r in rows:
        if all(max(_x(r, axis), _x(k, axis)) > _APART * min(_x(r, axis), _x(k, axis)) for k in kept):
            kept.append(r)
    left_out = [r["name"] for r in rows if r not in kept]
    kept.sort(key=lambda r: _x(r, axis))
    return {"variant": kept[0]["variant"], "rows": kept, "runs": [r["name"] for r in kept], "left_out": left_out}


def _x(r: Row, axis: Axis) -> float:
    return float(r["parameters"] if axis == "parameters" else r["train_tokens"])


def _panel(base: dict[str, Any], others: Sequence[dict[str, Any]], axis: Axis) -> dict[str, Any]:
    found = [base, *others]
    for one in found:
        plain = sum(other["variant"] == one["variant"] for other in found) == 1
        one["name"] = one["variant"] if plain else one["runs"][0]
        one["x"] = [_x(r, axis) for r in one["rows"]]
        one["loss"] = [r["validation"]["loss"] for r in one["rows"]]
    offset = all(len(one["x"]) >= _FOR_OFFSET for one in found)
    saved = [_saved(base, one, axis) for one in others]
    curves = []
    for one in found:
        reason = _rise(one["name"], one["x"], one["loss"])
        fit = None if reason else _fit(one["x"], one["loss"], offset)
        curves.append({k: v for k, v in one.items() if k != "rows"} | {"fit": fit, "reason": reason})
    first = base["rows"][0]
    return {
        "axis": axis,
        "baseline": base["name"],
        "tokens": first["train_tokens"] if axis == "parameters" else None,
        "parameters": first["parameters"] if axis == "tokens" else None,
        "curves": curves,
        "savings": saved,
    }


def _rise(name: str, x: Sequence[float], loss: Sequence[float]) -> str:
    """Where a curve does not fall from a point to the next, in words; "" where it falls throughout."""
    for i in range(len(x) - 1):
        if loss[i + 1] >= loss[i]:
            return (
                f"{name} does not fall from {compact(x[i])} to {compact(x[i + 1])} "
                f"({loss[i]:.3f} to {loss[i + 1]:.3f} nats)"
            )
    return ""


def _fit(x: Sequence[float], loss: Sequence[float], offset: bool) -> dict[str, Any] | None:
    try:
        fit: Fit = fit_power_law(x, loss, offset=offset)
    except ValueError:
        return None
    return {"form": fit.form, "values": fit.values, "intervals": fit.intervals, "points": fit.points, "rms": fit.rms}


def _saved(base: dict[str, Any], method: dict[str, Any], axis: Axis) -> dict[str, Any]:
    """What a method saves at each point of the baseline, over the seeds that all points of both have."""
    told: dict[str, Any] = {"method": method["name"], "seeds": [], "reason": "", "points": []}
    tables = [[known(by_seed(r["seeds"], "validation/loss")) for r in one["rows"]] for one in (base, method)]
    seeds = sorted(set.intersection(*(set(found) for table in tables for found in table)))
    told["seeds"] = seeds
    if not seeds:
        return told | {"reason": "no seed has ended at all points of both curves"}
    base_losses, losses = ([[found[s] for s in seeds] for found in table] for table in tables)
    for one, values in ((base, base_losses), (method, losses)):
        reason = _rise(one["name"], one["x"], [sum(each) / len(each) for each in values])
        if reason:
            return told | {"reason": f"{reason}, so that a size for a loss is not defined"}
    try:
        if len(seeds) > 1:
            found = sampled_savings(method["x"], losses, base["x"], base_losses, over="seeds")
        else:
            found = savings(method["x"], [v for (v,) in losses], base["x"], [v for (v,) in base_losses])
    except ValueError as error:
        return told | {"reason": str(error)}
    points = [_told(one, run) for one, run in zip(found, base["runs"], strict=True)]
    return told | {"points": points}


def _told(one: Saving, run: str) -> dict[str, Any]:
    """A saving as `results.json` has it: an end of the interval that the seeds leave open is None."""
    known_size = math.isfinite(one.needed)
    return {
        "run": run,
        "x": one.x,
        "loss": one.loss,
        "needed": one.needed if known_size else None,
        "share": one.share if known_size else None,
        "extrapolated": one.extrapolated,
        "low": finite(one.low),
        "high": finite(one.high),
    }
