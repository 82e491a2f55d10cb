"""A small text, and the ways in which a run dies."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from resformer.train import loop
from resformer.train.config import Config
from resformer.train.metrics import TIMING_FIELDS, read_rows

# The files that one process writes.
WEIGHTS, OPTIMIZER = (f"shard-00001-model-0000{number}-of-00002.safetensors" for number in (1, 2))


def write_text(directory: Path, *, seed: int = 0) -> list[str]:
    """Two domains of made-up words with some order in them."""
    draw = random.Random(seed)
    words = ["".join(draw.choice("abcdefgh") for _ in range(draw.randint(2, 6))) for _ in range(150)]
    paths = []
    for domain in ("one", "two"):
        texts = [" ".join(sorted(draw.choices(words, k=60))) for _ in range(200)]
        path = directory / f"{domain}.jsonl"
        path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
        paths.append(str(path))
    return paths


class Crash(Exception):  # noqa: N818
    """Stands for a process that dies."""


def crash_after(config: Config, out: Path, step: int, monkeypatch: pytest.MonkeyPatch, **how: Any) -> None:
    """Train, and die when `step` is done but not yet validated or saved."""
    real = loop.Reporter.step

    def dying(self: loop.Reporter, done: int, **values: Any) -> None:
        real(self, done, **values)
        if done == step:
            raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(loop.Reporter, "step", dying)
        with pytest.raises(Crash):
            loop.train(config, out, **how)


def in_child(work: Callable[[], None]) -> multiprocessing.process.BaseProcess:
    """Run `work` in a forked process (no second import of torch)."""
    child = multiprocessing.get_context("fork").Process(target=_exit_code_of, args=(work,))
    child.start()
    return child


def _exit_code_of(work: Callable[[], None]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        work()
    except SystemExit as stop:
        os._exit(stop.code if isinstance(stop.code, int) else 1)
    os._exit(0)


def wait_for_step(out: Path, step: int, seconds: float = 60.0, since: float = 0.0) -> None:
    """Wait until the run has written the row of `step`, after the time `since`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        path = out / "metrics.jsonl"
        if path.exists() and path.stat().st_mtime >= since and any(row["step"] >= step for row in read_rows(path)):
            return
        time.sleep(0.002)
    raise AssertionError(f"{out} did not reach step {step} in {seconds} s")


def comparable(out: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl without their timing fields."""
    rows = read_rows(out / "metrics.jsonl")
    return [{key: value for key, value in row.items() if key not in TIMING_FIELDS} for row in rows]


def assert_same_run(one: Path, other: Path) -> None:
    """Equal metrics, and equal bits of weights, optimizer and export."""
    assert comparable(one) == comparable(other)
    step = "checkpoints/step-00000020"
    for name in (f"{step}/{WEIGHTS}", f"{step}/{OPTIMIZER}", "model/model.safetensors"):
        assert_same_tensors(one / name, other / name)


def assert_same_tensors(one: Path, other: Path) -> None:
    """Equal names and bits; the order of tensors in the files is the storage's affair."""
    left, right = load_file(one), load_file(other)
    assert left.keys() == right.keys(), one.name
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype and tensor.numpy().tobytes() == right[name].numpy().tobytes(), name


def saved_weights(out: Path, step: int) -> dict[str, Tensor]:
    """The weights in a checkpoint that one process wrote, by name."""
    tensors = load_file(out / "checkpoints" / f"step-{step:08d}" / WEIGHTS)
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
