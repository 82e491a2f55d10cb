"""From runs to results: one plain dictionary that the report, the terminal table and `results.json` all show.

Every number is read from a run; what is not known is None. Losses in nats per token, shares 0..1, memory in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from resformer.experiments.markup import THIN_SPACE, finite, percent, signed
from resformer.experiments.report_claims import beside_paper, counted, judged
from resformer.experiments.report_critical import critical_points
from resformer.experiments.report_rows import add_tasks, compare, counterpart, row, total
from resformer.experiments.report_scaling import scaling
from resformer.experiments.runs import Run, pool_of, read_json, read_suite

SCHEMA = 2

# Twice the standard deviation over seeds, 0.038 nats, of the difference of two runs of one seed: pooled over 10 pairs
# of runs with 3 seeds at the scale mini (docs/results/mini). A yardstick for runs of that size with one seed, no test.
SEED_NOISE_NATS = 0.08
ONE_SEED = "measured, one seed"
_AS_LARGE = 0.1  # parameters that the headline's run may have more than the other, as a share


def loss_note(unscored: Sequence[str], command: str) -> str:
    """What a reader must know when not every trained run was scored on the whole split; "" when all were."""
    if not unscored:
        return ""
    names = ", ".join(unscored)
    return (
        f"No readable score on the whole validation split (eval.json) of {names}: all losses here, of every run, are "
        f"those of the training loop's last validation, and differ from scores on the whole split. Score with {command}"
    )


def interval(found: dict[str, Any], digits: int = 3) -> str:
    """The 95 % interval of a difference in words; "" where there is none."""
    if found["low"] is None or found["high"] is None:
        return ""
    return f"{signed(found['low'], digits)} to {signed(found['high'], digits)}"


def clearly(found: dict[str, Any]) -> str:
    """ "below", "above" or "" for a difference to the baseline: by its interval, or, with one seed, by what another
    seed moved the loss in a trial.
    """
    if found["low"] is None or found["high"] is None:
        return "" if abs(found["mean"]) < SEED_NOISE_NATS else "below" if found["mean"] < 0 else "above"
    return "below" if found["high"] < 0 else "above" if found["low"] > 0 else ""


def headline(results: dict[str, Any]) -> str:
    """The result in one sentence, as measured; what is said while runs or scores are missing is marked as such."""
    entries = [one for r in results["runs"] for one in r["seeds"]]
    done = sum(one["state"] == "finished" for one in entries)
    text = _comparison(results["runs"], results["baseline"])
    if results["unscored"] and not text.startswith("No comparison"):
        text = f"By the training loop's own validation: {text}"
    if done == len(entries) or text.startswith("No comparison"):
        return text
    return f"So far, with {done} of {len(entries)} runs done: {text}"


def _comparison(rows: Sequence[dict[str, Any]], baseline: str) -> str:
    base = next((r for r in rows if r["name"] == baseline), None)
    others = comparable(rows)
    if base is None or not base["validation"]:
        return f"No comparison yet: the baseline {baseline} has not finished."
    if not others:
        return f"No comparison yet: only the baseline {baseline} has finished."
    best = min(others, key=lambda r: r["difference"]["mean"])
    base = next(r for r in rows if r["name"] == best["against"])
    baseline = base["name"]
    found, where = best["difference"], clearly(best["difference"])
    nats, share = found["mean"], found["share"]
    against = f"({best['validation']['loss']:.3f} against {base['validation']['loss']:.3f})"
    seeds = len(found["by_seed"])
    sure = interval(found)
    if sure and where:
        ends = sorted((abs(found["low"]), abs(found["high"])))
        against = f"(95{THIN_SPACE}% interval {ends[0]:.3f} to {ends[1]:.3f}, {seeds} seeds)"
    if where == "below":
        among = (
            f"Of {len(others)} other runs, {best['name']} ends lowest:" if len(others) > 4 else f"{best['name']} ends"
        )
        gain = f"{-nats:.3f} nats ({percent(-share)})"
        return f"{among} {gain} below the {baseline} on the same tokens {against}."
    if where == "":
        side = "below" if nats < 0 else "above"
        why = f"and the 95{THIN_SPACE}% interval ({sure}, {seeds} seeds) holds zero" if sure else ""
        return (
            f"No clear winner: the best other run, {best['name']}, ends {abs(nats):.3f} nats {side} "
            f"the {baseline} {against}, {why or 'no more than another seed may change'}."
        )
    plain = len({r["against"] for r in others}) == 1
    nothing = f"Nothing beats the {baseline} here" if plain else "No run beats the one that it is compared with"
    above = "it" if plain else f"the {baseline}"
    return (
        f"{nothing}: the best other run, {best['name']}, "
        f"ends {nats:.3f} nats ({percent(share)}) above {above} {against}."
    )


def comparable(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The runs with a difference among which a best one may be named: a larger model is no finding, unless all are."""
    others = [r for r in rows if r["difference"]]
    return [r for r in others if _as_large(r)] or others


def _as_large(r: dict[str, Any]) -> bool:
    more = finite(r["parameters_difference"])
    return more is None or r["parameters"] is None or more <= _AS_LARGE * (r["parameters"] - more)


def evidence(rows: Sequence[dict[str, Any]]) -> str:
    """How much was measured: by how many seeds, of the run that has most."""
    most = max((r["finished"] for r in rows), default=0)
    return "nothing measured yet" if not most else ONE_SEED if most == 1 else f"measured, {most} seeds"


def label(run: Run, seeds: Sequence[int]) -> str:
    """How one run of one seed is called where it is told apart from the other seeds."""
    return f"{run.name} (seed {run.seed})" if len(seeds) > 1 else run.name


def collect(out: Path, runs: list[Run]) -> dict[str, Any]:
    """All results of the suite in `out`, ready for JSON. Every run name has one row, with its seeds inside."""
    suite = read_suite(out)
    seeds = sorted({run.seed for run in runs})
    by_name: dict[str, list[Run]] = {}
    for run in runs:
        by_name.setdefault(run.name, []).append(run)
    # All rows show the same measurement: the whole split only if every finished run was scored on it.
    unscored = [label(run, seeds) for run in runs if run.trained and not run.scored]
    specs = {str(spec.get("name") or spec["id"]): spec for spec in reversed(suite["runs"])}
    rows = [row(name, found, specs.get(name, {}), full=not unscored) for name, found in by_name.items()]
    add_tasks(rows)
    baseline = str(suite.get("baseline"))
    base = next((one for one in rows if one["name"] == baseline), None)
    for one in rows:
        if base is None:
            one |= dict.fromkeys(("against", "parameters_difference", "difference", "data_saved", "evaluation_noise"))
            one |= {"difference_by_domain": {}, "difference_by_task": {}}
        else:
            other = counterpart(one, rows, baseline)
            compare(one, next(r for r in rows if r["name"] == other), by_name[one["name"]], by_name[other])
    claims = judged(suite, rows, full=not unscored)
    speeds = [s for one in rows if (s := one["tokens_per_second"])]
    results = {
        "schema": SCHEMA,
        "suite": suite.get("name"),
        "scale": suite.get("scale"),
        "title": suite.get("title"),
        "question": suite.get("question"),
        "recipe": suite.get("recipe"),
        "baseline": baseline,
        "seeds": seeds,
        "evidence": evidence(rows),
        "written": datetime.now(UTC).strftime("%Y-%m-%d"),
        "complete": not unscored and all(run.trained for run in runs),
        "unscored": unscored,
        "loss_note": loss_note(unscored, str(suite.get("command") or "`resformer suite run`")),
        "missing": [label(run, seeds) for run in runs if not run.trained],
        "verdicts": counted(claims),
        "claims": claims,
        "paper": beside_paper(suite, rows),
        "paper_setting": suite.get("paper_setting"),
        "notes": [str(note) for note in suite.get("notes") or []],
        "runs": rows,
        "scaling": scaling(rows, baseline),
        "critical_points": critical_points(rows, by_name),
        "cost": _cost(rows),
        "seconds_total": total([one["train_seconds"] for r in rows for one in r["seeds"]]),
        "tokens_per_second_median": median(speeds) if speeds else None,
        "command": suite.get("command"),
        "config_overrides": suite.get("config_overrides"),
        "data": {
            "fingerprint": suite.get("data_fingerprint"),
            "manifest": read_json(pool_of(out, suite) / "data" / "manifest.json"),
        },
    }
    return {"schema": SCHEMA, "headline": headline(results)} | results


def _cost(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What all runs took together: training tokens, FLOPs (three forward passes a token), hours of training steps."""
    entries = [one for r in rows for one in r["seeds"]]
    seconds = total([one["train_seconds"] for one in entries])
    return {
        "runs": len(entries),
        "tokens": total([one["train_tokens"] for one in entries]),
        "flops": total([one["train_flops"] for one in entries]),
        "hours": None if seconds is None else seconds / 3600.0,
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
