"""A preparation that is killed again and again ends with the same bytes as one that is not."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from data_helpers import sentences, tree, write_rows

from resformer.data import parts, prepare


def source(directory: Path) -> Path:
    generator = random.Random(3)
    for name, count in (("wikipedia", 500), ("github", 300)):
        rows = [sentences(generator, generator.randint(20, 200)) for _ in range(count)]
        write_rows(directory / f"{name}.jsonl", [*rows, *rows[:20]])
    return directory


def in_child(work: Callable[[], object]) -> int:
    """Do `work` in a forked process, silently; its process id."""
    child = os.fork()
    if child:
        return child
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        work()
    finally:
        os._exit(0)


@pytest.mark.parametrize("kills", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_kills_at_any_moment_lose_nothing_and_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: int
) -> None:
    for place in ("resformer.data.reading.BLOCK_BYTES", "resformer.data.readers.BLOCK_BYTES"):
        monkeypatch.setattr(place, 2000)
    monkeypatch.setattr(parts, "PART_BYTES", 8000)
    text = source(tmp_path / "in")

    # A forked process has none of its parent's threads, with which a tokenizer is trained.
    vocabulary = prepare([text], tmp_path / "vocabulary", vocab_size=400, progress=False)

    def run(out: Path) -> Path:
        return prepare([text], out, tokenizer=vocabulary, validation_share=0.1, progress=False)

    started = time.perf_counter()
    expected = tree(run(tmp_path / "whole"))
    whole = time.perf_counter() - started
    generator, out = random.Random(kills), tmp_path / "out"
    for _ in range(kills):
        child = in_child(lambda: run(out))
        time.sleep(generator.uniform(0.0, 1.1 * whole))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert not out.exists() or tree(out) == expected
    assert tree(run(out)) == expected
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out", "vocabulary", "whole"]
