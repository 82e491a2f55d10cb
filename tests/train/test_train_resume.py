"""A run that was stopped, killed or damaged goes on to the same bits."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from train_helpers import (
    OPTIMIZER,
    WEIGHTS,
    Crash,
    assert_same_run,
    assert_same_tensors,
    comparable,
    crash_after,
    in_child,
    wait_for_step,
)

from resformer.errors import UserError
from resformer.train import checkpoint, fit, loop, saver, signals
from resformer.train.config import Config
from resformer.train.configure import edit
from resformer.train.failure import RunFailure, Stopped
from resformer.train.loop import train
from resformer.train.metrics import read_rows


@pytest.mark.parametrize("step", [7, 10, 20])
def test_after_a_crash(
    config: Config, whole_run: Path, tmp_path: Path, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """7: rows beyond the checkpoint of 5; 10: before the validation that is due; 20: before the last one."""
    crash_after(config, tmp_path / "run", step, monkeypatch)
    assert checkpoint.latest_step(tmp_path / "run" / "checkpoints") == (step - 1) // 5 * 5
    torch.manual_seed(99)
    train(config, tmp_path / "run", resume=True, command=["again"])
    assert_same_run(tmp_path / "run", whole_run)
    facts = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert [(entry["step"], entry["command"]) for entry in facts["resumed"]] == [((step - 1) // 5 * 5, ["again"])]


def test_twice_and_in_the_middle_of_a_line(
    config: Config, whole_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    crash_after(config, out, 8, monkeypatch)
    with open(out / "metrics.jsonl", "a") as file:
        file.write('{"split": "train", "step": 9, "lo')
    crash_after(config, out, 17, monkeypatch, resume=True)
    train(config, out, resume=True)
    assert_same_run(out, whole_run)


def test_a_finished_run_is_left_as_it_is(config: Config, tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = train(config, out)
    before = {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in out.rglob("*") if path.is_file()}
    assert train(config, out, resume=True) == result
    assert {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in out.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_with_a_checkpoint(
    config: Config, whole_run: Path, tmp_path: Path, signal_number: signal.Signals
) -> None:
    out, rare = tmp_path / "run", edit(config, {"train.checkpoint_every": 1000})
    child = in_child(lambda: _slowly(rare, out))
    wait_for_step(out, 3)
    os.kill(child.pid or 0, signal_number)
    child.join(60)
    assert child.exitcode == 128 + signal_number
    done = checkpoint.latest_step(out / "checkpoints")
    assert done is not None
    assert 3 <= done < 20
    assert read_rows(out / "metrics.jsonl")[-1]["step"] == done
    train(rare, out, resume=True)
    assert_same_run(out, whole_run)


def test_a_second_signal_ends_at_once(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(*_: object, **__: object) -> None:
        time.sleep(60)

    monkeypatch.setattr(fit.Fit, "save", endless)
    child = in_child(lambda: _slowly(edit(config, {"train.checkpoint_every": 1000}), tmp_path / "run"))
    wait_for_step(tmp_path / "run", 1)
    os.kill(child.pid or 0, signal.SIGTERM)
    time.sleep(0.5)
    assert child.is_alive()
    os.kill(child.pid or 0, signal.SIGTERM)
    child.join(5)
    assert child.exitcode == 128 + signal.SIGTERM


def test_a_signal_during_a_validation(
    config: Config, whole_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The validation is left out, the checkpoint says so, and the resumed run makes up for it."""
    out, real = tmp_path / "run", fit.evaluate

    def interrupted(*args: object, **how: object) -> object:
        os.kill(os.getpid(), signal.SIGTERM)
        return real(*args, **how)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(fit, "evaluate", interrupted)
        with pytest.raises(SystemExit) as stopped:
            train(config, out)
    assert stopped.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert [row["step"] for row in read_rows(out / "metrics.jsonl")] == list(range(1, 11))
    assert checkpoint.find(out / "checkpoints")[1].pending_validation
    crash_after(config, out, 12, monkeypatch, resume=True)  # validated after the checkpoint: must not count twice
    train(config, out, resume=True)
    assert_same_run(out, whole_run)


@pytest.mark.parametrize("moment", ["write", "put_directory", "latest", "prune"])
def test_kill_9_during_a_save(
    config: Config, whole_run: Path, tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between files, before the rename, before the pointer, before old ones are removed; at the third save."""
    out = tmp_path / "run"
    name = {"write": "sha256", "put_directory": "put_directory", "latest": "write_atomic", "prune": "prune"}[moment]
    place = checkpoint if moment == "prune" else saver
    real, calls = getattr(place, name), []

    def fatal(*args: object, **how: object) -> object:
        calls.append(1)
        if len(calls) == (6 if moment == "write" else 3):
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **how)

    with monkeypatch.context() as patch:
        patch.setattr(place, name, fatal)
        child = in_child(lambda: _train(config, out))
        child.join(60)
    assert child.exitcode == -signal.SIGKILL
    assert checkpoint.find(out / "checkpoints")[1].step == (10 if moment in ("write", "put_directory") else 15)
    train(config, out, resume=True)
    assert_same_run(out, whole_run)
    assert checkpoint.steps(out / "checkpoints") == [15, 20]
    assert not list((out / "checkpoints").glob(".tmp-*"))


@pytest.mark.parametrize(
    ("kills", "background"), [(4, False), (4, True), pytest.param(100, True, marks=pytest.mark.slow)]
)
def test_kill_9_at_any_moment(config: Config, tmp_path: Path, kills: int, background: bool) -> None:
    """Killed again and again, often within a save; at the end nothing tells it from a run that was never killed."""
    steps = 8 * kills
    changes = {"train.steps": steps, "train.checkpoint_every": 2, "train.validate_every": 7}
    often = edit(config, {**changes, "train.batch_size": 4, "train.async_save": background})
    out, draw, killed = tmp_path / "run", random.Random(0), 0
    train(edit(often, {"train.async_save": False}), tmp_path / "whole")
    while killed < kills:
        before = checkpoint.latest_step(out / "checkpoints") or 0
        assert before < steps, f"finished after {killed} kills"
        started = time.time()
        child = in_child(lambda: _train(often, out, resume=before > 0, overwrite=before == 0))  # noqa: B023
        if draw.random() < 0.7:  # at work; otherwise at any moment of the start
            wait_for_step(out, before + draw.randint(1, 4), since=started)
        time.sleep(draw.uniform(0, 0.1))
        child.kill()
        child.join(60)
        killed += child.exitcode == -signal.SIGKILL
    begun = bool(checkpoint.steps(out / "checkpoints"))
    _train(often, out, resume=begun, overwrite=not begun)
    assert comparable(out) == comparable(tmp_path / "whole")
    for name in (WEIGHTS, OPTIMIZER):
        place = f"checkpoints/step-{steps:08d}/{name}"
        assert_same_tensors(out / place, tmp_path / "whole" / place)


def _train(config: Config, out: Path, *, resume: bool = False, overwrite: bool = False) -> None:
    train(config, out, resume=resume, overwrite=overwrite)


def _slowly(config: Config, out: Path, *, resume: bool = False) -> None:
    """Train with a pause after every step, so that a signal meets a running process."""
    real = loop.Reporter.step

    def pausing(self: loop.Reporter, step: int, **values: float) -> None:
        real(self, step, **values)
        time.sleep(0.05)

    loop.Reporter.step = pausing  # type: ignore[method-assign, assignment]
    train(config, out, resume=resume)


@pytest.mark.parametrize("damage", ["flip", "cut", "missing", "state"])
def test_a_damaged_checkpoint_is_passed_over(
    config: Config,
    whole_run: Path,
    tmp_path: Path,
    damage: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "run"
    crash_after(config, out, 12, monkeypatch)
    directory = out / "checkpoints" / "step-00000010"
    victim = directory / ("state.json" if damage == "state" else OPTIMIZER)
    content = bytearray(victim.read_bytes())
    if damage == "missing":
        victim.unlink()
    elif damage == "cut":
        victim.write_bytes(content[:-100])
    else:
        content[len(content) // 2] ^= 1
        victim.write_bytes(content)
    capsys.readouterr()
    train(config, out, resume=True)
    said = capsys.readouterr().err
    assert "damaged checkpoint passed over: step-00000010: " in said
    assert victim.name in said
    assert "going on from step-00000005" in said
    assert_same_run(out, whole_run)


def test_no_checkpoint_that_can_be_used(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    crash_after(config, out, 7, monkeypatch)
    before = (out / "metrics.jsonl").read_bytes()
    (out / "checkpoints" / "step-00000005" / WEIGHTS).write_bytes(b"")
    with pytest.raises(UserError, match=rf"no usable checkpoint in .*{WEIGHTS} does not fit its checksum"):
        train(config, out, resume=True)
    assert (out / "metrics.jsonl").read_bytes() == before


def test_a_pickle_in_place_of_a_tensor_file_is_never_opened(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither as it is nor with checksums that somebody made fit."""
    out, mark = tmp_path / "run", tmp_path / "executed"

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {mark}",)

    crash_after(config, out, 7, monkeypatch)
    victim = out / "checkpoints" / "step-00000005" / OPTIMIZER
    torch.save(Evil(), victim)
    with pytest.raises(UserError, match="does not fit its checksum"):
        train(config, out, resume=True)
    state = json.loads((victim.parent / "state.json").read_text())
    state["files"][victim.name] = checkpoint.sha256(victim)
    state.pop("sha256")
    (victim.parent / "state.json").write_text(json.dumps({**state, "sha256": checkpoint._digest(state)}))
    with pytest.raises((UserError, SafetensorError)):
        train(config, out, resume=True)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train.steps": 30}, "train.steps is 20 in the run and 30 now"),
        ({"train.batch_size": 16}, "train.batch_size is 8 in the run and 16 now"),
        ({"model.variant": "identity"}, "model.variant is 'learnable' in the run and 'identity' now"),
        ({"optim.lr": 1e-3, "train.seed": 1}, "train.seed is 0 in the run and 1 now; optim.lr is 0.002 in the run and"),
    ],
)
def test_resume_with_another_configuration(
    config: Config, whole_run: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError) as caught:
        train(edit(config, changes), whole_run, resume=True)
    assert message in str(caught.value)
    assert f"--config {whole_run / 'config.toml'}" in str(caught.value)


def test_resume_with_another_corpus(config: Config, whole_run: Path, tmp_path: Path) -> None:
    from train_helpers import write_text

    from resformer.data import open_dataset, prepare

    other = prepare(
        write_text(tmp_path, seed=1), tmp_path / "data", vocab_size=300, validation_share=0.1, progress=False
    )
    with pytest.raises(UserError) as caught:
        train(edit(config, {"data.dir": str(other)}), whole_run, resume=True)
    for directory in (config.data.dir, other):
        assert open_dataset(str(directory)).fingerprint[:12] in str(caught.value)


def test_resume_where_nothing_is(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"--resume: no run in .*config.toml is missing"):
        train(config, tmp_path / "run", resume=True)
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match="exclude each other"):
        train(config, tmp_path / "run", resume=True, overwrite=True)


def test_a_run_killed_before_its_first_checkpoint_goes_on_from_its_first_step(
    config: Config, whole_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    crash_after(config, out, 2, monkeypatch)
    with pytest.raises(UserError, match=r"optim\.lr is .* in the run and .* now"):
        train(edit(config, {"optim.lr": 0.5}), out, resume=True)
    train(config, out, resume=True)
    assert "no checkpoint was written yet: the run starts from its first step" in capsys.readouterr().err
    assert_same_run(out, whole_run)


def test_a_kill_between_two_renames_of_a_checkpoint_loses_nothing(
    config: Config, whole_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that is saved a second time displaces the first one for a moment."""
    out = tmp_path / "run"
    crash_after(config, out, 18, monkeypatch)
    last = out / "checkpoints" / "step-00000015"
    displaced = out / "checkpoints" / ".tmp-old-abcdefgh"
    displaced.mkdir()
    last.rename(displaced / last.name)
    shutil.rmtree(out / "checkpoints" / "step-00000010")
    train(config, out, resume=True)
    assert_same_run(out, whole_run)
    assert not displaced.exists()


def test_a_resumed_run_does_not_write_the_checkpoint_it_came_from_again(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    crash_after(config, out, 18, monkeypatch)
    state = out / "checkpoints" / "step-00000015" / "state.json"
    before = state.stat().st_ino
    asked = signals.StopRequest.__init__

    def asked_already(self: signals.StopRequest) -> None:
        asked(self)
        self.number = signal.SIGTERM

    monkeypatch.setattr(signals.StopRequest, "__init__", asked_already)
    with pytest.raises(Stopped):
        train(config, out, resume=True)
    assert state.stat().st_ino == before


def test_a_checkpoint_without_its_state_is_named(
    config: Config, whole_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    crash_after(config, out, 18, monkeypatch)
    (out / "checkpoints" / "step-00000015" / "state.json").unlink()
    train(config, out, resume=True)
    said = capsys.readouterr().err
    assert "damaged checkpoint passed over: step-00000015: state.json is missing; going on from step-00000010" in said
    assert_same_run(out, whole_run)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"format": None}, "has format None"),
        ({"samples": None}, "samples is None"),
        ({"step": "x"}, "step is 'x'"),
        ({"step": 14}, "is of step 14"),
        ({"files": []}, "names no files"),
        ({"norm_mean": True}, "norm_mean is True"),
    ],
)
def test_a_sealed_state_of_another_kind_is_damage(
    config: Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    change: dict,
    why: str,
) -> None:
    out = tmp_path / "run"
    crash_after(config, out, 18, monkeypatch)
    file = out / "checkpoints" / "step-00000015" / "state.json"
    content = {**json.loads(file.read_text()), **change}
    del content["sha256"]
    file.write_text(json.dumps({**content, "sha256": checkpoint._digest(content)}))
    _, state = checkpoint.find(out / "checkpoints", report=print)
    assert state.step == 10 and why in capsys.readouterr().out


def test_deep_json_in_place_of_a_state_is_damage(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    crash_after(config, out, 18, monkeypatch)
    (out / "checkpoints" / "step-00000015" / "state.json").write_text("[" * 100_000)
    assert checkpoint.find(out / "checkpoints")[1].step == 10


def test_weights_that_are_not_finite_are_not_saved(config: Config, tmp_path: Path) -> None:
    wild = edit(config, {"optim.lr": 1e300, "optim.warmup_steps": 0, "train.checkpoint_every": 1})
    with pytest.raises(RunFailure, match=r"^step 1: its update made weights that are not finite, .*no checkpoint yet"):
        train(wild, tmp_path / "run")
    assert checkpoint.steps(tmp_path / "run" / "checkpoints") == []


@pytest.mark.parametrize("left", ["missing", "empty", "without the last validation"])
def test_a_finished_run_whose_metrics_are_lost(config: Config, whole_run: Path, tmp_path: Path, left: str) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole_run, out)
    path = out / "metrics.jsonl"
    rows = path.read_text().splitlines(keepends=True)
    kept = [] if left == "empty" else [row for row in rows if '"step": 20' not in row]
    path.write_text("".join(kept))
    if left == "missing":
        path.unlink()
    before = {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}
    with pytest.raises(UserError, match=r"metrics\.jsonl.*put (it|the file) back"):
        train(config, out, resume=True)
    assert {file: file.read_bytes() for file in out.rglob("*") if file.is_file()} == before


def test_resume_with_other_kernels_says_so(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    crash_after(config, tmp_path / "run", 18, monkeypatch)
    train(edit(config, {"train.checkpointing": True}), tmp_path / "run", resume=True)
    assert "train.checkpointing is False in the run and True now: the numbers may differ" in capsys.readouterr().err


def test_a_full_disk_leaves_the_last_checkpoint(
    config: Config, whole_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system refuses files of more than 200 kB: weights fit, the optimizer does not."""
    import resource

    out = tmp_path / "run"
    crash_after(config, out, 7, monkeypatch)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
        with pytest.raises(
            RunFailure, match=r"step 10: .*could not be written: .*; the checkpoint of step 5 is intact"
        ):
            train(config, out, resume=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert not list((out / "checkpoints").glob(".tmp-*"))
    train(config, out, resume=True)
    assert_same_run(out, whole_run)


def test_crash_is_no_ordinary_error() -> None:
    """`crash_after` relies on nothing between the loop and the test catching it."""
    assert not issubclass(Crash, OSError | UserError | RunFailure)
