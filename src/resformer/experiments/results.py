"""From runs to results: one plain dictionary that the report, the terminal table and `results.json` all show.

Every number is read from a run; what is not known is None. Losses in nats per token, shares 0..1, memory in bytes.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import numpy as np

from resformer.experiments.curves import data_saved
from resformer.experiments.markup import finite
from resformer.experiments.runs import Curve, Run, read_json, read_suite

SCHEMA = 1

# In a trial of the quick suite's size (2.7M parameters, 250 and 800 steps) a second seed moved the validation loss by
# 0.007, 0.009, 0.010 and 0.027 nats. One seed cannot rank what is closer than that.
SEED_NOISE_NATS = 0.03
ONE_SEED = "measured, one seed"


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


def final_validation(run: Run, *, full: bool) -> dict[str, Any]:
    """Loss and bits per byte at the end, overall and by domain; {} for a run that has not finished.

    `full` takes the validation on the whole split, else the loop's last one.
    """
    if not run.trained:
        return {}
    if full:
        return {key: run.evaluation.get(key) for key in ("loss", "bits_per_byte", "domains")} | {"full": True}
    rows = {
        d: {k: c.last(k) for k in ("loss", "bits_per_byte", "tokens")} for d, c in run.validation.items() if d != "all"
    }
    overall = run.validation.get("all", Curve())
    return {
        "loss": overall.last("loss"),
        "bits_per_byte": overall.last("bits_per_byte"),
        "domains": rows,
        "full": False,
    }


def median_speed(run: Run) -> float | None:
    """Median training tokens per second, without the first tenth of the steps (warm-up of caches and allocator)."""
    speeds = run.train["tokens_per_second"]
    speeds = speeds[len(speeds) // 10 :]
    speeds = speeds[np.isfinite(speeds)]
    return float(np.median(speeds)) if len(speeds) else None


def row(run: Run, *, full: bool) -> dict[str, Any]:
    """What one run shows by itself."""
    seconds = run.train["seconds"]
    account = run.accounting
    groups = account.get("parameters_by_group")
    return {
        "name": run.name,
        "variant": run.variant,
        "formula": formula(run),
        "id": run.id,
        "seed": run.seed,
        "state": run.state,
        "scored": run.scored,
        "step": run.step,
        "steps": run.steps,
        "train_tokens": finite(run.train.last("tokens")),
        "train_seconds": float(np.nansum(seconds)) if len(seconds) else None,
        "validation": final_validation(run, full=full) or None,
        "parameters": account.get("parameters"),
        "token_tables": groups.get("tables") if isinstance(groups, dict) else None,
        "kv_bytes_per_token": account.get("kv_bytes_per_token"),
        "kv_ratio": account.get("kv_ratio"),
        "flops_per_token": account.get("flops_per_token"),
        "tokens_per_second": median_speed(run),
        "lambdas": {k: run.lambdas[k] for k in ("step", "layers", "first", "own") if k in run.lambdas} or None,
        "sample": run.sample or None,
    }


def compare(own: dict[str, Any], base: dict[str, Any], run: Run, baseline: Run) -> None:
    """Add to `own` what only a comparison with the baseline can say; None where either side is not finished."""
    own["parameters_difference"] = _minus(own["parameters"], base["parameters"])
    mine, theirs = own["validation"] or {}, base["validation"] or {}
    comparable = bool(mine and theirs and own["train_tokens"] == base["train_tokens"])
    nats = _minus(mine.get("loss"), theirs.get("loss")) if comparable else None
    own["difference"] = None if nats is None else {"nats": nats, "share": nats / theirs["loss"]}
    own["difference_by_domain"] = {
        domain: _minus(found.get("loss"), theirs["domains"].get(domain, {}).get("loss")) if comparable else None
        for domain, found in mine.get("domains", {}).items()
    }
    own["data_saved"] = None
    if comparable and run is not baseline:
        a, b = run.validation["all"], baseline.validation["all"]
        saved = data_saved(a["train_tokens"], a["loss"], b["train_tokens"], b["loss"])
        own["data_saved"] = {"share": saved.share, "tokens": saved.tokens, "reason": saved.reason}


def more_tokens(saved: dict[str, Any], total: float) -> float:
    """How many more training tokens a run needs than the baseline for its own final loss, as a share of the baseline's;
    for a negative `share`, where `tokens` is when the baseline had that loss.
    """
    return total / saved["tokens"] - 1.0


def _minus(a: object, b: object) -> float | None:
    left, right = finite(a), finite(b)
    return None if left is None or right is None else left - right


def judge(claim: dict[str, Any], rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A claim with its measured difference and verdict. With one seed, a difference within seed noise decides
    nothing.
    """
    left, right = rows.get(str(claim.get("left"))), rows.get(str(claim.get("right")))
    values = [_measured(side, str(claim.get("on"))) for side in (left, right)]
    nats = _minus(*values)
    verdict = "not run"
    if nats is not None:
        verdict = "undecided" if abs(nats) < SEED_NOISE_NATS else "held" if nats < 0 else "not held"
    return dict(claim) | {"difference": nats, "verdict": verdict, "evidence": ONE_SEED}


def _measured(found: dict[str, Any] | None, on: str) -> float | None:
    """The value of `validation/loss` or `validation/<domain>/loss` in a row, None if it has none."""
    _, *path = on.split("/")
    at: Any = (found or {}).get("validation") or {}
    if len(path) == 2:
        at, path = at.get("domains", {}).get(path[0], {}), path[1:]
    return finite(at.get(path[0])) if path else None


def loss_note(unscored: list[str], command: str) -> str:
    """What a reader must know when not every trained run was scored on the whole split; "" when all were."""
    if not unscored:
        return ""
    names = ", ".join(unscored)
    return (
        f"No readable score on the whole validation split (eval.json) of {names}: all losses here, of every run, are "
        f"those of the training loop's last validation, and differ from scores on the whole split. Score with {command}"
    )


def headline(rows: list[dict[str, Any]], baseline: str, unscored: list[str]) -> str:
    """The result in one sentence, as measured; what is said while runs or scores are missing is marked as such."""
    done = sum(r["state"] == "finished" for r in rows)
    text = _comparison(rows, baseline)
    if unscored and not text.startswith("No comparison"):
        text = f"By the training loop's own validation: {text}"
    if done == len(rows) or text.startswith("No comparison"):
        return text
    return f"So far, with {done} of {len(rows)} runs done: {text}"


def _comparison(rows: list[dict[str, Any]], baseline: str) -> str:
    base = next((r for r in rows if r["name"] == baseline), None)
    others = [r for r in rows if r["name"] != baseline and r.get("difference")]
    if base is None or not base["validation"]:
        return f"No comparison yet: the baseline {baseline} has not finished."
    if not others:
        return f"No comparison yet: only the baseline {baseline} has finished."
    best = min(others, key=lambda r: r["difference"]["nats"])
    nats, share = best["difference"]["nats"], best["difference"]["share"]
    against = f"({best['validation']['loss']:.3f} against {base['validation']['loss']:.3f})"
    if nats <= -SEED_NOISE_NATS:
        gain = f"{-nats:.3f} nats ({-100 * share:.1f} %)"
        return f"{best['name']} ends {gain} below the {baseline} on the same tokens {against}."
    if nats < SEED_NOISE_NATS:
        where = "below" if nats < 0 else "above"
        return (
            f"No clear winner: the best other run, {best['name']}, ends {abs(nats):.3f} nats {where} "
            f"the {baseline} {against}, no more than another seed may change."
        )
    return (
        f"Nothing beats the {baseline} here: the best other run, {best['name']}, "
        f"ends {nats:.3f} nats ({100 * share:.1f} %) above it {against}."
    )


def collect(out: Path, runs: list[Run]) -> dict[str, Any]:
    """All results of the suite in `out`, ready for JSON."""
    suite = read_suite(out)
    # All rows show the same measurement: the whole split only if every finished run was scored on it.
    unscored = [run.name for run in runs if run.trained and not run.scored]
    full = not unscored
    rows = [row(run, full=full) for run in runs]
    baseline = str(suite.get("baseline"))
    at = next((i for i, run in enumerate(runs) if run.name == baseline), None)
    for one, run in zip(rows, runs, strict=True):
        if at is None:
            one |= {"parameters_difference": None, "difference": None, "difference_by_domain": {}, "data_saved": None}
        else:
            compare(one, rows[at], run, runs[at])
    by_name = {one["name"]: one for one in rows}
    seconds = [one["train_seconds"] for one in rows if one["train_seconds"] is not None]
    return {
        "schema": SCHEMA,
        "suite": suite.get("name"),
        "title": suite.get("title"),
        "recipe": suite.get("recipe"),
        "baseline": baseline,
        "headline": headline(rows, baseline, unscored),
        "evidence": ONE_SEED,
        "complete": not unscored and all(one["state"] == "finished" for one in rows),
        "unscored": unscored,
        "loss_note": loss_note(unscored, str(suite.get("command") or "`resformer suite run`")),
        "missing": [one["name"] for one in rows if one["state"] != "finished"],
        "claims": [judge(claim, by_name) for claim in suite.get("claims", []) if isinstance(claim, dict)],
        "runs": rows,
        "seconds_total": sum(seconds) if seconds else None,
        "tokens_per_second_median": statistics.median(speeds)
        if (speeds := [s for o in rows if (s := o["tokens_per_second"])])
        else None,
        "command": suite.get("command"),
        "config_overrides": suite.get("config_overrides"),
        "data": {"fingerprint": suite.get("data_fingerprint"), "manifest": read_json(out / "data" / "manifest.json")},
    }


def clean(value: Any) -> Any:
    """`value` with every non-finite number as None: JSON has no NaN."""
    if isinstance(value, dict):
        return {str(key): clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [clean(item) for item in value]
    if isinstance(value, float):
        return finite(value)
    return value
