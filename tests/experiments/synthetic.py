"""Finished suite directories made of formulas, in the exact layout that `train` and `run_suite` write: what the report
is developed and tested on.
"""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path

import numpy as np
import tomli_w

DOMAINS = ("github", "arxiv", "wikipedia", "book")
OFFSETS = {"github": -0.9, "arxiv": -0.1, "wikipedia": 0.6, "book": 0.4}
MIXING = ("learnable", "learnable_plus")


def loss_at(step: float, gain: float) -> float:
    """Validation loss without noise; `gain` is what a method ends below the Transformer, nearly."""
    return 3.35 + 5.0 * math.exp(-step / 45) + 1.45 * math.exp(-step / 190) - gain * (1 - math.exp(-step / 60))


def write_run(
    out: Path,
    run_id: str,
    variant: str,
    *,
    gain: float,
    steps: int = 250,
    until: int | None = None,
    every: int = 25,
    seed: int = 0,
    sample: str = "river was built in the first of the city, and the\nsecond was a small part of the world.",
    kv_ratio: float = 1.0,
    full: bool = True,
    tables: int = 0,
    parameters: int = 2_663_552,
    options: dict | None = None,
    tasks: dict[str, float] | None = None,
    measures: bool = True,
    documents: int = 12,
    commit: str = "3b322f15b320bd38201183f2621b6e3b6b93c9f2",
    torch: str = "2.13.0",
) -> Path:
    """One run directory; `until` < `steps` leaves it half done. Another seed moves all runs by its own 0.01 or so, and
    each run by a third of that.
    """
    if seed:
        own = np.random.default_rng([seed, zlib.crc32(run_id.encode())])
        gain += 0.01 * np.random.default_rng(seed + 100).standard_normal() + 0.003 * own.standard_normal()
    path = out / "runs" / run_id
    path.mkdir(parents=True, exist_ok=True)  # a log may be there already
    until = steps if until is None else until
    rows = metrics(run_id, variant, gain=gain, steps=steps, until=until, every=every, seed=seed)
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "model": {"variant": variant, "variant_options": options or {}, "hidden_size": 128, "intermediate_size": 352,
                  "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": "none"},
        "data": {"dir": "data", "sequence_length": 256},
        "train": {"steps": steps, "batch_size": 16, "seed": seed, "device": "cpu", "dtype": "fp32"},
        "optim": {"lr": 2e-3, "warmup_steps": 100},
    }  # fmt: skip
    (path / "config.toml").write_text(tomli_w.dumps(config))
    (path / "environment.json").write_text(json.dumps({
        "versions": {"python": "3.11.9", "torch": torch, "transformers": "5.24.0", "resformer": "0.1.0"},
        "threads": 1, "device": "cpu", "commit": commit,
        "data": {"fingerprint": "ab12" * 16, "domains": list(DOMAINS), "weights": dict.fromkeys(DOMAINS, 0.25),
                 "train_tokens": dict.fromkeys(DOMAINS, 1_000_000),
                 "validation_tokens": dict.fromkeys(DOMAINS, 60_000)},
        "accounting": {"parameters": parameters + (14 if variant in MIXING else -114_688 if kv_ratio < 1 else 0),
                       "kv_bytes_per_token": round(8192 * kv_ratio), "kv_ratio": kv_ratio, "flops_per_token": 5.5e6,
                       "parameters_by_group": {"embedding": 524_288} | ({"tables": tables} if tables else {})},
    }))  # fmt: skip
    if until == steps:
        write_model(path, f" {sample}")
        if full:
            write_scores(path, gain, steps, tasks or {})
        if measures:
            write_measures(path, gain)
        if documents:
            write_documents(path, gain, steps, documents)
    return path


def metrics(run_id: str, variant: str, *, gain: float, steps: int, until: int, every: int, seed: int) -> list[dict]:
    """Rows of metrics.jsonl."""
    noise = np.random.default_rng(7 + seed)  # the same data order: the batch noise is shared by all runs
    own = np.random.default_rng(sum(map(ord, run_id)))
    rows: list[dict] = []
    for step in range(1, until + 1):
        value = loss_at(step, gain) + 0.09 * noise.standard_normal() + 0.008 * own.standard_normal()
        speed = 4200 + 60 * own.standard_normal()
        rows.append(
            {"split": "train", "step": step, "tokens": 4096 * step, "loss": value, "lr": 2e-3, "grad_norm": 0.8,
             "tokens_per_second": speed, "seconds": 4096 / speed}
        )  # fmt: skip
        if step % every == 0 or step == steps:
            for domain in (*DOMAINS, "all"):
                shift = OFFSETS.get(domain, 0.0)
                wiggle = gain * 0.5 * own.standard_normal() if domain != "all" else 0.0
                found = loss_at(step, gain) + 0.05 + shift + 0.3 * wiggle
                rows.append(
                    {"split": "validation", "domain": domain, "step": step, "loss": found, "tokens": 16384,
                     "bits_per_byte": found / 3.2 / math.log(2), "train_tokens": 4096 * step}
                )  # fmt: skip
            if variant in MIXING:
                layers = list(range(2, 9))
                first = [
                    0.5 + 0.5 * n / 8 * step / steps + (0.35 * n if variant == "learnable_plus" else 0) - 0.12
                    for n in layers
                ]
                ownc = [0.5 + 0.2 * math.sin(n) * step / steps for n in layers]
                rows.append({"split": "lambdas", "step": step, "layers": layers, "first": first, "own": ownc})
    return rows


def write_model(path: Path, sample: str) -> None:
    (path / "model").mkdir()
    (path / "model" / "config.json").write_text("{}")
    (path / "samples.json").write_text(json.dumps({"prompt": "The history of the", "text": sample, "seed": 0}))


def write_scores(path: Path, gain: float, steps: int, tasks: dict[str, float]) -> None:
    domains = {
        d: {"loss": loss_at(steps, gain) + 0.06 + OFFSETS[d], "bits_per_byte": 1.5, "tokens": 60000} for d in DOMAINS
    }
    mean = sum(d["loss"] for d in domains.values()) / len(domains)
    found = {"step": steps, "loss": mean, "bits_per_byte": 1.55, "domains": domains}
    if tasks:
        found["tasks"] = {name: {"metrics": {"acc": {"value": v, "stderr": 0.01}}} for name, v in tasks.items()}
    (path / "eval.json").write_text(json.dumps(found))


def write_measures(path: Path, gain: float) -> None:
    """Three measures by layer, and one by position."""
    rows = []
    for layer in range(1, 9):
        bend = math.sin(layer / 2)
        values = {"importance_entropy": 4.5 + bend + 2 * gain, "first_token_importance": 0.2 - gain - 0.05 * bend,
                  "value_similarity": 0.1 + 0.05 * bend + gain}  # fmt: skip
        rows += [{"measure": name, "layer": layer, "texts": 32, "value": v, "standard_error": 0.01}
                 for name, v in values.items()]  # fmt: skip
        rows.append({"measure": "value_norm", "layer": layer, "texts": 32, "values": [1.0, 2.0]})
    (path / "measures.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_documents(path: Path, gain: float, steps: int, count: int) -> None:
    """Losses of `count` documents in each domain; what makes a document hard is the same for all runs."""
    shared, own = np.random.default_rng(3), np.random.default_rng(sum(map(ord, path.name)))
    domains = {}
    for domain in DOMAINS:
        tokens = shared.integers(50, 400, size=count)
        hard, wiggle = 0.4 * shared.standard_normal(count), 0.02 * own.standard_normal(count)
        each = loss_at(steps, gain) + 0.06 + OFFSETS[domain] + hard + wiggle
        domains[domain] = {"nll": (each * tokens).tolist(), "tokens": tokens.tolist()}
    found = {"step": steps, "data_fingerprint": "ab12" * 16, "sequence_length": 256, "domains": domains}
    (path / "documents.json").write_text(json.dumps(found))


def write_suite(
    out: Path,
    runs: list[dict],
    *,
    baseline: str = "transformer",
    claims: list[tuple | dict] = (),
    seeds: tuple[int, ...] = (),
    **more: object,
) -> Path:
    """`runs` are the arguments of `write_run` plus `name` and `overrides` (as in suite.json); `skip` leaves a run out
    of the disk. With `seeds` each run is there once for each of them; `skip` may then be a set of seeds.
    """
    described = []
    for seed in seeds or (None,):
        for run in runs:
            run = dict(run) if seed is None else run | {"seed": seed}
            name = run.pop("name", run["variant"])
            overrides = run.pop("overrides", {})
            options = overrides.get("model.variant_options", {})
            key = name if not seed else f"{name}/{seed}"
            run_id = run.pop("run_id", f"{name}-{zlib.crc32(key.encode()):08x}")
            skip = run.pop("skip", False)
            if skip is False or (skip is not True and seed not in skip):
                write_run(out, run_id, options=options, **run)
            described.append(
                {"id": run_id, "name": name, "variant": run["variant"], "seed": run.get("seed", 0),
                 "overrides": overrides, "steps": run.get("steps", 250)}
            )  # fmt: skip
    suite = {
        "schema": 2, "name": "quick", "scale": "mini", "title": "", "question": "", "recipe": "quick",
        "baseline": baseline, "seeds": list(seeds) or [0], "pool": ".", "records": None,
        "claims": [less(*claim) if isinstance(claim, tuple) else claim for claim in claims],
        "paper": [], "paper_setting": "", "notes": [],
        "runs": described, "config_overrides": {}, "data_fingerprint": "ab12" * 16,
        "command": "resformer suite run quick --out runs/quick --jobs 2",
    } | more  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    (out / "suite.json").write_text(json.dumps(suite))
    counts = {"documents": 1000, "tokens": {"train": 1_000_000, "validation": 20_000}}
    sources = [{"package": f"package-{i}", "version": "1.0", "files": i, "licence": "BSD-3"} for i in range(20)]
    manifest = {"domains": dict.fromkeys(DOMAINS, counts), "inputs": [{"corpus": "x", "sources": sources}]}
    (out / "data").mkdir(exist_ok=True)
    (out / "data" / "manifest.json").write_text(json.dumps(manifest))
    return out


def less(left: str, right: str, on: str = "validation/loss", paper: str = "") -> dict:
    return {"kind": "less", "left": left, "right": right, "on": on, "margin": 0.0, "paper": paper}


def not_less(left: str, right: str, margin: float, paper: str = "") -> dict:
    return {"kind": "not_less", "left": left, "right": right, "on": "validation/loss", "margin": margin, "paper": paper}


def quick(out: Path) -> Path:
    """The four runs of the quick suite, all finished, with the gains of a real trial."""
    return write_suite(
        out,
        [
            {"variant": "transformer", "gain": 0.0},
            {"variant": "learnable", "gain": 0.128},
            {
                "variant": "learnable_plus",
                "gain": 0.173,
                "sample": "of <b>the</b> city & the <script>alert(1)</script> state. " * 9,
            },
            {"variant": "svformer", "gain": 0.11, "kv_ratio": 0.5625},
        ],
        claims=[("learnable", "transformer"), ("learnable_plus", "transformer")],
    )


def variants(out: Path, seeds: tuple[int, ...] = (0, 1, 2)) -> Path:
    """Eight runs with three seeds each, claims of all verdicts, the paper's rows, tasks, measures and documents."""
    gains = {"transformer": 0.0, "neutreno": 0.09, "identity": 0.10, "constant": 0.168, "sparse": 0.17,
             "learnable": 0.128, "learnable_plus": 0.173, "query_residual": -0.05}  # fmt: skip
    common = {"documents": 60}
    runs = [
        {"variant": name, "gain": gain, "tasks": {"piqa": 0.55 + gain / 4, "arc_easy": 0.3 + gain / 3}} | common
        for name, gain in gains.items()
    ]
    return write_suite(
        out,
        runs,
        seeds=seeds,
        name="variants",
        title="Forms of value residual against the Transformer",
        question="Which form of the residual on values lowers the loss most, at equal tokens?",
        claims=[
            less("identity", "transformer", paper="2.712 against 2.739 at 82M (v1 table 5)"),
            less("sparse", "transformer", paper="2.687 against 2.739 at 82M (v5)"),
            less("learnable", "transformer", paper="2.705 against 2.739 at 82M (v5)"),
            less("sparse", "constant", paper="2.687 against 2.700 at 82M (v5)"),
            less("learnable", "constant", paper="not in the paper"),
            less("identity", "transformer", "validation/wikipedia/perplexity", "23.8 against 24.8 at 468M (v5)"),
            less("transformer", "identity", "tasks/average", "0.333 against 0.355 (v1 table 1)"),
            less("identity", "transformer", "validation/poetry/loss"),
            not_less("query_residual", "transformer", 0.02, "2.742 against 2.739 at 82M (v5)"),
        ],
        paper=[
            {"run": "transformer", "values": {"loss": 2.739, "wikipedia/perplexity": 24.8}, "source": "v1 table 5"},
            {"run": "identity", "values": {"loss": 2.712, "wikipedia/perplexity": 23.8}, "source": "v1 table 5"},
            {"run": "constant", "values": {"loss": 2.700}, "source": "v5, ablations"},
            {"run": "sparse", "values": {"loss": 2.687}, "source": "v5, ablations"},
            {"run": "query_residual", "values": {"loss": 2.742}, "source": "v5, ablations"},
            {"run": "absent", "values": {"loss": 2.6}, "source": "v5"},
        ],
        paper_setting="82M parameters, 20B tokens of SlimPajama; mean of the losses of its seven domains",
        notes=["The paper does not give the initial logits of Learnable-Plus; here they are linear in depth."],
    )


def sparse_layers(out: Path, seeds: tuple[int, ...] = ()) -> Path:
    """Eighteen runs that sweep settings, with one seed."""

    def one(name: str, gain: float, **options: object) -> dict:
        return {"variant": "sparse", "name": name, "gain": gain, "overrides": {"model.variant_options": options}}

    runs = [{"variant": "transformer", "gain": 0.0}]
    runs += [one(f"layer_{n}", 0.02 * n - 0.04, layers=[n]) for n in range(2, 9)]
    runs += [one(f"last_{k}", 0.15 - 0.02 * abs(k - 3), layers=f"last:{k}") for k in range(2, 7)]
    runs += [one(f"strength_{s:g}", 0.15 - 0.02 * abs(s - 5), layers="last:3", first=s) for s in (1.0, 2.0, 10.0)]
    runs += [{"variant": "identity", "gain": 0.1}, {"variant": "learnable", "gain": 0.12}]
    return write_suite(
        out,
        runs,
        seeds=seeds,
        name="sparse_layers",
        title="Which layers a sparse residual takes, and how strong",
        question="Which of 8 layers profit from V_1, alone and together, and how strong should it be?",
        claims=[less("last_3", "transformer", paper="2.687 against 2.739"), less("layer_7", "layer_2"),
                less("layer_7", "layer_8"), not_less("last_2", "last_3", 0.02)],
        paper=[{"run": "transformer", "values": {"loss": 2.739}, "source": "v1 table 5"},
               {"run": "last_3", "values": {"loss": 2.687}, "source": "v5"}],
        paper_setting="82M parameters, 20B tokens of SlimPajama",
    )  # fmt: skip


def pairs(out: Path) -> Path:
    """Runs of which each pair shares a setting that the baseline has not: other size, window, tokens."""
    window, large = {"model.sliding_window": 64}, {"model.hidden_size": 192}
    return write_suite(
        out,
        [
            {"variant": "transformer", "gain": 0.0},
            {"variant": "identity", "gain": 0.1},
            {"variant": "transformer", "name": "transformer_window", "gain": -0.2, "overrides": window},
            {"variant": "identity", "name": "identity_window", "gain": -0.05, "overrides": window},
            {"variant": "transformer", "name": "transformer_large", "gain": 0.5, "overrides": large,
             "parameters": 5_000_000},
            {"variant": "identity", "name": "identity_large", "gain": 0.58, "overrides": large,
             "parameters": 5_000_000},
            {"variant": "svformer", "name": "svformer_short", "gain": 0.1, "steps": 120, "kv_ratio": 0.5625,
             "overrides": {"train.steps": 120}},
        ],
        name="combine",
        claims=[less("identity_window", "transformer_window"), less("identity_large", "transformer_large")],
        paper=[
            {"run": "transformer", "values": {"loss": 2.739}, "source": "v1 table 5"},
            {"run": "transformer_large", "values": {"loss": 2.5015}, "source": "v1 table 5"},
            {"run": "identity_large", "values": {"loss": 2.4692}, "source": "v1 table 5"},
        ],
    )  # fmt: skip
