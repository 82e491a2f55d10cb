"""The commands that train and finish one run, and where they run: on CPU threads or on devices."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from resformer.experiments.places import Places
from resformer.experiments.runs import Run
from resformer.experiments.spec import Planned


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How the runs of a suite are started.

    Attributes:
        jobs: runs at the same time.
        processes: of one run, under torchrun where there are several.
        imports: files with variants of the user's own, for every process.
        tasks: lm-eval tasks for trained models.
        task_files: where their data lie.
    """

    jobs: int = 2
    processes: int = 1
    imports: Sequence[Path] = ()
    tasks: Sequence[str] = ()
    task_files: Path | None = None

    def import_flags(self) -> list[str]:
        return [word for path in self.imports for word in ("--import", str(path))]

    def train(self, planned: Planned, places: Places, run: Run) -> list[str]:
        """Train the run, or go on where its last checkpoint is."""
        start = [sys.executable, "-m"]
        if self.processes > 1:
            start += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(self.processes), "-m"]
        config = places.out / "configs" / f"{run.id}.toml"
        command = [*start, "resformer", "train", planned.scale.recipe, "--config", str(config), "--out", str(run.path)]
        # A run that was killed before its first checkpoint starts again: there is nothing that could be lost.
        resume = ["--resume"] if (run.path / "config.toml").exists() else ["--overwrite"] if run.path.exists() else []
        return [*command, *resume, *self.import_flags()]

    def finish(self, planned: Planned, places: Places, run: Run) -> list[str]:
        """Score, analyse and sample what is trained."""
        suite = planned.suite
        options = ["--prompt", suite.prompt, "--max-new-tokens", str(suite.sample_tokens)]
        options += ["--seed", str(suite.sample_seed)]
        options += [word for task in self.tasks for word in ("--task", task)]
        if self.task_files is not None:
            options += ["--task-files", str(self.task_files)]
        command = [sys.executable, "-m", "resformer.experiments.finish", str(run.path), "--data", str(places.data)]
        return [*command, *options, *self.import_flags()]


def environment() -> dict[str, str]:
    """Of every child: one CPU thread each, so that runs beside one another do not slow each other down."""
    single = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    return {**os.environ, **single, "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}


def slots(jobs: int, processes: int, devices: Sequence[str]) -> list[Mapping[str, str]]:
    """What each of the places for a run adds to the environment: its share of the devices, so that two runs never meet
    on one. No more places than there are devices for; without devices as many as asked for.
    """
    if not devices:
        return [{}] * jobs
    groups = [devices[i : i + processes] for i in range(0, len(devices) - processes + 1, processes)][:jobs]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(group)} for group in groups]


def visible_devices() -> list[str]:
    """The CUDA devices that this process may use, as CUDA_VISIBLE_DEVICES names them; none without a GPU."""
    import torch

    count = torch.cuda.device_count()
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return named[:count] if named else [str(i) for i in range(count)]
