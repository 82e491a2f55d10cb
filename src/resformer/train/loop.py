"""One run from its configuration to its export.

`train` checks everything before it writes anything, then trains (`fit.py`), and ends with an export. With torchrun,
every process of the run comes here.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from resformer.convert.morph import morph
from resformer.errors import UserError
from resformer.evaluate.loading import resolve_device
from resformer.models import ResFormerConfig, ResFormerForCausalLM
from resformer.models.accounting import account
from resformer.parallel import Layout, Ranks, parallelize, processes
from resformer.parallel.ranks import lost_contact
from resformer.train import checkpoint, rundir
from resformer.train.adopt import adopted, check_tokenizer
from resformer.train.build import build_model, model_config, numerics
from resformer.train.checkpoint import TrainState
from resformer.train.checks import effective
from resformer.train.config import Config
from resformer.train.distill import Source, check_source, distilled_losses, open_source
from resformer.train.environment import versions
from resformer.train.export import export_run
from resformer.train.failure import RunFailure, Stopped
from resformer.train.fit import Fit
from resformer.train.initial import load_initial
from resformer.train.loss import batch_losses
from resformer.train.memory import keep_freed_memory
from resformer.train.metrics import MetricsLog, NoLog, read_rows
from resformer.train.optim import build_optimizers, watched
from resformer.train.progress import Reporter, Silent
from resformer.train.recovery import recovery_of
from resformer.train.setup import (
    Parts,
    check_alike,
    check_epochs,
    hold,
    last_validation,
    micro_batch_size,
    open_data,
    record_resume,
    restore,
    show_plan,
    start,
)
from resformer.train.signals import StopRequest
from resformer.train.track import Trackers, check_trackers
from resformer.train.usage import Usage

PAPER_VOCABULARY = 50_277  # of GPT-NeoX


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
    on_change: Literal["refuse", "continue"] = "refuse",
    command: Sequence[str] | None = None,
) -> RunResult:
    """Train one model into the run directory `out`.

    Args:
        config: the whole configuration, of a recipe or `configure`.
        out: the run directory; must be new or empty unless `resume` or `overwrite`.
        resume: go on from the last checkpoint in `out`, from the first step if there is none yet; on the CPU the
            result equals an uninterrupted run's to the bit.
        overwrite: start anew in `out`; only files that a run wrote are removed.
        dry_run: print the configuration and what the run costs, write nothing.
        on_change: with `resume`, what a changed horizon, batch or optimizer setting means: "refuse", or "continue" with
            the new values from the checkpoint on (the schedule is that of the new horizon at the steps still to come,
            the data go on with the first sample not yet seen).
        command: the command line, for the record.

    Raises:
        UserError: a mistake in configuration, data or directory; nothing has been written or lost.
        RunFailure: the run broke (loss not finite, disk full, a process lost); the last checkpoint is intact.
        Stopped: after SIGTERM or SIGINT, with a checkpoint written (exit code 143 or 130).
        Elsewhere: in all processes but the one that raises one of the above.
    """
    out = Path(out)
    config, notes = effective(adopted(config, out if resume else None))
    check_trackers(config)
    if on_change != "refuse" and not resume:
        raise UserError(f"--on-change {on_change} belongs to --resume; give that as well, or leave it away")
    device = resolve_device(config.train.device)
    if dry_run:
        rundir.check_start(out, resume=resume, overwrite=overwrite)
        return _dry_run(config, out, notes)
    with processes(device, timeout_seconds=config.parallel.timeout_seconds) as ranks:
        try:
            ranks.on_first(lambda: rundir.check_start(out, resume=resume, overwrite=overwrite))
            if resume and ranks.on_first(lambda: rundir.nothing_saved(out, config)):
                notes.append("no checkpoint was written yet: the run starts from its first step")
                resume, overwrite = False, True
            if ranks.device.type == "cpu":
                keep_freed_memory()
            with numerics(config, ranks.device):
                parts, described = _parts(config, out, ranks, notes, resume=resume)
                held = ranks.together(lambda: hold(out, resume=resume, overwrite=overwrite) if ranks.first else NoLog())
                with held as log:
                    state = TrainState(
                        data_fingerprint=parts.dataset.fingerprint,
                        versions=versions(),
                        pending_validation=config.uptrain.source is not None,  # of the model as it starts
                    )
                    changed: dict[str, tuple[Any, Any]] = {}
                    if resume:
                        state, changed = restore(parts, state, notes, change=on_change == "continue")
                        check_epochs(config, parts.sampler, state)
                    else:
                        ranks.on_first(lambda: start(parts, described, command, overwrite=overwrite))
                    return _run(parts, described, state, log, notes, resume=resume, command=command, changed=changed)
        except RuntimeError as error:
            if ranks.size == 1 or isinstance(error, RunFailure) or not (said := lost_contact(error)):
                raise
            raise RunFailure(
                f"process {ranks.rank} of {ranks.size} lost contact with another one ({said}); "
                f"{checkpoint.kept(out / rundir.CHECKPOINTS)}; start all of them again with --resume"
            ) from error


def _dry_run(config: Config, out: Path, notes: list[str]) -> RunResult:
    if config.data.dir is None:
        check_source(config, model_config(config, vocab_size=config.model.vocab_size or PAPER_VOCABULARY))
        show_plan(config, model_config(config, vocab_size=PAPER_VOCABULARY), None, notes)
        return RunResult(out=out, final_validation={})
    dataset, sampler = open_data(config)
    check_epochs(config, sampler)
    check_source(config, _described(config, dataset))
    notes += check_tokenizer(config, dataset)
    show_plan(config, _described(config, dataset), (dataset, sampler), notes)
    return RunResult(out=out, final_validation={})


def _described(config: Config, dataset: Any) -> ResFormerConfig:
    return model_config(
        config, vocab_size=dataset.vocab_size, eos_token_id=dataset.eos_token_id, bos_token_id=dataset.bos_token_id
    )


def _parts(config: Config, out: Path, ranks: Ranks, notes: list[str], *, resume: bool) -> tuple[Parts, ResFormerConfig]:
    """Corpus, model and optimizers, in every process. What can go wrong in one alone comes before the first exchange,
    in which the others would wait for it.
    """

    def alone() -> tuple[Layout, Any, Any, ResFormerConfig, ResFormerForCausalLM, Any]:
        layout = Layout.of(ranks.size, shard=config.parallel.shard, replicate=config.parallel.replicate)
        micro_batch_size(config, ranks.size)
        dataset, sampler = open_data(config, verify=ranks.local_rank == 0)
        if not resume:
            notes.extend(check_tokenizer(config, dataset))
        described = _described(config, dataset)
        model = build_model(config, described, ranks.device)
        if config.train.init_from is not None and not resume:
            load_initial(model, config.train.init_from, report=notes.append)
        if not resume:
            check_epochs(config, sampler)
        if config.uptrain.morph_steps:
            morph(model, 0.0)  # complains where there is nothing to morph
        sampler.batch(1)  # what cannot be read stops us before an older run is removed
        # For the score before step 1 alone a run that is past it needs the source no more.
        past = resume and min(checkpoint.steps(out / rundir.CHECKPOINTS), default=0) > 0
        wanted = config.uptrain.source is not None and (config.uptrain.kl > 0 or not past)
        source = open_source(config, described, ranks.device) if wanted else None
        return layout, dataset, sampler, described, model, source

    layout, dataset, sampler, described, model, source = ranks.together(alone)
    check_alike(config, dataset, ranks)
    parallelize(
        model,
        ranks,
        layout,
        checkpointing=config.train.checkpointing,
        compile=config.train.compile,
        methods=(batch_losses, distilled_losses),
    )
    optimizers = ranks.together(lambda: build_optimizers(model, config.optim))
    ranks.together(lambda: watched(optimizers, config.track.gradient_norms))  # complains before anything is written
    parts = Parts(
        config=config,
        out=out,
        ranks=ranks,
        dataset=dataset,
        sampler=sampler,
        model=model,
        optimizers=optimizers,
        source=Source(model=source),
    )
    return parts, described


def _run(
    parts: Parts,
    described: ResFormerConfig,
    state: TrainState,
    log: MetricsLog | NoLog,
    notes: list[str],
    *,
    resume: bool,
    command: Sequence[str] | None,
    changed: dict[str, tuple[Any, Any]],
) -> RunResult:
    """Train, then export, in a run directory that the caller holds."""
    config, out, target, ranks = parts.config, parts.out, parts.out / rundir.MODEL, parts.ranks
    steps, first = config.train.steps, parts.ranks.first
    complete = ranks.on_first(lambda: state.step == steps and not state.pending_validation and target.exists())
    shown = Reporter(steps=steps, done=state.step, every_seconds=config.track.log_every_seconds) if first else Silent()
    costs = account(described, sequence_length=config.data.sequence_length)
    usage = Usage(ranks.device, costs.flops_per_token, ranks.size, config.track.peak_flops)
    try:
        with shown as reporter, StopRequest() as stop:
            for note in notes:
                reporter.note(f"note: {note}")
            if first:
                checkpoint.clean(parts.checkpoints)
            if not log.cut(state.metrics_bytes):
                reporter.note(f"note: {log.path} is shorter than the checkpoint remembers; rows are missing")
            if resume and not complete and first:
                record_resume(parts, state, command, changed)
            trackers = Trackers(config, out, state.step, reporter.note) if first else None
            with closing(trackers) if trackers is not None else nullcontext():
                if trackers is not None:
                    log.listeners.append(trackers)
                Fit(parts, log, reporter, stop, usage).run(state)
            if not complete:
                ranks.on_first(lambda: export_run(out, overwrite=True, report=reporter.note))
            _, final = ranks.on_first(lambda: last_validation(out))
            if first and (found := recovery_of(read_rows(out / rundir.METRICS), costs.asdict())):
                reporter.note(found.line())
            reporter.note(f"done: {steps} steps, validation loss {final['all']['loss']:.4f}; model in {target}")
    except OSError as error:
        where = error.filename or out
        raise RunFailure(f"{where}: {error.strerror or error}; {checkpoint.kept(parts.checkpoints)}") from error
    return RunResult(out=out, final_validation=final)


__all__ = ["RunFailure", "RunResult", "Stopped", "train"]
