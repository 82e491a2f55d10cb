"""Several processes that train one model (gloo, forked from the test): the same run as one process's."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from train_helpers import assert_same_tensors, comparable, in_child, wait_for_step

from resformer.errors import UserError
from resformer.parallel import Layout, processes
from resformer.parallel.ranks import launched
from resformer.train import checkpoint, fit, loop
from resformer.train.config import Config
from resformer.train.configure import edit
from resformer.train.loop import train
from resformer.train.metrics import read_rows
from resformer.train.setup import micro_batch_size

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="torch was built without gloo"
)

VARIANTS = ("transformer", "learnable_plus", "dense", "svformer", "neutreno", "denseformer")
LAYOUTS = {"fsdp": (2, {}), "ddp": (2, {"parallel.replicate": 2}), "hsdp": (4, {"parallel.replicate": 2})}


def launch(count: int, work: Callable[[int], None]) -> list[BaseProcess]:
    """Start `work(rank)` in `count` processes, with the environment that torchrun sets."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def ranked(rank: int) -> Callable[[], None]:
        def run() -> None:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            work(rank)

        return run

    return [in_child(ranked(rank)) for rank in range(count)]


def exit_codes(children: list[BaseProcess], seconds: float = 120) -> list[int | None]:
    deadline = time.monotonic() + seconds
    for child in children:
        child.join(max(0.1, deadline - time.monotonic()))
    codes = [child.exitcode for child in children]
    for child in children:
        child.kill()
    return codes


def train_in(count: int, config: Config, out: Path, **how: Any) -> None:
    assert exit_codes(launch(count, lambda _: (train(config, out, **how), None)[1])) == [0] * count


def assert_close_runs(one: Path, other: Path, tolerance: float = 1e-5) -> None:
    """The same rows; losses within `tolerance` relative, the rest (norms, lambdas) within ten times that."""
    left, right = comparable(one), comparable(other)
    assert [(row["split"], row["step"], row.get("domain")) for row in left] == [
        (row["split"], row["step"], row.get("domain")) for row in right
    ]
    for a, b in zip(left, right, strict=True):
        for key, value in a.items():
            if isinstance(value, float | list):
                loose = 1 if key in ("loss", "bits_per_byte") else 10
                assert b[key] == pytest.approx(value, rel=loose * tolerance, abs=loose * tolerance), (a["step"], key)


def short(config: Config, variant: str, **changes: Any) -> Config:
    """A run whose validation has a number of windows that two processes cannot share evenly."""
    base = {"train.steps": 8, "train.validate_every": 8, "train.checkpoint_every": 8, "train.validation_tokens": 32 * 5}
    return edit(config, {"model.variant": variant, "train.micro_batch_size": 2, **base, **changes})


@pytest.mark.parametrize(
    ("variant", "layout"), [(v, "fsdp") for v in VARIANTS] + [("learnable_plus", "ddp"), ("svformer", "hsdp")]
)
def test_losses_are_those_of_one_process(config: Config, tmp_path: Path, variant: str, layout: str) -> None:
    count, changes = LAYOUTS[layout]
    alone = short(config, variant)
    train(alone, tmp_path / "one")
    train_in(count, edit(alone, changes), tmp_path / "many")
    assert_close_runs(tmp_path / "one", tmp_path / "many")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["plain", "checkpointing", "compile"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_fifty_steps(config: Config, tmp_path: Path, variant: str, layout: str, how: str) -> None:
    if how == "compile" and layout != "fsdp":
        pytest.skip("compiling takes a minute and sees nothing of the layout")
    count, changes = LAYOUTS[layout]
    longer = {"train.steps": 50, "train.validate_every": 25, "train.checkpoint_every": 50}
    alone = short(config, variant, **longer)
    train(alone, tmp_path / "one")
    more = {} if how == "plain" else {f"train.{how}": True}
    train_in(count, edit(alone, {**changes, **more}), tmp_path / "many")
    assert_close_runs(tmp_path / "one", tmp_path / "many")


def test_muon_on_sharded_matrices(config: Config, tmp_path: Path) -> None:
    alone = short(config, "learnable", **{"optim.matrices": "muon"})
    train(alone, tmp_path / "one")
    train_in(2, alone, tmp_path / "two")
    assert_close_runs(tmp_path / "one", tmp_path / "two", tolerance=1e-4)  # it computes in bf16


@pytest.mark.parametrize("layout", LAYOUTS)
def test_distillation_and_morphing(config: Config, whole_run: Path, tmp_path: Path, layout: str) -> None:
    count, changes = LAYOUTS[layout]
    how = {"uptrain.source": str(whole_run), "uptrain.kl": 0.5, "uptrain.morph_steps": 6, "optim.lambda_lr_scale": 0.0}
    alone = short(config, "learnable", **how)
    train(alone, tmp_path / "one")
    train_in(count, edit(alone, changes), tmp_path / "many")
    assert_close_runs(tmp_path / "one", tmp_path / "many")
    rows = comparable(tmp_path / "many")
    assert all("kl" in row for row in rows if row["split"] == "train")
    assert {row["split"] for row in rows if row["step"] == 0} == {"source", "validation", "lambdas"}


def test_checkpointing_and_background_saves(config: Config, tmp_path: Path) -> None:
    alone = short(config, "learnable", **{"train.checkpoint_every": 3})
    train(alone, tmp_path / "one")
    train_in(2, edit(alone, {"train.checkpointing": True, "train.async_save": True}), tmp_path / "two")
    assert_close_runs(tmp_path / "one", tmp_path / "two")
    assert checkpoint.steps(tmp_path / "two" / "checkpoints") == [6, 8]


def stop_at(config: Config, out: Path, step: int, rank: int, number: int) -> list[int | None]:
    """Train in two processes and send a signal to one of them while it works on `step`."""

    def work(mine: int) -> None:
        real = fit.Fit.step

        def signalled(self: fit.Fit, state: checkpoint.TrainState, feeder: Any) -> checkpoint.TrainState:
            if state.step + 1 == step and mine == rank:
                os.kill(os.getpid(), number)
            return real(self, state, feeder)

        fit.Fit.step = signalled  # type: ignore[method-assign]
        train(config, out)

    return exit_codes(launch(2, work))


def test_a_signal_to_one_ends_all_with_a_checkpoint_that_any_number_resumes(config: Config, tmp_path: Path) -> None:
    import shutil

    whole, half = short(config, "learnable_plus", **{"train.steps": 12}), tmp_path / "two"
    train_in(2, whole, tmp_path / "whole")
    assert stop_at(whole, half, 7, 1, signal.SIGTERM) == [143, 143]
    assert checkpoint.find(half / "checkpoints")[1].step == 7
    for count in (1, 4):
        shutil.copytree(half, tmp_path / f"{count}")
        if count == 1:
            train(whole, tmp_path / "1", resume=True)
        else:
            train_in(count, whole, tmp_path / "4", resume=True)
        assert_close_runs(tmp_path / "whole", tmp_path / f"{count}")
    train_in(2, whole, half, resume=True)
    assert comparable(half) == comparable(tmp_path / "whole")
    files = sorted((half / "checkpoints" / "step-00000012").glob("*.safetensors"))
    assert len(files) == 4
    for path in files:
        assert_same_tensors(path, tmp_path / "whole" / "checkpoints" / "step-00000012" / path.name)


def test_a_dead_process_ends_the_others(config: Config, tmp_path: Path) -> None:
    out, err = tmp_path / "run", tmp_path / "err"
    forever = short(
        config, "learnable", **{"train.steps": 10_000, "train.checkpoint_every": 5, "train.validate_every": 10_000}
    )

    def work(rank: int) -> None:
        if rank == 0:
            os.dup2(os.open(err, os.O_WRONLY | os.O_CREAT), 2)
        try:
            train(forever, out)
        except loop.RunFailure as failure:
            (tmp_path / f"said-{rank}").write_text(str(failure))
            os._exit(1)

    children = launch(2, work)
    wait_for_step(out, 7)
    children[1].kill()
    assert exit_codes(children, 30) == [1, -signal.SIGKILL]
    said = (tmp_path / "said-0").read_text()
    assert said.startswith("process 0 of 2 lost contact with another one (")
    assert "is intact; start all of them again with --resume" in said


@pytest.mark.parametrize("replicate", [1, 2])
def test_a_mistake_that_one_process_sees_ends_all(config: Config, tmp_path: Path, replicate: int) -> None:
    config = edit(config, {"parallel.replicate": replicate})

    def work(rank: int) -> None:
        if rank == 1:
            loop.open_data = lambda *_, **__: (_ for _ in ()).throw(UserError("no corpus here"))  # type: ignore[assignment]
        try:
            train(config, tmp_path / "run")
        except UserError as error:
            (tmp_path / "said").write_text(f"{rank}: {error}")
            os._exit(2)

    assert exit_codes(launch(2, work), 60) == [2, 2]
    assert (tmp_path / "said").read_text() == "1: process 1 of 2: no corpus here"
    assert not (tmp_path / "run").exists()


def test_a_full_disk_ends_all_and_leaves_the_last_checkpoint(config: Config, tmp_path: Path) -> None:
    """The second save fails in the second process."""
    out, frequent = tmp_path / "run", short(config, "learnable", **{"train.checkpoint_every": 2})

    def work(rank: int) -> None:
        from resformer.train import tensors

        real, calls = tensors.write, []

        def full(directory: Path, found: dict[str, torch.Tensor], group: Any) -> None:
            calls.append(1)
            real(directory, found, group)
            if rank == 1 and len(calls) == 2:
                raise OSError(28, "No space left on device")

        tensors.write = full
        try:
            train(frequent, out)
        except loop.RunFailure as failure:
            (tmp_path / f"said-{rank}").write_text(str(failure))
            os._exit(1)

    assert exit_codes(launch(2, work), 60) == [1, 1]
    said = (tmp_path / "said-0").read_text()
    assert said.startswith("step 4: the checkpoint ")
    assert said.endswith("could not be written: No space left on device; the checkpoint of step 2 is intact")
    assert not (tmp_path / "said-1").exists()
    assert [path.name for path in (out / "checkpoints").iterdir() if path.name.startswith(".tmp")] == []
    assert read_rows(out / "metrics.jsonl")[-1]["step"] == 4


@pytest.mark.parametrize(
    ("size", "shard", "replicate", "message"),
    [
        (1, 2, 1, "parallel.shard 2 x parallel.replicate 1: there is 1 process; start 2 (torchrun --nproc-per-node 2"),
        (1, None, 3, "parallel.shard none x parallel.replicate 3: there is 1 process; start 3"),
        (4, 3, 1, "parallel.shard 3 x parallel.replicate 1: there are 4 processes; the product must be 4"),
        (4, None, 3, "parallel.shard none x parallel.replicate 3: there are 4 processes"),
    ],
)
def test_layouts_that_do_not_fit(size: int, shard: int | None, replicate: int, message: str) -> None:
    with pytest.raises(UserError) as caught:
        Layout.of(size, shard=shard, replicate=replicate)
    assert message in str(caught.value)
    assert Layout.of(4, shard=None, replicate=2) == Layout(shard=2, replicate=2)
    assert Layout.of(1, shard=None, replicate=1) == Layout()


def test_batches_that_cannot_be_shared(config: Config) -> None:
    assert micro_batch_size(config, 1) in (config.train.micro_batch_size, config.train.batch_size)
    with pytest.raises(UserError, match=r"train.batch_size 8 cannot be shared by 3 processes; start 2, or change it"):
        micro_batch_size(config, 3)
    with pytest.raises(UserError, match=r"does not divide the 2 sequences that each of 4 processes has .*; 2 would"):
        micro_batch_size(edit(config, {"train.micro_batch_size": 4}), 4)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2, but RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT is not set"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two', expected a whole number"),
    ],
)
def test_half_a_launcher(environment: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as caught:
        launched()
    assert message in str(caught.value)


def test_one_process_needs_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with processes(torch.device("cpu")) as ranks:
        assert (ranks.rank, ranks.size, ranks.first, ranks.rows(8)) == (0, 1, True, slice(0, 8))
        assert ranks.agree(3, 0) == [3, 0]
        assert ranks.on_first(lambda: "x") == "x"
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"optim.lr": 1e-4}, "optim.lr is "),
        ({"train.steps": 9}, "train.steps is "),
        ({"model.variant": "svformer"}, "model.variant is "),
    ],
)
def test_processes_that_were_not_started_alike_are_told(
    config: Config, tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    """An edited command on one node would train another model, or wait for ever."""
    both = [short(config, "learnable"), edit(short(config, "learnable"), change)]

    def work(rank: int) -> None:
        try:
            train(both[rank], tmp_path / "run")
        except UserError as error:
            (tmp_path / f"said{rank}").write_text(str(error))
            raise

    assert all(exit_codes(launch(2, work)))
    text = (tmp_path / "said0").read_text()
    assert text.startswith(f"the processes were not started alike: {said}") and "give all of them the same" in text
    assert not (tmp_path / "run").exists() and not (tmp_path / "said1").exists()
