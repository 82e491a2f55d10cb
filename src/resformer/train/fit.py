"""The steps of a run: batch, gradients, update, and what is written after them."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from resformer.convert.morph import morph, share_after
from resformer.evaluate.loss import Interrupted, evaluate
from resformer.models.groups import group_of
from resformer.parallel.wrap import gathered, settle
from resformer.train import checkpoint
from resformer.train.build import autocast
from resformer.train.checkpoint import TrainState
from resformer.train.failure import RunFailure, Stopped
from resformer.train.feed import Feeder
from resformer.train.incident import is_spike, running_mean, write_incident
from resformer.train.loss import accumulate
from resformer.train.metrics import MetricsLog, NoLog, score_rows
from resformer.train.optim import (
    clip_gradients,
    finite,
    gradient_norms,
    norms_by_group,
    parameters_of,
    set_learning_rate,
    watched,
)
from resformer.train.progress import Reporter, Silent
from resformer.train.saver import Saver
from resformer.train.setup import Parts, epochs_note
from resformer.train.signals import StopRequest, name_of
from resformer.train.usage import Usage


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a step leaves on the device, for whoever wants to read it: reading waits for the device.

    `tokens` are those of all batches so far, batch_size x sequence_length each, whether their targets count or not;
    `loss_tokens` the targets of this step that do, None where all do.
    """

    step: int
    tokens: int
    loss_tokens: int | None
    first_sample: int
    lr: float
    numbers: Tensor
    """Loss and norm of the gradient; the KL divergence from the source, where there is a teacher."""
    norms: Tensor
    """Of each parameter's gradient."""
    started: float


def reads_late(device: torch.device) -> bool:
    """Whether a step's numbers are read while the next one runs, so that the device never waits for the host."""
    return device.type != "cpu"


class Fit:
    """Trains from one state to another. A state that is not finite never reaches a checkpoint."""

    def __init__(
        self, parts: Parts, log: MetricsLog | NoLog, reporter: Reporter | Silent, stop: StopRequest, usage: Usage
    ) -> None:
        config = parts.config
        self.parts, self.config, self.ranks = parts, config, parts.ranks
        self.log, self.reporter, self.stop, self.usage = log, reporter, stop, usage
        self.steps, self.tokens_per_step = config.train.steps, config.train.batch_size * config.data.sequence_length
        self.parameters = parameters_of(parts.optimizers)
        self.watched = watched(parts.optimizers, config.track.gradient_norms)
        self.guarded = config.train.skip_limit > 0 or config.train.spike_factor is not None
        self.late = reads_late(parts.ranks.device)
        self.unread: Reading | None = None
        self.read_at = 0.0
        self.saver = Saver(
            parts.checkpoints,
            parts.ranks,
            keep_last=config.train.keep_last,
            keep_every=config.train.keep_every,
            background=config.train.async_save,
        )

    def run(self, state: TrainState) -> TrainState:
        """Train to the last step.

        Raises:
            RunFailure: numbers that are not finite, or something could not be written.
            Stopped: a signal came; there is a checkpoint of the step after which it was honoured.
        """
        if state.step:
            self.saver.saved = state.step  # it came from there
        if state.pending_validation:
            state = self.validate(state)
            if state.step == self.steps and not state.pending_validation:
                self.save(state, at_once=True)
        if state.step < self.steps and (note := epochs_note(self.config, self.parts.sampler, state)):
            self.reporter.note(f"note: {note}")
        signal = self.ranks.agree(self.stop.number)[0]
        with Feeder(self.parts.sampler, self.ranks, self.config.train.batch_size) as feeder:
            while state.step < self.steps and not signal:
                state = self.step(state, feeder)
                last, train = state.step == self.steps, self.config.train
                validating, saving = state.step % train.validate_every == 0, state.step % train.checkpoint_every == 0
                if validating or saving or last:
                    self.read()
                if validating or last:
                    state = self.validate(state)
                if saving or last:
                    self.save(state, at_once=last)
                signal, failed = self.ranks.agree(self.stop.number, int(self.saver.failed))
                if failed:
                    self.saver.finish()
        if signal:
            self.read()
            if self.saver.saved != state.step:
                self.save(state, at_once=True)
            self.saver.finish()
            self.reporter.note(
                f"{name_of(signal)}: stopped after step {state.step}, checkpoint written; go on with --resume"
            )
            raise Stopped(f"stopped after step {state.step}", number=signal)
        return state

    def step(self, state: TrainState, feeder: Feeder) -> TrainState:
        """One optimizer step."""
        started, step, train = time.perf_counter(), state.step + 1, self.config.train
        torch.manual_seed(draw_seed(train.seed, step, self.ranks.rank))
        rows = feeder.take(state.samples, more=step < self.steps)
        lr = set_learning_rate(self.parts.optimizers, self.config.optim, step=step, steps=self.steps)
        if morphing := self.config.uptrain.morph_steps:
            morph(self.parts.model, share_after(step, morphing))
        with autocast(self.config, self.ranks.device):
            loss = accumulate(
                self.parts.model,
                rows.tokens,
                micro_batch_size=self.parts.micro_batch_size,
                mask_BT=rows.mask,
                positions_BT=rows.positions,
                count=rows.count,
                ranks=self.ranks,
                teacher=self.parts.teacher,
            ).reshape(-1)
        norms = gradient_norms(self.parameters)
        norm = clip_gradients(self.parameters, norms, self.config.optim.grad_clip)
        reading = Reading(
            step=step,
            tokens=state.tokens + self.tokens_per_step,
            loss_tokens=rows.count,
            first_sample=state.samples,
            lr=lr,
            numbers=torch.stack([part.detach().float() for part in (loss[0], norm, *loss[1:])]),
            norms=norms,
            started=started,
        )
        skipped, norm_mean = self.judge(reading, state) if self.guarded else (False, 0.0)
        if not skipped:
            for optimizer in self.parts.optimizers:
                optimizer.step()
        for optimizer in self.parts.optimizers:
            optimizer.zero_grad(set_to_none=True)
        if not skipped:
            self.read()  # of the step before
            self.unread = reading
        if not self.late:
            self.read()
        return replace(
            state,
            step=step,
            tokens=reading.tokens,
            samples=state.samples + train.batch_size,
            norm_mean=norm_mean,
            skipped=state.skipped + skipped,
        )

    def read(self) -> None:
        """Write the row of the step that has not been read yet, if there is one.

        `tokens` and `tokens_per_second` count batch_size x sequence_length a step, whatever of it is padding or the
        first token of a document; `loss_tokens` are the targets that count, where some do not.
        """
        reading, self.unread = self.unread, None
        if reading is None:
            return
        loss, norm, *kl = reading.numbers.tolist()
        now = time.perf_counter()
        seconds, self.read_at = now - max(reading.started, self.read_at), now
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self.broken(reading, loss, norm)
        speed = self.tokens_per_step / seconds
        row: dict[str, Any] = {
            "split": "train",
            "step": reading.step,
            "tokens": reading.tokens,
            "loss": loss,
            "lr": reading.lr,
            "grad_norm": norm,
            "tokens_per_second": speed,
            "seconds": seconds,
            **self.usage.fields(speed),
        }
        if kl:
            row["kl"] = kl[0]
        if reading.loss_tokens is not None:
            row["loss_tokens"] = reading.loss_tokens
        if self.watched:
            norms = reading.norms.tolist()
            row["gradient_norms"] = {name: norms[place] for name, place in self.watched}
        self.log.write(row)
        self.reporter.step(reading.step, loss=loss, tokens_per_second=speed, mfu=row.get("mfu"))

    def judge(self, reading: Reading, state: TrainState) -> tuple[bool, float]:
        """Whether to leave a step out, and the running mean of the norm. Waits for the device."""
        loss, norm = reading.numbers.tolist()[:2]
        train, mean = self.config.train, state.norm_mean
        if math.isfinite(loss) and math.isfinite(norm):
            if not is_spike(norm, mean, factor=train.spike_factor, steps=state.step - state.skipped):
                return False, running_mean(mean, norm)
            kind = "spike"
        else:
            kind = "not finite"
            if state.skipped >= train.skip_limit:
                self.broken(reading, loss, norm, state)
        skip = state.skipped < train.skip_limit
        action = "skipped" if skip else "kept"
        where = self.record(reading, loss, norm, kind=kind, action=action, mean=mean)
        self.reporter.note(
            f"step {reading.step}: {kind} (loss {loss:.4g}, norm of the gradient {norm:.4g}, mean before {mean:.4g}); "
            f"{action}, {state.skipped + skip} of {train.skip_limit} skipped so far; see {where}"
        )
        if not skip:
            return False, running_mean(mean, norm)
        finite = {"loss": loss, "grad_norm": norm} if kind == "spike" else {}
        self.read()
        self.log.write({"split": "skipped", "step": reading.step, "reason": kind, **finite})
        return True, mean

    def broken(self, reading: Reading, loss: float, norm: float, state: TrainState | None = None) -> NoReturn:
        """End the run: what was computed is no number."""
        where = self.record(reading, loss, norm, kind="not finite", action="stopped", mean=0.0)
        limit = self.config.train.skip_limit
        tried = f", {limit} steps were skipped before" if state is not None and limit else ""
        first = reading.first_sample
        self.ranks.fail(
            RunFailure(
                f"step {reading.step}: loss is {loss}, norm of the gradient {norm} (samples {first} to "
                f"{first + self.config.train.batch_size - 1}, see {where}){tried}; "
                f"{checkpoint.kept(self.parts.checkpoints)}; "
                "start again with a lower optim.lr, or let train.skip_limit steps be left out"
            )
        )

    def record(self, reading: Reading, loss: float, norm: float, *, kind: str, action: str, mean: float) -> str:
        """Write an incident's file; return its place."""
        if not self.ranks.first:
            return ""
        first = reading.first_sample
        path = write_incident(
            self.parts.out,
            step=reading.step,
            kind=kind,
            action=action,
            loss=loss,
            norm=norm,
            norm_mean=mean,
            norms=norms_by_group(self.parts.optimizers, reading.norms),
            lr=reading.lr,
            sampler=self.parts.sampler,
            domains=self.parts.dataset.domains,
            samples=range(first, first + self.config.train.batch_size),
        )
        return str(path)

    def validate(self, state: TrainState) -> TrainState:
        """Score the validation text and write the rows; when a stop comes in between, leave it to the resumed run."""
        parts, source = self.parts, None
        try:
            if state.step == 0 and parts.source.model is not None:
                source = self.scores(parts.source.model)
            scores = self.scores(parts.model)
        except Interrupted:
            return replace(state, pending_validation=True)
        finally:
            settle(parts.model)
        if not math.isfinite(scores["loss"]):
            self.ranks.fail(
                RunFailure(
                    f"step {state.step}: validation loss is {scores['loss']}; {checkpoint.kept(parts.checkpoints)}; "
                    "start again with a lower optim.lr"
                )
            )
        rows = score_rows("validation", scores, step=state.step, tokens=state.tokens)
        if parts.teacher is None:
            parts.source.model = None
        if source is not None:
            rows = [*score_rows("source", source, step=state.step, tokens=state.tokens), *rows]
        small = [name for name, parameter in parts.model.named_parameters() if group_of(name, parameter) == "lambdas"]
        with gathered(parts.model, small):
            lambdas = parts.model.lambda_map()
        if lambdas:
            rows.append({"split": "lambdas", "step": state.step, **lambdas})
        self.log.write(*rows)
        self.reporter.note(
            f"step {state.step}: validation loss {scores['loss']:.4f}, {scores['bits_per_byte']:.4f} bits per byte"
            + (f"; of uptrain.source {source['loss']:.4f}" if source is not None else "")
        )
        return replace(state, pending_validation=False)

    def scores(self, model: Any) -> dict[str, Any]:
        """What `evaluate` says of a model on the validation text.

        Raises:
            Interrupted: a stop came in between.
        """
        config = self.config
        with autocast(config, self.ranks.device):
            return evaluate(
                model,
                self.parts.dataset,
                sequence_length=config.data.sequence_length,
                batch_size=self.parts.micro_batch_size,
                max_tokens=config.train.validation_tokens,
                document_mask=config.data.document_mask,
                device=self.ranks.device,
                stop=lambda: bool(self.ranks.agree(self.stop.number)[0]),
                ranks=self.ranks,
            )

    def save(self, state: TrainState, *, at_once: bool) -> None:
        """A checkpoint of `state`, whose rows have all been written.

        Raises:
            RunFailure: a weight is not finite, or it could not be written.
        """
        if self.ranks.agree(int(not finite(self.parameters)))[0]:
            self.ranks.fail(
                RunFailure(
                    f"step {state.step}: its update made weights that are not finite, so it is not saved; "
                    f"{checkpoint.kept(self.parts.checkpoints)}; start again with a lower optim.lr"
                )
            )
        state = replace(state, metrics_bytes=self.log.sync(), processes=self.ranks.size)
        self.saver.save(state, self.parts.model, self.parts.optimizers, at_once=at_once)


def draw_seed(seed: int, step: int, rank: int) -> int:
    """The seed of what a process draws in a step (dropout), so that a resumed run draws the same."""
    return (seed * 1_000_003 + step) * 1_009 % 2**48 + rank
