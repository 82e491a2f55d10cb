"""A corpus at an address is the same corpus, fetched as far as it is read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pytest

from resformer import cli
from resformer.data import inspect, open_dataset
from resformer.data.remote import Remote
from resformer.errors import UserError

ADDRESS = "memory://bucket/corpus"


@pytest.fixture
def address(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    store = fsspec.filesystem("memory")
    store.put(str(prepared), "/bucket/corpus", recursive=True)
    yield ADDRESS
    store.rm("/bucket", recursive=True)


def kept(tmp_path: Path) -> set[str]:
    return {p.name for p in (tmp_path / "cache").rglob("*") if p.is_file() and not p.name.startswith(".")}


def test_files_are_fetched_when_they_are_read_and_only_then(address: str, prepared: Path, tmp_path: Path) -> None:
    here, there = open_dataset(prepared), open_dataset(address, verify="sample")
    small = {"index.json", "tokenizer.json", "tokenizer_config.json", "manifest.json"}
    assert kept(tmp_path) == small
    assert here.fingerprint == there.fingerprint
    assert np.array_equal(here.stream("train", "book")[3:90], there.stream("train", "book")[3:90])
    assert kept(tmp_path) == {*small, "book.train.00000.bin"}
    sizes = {"sequence_length": 16, "batch_size": 4, "seed": 1}
    assert np.array_equal(here.sampler(**sizes).batch(5).tokens, there.sampler(**sizes).batch(5).tokens)
    fsspec.filesystem("memory").rm("/bucket/corpus/shards", recursive=True)
    again = open_dataset(address, verify="none")  # what is kept needs no store
    assert len(again.stream("train", "book")[:]) == len(here.stream("train", "book"))


def test_full_verification_fetches_everything(address: str, prepared: Path, tmp_path: Path) -> None:
    assert inspect(address, "full")["fingerprint"] == open_dataset(prepared).fingerprint
    assert kept(tmp_path) == {p.name for p in prepared.rglob("*") if p.is_file()}


def test_damage_at_the_address_is_one_line(address: str, tmp_path: Path) -> None:
    store = fsspec.filesystem("memory")
    shard = "/bucket/corpus/shards/book.train.00000.bin"
    data = bytearray(store.cat_file(shard))
    data[7] ^= 1
    store.pipe_file(shard, bytes(data))
    dataset = open_dataset(address, verify="none")
    with pytest.raises(UserError, match=r"book\.train\.00000\.bin: does not fit the index"):
        dataset.stream("train", "book")[:5]
    assert "book.train.00000.bin" not in kept(tmp_path)
    store.rm(shard)
    with pytest.raises(UserError, match=r"book\.train\.00000\.bin: not found"):
        dataset.stream("train", "book")[:5]


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("memory://nothing/here", "memory://nothing/here/index.json: not found"),
        ("nosuchstore://bucket/corpus", "nosuchstore://bucket/corpus: cannot be opened"),
    ],
)
def test_wrong_addresses_are_one_line(
    place: str, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert cli.main(["data", "inspect", place]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_an_index_that_names_a_file_outside_fetches_nothing(address: str, tmp_path: Path) -> None:
    corpus = Remote(address)
    corpus.index["files"]["../../evil"] = {"bytes": 1, "sha256": "", "sample_sha256": ""}
    with pytest.raises(UserError, match="lies outside"):
        corpus.place("../../evil")
