"""A finished suite directory made of formulas, in the exact layout that `train` and `run_suite` write: what the report
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
) -> Path:
    """One run directory; `until` < `steps` leaves it half done."""
    path = out / "runs" / run_id
    path.mkdir(parents=True, exist_ok=True)  # a log may be there already
    until = steps if until is None else until
    noise = np.random.default_rng(7)  # the same data order: the batch noise is shared by all runs
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
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "model": {"variant": variant, "variant_options": {}, "hidden_size": 128, "intermediate_size": 352,
                  "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": "none"},
        "data": {"dir": "data", "sequence_length": 256},
        "train": {"steps": steps, "batch_size": 16, "seed": seed, "device": "cpu", "dtype": "fp32"},
        "optim": {"lr": 2e-3, "warmup_steps": 100},
    }  # fmt: skip
    (path / "config.toml").write_text(tomli_w.dumps(config))
    (path / "environment.json").write_text(json.dumps({
        "versions": {"python": "3.11.9", "torch": "2.13.0", "transformers": "5.24.0", "resformer": "0.1.0"},
        "threads": 1, "device": "cpu",
        "data": {"fingerprint": "ab12" * 16, "domains": list(DOMAINS), "weights": dict.fromkeys(DOMAINS, 0.25),
                 "train_tokens": dict.fromkeys(DOMAINS, 1_000_000),
                 "validation_tokens": dict.fromkeys(DOMAINS, 60_000)},
        "accounting": {"parameters": 2_663_552 + (14 if variant in MIXING else -114_688 if kv_ratio < 1 else 0),
                       "kv_bytes_per_token": round(8192 * kv_ratio), "kv_ratio": kv_ratio, "flops_per_token": 5.5e6,
                       "parameters_by_group": {"embedding": 524_288} | ({"tables": tables} if tables else {})},
    }))  # fmt: skip
    if until == steps:
        (path / "model").mkdir()
        (path / "model" / "config.json").write_text("{}")
        (path / "samples.json").write_text(
            json.dumps({"prompt": "The history of the", "text": f" {sample}", "seed": 0})
        )
        if full:
            domains = {
                d: {"loss": loss_at(steps, gain) + 0.06 + OFFSETS[d], "bits_per_byte": 1.5, "tokens": 60000}
                for d in DOMAINS
            }
            mean = sum(d["loss"] for d in domains.values()) / len(domains)
            (path / "eval.json").write_text(
                json.dumps({"step": steps, "loss": mean, "bits_per_byte": 1.55, "domains": domains})
            )
    return path


def write_suite(
    out: Path, runs: list[dict], *, baseline: str = "transformer", claims: list[tuple[str, str]] = ()
) -> Path:
    """`runs` are the arguments of `write_run` plus `name`; `skip` leaves a run out of the disk."""
    described = []
    for run in runs:
        run = dict(run)
        name = run.pop("name", run["variant"])
        run_id = run.pop("run_id", f"{name}-{zlib.crc32(name.encode()):08x}")
        if not run.pop("skip", False):
            write_run(out, run_id, **run)
        described.append(
            {"id": run_id, "name": name, "variant": run["variant"], "seed": run.get("seed", 0), "overrides": {},
             "steps": run.get("steps", 250)}
        )  # fmt: skip
    suite = {
        "schema": 1, "name": "quick", "title": "", "recipe": "quick", "baseline": baseline,
        "claims": [{"left": a, "right": b, "on": "validation/loss"} for a, b in claims],
        "runs": described, "config_overrides": {}, "data_fingerprint": "ab12" * 16,
        "command": "resformer suite run quick --out runs/quick --jobs 2",
    }  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    (out / "suite.json").write_text(json.dumps(suite))
    counts = {"documents": 1000, "tokens": {"train": 1_000_000, "validation": 20_000}}
    sources = [{"package": f"package-{i}", "version": "1.0", "files": i, "licence": "BSD-3"} for i in range(20)]
    manifest = {"domains": dict.fromkeys(DOMAINS, counts), "inputs": [{"corpus": "x", "sources": sources}]}
    (out / "data").mkdir(exist_ok=True)
    (out / "data" / "manifest.json").write_text(json.dumps(manifest))
    return out


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
