"""A small corpus of three made-up domains, prepared once a session. No network."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from data_helpers import DOMAINS, sentences, write_rows

from resformer.data import prepare


@pytest.fixture(scope="session")
def texts() -> dict[str, list[str]]:
    generator = random.Random(7)
    return {
        name: [f"{name} {i}: {sentences(generator, generator.randint(20, 120))}" for i in range(count)]
        for name, count in DOMAINS.items()
    }


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory, texts: dict[str, list[str]]) -> Path:
    directory = tmp_path_factory.mktemp("source")
    for name, rows in texts.items():
        write_rows(directory / f"{name}.jsonl", rows)
    return directory


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory, source: Path) -> Path:
    out = tmp_path_factory.mktemp("prepared") / "data"
    return prepare([source], out, vocab_size=320, validation_share=0.2, progress=False)


@pytest.fixture
def copy(prepared: Path, tmp_path: Path) -> Path:
    """A copy of the prepared corpus that a test may damage."""
    return Path(shutil.copytree(prepared, tmp_path / "copy"))


@pytest.fixture
def build(tmp_path: Path) -> Callable[..., Path]:
    """prepare() into a fresh directory with small settings."""

    def run(inputs: list, name: str = "out", **options: object) -> Path:
        settings = {"vocab_size": 300, "validation_share": 0.1, "progress": False, **options}
        return prepare(inputs, tmp_path / name, **settings)  # type: ignore[arg-type]

    return run
