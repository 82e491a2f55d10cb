"""The training loop of one process, and what surrounds it.

`train` checks everything before it writes anything, then trains, and ends with an export. `_fit` is the loop itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from resformer.evaluate.loading import resolve_device
from resformer.evaluate.loss import Interrupted, evaluate
from resformer.train import checkpoint, rundir
from resformer.train.build import autocast, build_model, model_config, numerics
from resformer.train.checkpoint import TrainState
from resformer.train.checks import effective
from resformer.train.config import Config
from resformer.train.environment import versions
from resformer.train.export import export_run
from resformer.train.failure import RunFailure, Stopped
from resformer.train.loss import accumulate
from resformer.train.memory import keep_freed_memory
from resformer.train.metrics import MetricsLog
from resformer.train.optim import build_optimizer, clip_gradients, set_learning_rate
from resformer.train.progress import Reporter
from resformer.train.setup import Parts, hold, last_validation, open_data, record_resume, restore, show_plan, start
from resformer.train.signals import StopRequest
from resformer.train.track import Trackers, check_trackers


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What a run left: its directory, and its last validation as `{domain: {"loss", "bits_per_byte", "tokens"}}`.

    The domain "all" is the unweighted mean of the others.
    """

    out: Path
    final_validation: dict[str, dict[str, float]]


def train(
    config: Config,
    out: Path | str,
    *,
    resume: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    command: Sequence[str] | None = None,
) -> RunResult:
    """Train one model into the run directory `out`.

    Args:
        config: the whole configuration, of a recipe or `configure`.
        out: the run directory; must be new or empty unless `resume` or `overwrite`.
        resume: go on from the last checkpoint in `out`; on the CPU the result equals an uninterrupted run's to the bit.
        overwrite: start anew in `out`; only files that a run wrote are removed.
        dry_run: print the configuration and what the run costs, write nothing.
        command: the command line, for the record.

    Raises:
        UserError: a mistake in configuration, data or directory; nothing has been written or lost.
        RunFailure: the run broke (loss not finite, disk full); the last checkpoint is intact.
        Stopped: after SIGTERM or SIGINT, with a checkpoint written (exit code 143 or 130).
    """
    out = Path(out)
    config, notes = effective(config)
    check_trackers(config)
    rundir.check_start(out, resume=resume, overwrite=overwrite)
    device = resolve_device(config.train.device)
    if device.type == "cpu":
        keep_freed_memory()
    with numerics(config, device):
        dataset, sampler = open_data(config)
        described = model_config(
            config,
            vocab_size=dataset.vocab_size,
            eos_token_id=dataset.eos_token_id,
            bos_token_id=dataset.bos_token_id,
        )
        if dry_run:
            show_plan(config, described, dataset, sampler, notes)
            return RunResult(out=out, final_validation={})
        model = build_model(config, described, device)
        optimizer = build_optimizer(model, config.optim)
        parts = Parts(
            config=config,
            out=out,
            device=device,
            dataset=dataset,
            sampler=sampler,
            model=model,
            optimizer=optimizer,
        )
        state = TrainState(data_fingerprint=dataset.fingerprint, versions=versions())
        sampler.batch(1)  # what cannot be read stops us before an older run is removed
        with hold(out, resume=resume, overwrite=overwrite) as log:
            if resume:
                state = restore(parts, state, notes)
            else:
                start(parts, described, command, overwrite=overwrite)
            return _run(parts, state, log, notes, resume=resume, command=command)


def _run(
    parts: Parts,
    state: TrainState,
    log: MetricsLog,
    notes: list[str],
    *,
    resume: bool,
    command: Sequence[str] | None,
) -> RunResult:
    """Train, then export, in a run directory that the caller holds."""
    steps, out, target = parts.config.train.steps, parts.out, parts.out / rundir.MODEL
    complete = state.step == steps and not state.pending_validation and target.exists()
    every_seconds = parts.config.track.log_every_seconds
    try:
        with (
            Reporter(steps=steps, done=state.step, every_seconds=every_seconds) as reporter,
            StopRequest() as stop,
        ):
            for note in notes:
                reporter.note(f"note: {note}")
            checkpoint.clean(parts.checkpoints)
            if not log.cut(state.metrics_bytes):
                reporter.note(f"note: {log.path} is shorter than the checkpoint remembers; rows are missing")
            if resume and not complete:
                record_resume(parts, state, command)
            with closing(Trackers(parts.config, out, state.step, reporter.note)) as trackers:
                log.listeners.append(trackers)
                _fit(parts, state, log, reporter, stop)
            if not complete:
                export_run(out, overwrite=True, report=reporter.note)
    except OSError as error:
        where = error.filename or out
        raise RunFailure(f"{where}: {error.strerror or error}; {checkpoint.kept(parts.checkpoints)}") from error
    _, final = last_validation(out)
    reporter.note(f"done: {steps} steps, validation loss {final['all']['loss']:.4f}; model in {target}")
    return RunResult(out=out, final_validation=final)


def _fit(parts: Parts, state: TrainState, log: MetricsLog, reporter: Reporter, stop: StopRequest) -> None:
    """Train from `state` to the last step. A state that is not finite never reaches a checkpoint."""
    config, optimizer = parts.config, parts.optimizer
    steps, tokens_per_step = config.train.steps, config.train.batch_size * config.data.sequence_length
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if state.pending_validation:
        state = _validate(parts, state, log, reporter, stop)
        if state.step == steps and not state.pending_validation:
            _save(parts, state, log)
    while state.step < steps and not stop.requested:
        started, step = time.perf_counter(), state.step + 1
        tokens_BT1 = torch.from_numpy(parts.sampler.batch(step).tokens).to(parts.device, non_blocking=True)
        lr = set_learning_rate(optimizer, config.optim, step=step, steps=steps)
        with autocast(config, parts.device):
            loss = accumulate(parts.model, tokens_BT1, micro_batch_size=config.micro_batch_size)
        norm = clip_gradients(parameters, config.optim.grad_clip)
        loss_value, norm_value = _finite(parts, step, loss, norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds = time.perf_counter() - started
        state = replace(state, step=step, tokens=state.tokens + tokens_per_step)
        row: dict[str, Any] = {
            "split": "train",
            "step": step,
            "tokens": state.tokens,
            "loss": loss_value,
            "lr": lr,
            "grad_norm": norm_value,
            "tokens_per_second": tokens_per_step / seconds,
            "seconds": seconds,
        }
        log.write(row)
        reporter.step(step, loss=loss_value, tokens_per_second=row["tokens_per_second"])
        if step % config.train.validate_every == 0 or step == steps:
            state = _validate(parts, state, log, reporter, stop)
        if step % config.train.checkpoint_every == 0 or step == steps:
            _save(parts, state, log)
    if stop.requested:
        if checkpoint.latest_step(parts.checkpoints) != state.step:
            _save(parts, state, log)
        reporter.note(f"{stop.name}: stopped after step {state.step}, checkpoint written; go on with --resume")
        raise Stopped(f"stopped after step {state.step}", number=stop.number)


def _finite(parts: Parts, step: int, loss: Tensor, norm: Tensor) -> tuple[float, float]:
    loss_value, norm_value = torch.stack([loss.detach().float(), norm.detach().float()]).tolist()
    if math.isfinite(loss_value) and math.isfinite(norm_value):
        return loss_value, norm_value
    raise RunFailure(
        f"step {step}: loss is {loss_value}, norm of the gradient {norm_value}; stopped before the weights changed, "
        f"{checkpoint.kept(parts.checkpoints)}; start again with a lower optim.lr"
    )


def _validate(parts: Parts, state: TrainState, log: MetricsLog, reporter: Reporter, stop: StopRequest) -> TrainState:
    """Score the validation text and write the rows; when a stop comes in between, leave it to the resumed run."""
    config = parts.config
    try:
        with autocast(config, parts.device):
            scores = evaluate(
                parts.model,
                parts.dataset,
                sequence_length=config.data.sequence_length,
                batch_size=config.micro_batch_size,
                max_tokens=config.train.validation_tokens,
                device=parts.device,
                stop=stop,
            )
    except Interrupted:
        return replace(state, pending_validation=True)
    if not math.isfinite(scores["loss"]):
        raise RunFailure(
            f"step {state.step}: validation loss is {scores['loss']}; {checkpoint.kept(parts.checkpoints)}; start "
            "again with a lower optim.lr"
        )
    mean = {
        "loss": scores["loss"],
        "bits_per_byte": scores["bits_per_byte"],
        "tokens": sum(d["tokens"] for d in scores["domains"].values()),
    }
    rows: list[dict[str, Any]] = [
        {"split": "validation", "domain": domain, "step": state.step, **values, "train_tokens": state.tokens}
        for domain, values in [*scores["domains"].items(), ("all", mean)]
    ]
    lambdas = parts.model.lambda_map()
    if lambdas:
        rows.append({"split": "lambdas", "step": state.step, **lambdas})
    log.write(*rows)
    reporter.note(f"step {state.step}: validation loss {mean['loss']:.4f}, {mean['bits_per_byte']:.4f} bits per byte")
    return replace(state, pending_validation=False)


def _save(parts: Parts, state: TrainState, log: MetricsLog) -> None:
    state = replace(state, metrics_bytes=log.sync())
    checkpoint.save(parts.checkpoints, state, parts.model, parts.optimizer, keep_last=parts.config.train.keep_last)
