"""Steps that go wrong: reports, steps left out, limits; and numbers that are read late."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from train_helpers import assert_same_run, comparable, crash_after, in_child, saved_weights

from resformer.errors import UserError
from resformer.train import checkpoint, fit, signals
from resformer.train.config import Config
from resformer.train.configure import edit, from_toml
from resformer.train.failure import RunFailure
from resformer.train.incident import is_spike, running_mean
from resformer.train.loop import train
from resformer.train.metrics import read_rows


def scale_gradients(monkeypatch: pytest.MonkeyPatch, factors: dict[int, float]) -> None:
    """Multiply the gradients of these steps."""
    real, step = fit.accumulate, fit.Fit.step
    now = [0]

    def noting(self: fit.Fit, state: checkpoint.TrainState, feeder: Any) -> checkpoint.TrainState:
        now[0] = state.step + 1
        return step(self, state, feeder)

    def scaled(model: torch.nn.Module, *args: Any, **how: Any) -> torch.Tensor:
        loss = real(model, *args, **how)
        if now[0] in factors:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad *= factors[now[0]]
        return loss

    monkeypatch.setattr(fit.Fit, "step", noting)
    monkeypatch.setattr(fit, "accumulate", scaled)


def test_a_run_that_breaks_says_where(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scale_gradients(monkeypatch, {7: math.nan})
    with pytest.raises(
        RunFailure, match=r"^step 7: .* norm of the gradient nan \(samples 48 to 55, see .*\)"
    ) as caught:
        train(config, tmp_path / "run")
    assert "the checkpoint of step 5 is intact" in str(caught.value)
    report = json.loads((tmp_path / "run" / "incidents" / "step-00000007.json").read_text())
    assert (report["kind"], report["action"]) == ("not finite", "stopped")
    assert report["samples"] == {"first": 48, "last": 55}
    assert sum(report["domains"].values()) == 8
    assert report["grad_norms"]["matrices"] == "nan"
    assert len(report["grad_norms"]) == 3 + 5
    monkeypatch.undo()
    train(config, tmp_path / "run", resume=True)
    train(edit(config, {"train.steps": 1}), tmp_path / "run", overwrite=True)  # reports are a run's own
    assert not (tmp_path / "run" / "incidents").exists()


def test_steps_are_left_out_up_to_a_limit(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that is left out leaves weights and optimizer as they were; a resumed run remembers how many."""
    scale_gradients(monkeypatch, {2: math.inf, 5: math.nan, 8: math.nan})
    every = edit(config, {"train.skip_limit": 2, "train.checkpoint_every": 1, "train.keep_last": 9})
    with pytest.raises(RunFailure, match=r"^step 8: .*2 steps were skipped before; the checkpoint of step 7 is intact"):
        train(every, tmp_path / "run")
    before, after = saved_weights(tmp_path / "run", 4), saved_weights(tmp_path / "run", 5)
    assert all(torch.equal(before[name], after[name]) for name in before)
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert [(row["split"], row["step"]) for row in rows] == [
        ("skipped" if step in (2, 5) else "train", step) for step in range(1, 8)
    ]
    with pytest.raises(RunFailure, match=r"^step 8: .*2 steps were skipped before"):
        train(every, tmp_path / "run", resume=True)
    train(edit(every, {"train.skip_limit": 3}), tmp_path / "run", resume=True)
    assert checkpoint.find(tmp_path / "run" / "checkpoints")[1].skipped == 3


@pytest.mark.parametrize("limit", [0, 1])
def test_spikes(
    config: Config, tmp_path: Path, limit: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Reported; left out if that is allowed. A resumed run judges as an uninterrupted one."""
    scale_gradients(monkeypatch, {25: 50.0})
    long = edit(config, {"train.steps": 30, "train.spike_factor": 4.0, "train.skip_limit": limit})
    train(long, tmp_path / "whole")
    said = capsys.readouterr().err
    assert "step 25: spike (" in said
    assert ("skipped, 1 of 1" if limit else "kept, 0 of 0") in said
    report = json.loads((tmp_path / "whole" / "incidents" / "step-00000025.json").read_text())
    assert report["grad_norm"] > 4 * report["grad_norm_mean"] > 0
    kinds = [row["split"] for row in read_rows(tmp_path / "whole" / "metrics.jsonl") if row["step"] == 25]
    assert kinds == ["skipped" if limit else "train"]
    crash_after(long, tmp_path / "run", 23, monkeypatch)
    train(long, tmp_path / "run", resume=True)
    assert comparable(tmp_path / "run") == comparable(tmp_path / "whole")


def test_what_a_spike_is() -> None:
    assert running_mean(0.0, 3.0) == 3.0
    assert 3.0 < running_mean(3.0, 4.0) < 3.1
    assert is_spike(9.0, 2.0, factor=4.0, steps=20)
    assert not is_spike(7.0, 2.0, factor=4.0, steps=20)
    assert not is_spike(9.0, 2.0, factor=4.0, steps=19)
    assert not is_spike(9.0, 2.0, factor=None, steps=100)


def test_numbers_read_late_are_the_same(
    config: Config, whole_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on an accelerator: each step's numbers are read while the next one runs."""
    monkeypatch.setattr(fit, "reads_late", lambda device: True)
    out = tmp_path / "run"
    crash_after(config, out, 13, monkeypatch)
    train(config, out, resume=True)
    assert_same_run(out, whole_run)
    scale_gradients(monkeypatch, {10: math.nan})
    with pytest.raises(RunFailure, match=r"^step 10: .*the checkpoint of step 5 is intact"):  # 10 would have been saved
        train(config, tmp_path / "broken")


def test_what_a_step_draws_is_drawn_again_after_a_resume(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model with dropout, which no variant here has."""
    from resformer.models.mlp import MLP

    real = MLP.forward
    monkeypatch.setattr(MLP, "forward", lambda self, x: torch.nn.functional.dropout(real(self, x), 0.3, self.training))
    train(config, tmp_path / "whole")
    crash_after(config, tmp_path / "run", 12, monkeypatch)
    train(config, tmp_path / "run", resume=True)
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    assert comparable(tmp_path / "run") != []


def test_some_checkpoints_are_kept_for_good(config: Config, tmp_path: Path) -> None:
    often = edit(config, {"train.checkpoint_every": 2, "train.keep_last": 1, "train.keep_every": 6})
    train(often, tmp_path / "run")
    assert checkpoint.steps(tmp_path / "run" / "checkpoints") == [6, 12, 18, 20]


def test_the_rest_of_a_run_may_have_another_horizon_and_batch(config: Config, tmp_path: Path) -> None:
    """The data go on with the first sample that has not been seen, the schedule is the new horizon's."""
    from resformer.data import open_dataset
    from resformer.train.schedule import lr_at

    out = tmp_path / "run"
    train(edit(config, {"train.steps": 10}), out)
    longer = edit(config, {"train.steps": 16, "train.batch_size": 12, "optim.lr": 1e-3})
    with pytest.raises(UserError, match=r"train\.steps is 10 in the run and 16 now.*\(--on-change continue\)"):
        train(longer, out, resume=True)
    seen: list[int] = []
    dataset = open_dataset(str(config.data.dir))
    sampler = type(dataset.sampler(sequence_length=32, batch_size=8, seed=0))
    real = sampler.samples
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "samples", lambda self, indices: (seen.extend(indices.tolist()), real(self, indices))[1])
        train(longer, out, resume=True, on_change="continue")
    asked = seen[seen.index(80) :]
    assert asked[: 6 * 12] == list(range(80, 80 + 6 * 12))
    rows = [row for row in read_rows(out / "metrics.jsonl") if row["split"] == "train"]
    assert [row["step"] for row in rows] == list(range(1, 17))
    assert rows[-1]["lr"] == lr_at(16, steps=16, lr=1e-3, warmup_steps=config.optim.warmup_steps)
    assert rows[-1]["tokens"] == 10 * 8 * 32 + 6 * 12 * 32
    assert from_toml(out / "config.toml") == longer
    changed = json.loads((out / "environment.json").read_text())["resumed"][0]["changed"]
    assert changed["train.batch_size"] == {"before": 8, "now": 12}
    train(longer, out, resume=True)  # finished: nothing to do, nothing to refuse
    with pytest.raises(UserError, match=r"the run is at step 16, train\.steps is 4 now"):
        train(edit(longer, {"train.steps": 4}), out, resume=True, on_change="continue")
    with pytest.raises(UserError, match=r"model\.variant is .* or start another run"):
        train(edit(longer, {"model.variant": "identity"}), out, resume=True, on_change="continue")
    with pytest.raises(UserError, match="--on-change continue belongs to --resume"):
        train(longer, tmp_path / "other", on_change="continue")


def test_a_failed_background_save_ends_the_run(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from resformer.train import saver

    real, calls = saver.put_directory, []

    def full(temporary: Path, target: Path) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        real(temporary, target)

    monkeypatch.setattr(saver, "put_directory", full)
    with pytest.raises(
        RunFailure, match=r"step 10: the checkpoint .*No space left on device; the checkpoint of step 5 is"
    ):
        train(edit(config, {"train.async_save": True}), tmp_path / "run")
    assert checkpoint.steps(tmp_path / "run" / "checkpoints") == [5]
    assert not list((tmp_path / "run" / "checkpoints").glob(".tmp-*"))


def test_below_a_launcher_the_echo_of_a_signal_is_no_second_one(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C reaches torchrun and its processes, and torchrun passes it on."""
    monkeypatch.setenv(signals.LAUNCHED, "here")

    def work() -> None:
        with signals.StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.number == signal.SIGINT
            stop._at -= 2 * signals.ECHO_SECONDS
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)

    child = in_child(work)
    child.join(20)
    assert child.exitcode == 128 + signal.SIGTERM
