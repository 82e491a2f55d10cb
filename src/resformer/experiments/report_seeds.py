"""What one training run, of one seed, shows by itself.

Losses in nats per token, shares 0..1, memory in bytes; what is not known is None.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from resformer.experiments.markup import finite
from resformer.experiments.runs import Curve, Run

_FORWARD_AND_BACKWARD = 3  # a training token costs so many forward passes, as in `analyze.curves`
_ACCURACIES = ("acc", "acc_norm", "exact_match")  # the first that a task has; the paper's zero-shot table has acc


def formula(run: Run) -> str:
    """The variant's equation with this run's options, from the registry; "" for a variant that is not installed
    here.
    """
    from resformer.core import registry
    from resformer.core.policy import Shape

    model = run.config.get("model", {})
    try:
        heads = int(model["num_attention_heads"])
        shape = Shape(
            layers=int(model["num_hidden_layers"]),
            hidden_size=int(model["hidden_size"]),
            heads=heads,
            kv_heads=int(model.get("num_key_value_heads") or heads),
            head_dim=int(model.get("head_dim") or int(model["hidden_size"]) // heads),
        )
        return registry.build(run.variant, model.get("variant_options"), shape).formula(shape)
    except (KeyError, TypeError, ValueError):
        pass
    try:
        return registry.get(run.variant).equation
    except ValueError:
        return ""


def final_validation(run: Run, *, full: bool) -> dict[str, Any] | None:
    """Loss, perplexity and bits per byte at the end, overall and by domain; None for a run that has not finished.

    `full` takes the validation on the whole split, else the loop's last one. The overall loss is the plain mean of the
    domains; perplexity is given by domain only, exp of its loss.
    """
    if not run.trained:
        return None
    if full:
        head: dict[str, Any] = {key: run.evaluation.get(key) for key in ("loss", "bits_per_byte")}
        rows: dict[str, dict[str, Any]] = run.evaluation["domains"]
    else:
        overall = run.validation.get("all", Curve())
        head = {key: overall.last(key) for key in ("loss", "bits_per_byte")}
        keys = ("loss", "bits_per_byte", "tokens")
        rows = {d: {k: c.last(k) for k in keys} for d, c in run.validation.items() if d != "all"}
    return head | {"domains": {d: dict(found) | _perplexity(found) for d, found in rows.items()}, "full": full}


def _perplexity(found: dict[str, Any]) -> dict[str, float | None]:
    loss = finite(found.get("loss"))
    return {"perplexity": math.exp(loss) if loss is not None and loss < 100 else None}


def tasks(run: Run) -> dict[str, float]:
    """Accuracy by lm-eval task; {} when none was scored."""
    found = run.evaluation.get("tasks")
    scores: dict[str, float] = {}
    for name, task in found.items() if isinstance(found, dict) else ():
        metrics = task.get("metrics", task) if isinstance(task, dict) else {}
        for key in _ACCURACIES:
            value = metrics.get(key)
            score = finite(value.get("value") if isinstance(value, dict) else value)
            if score is not None:
                scores[str(name)] = score
                break
    return scores


def median_speed(run: Run) -> float | None:
    """Median training tokens per second, without the first tenth of the steps (warm-up of caches and allocator)."""
    speeds = run.train["tokens_per_second"]
    speeds = speeds[len(speeds) // 10 :]
    speeds = speeds[np.isfinite(speeds)]
    return float(np.median(speeds)) if len(speeds) else None


def entry(run: Run, *, full: bool) -> dict[str, Any]:
    """One seed of a run, as `results.json` has it."""
    seconds = run.train["seconds"]
    tokens = finite(run.train.last("tokens"))
    flops = finite(run.accounting.get("flops_per_token"))
    return {
        "seed": run.seed,
        "id": run.id,
        "state": run.state,
        "scored": run.scored,
        "recorded": run.recorded,
        "failure": run.failure,
        "step": run.step,
        "steps": run.steps,
        "train_tokens": tokens,
        "train_seconds": float(np.nansum(seconds)) if len(seconds) else None,
        "train_flops": None if tokens is None or flops is None else _FORWARD_AND_BACKWARD * flops * tokens,
        "tokens_per_second": median_speed(run),
        "validation": final_validation(run, full=full),
        "tasks": tasks(run),
    }


def measured(found: dict[str, Any], on: str) -> float | None:
    """The value of a claim's `on` in one seed of a run (`validation/loss`, `validation/DOMAIN/loss`,
    `validation/DOMAIN/perplexity`, `tasks/TASK`, `tasks/average`); None if it has none, NaN if it diverged.
    """
    kind, *path = on.split("/")
    if kind == "tasks":
        return found["tasks"].get("/".join(path))
    validation = found["validation"]
    if kind != "validation" or not path or not validation:
        return None
    at = validation if len(path) == 1 else validation["domains"].get("/".join(path[:-1]))
    if at is None or path[-1] not in at:
        return None
    value = finite(at[path[-1]])
    return math.nan if value is None else value
