"""A small real corpus, and the `tiny` recipe over it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from train_helpers import write_text

from resformer.data import prepare
from resformer.recipes import recipe
from resformer.train.config import Config
from resformer.train.configure import edit
from resformer.train.loop import train


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("corpus")
    return prepare(write_text(root), root / "data", vocab_size=300, validation_share=0.1, progress=False)


@pytest.fixture(scope="session")
def config(corpus: Path) -> Config:
    """20 steps, validated at 10 and 20, a checkpoint every 5; two micro-batches a step."""
    return edit(recipe("tiny"), {"data.dir": str(corpus), "train.device": "cpu", "train.micro_batch_size": 4})


@pytest.fixture(scope="session")
def whole_run(config: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody interrupted. Read only."""
    out = tmp_path_factory.mktemp("whole") / "run"
    train(config, out, command=["test"])
    return out
