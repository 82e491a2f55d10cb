"""A small suite, and what stands for training in tests of everything around it."""

from __future__ import annotations

from pathlib import Path

from resformer.experiments import suite as suites
from resformer.experiments.launch import Launch
from resformer.experiments.places import Places
from resformer.experiments.spec import Less, RunSpec, Scale, Suite
from resformer.experiments.suite import Request
from resformer.train.config import Config
from resformer.train.configure import edit

HERE = Path(__file__).parent
# Stands for `resformer train` and what follows it: writes what they write, without the minutes.
STAND_IN = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import synthetic
run, variant, gain = Path(sys.argv[2]), sys.argv[3], float(sys.argv[4])
if variant == "sparse":
    print("RunFailure: loss is nan at step 3")
    sys.exit(1)
synthetic.write_run(run.parent.parent, run.name, variant, gain=gain, steps=40)
(run / "config.toml").write_bytes(Path(sys.argv[5]).read_bytes())
"""
FINGERPRINT = "ab12" * 16  # of the corpus that synthetic runs name
GAINS = {"transformer": 0.0, "learnable": 0.3, "svformer": 0.1, "sparse": 0.0}


def small(*variants: str) -> Suite:
    return Suite(
        name="small",
        title="",
        scales={"only": Scale(recipe="r")},
        runs=tuple(RunSpec(variant=variant) for variant in variants),
        baseline="transformer",
        claims=(Less(variants[-1], "transformer"),),
    )


def request(
    suite: Suite, out: Path, *, pool: Path | None = None, records: Path | None = None, jobs: int = 2,
    config_overrides: object = (), only: tuple[int, ...] = (), seeds: tuple[int, ...] = (), data: Path | None = None,
) -> Request:  # fmt: skip
    return Request(
        planned=suite.at(seeds=seeds), places=Places.of(out, pool, data, records), launch=Launch(jobs=jobs),
        overrides=config_overrides, only=only,
    )  # fmt: skip


def run_suite(suite: Suite, out: Path, *, load_recipe=None, **more) -> int:
    return suites.run_suite(request(suite, out, **more), load_recipe=load_recipe)


def recipe(name: str) -> Config:
    return edit(Config(), {"train.steps": 40, "optim.warmup_steps": 4})
