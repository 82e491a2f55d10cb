"""What comes before the first step: data, run directory, checkpoint. Nothing here trains."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from resformer.data import open_dataset
from resformer.errors import UserError
from resformer.models import ResFormerConfig, ResFormerForCausalLM
from resformer.models.accounting import account
from resformer.train import checkpoint, imports, rundir
from resformer.train.checkpoint import TrainState
from resformer.train.config import Config
from resformer.train.configure import to_toml
from resformer.train.environment import environment, versions
from resformer.train.estimate import estimate_memory, memory_line, time_line
from resformer.train.files import write_atomic, write_json
from resformer.train.metrics import MetricsLog, read_rows


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What one run is made of; none of it changes place while the run goes."""

    config: Config
    out: Path
    device: torch.device
    dataset: Any
    sampler: Any
    model: ResFormerForCausalLM
    optimizer: torch.optim.AdamW

    @property
    def checkpoints(self) -> Path:
        return self.out / rundir.CHECKPOINTS


def open_data(config: Config) -> tuple[Any, Any]:
    if config.data.dir is None:
        raise UserError(
            "data.dir is not set; pass --data DIR (`resformer data prepare --input embedded --out DIR` makes one)"
        )
    dataset = open_dataset(config.data.dir, verify=config.data.verify)
    sampler = dataset.sampler(
        sequence_length=config.data.sequence_length,
        batch_size=config.train.batch_size,
        seed=config.train.seed,
        weights=config.data.weights,
    )
    for domain in dataset.domains:  # complains now, not at the first validation, when one has no text
        dataset.validation(
            domain, sequence_length=config.data.sequence_length, max_tokens=config.train.validation_tokens
        )
    return dataset, sampler


def hold(out: Path, *, resume: bool, overwrite: bool) -> MetricsLog:
    """Open the run's metrics.jsonl, which keeps every other process out, and look again whether the run may start.

    Raises:
        UserError: another process is at work there, or was since the first look; nothing has been changed.
    """
    out.mkdir(parents=True, exist_ok=True)
    log = MetricsLog(out / rundir.METRICS)
    try:
        rundir.check_start(out, resume=resume, overwrite=overwrite, held=True)
    except UserError:
        log.close()
        raise
    return log


def start(parts: Parts, described: ResFormerConfig, command: Sequence[str] | None, *, overwrite: bool) -> None:
    """Make the run directory, which the caller holds: configuration, environment, tokenizer."""
    out, dataset = parts.out, parts.dataset
    if overwrite:
        rundir.clear(out)
    write_atomic(out / rundir.CONFIG, to_toml(parts.config))
    facts = environment(command=command, device=parts.device, dataset=dataset)
    facts[imports.KEY] = imports.recorded()
    facts["accounting"] = account(described, sequence_length=parts.config.data.sequence_length).asdict()
    write_json(out / rundir.ENVIRONMENT, facts)
    (out / rundir.TOKENIZER).mkdir(exist_ok=True)
    wanted = re.compile("|".join(rundir.TOKENIZER_FILES))
    for path in sorted(Path(dataset.tokenizer_dir).iterdir()):
        if wanted.fullmatch(path.name):
            shutil.copy(path, out / rundir.TOKENIZER / path.name)


def restore(parts: Parts, fresh: TrainState, notes: list[str]) -> TrainState:
    """Bring model and optimizer to the last checkpoint; nothing in the directory changes."""
    notes += rundir.check_same(parts.out, parts.config)
    directory, state = checkpoint.find(parts.checkpoints, report=notes.append)
    if state.data_fingerprint != fresh.data_fingerprint:
        raise UserError(
            f"--resume {parts.out}: the run was trained on the corpus {state.data_fingerprint[:12]}, "
            f"{parts.config.data.dir} is {fresh.data_fingerprint[:12]}; give the same corpus or start another run"
        )
    changed = [
        f"{k} {v} (now {fresh.versions.get(k)})" for k, v in state.versions.items() if fresh.versions.get(k) != v
    ]
    if changed:
        notes.append(f"the checkpoint was written with {', '.join(changed)}: the last bits may differ")
    finished = state.step == parts.config.train.steps and not state.pending_validation
    if finished and last_validation(parts.out)[0] != state.step:
        raise UserError(
            f"--resume {parts.out}: the run is finished, but its last validation is missing from "
            f"{parts.out / rundir.METRICS}; put the file back, or start anew with --overwrite"
        )
    checkpoint.restore(directory, parts.model, parts.optimizer)
    notes.append(f"resumed from step {state.step}")
    return replace(state, versions=fresh.versions)


def last_validation(out: Path) -> tuple[int, dict[str, dict[str, float]]]:
    """Step and scores by domain of the last validation that metrics.jsonl has; step 0 if there is none."""
    rows = [row for row in read_rows(out / rundir.METRICS) if row.get("split") == "validation"]
    last = max((row["step"] for row in rows if row["domain"] == "all"), default=0)
    wanted = ("loss", "bits_per_byte", "tokens")
    return last, {row["domain"]: {key: row[key] for key in wanted} for row in rows if row["step"] == last}


def record_resume(parts: Parts, state: TrainState, command: Sequence[str] | None) -> None:
    """Add to environment.json where and with what the run went on."""
    path = parts.out / rundir.ENVIRONMENT
    facts = json.loads(path.read_text(encoding="utf-8"))
    entry = {
        "step": state.step,
        "command": list(command) if command is not None else None,
        "threads": torch.get_num_threads(),
        "versions": versions(),
    }
    write_json(path, {**facts, "resumed": [*facts.get("resumed", []), entry]})


def show_plan(config: Config, described: ResFormerConfig, dataset: Any, sampler: Any, notes: list[str]) -> None:
    """What `--dry-run` prints: the configuration, then costs as comments, so that the output is a valid config file."""
    costs = account(described, sequence_length=config.data.sequence_length)
    steps, tokens = config.train.steps, config.train.steps * config.train.batch_size * config.data.sequence_length
    epochs = ", ".join(f"{domain} {times:.2f}" for domain, times in sampler.epochs(steps).items())
    lines = [
        *(f"note: {note}" for note in notes),
        f"parameters: {costs.parameters:,} ({json.dumps(costs.parameters_by_group)})",
        f"FLOPs: {costs.flops_per_token:,} per token forward, {3 * costs.flops_per_token * tokens:.3g} for the run",
        memory_line(estimate_memory(config, described)),
        time_line(3 * costs.flops_per_token * tokens),
        f"KV cache: {costs.kv_bytes_per_token:,} bytes per token (fp32), {costs.kv_ratio:.4f} of the Transformer's",
        f"training tokens: {tokens:,} in {steps:,} steps; epochs: {epochs}",
        f"corpus: {dataset.fingerprint}",
    ]
    print(to_toml(config))
    print("\n".join(f"# {line}" for line in lines))
