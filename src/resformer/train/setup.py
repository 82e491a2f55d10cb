"""What comes before the first step: data, run directory, checkpoint. Nothing here trains."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from resformer.data import open_dataset
from resformer.data.sampler import check_weights
from resformer.errors import UserError
from resformer.models import ResFormerConfig, ResFormerForCausalLM
from resformer.models.accounting import account
from resformer.parallel import Ranks
from resformer.train import checkpoint, imports, rundir, tensors
from resformer.train.checkpoint import TrainState
from resformer.train.config import Config
from resformer.train.configure import to_toml, to_tree
from resformer.train.distill import Source, Teacher
from resformer.train.environment import environment, versions
from resformer.train.estimate import estimate_memory, memory_line, time_line
from resformer.train.files import put_back, write_atomic, write_json
from resformer.train.initial import local
from resformer.train.metrics import MetricsLog, read_rows


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What one run is made of; none of it changes place while the run goes."""

    config: Config
    out: Path
    ranks: Ranks
    dataset: Any
    sampler: Any
    model: ResFormerForCausalLM
    optimizers: Sequence[torch.optim.Optimizer]
    source: Source

    @property
    def teacher(self) -> Teacher | None:
        """Whom to distil from."""
        how, model = self.config.uptrain, self.source.model
        return Teacher(model=model, share=how.kl, temperature=how.temperature) if how.kl > 0 else None

    @property
    def checkpoints(self) -> Path:
        return self.out / rundir.CHECKPOINTS

    @property
    def micro_batch_size(self) -> int:
        """Sequences of a forward pass of one process."""
        return micro_batch_size(self.config, self.ranks.size)


def micro_batch_size(config: Config, processes: int) -> int:
    """Sequences of a forward pass of one process; none given = all that a process has.

    Raises:
        UserError: the processes cannot all have the same number of them.
    """
    batch, micro = config.train.batch_size, config.train.micro_batch_size
    if batch % processes:
        fitting = [n for n in range(1, min(processes, batch) + 1) if batch % n == 0]
        raise UserError(
            f"train.batch_size {batch} cannot be shared by {processes} processes; start {fitting[-1]}, or change it"
        )
    share = batch // processes
    if micro is None or share % micro == 0:
        return micro or share
    near = max(d for d in range(1, min(micro, share) + 1) if share % d == 0)
    raise UserError(
        f"train.micro_batch_size {micro} does not divide the {share} sequences that each of {processes} processes has "
        f"of train.batch_size {batch}; {near} would"
    )


def open_data(config: Config, *, verify: bool = True) -> tuple[Any, Any]:
    """The corpus, and the order of its samples; `verify` False leaves the checksums to another process.

    Raises:
        UserError: there is none, or it does not fit.
    """
    if config.data.dir is None:
        raise UserError(
            "data.dir is not set; pass --data DIR (`resformer data prepare --input embedded --out DIR` makes one)"
        )
    dataset = open_dataset(config.data.dir, verify=config.data.verify if verify else "none")
    if config.data.weights is not None:
        check_weights(config.data.weights, dataset.domains, name="data.weights")
    sampler = dataset.sampler(
        sequence_length=config.data.sequence_length,
        batch_size=config.train.batch_size,
        seed=config.train.seed,
        weights=config.data.weights,
        packing=config.data.packing,
        document_mask=config.data.document_mask,
    )
    for domain in dataset.domains:  # complains now, not at the first validation, when one has no text
        dataset.validation(
            domain, sequence_length=config.data.sequence_length, max_tokens=config.train.validation_tokens
        )
    return dataset, sampler


def check_alike(config: Config, dataset: Any, ranks: Ranks) -> None:
    """See that all processes were given the same configuration and corpus; where a corpus lies may differ.

    Raises:
        UserError: in the first process, and Elsewhere in the others: something differs, which it names.
    """
    if ranks.size == 1:
        return
    own = {f"{s}.{name}": value for s, table in to_tree(config).items() for name, value in table.items()}
    own |= {"data.dir": f"the corpus {dataset.fingerprint[:12]}"}
    given = ranks.gather(own)
    for rank, other in enumerate(given):
        if different := [name for name in given[0] if given[0][name] != other[name]]:
            said = ", ".join(
                f"{name} is {given[0][name]!r} in process 0 and {other[name]!r} in {rank}" for name in different
            )
            ranks.fail(UserError(f"the processes were not started alike: {said}; give all of them the same"))


def check_epochs(config: Config, sampler: Any, state: TrainState = TrainState()) -> None:  # noqa: B008  (frozen)
    """Keep to data.max_epochs, in a run that stands at `state`.

    Raises:
        UserError: the run would go through a domain more often.
    """
    most, left = config.data.max_epochs, config.train.steps - state.step
    if most is None:
        return
    epochs = sampler.epochs(left, samples=state.samples)
    domain = max(epochs, key=lambda name: epochs[name])
    if epochs[domain] <= most:
        return
    fitting = min(left, int(left * most / epochs[domain]) + 1)
    # The mixture is exact to within a sample only.
    while fitting and max(sampler.epochs(fitting, samples=state.samples).values()) > most:
        fitting -= 1
    shorter = f"set train.steps to {state.step + fitting} or fewer, " if fitting else ""
    raise UserError(
        f"the run would go {epochs[domain]:.4g} times through domain '{domain}', data.max_epochs is {most:g}; {shorter}"
        "give the domain a lower weight (data.weights), prepare more text of it, or raise data.max_epochs (none = no "
        "limit)"
    )


def epochs_note(config: Config, sampler: Any, state: TrainState) -> str:
    """A line on the domains that the run, which stands at `state`, goes through more than once; "" for none."""
    epochs = sampler.epochs(config.train.steps - state.step, samples=state.samples)
    again = {name: times for name, times in epochs.items() if times > 1}
    if not again:
        return ""
    times = ", ".join(f"{name} {count:.2f}" for name, count in again.items())
    return f"domains that are repeated, in epochs of the whole run: {times} (data.max_epochs sets a limit)"


def _counted(sampler: Any, tokens: int) -> str:
    padding, counted = sampler.shares()
    return f"padding {padding:.2%}, targets that count about {round(counted * tokens):,} ({counted:.2%})"


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
    facts = environment(command=command, device=parts.ranks.device, dataset=dataset, processes=parts.ranks.size)
    facts[imports.KEY] = imports.recorded()
    facts["accounting"] = account(described, sequence_length=parts.config.data.sequence_length).asdict()
    write_json(out / rundir.ENVIRONMENT, facts)
    (out / rundir.TOKENIZER).mkdir(exist_ok=True)
    wanted = re.compile("|".join(rundir.KEPT_FILES))
    places = [Path(dataset.tokenizer_dir)]
    if parts.config.model.from_init and parts.config.train.init_from is not None:
        places.append(local(parts.config.train.init_from))  # its chat template, and how it generates, stay with it
    for path in (path for place in places for path in sorted(place.iterdir())):
        if wanted.fullmatch(path.name):
            shutil.copy(path, out / rundir.TOKENIZER / path.name)


def restore(
    parts: Parts, fresh: TrainState, notes: list[str], *, change: bool = False
) -> tuple[TrainState, dict[str, tuple[Any, Any]]]:
    """Bring model and optimizers to the last checkpoint; no file changes. Return where the run stands,
    and the keys that the rest of it is to have other values of: path -> (before, now).
    """
    directory, state, more, changed = parts.ranks.on_first(lambda: _found(parts, fresh, change=change))
    notes += more
    group = parts.ranks.saving
    found = parts.ranks.together(lambda: tensors.described(directory))
    tensors.read_everything(directory, parts.model, parts.optimizers, found, group)
    notes.append(f"resumed from step {state.step}")
    return replace(state, versions=fresh.versions), changed


def _found(
    parts: Parts, fresh: TrainState, *, change: bool
) -> tuple[Path, TrainState, list[str], dict[str, tuple[Any, Any]]]:
    """The checkpoint to go on from, its state, notes and changed keys."""
    config, out = parts.config, parts.out
    notes, changed = rundir.check_same(out, config, change=change)
    put_back(parts.checkpoints)  # the run is held: nobody is saving
    directory, state = checkpoint.find(parts.checkpoints, report=notes.append)
    read_rows(out / rundir.METRICS)  # complains now, not when the run is exported
    if state.data_fingerprint != fresh.data_fingerprint:
        raise UserError(
            f"--resume {out}: the run was trained on the corpus {state.data_fingerprint[:12]}, "
            f"{config.data.dir} is {fresh.data_fingerprint[:12]}; give the same corpus or start another run"
        )
    if state.step > config.train.steps or (state.step == config.train.steps and "train.steps" in changed):
        raise UserError(
            f"--resume {out}: the run is at step {state.step}, train.steps is {config.train.steps} now; set it higher"
        )
    versions_differ = [
        f"{k} {v} (now {fresh.versions.get(k)})" for k, v in state.versions.items() if fresh.versions.get(k) != v
    ]
    if versions_differ:
        notes.append(f"the checkpoint was written with {', '.join(versions_differ)}: the last bits may differ")
    if state.processes != parts.ranks.size:
        notes.append(
            f"the checkpoint was written by {state.processes} process{'es' * (state.processes > 1)}, now there "
            f"{'are' if parts.ranks.size > 1 else 'is'} {parts.ranks.size}: the same batches, the last bits may differ"
        )
    finished = state.step == config.train.steps and not state.pending_validation
    if finished and last_validation(out)[0] != state.step:
        raise UserError(
            f"--resume {out}: the run is finished, but its last validation is missing from "
            f"{out / rundir.METRICS}; put the file back, or start anew with --overwrite"
        )
    return directory, state, notes, changed


def last_validation(out: Path) -> tuple[int, dict[str, dict[str, float]]]:
    """Step and scores by domain of the last validation that metrics.jsonl has; step 0 if there is none."""
    rows = [row for row in read_rows(out / rundir.METRICS) if row.get("split") == "validation"]
    last = max((row["step"] for row in rows if row["domain"] == "all"), default=0)
    wanted = ("loss", "bits_per_byte", "tokens")
    return last, {row["domain"]: {key: row[key] for key in wanted} for row in rows if row["step"] == last}


def record_resume(
    parts: Parts, state: TrainState, command: Sequence[str] | None, changed: Mapping[str, tuple[Any, Any]]
) -> None:
    """Add to environment.json where and with what the run went on, and give config.toml the keys that changed."""
    path = parts.out / rundir.ENVIRONMENT
    try:
        facts = dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise UserError(f"{path} cannot be used ({error}); put back what the run wrote there") from None
    entry = {
        "step": state.step,
        "command": list(command) if command is not None else None,
        "processes": parts.ranks.size,
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "changed": {path: {"before": before, "now": now} for path, (before, now) in changed.items()},
    }
    write_json(path, {**facts, "resumed": [*facts.get("resumed", []), entry]})
    if changed:
        write_atomic(parts.out / rundir.CONFIG, to_toml(parts.config))


def show_plan(config: Config, described: ResFormerConfig, data: tuple[Any, Any] | None, notes: list[str]) -> None:
    """What `--dry-run` prints: the configuration, then costs as comments, so that the output is a valid config file.
    data: the corpus and the order of its samples, if there is a corpus yet.
    """
    costs = account(described, sequence_length=config.data.sequence_length)
    steps, tokens = config.train.steps, config.train.steps * config.train.batch_size * config.data.sequence_length
    said, corpus = "", f"none given; a vocabulary of {described.vocab_size:,}, the paper's, is assumed"
    if data is not None:
        dataset, sampler = data
        epochs = ", ".join(f"{domain} {times:.2f}" for domain, times in sampler.epochs(steps).items())
        said = f"; epochs: {epochs}" + (f"; {_counted(sampler, tokens)}" if sampler.masked else "")
        corpus = dataset.fingerprint
    lines = [
        *(f"note: {note}" for note in notes),
        f"parameters: {costs.parameters:,} ({json.dumps(costs.parameters_by_group)})",
        f"FLOPs: {costs.flops_per_token:,} per token forward, {3 * costs.flops_per_token * tokens:.3g} for the run",
        memory_line(estimate_memory(config, described), config.micro_batch_size),
        time_line(3 * costs.flops_per_token * tokens),
        f"KV cache: {costs.kv_bytes_per_token:,} bytes per token (fp32), {costs.kv_ratio:.4f} of the Transformer's",
        f"training tokens: {tokens:,} in {steps:,} steps{said}",
        f"corpus: {corpus}",
    ]
    print(to_toml(config))
    print("\n".join(f"# {line}" for line in lines))
