"""One row a run name: means over its finished seeds, and the difference to the baseline seed by seed.

Losses in nats per token, shares 0..1, memory in bytes; what is not known is None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from resformer.experiments import statistics
from resformer.experiments.curves import data_saved
from resformer.experiments.markup import finite
from resformer.experiments.report_seeds import entry, formula, measured
from resformer.experiments.runs import Run
from resformer.experiments.statistics import Comparison

# What the small charts by layer show, in this order: measure -> what stands above its chart.
MEASURES = {
    "importance_entropy": "Entropy of token importance (nats)",
    "first_token_importance": "Attention that the first token gets (share)",
    "hidden_similarity": "Similarity of hidden states (cosine)",
    "value_similarity": "Similarity of values (cosine)",
    "key_similarity": "Similarity of keys (cosine)",
    "value_norm": "Value norm (mean of positions)",
    "value_first_token_ratio": "Value norm, first token / others",
    "hidden_first_token_ratio": "Hidden-state norm, first token / others",
    "value_largest_eigenvalue": "Largest eigenvalue of values",
    "hidden_effective_rank": "Effective rank of hidden states",
    "read_value_share": "Values of other layers in the output (share)",
    "loss_without_attention": "Loss without the layer's attention (nats more)",
    "loss_without_mlp": "Loss without the layer's MLP (nats more)",
}


def mean(values: Sequence[object]) -> float | None:
    """The mean of what is known, None if nothing is."""
    known = [found for value in values if (found := finite(value)) is not None]
    return sum(known) / len(known) if known else None


def total(values: Sequence[object]) -> float | None:
    known = [found for value in values if (found := finite(value)) is not None]
    return sum(known) if known else None


def by_seed(entries: Sequence[dict[str, Any]], on: str) -> dict[int, float]:
    """The values of a claim's `on` by seed, of finished seeds; NaN for one that diverged."""
    values = ((one["seed"], measured(one, on)) for one in entries if one["state"] == "finished")
    return {seed: value for seed, value in values if value is not None}


def known(seeds: Mapping[int, float]) -> dict[int, float]:
    """Without the seeds that diverged."""
    return {seed: value for seed, value in seeds.items() if np.isfinite(value)}


def summary(found: Comparison | None, base: Mapping[int, float] | None = None) -> dict[str, Any] | None:
    """A comparison as `results.json` has it; with `base`, also as shares of the baseline's mean over the same seeds."""
    if found is None or found.mean is None:
        return None
    told: dict[str, Any] = {
        "mean": found.mean,
        "low": found.low,
        "high": found.high,
        "sd": found.sd,
        "p": found.p,
        "p_exact": found.p_exact,
        "seeds_needed": found.seeds_needed,
        "by_seed": {str(seed): d for seed, d in zip(found.seeds, found.differences, strict=True)},
    }
    if base is not None:
        level = mean([base[seed] for seed in found.seeds])
        told["share"] = found.mean / level if level else None
    return told


def row(name: str, runs: Sequence[Run], specs: Mapping[str, Any], *, full: bool) -> dict[str, Any]:
    """What the runs of one name, one a seed, show by themselves. `specs` is what `suite.json` says of them."""
    entries = [entry(run, full=full) for run in runs]
    done = [one for one in entries if one["state"] == "finished"]
    account = next((run.accounting for run in runs if run.accounting), {})
    groups = account.get("parameters_by_group")
    states = {one["state"] for one in entries}
    known_run = next((run for run in runs if run.config), runs[0])
    return {
        "name": name,
        "variant": runs[0].variant,
        "formula": formula(known_run),
        "overrides": specs.get("overrides") or {},
        "state": states.pop() if len(states) == 1 else "partial",
        "finished": len(done),
        "scored": all(one["scored"] for one in done),
        "step": sum(one["step"] for one in entries),
        "steps": None if any(one["steps"] is None for one in entries) else sum(one["steps"] for one in entries),
        "train_tokens": mean([one["train_tokens"] for one in done or entries]),
        "train_seconds": mean([one["train_seconds"] for one in done or entries]),
        "train_flops": mean([one["train_flops"] for one in done or entries]),
        "validation": _validation(done),
        "tasks": {},
        "parameters": account.get("parameters"),
        "token_tables": groups.get("tables") if isinstance(groups, dict) else None,
        "kv_bytes_per_token": account.get("kv_bytes_per_token"),
        "kv_ratio": account.get("kv_ratio"),
        "flops_per_token": account.get("flops_per_token"),
        "layers": known_run.config.get("model", {}).get("num_hidden_layers"),
        "tokens_per_second": mean([one["tokens_per_second"] for one in entries]),
        "lambdas": _lambdas(runs),
        "measures": _measures([run for run in runs if run.trained]),
        "sample": next((run.sample for run in runs if run.sample), None),
        "seeds": entries,
    }


def _validation(done: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Means over seeds; `low` and `high` are the lowest and highest loss of a seed."""
    found = [one["validation"] for one in done if one["validation"]]
    if not found:
        return None
    losses = [loss for one in found if (loss := finite(one["loss"])) is not None]
    keys = ("loss", "bits_per_byte", "perplexity", "tokens")
    domains = list(dict.fromkeys(domain for one in found for domain in one["domains"]))
    return {
        "loss": mean(losses),
        "low": min(losses, default=None),
        "high": max(losses, default=None),
        "bits_per_byte": mean([one["bits_per_byte"] for one in found]),
        "domains": {d: {k: mean([one["domains"].get(d, {}).get(k) for one in found]) for k in keys} for d in domains},
        "full": found[0]["full"],
    }


def add_tasks(rows: Sequence[dict[str, Any]]) -> None:
    """Mean accuracies, with their average where a run was scored on all tasks that any run was scored on."""
    entries = [one for found in rows for one in found["seeds"]]
    names = list(dict.fromkeys(task for one in entries for task in one["tasks"]))
    for one in entries:
        if names and {*one["tasks"]} == {*names}:
            one["tasks"]["average"] = sum(one["tasks"].values()) / len(names)
    for found in rows:
        every = [*names, "average"] if names else []
        scores = {task: mean([one["tasks"].get(task) for one in found["seeds"]]) for task in every}
        found["tasks"] = {task: score for task, score in scores.items() if score is not None}


def _lambdas(runs: Sequence[Run]) -> dict[str, Any] | None:
    """Both coefficients by layer, as means over the seeds that have them for the same layers."""
    found = [run.lambdas for run in runs if run.lambdas.get("layers")]
    if not found:
        return None
    same = [one for one in found if one["layers"] == found[0]["layers"]]
    told: dict[str, Any] = {"step": found[0].get("step"), "layers": found[0]["layers"], "seeds": len(same)}
    for key in ("first", "own"):
        columns = [one.get(key) or [] for one in same]
        told[key] = [mean(values) for values in zip(*columns, strict=False)]
    return told


def _measures(runs: Sequence[Run]) -> dict[str, dict[str, list[float]]]:
    """Of each measure shown: layers from 1, its mean over seeds, and the lowest and highest seed."""
    found: dict[str, dict[int, list[float]]] = {}
    for run in runs:
        for line in run.measures:
            layer, value = line.get("layer"), finite(line.get("value"))
            if line["measure"] == "value_norm" and isinstance(line.get("values"), list):
                value = mean(line["values"])
            if line["measure"] in MEASURES and isinstance(layer, int) and layer > 0 and value is not None:
                found.setdefault(line["measure"], {}).setdefault(layer, []).append(value)
    return {
        name: {
            "layers": sorted(layers),
            "mean": [sum(layers[n]) / len(layers[n]) for n in sorted(layers)],
            "low": [min(layers[n]) for n in sorted(layers)],
            "high": [max(layers[n]) for n in sorted(layers)],
        }
        for name in MEASURES
        if (layers := found.get(name))
    }


def counterpart(own: dict[str, Any], rows: Sequence[dict[str, Any]], baseline: str) -> str:
    """The run that `own` is compared with: the one of the baseline's variant with the same settings but for the
    variant's own (of the same size, window, learning rate, ...); the baseline where the suite has no such run.
    """
    variant = next((r["variant"] for r in rows if r["name"] == baseline), None)
    if own["variant"] == variant:
        return baseline
    settings = _settings(own)
    same = [r["name"] for r in rows if r["variant"] == variant and _settings(r) == settings]
    return baseline if baseline in same or not same else str(same[0])


def _settings(r: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in r["overrides"].items() if key != "model.variant_options"}


def compare(own: dict[str, Any], base: dict[str, Any], runs: Sequence[Run], base_runs: Sequence[Run]) -> None:
    """Add to `own` what only a comparison with its counterpart `base` can say; None where it cannot be made."""
    own["against"] = base["name"]
    paired = _paired(own, base, runs, base_runs)
    own["parameters_difference"] = _minus(own["parameters"], base["parameters"])
    own["difference"] = _difference(own, base, paired, "validation/loss")
    domains = (own["validation"] or {}).get("domains", {})
    own["difference_by_domain"] = {d: _difference(own, base, paired, f"validation/{d}/loss") for d in domains}
    own["difference_by_task"] = {t: _difference(own, base, paired, f"tasks/{t}") for t in own["tasks"]}
    own["data_saved"] = own["evaluation_noise"] = None
    if own is not base and paired:
        own["data_saved"] = _saved([(left, right, one) for one, _, left, right in paired])
        own["evaluation_noise"] = _evaluation_noise([(left, right) for _, _, left, right in paired])


Paired = list[tuple[dict[str, Any], dict[str, Any], Run, Run]]


def _paired(own: dict[str, Any], base: dict[str, Any], runs: Sequence[Run], base_runs: Sequence[Run]) -> Paired:
    """Seeds that both have finished on as many tokens, in sequences of one length: (own entry, the other's, own run,
    the other's).
    """
    theirs = {run.seed: (one, run) for one, run in zip(base["seeds"], base_runs, strict=True)}
    found = []
    for one, run in zip(own["seeds"], runs, strict=True):
        other, other_run = theirs.get(run.seed, (None, None))
        if other is None or other_run is None or not run.trained or not other_run.trained:
            continue
        if one["train_tokens"] == other["train_tokens"] and _length(run) == _length(other_run):
            found.append((one, other, run, other_run))
    return found


def _length(run: Run) -> object:
    return run.config.get("data", {}).get("sequence_length")


def _difference(own: dict[str, Any], base: dict[str, Any], paired: Paired, on: str) -> dict[str, Any] | None:
    if own is base:
        return None
    left, right = known(by_seed([a for a, *_ in paired], on)), known(by_seed([b for _, b, *_ in paired], on))
    return summary(statistics.compare(left, right), right)


def _saved(paired: Sequence[tuple[Run, Run, dict[str, Any]]]) -> dict[str, Any]:
    """Data saved, as means over seeds: `more` is the change in tokens for the same loss (negative: fewer), `share` and
    `tokens` as in `curves.DataSaved`. All None with a `reason` where a seed cannot tell; `tokens` also where seeds end
    on both sides of the baseline.
    """
    found = []
    for run, baseline, one in paired:
        a, b = run.validation["all"], baseline.validation["all"]
        saved = data_saved(a["train_tokens"], a["loss"], b["train_tokens"], b["loss"])
        if saved.share is None or saved.tokens is None:
            return {"share": None, "tokens": None, "more": None, "low": None, "high": None, "reason": saved.reason}
        whole = one["train_tokens"]
        more = -saved.share if saved.share >= 0 else whole / saved.tokens - 1.0
        found.append((saved.share, saved.tokens, more))
    shares, tokens, changes = zip(*found, strict=True)
    one_side = all(share >= 0 for share in shares) or all(share <= 0 for share in shares)
    return {
        "share": mean(shares),
        "tokens": mean(tokens) if one_side else None,
        "more": mean(changes),
        "low": min(changes),
        "high": max(changes),
        "reason": "",
    }


def _evaluation_noise(pairs: Sequence[tuple[Run, Run]]) -> dict[str, Any] | None:
    """How far another draw of validation documents would move the difference: the mean over seeds of the interval's
    half width, in nats. It says nothing of what another seed of training would do. None without documents.
    """
    widths, count = [], 0
    for left, right in pairs:
        try:
            _, low, high = statistics.document_interval(_documents(left), _documents(right))
        except (KeyError, TypeError, ValueError):
            continue
        widths.append((high - low) / 2)
        count = sum(len(tokens) for _, tokens in _documents(left).values())
    return {"half_width": mean(widths), "documents": count, "seeds": len(widths)} if widths else None


def _documents(run: Run) -> dict[str, tuple[list[float], list[float]]]:
    found = run.documents.get("domains")
    return {d: (rows["nll"], rows["tokens"]) for d, rows in found.items()} if isinstance(found, dict) else {}


def _minus(a: object, b: object) -> float | None:
    left, right = finite(a), finite(b)
    return None if left is None or right is None else left - right


def lookup(rows: Sequence[dict[str, Any]]) -> Callable[[str, str], dict[int, float]]:
    """(run name, claim's `on`) -> values by seed, for `statistics.judge`."""
    entries = {found["name"]: found["seeds"] for found in rows}
    return lambda name, on: by_seed(entries.get(name, []), on)
