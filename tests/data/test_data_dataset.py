"""Opening a corpus: validation windows that score each token once, and damage that is named."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_helpers import write_rows

from resformer.data import inspect, open_dataset, shards
from resformer.errors import UserError


@pytest.mark.parametrize("length", [1, 7, 64, 100_000])
def test_windows_score_every_token_once_with_the_token_before_as_context(prepared: Path, length: int) -> None:
    dataset = open_dataset(prepared)
    for domain in dataset.domains:
        stream = np.asarray(dataset.stream("validation", domain), dtype=np.int64)
        windows = list(dataset.validation(domain, sequence_length=length))
        assert len(windows) == -(-len(stream) // length)
        for window in windows:
            assert window.tokens.shape == (length + 1,)
            assert window.tokens.dtype == np.int64
            assert window.mask.shape == (length,)
            assert window.mask.dtype == np.bool_
        np.testing.assert_array_equal(np.concatenate([w.tokens[1:][w.mask] for w in windows]), stream)
        inputs = np.concatenate([w.tokens[:-1][w.mask] for w in windows])
        np.testing.assert_array_equal(inputs, np.concatenate([[dataset.eos_token_id], stream[:-1]]))
        entry = dataset.index["domains"][domain]["splits"]["validation"]
        assert dataset.validation_bytes(domain, sequence_length=length) == entry["bytes"]


def test_cap_scores_exactly_that_many_tokens_and_their_bytes(prepared: Path) -> None:
    dataset = open_dataset(prepared)
    domain = "wikipedia"
    stream = dataset.stream("validation", domain)
    for cap in (1, 5, 100, int(dataset.document_table("validation", domain)[1, 0]), len(stream), len(stream) + 5):
        windows = list(dataset.validation(domain, sequence_length=16, max_tokens=cap))
        scored = np.concatenate([w.tokens[1:][w.mask] for w in windows])
        np.testing.assert_array_equal(scored, stream[: min(cap, len(stream))])
        text = dataset.vocabulary.decode(scored[scored != dataset.eos_token_id])
        assert dataset.validation_bytes(domain, sequence_length=16, max_tokens=cap) == len(text.encode())


def test_cap_keeps_documents_whole_where_bytes_of_a_part_are_unknown(
    build: Callable[..., Path], prepared: Path, tmp_path: Path
) -> None:
    """A normalizer changes the text, so the tokens no longer tell the bytes."""
    value = json.loads((prepared / "tokenizer.json").read_text())
    value["normalizer"] = {"type": "Replace", "pattern": {"String": "\u00e4"}, "content": "a"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(value))
    file = write_rows(tmp_path / "a.jsonl", [f"\u00e4 document {i} " + "\u00e4b " * 30 for i in range(30)])
    dataset = open_dataset(build([file], validation_share=0.3, tokenizer=tmp_path / "tokenizer.json"))
    table = dataset.document_table("validation", "a").astype(int)
    assert dataset.covered("a", max_tokens=1) == (table[0, 0], table[0, 1])
    assert dataset.covered("a", max_tokens=int(table[2, 0]) + 1) == (table[3, 0], table[3, 1])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda d: d.validation("bok", sequence_length=8), "no domain 'bok'; did you mean 'book'"),
        (lambda d: d.validation("book", sequence_length=0), "sequence_length: got 0"),
        (lambda d: d.validation("book", sequence_length=8, max_tokens=0), "max_tokens: got 0"),
        (lambda d: d.tokens("valid", "book"), "split: got 'valid'.*did you mean 'validation'"),
        (lambda d: open_dataset(d.directory, verify="ful"), "verify: got 'ful'.*did you mean 'full'"),
    ],
)
def test_mistakes_are_named(prepared: Path, call: Callable, message: str) -> None:
    with pytest.raises(UserError, match=message):
        call(open_dataset(prepared))


def flip(file: Path, place: int = -1) -> None:
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-2])


DAMAGE: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "flipped byte in a shard": ("shards/book.train.bin", flip, "its sha256 does not fit"),
    "flipped byte in a document table": ("shards/book.validation.docs.npy", flip, "its sha256 does not fit"),
    "cut shard": ("shards/github.train.bin", cut, "bytes, the index says"),
    "missing shard": ("shards/github.validation.bin", Path.unlink, "missing"),
    "other tokenizer": ("tokenizer.json", flip, "does not fit the shards"),
    "missing tokenizer": ("tokenizer.json", Path.unlink, "missing; the shards were written with the tokenizer"),
    "changed tokenizer config": ("tokenizer_config.json", flip, "its sha256 does not fit"),
    "changed manifest": ("manifest.json", cut, "bytes, the index says"),
    "missing index": ("index.json", Path.unlink, "expected a prepared corpus"),
    "index cut": ("index.json", lambda f: f.write_bytes(f.read_bytes()[:-9]), "not valid JSON"),
    "index of something else": ("index.json", lambda f: f.write_text("{}"), "not an index of prepared shards"),
    "index edited": (
        "index.json",
        lambda f: f.write_text(f.read_text().replace('"vocab_size": 320', '"vocab_size": 999', 1)),
        "was changed after it was written",
    ),
    "index of a later release": (
        "index.json",
        lambda f: f.write_text(f.read_text().replace('"version": 1', '"version": 2', 1)),
        "has version 2, this release reads version 1",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_one_line_that_names_the_file(copy: Path, case: str) -> None:
    name, damage, message = DAMAGE[case]
    damage(copy / name)
    with pytest.raises(UserError, match=message) as error:
        open_dataset(copy)
    assert str(copy / name) in str(error.value)
    assert "\n" not in str(error.value)


def test_tokenizer_of_another_corpus_names_both_sides(build: Callable[..., Path], source: Path, copy: Path) -> None:
    other = build([source], vocab_size=310)
    shutil.copy(other / "tokenizer.json", copy / "tokenizer.json")
    digests = [hashlib.sha256((d / "tokenizer.json").read_bytes()).hexdigest()[:12] for d in (other, copy)]
    for how in ("full", "sample", "none"):
        with pytest.raises(UserError) as error:
            open_dataset(copy, verify=how)
        assert digests[1] in str(error.value)
        assert json.loads((copy / "index.json").read_text())["tokenizer"]["sha256"][:12] in str(error.value)


def reseal(root: Path, change: Callable[[dict], None]) -> None:
    """Write an index whose checksums fit again, as a foreign writer with an error in it would."""
    index = json.loads((root / "index.json").read_text())
    change(index)
    index["files"] = {name: shards.file_entry(root / name) for name in index["files"]}
    (root / "index.json").write_text(json.dumps(shards.seal(index)))


@pytest.mark.parametrize("how", ["full", "sample"])
def test_id_outside_the_vocabulary(copy: Path, how: str) -> None:
    file = copy / "shards" / "book.train.bin"
    ids = np.fromfile(file, dtype="<u2")
    ids[len(ids) // 2] = 320
    ids.tofile(file)
    reseal(copy, lambda index: None)
    with pytest.raises(UserError, match=r"book\.train\.bin: holds token id 320, the vocabulary has 320"):
        open_dataset(copy, verify=how)


def test_overlap_of_the_splits_is_found(copy: Path) -> None:
    for kind in ("bin", "docs.npy"):
        shutil.copy(copy / "shards" / f"book.train.{kind}", copy / "shards" / f"book.validation.{kind}")

    def change(index: dict) -> None:
        splits = index["domains"]["book"]["splits"]
        names = {key: splits["validation"][key] for key in ("shard", "document_table")}
        splits["validation"] = {**splits["train"], **names}

    reseal(copy, change)
    with pytest.raises(UserError, match="documents are in both the train and the validation split"):
        open_dataset(copy)


def test_document_table_that_does_not_fit_its_shard(copy: Path) -> None:
    reseal(copy, lambda index: index["domains"]["book"]["splits"]["train"].update(bytes=1))
    with pytest.raises(UserError, match=r"book\.train\.docs\.npy: ends at"):
        open_dataset(copy)


def test_pickle_in_a_document_table_is_not_loaded(copy: Path) -> None:
    np.save(copy / "shards" / "book.train.docs.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    reseal(copy, lambda index: None)
    with pytest.raises(UserError, match="not a document table"):
        open_dataset(copy)


def test_sampled_check_reads_large_files_in_part(tmp_path: Path) -> None:
    file = tmp_path / "large"
    data = bytearray(np.random.default_rng(0).bytes(3_000_000))
    file.write_bytes(data)
    before = shards.file_entry(file)
    assert before == {
        "bytes": 3_000_000,
        "sha256": hashlib.sha256(data).hexdigest(),
        "sample_sha256": before["sample_sha256"],
    }
    for place, noticed in ((0, True), (2_999_999, True), (70_000, False)):
        changed = bytearray(data)
        changed[place] ^= 1
        file.write_bytes(changed)
        after = shards.file_entry(file)
        assert (after["sample_sha256"] != before["sample_sha256"]) == noticed
        assert after["sha256"] != before["sha256"]


def test_sampled_check_reads_small_files_whole(tmp_path: Path) -> None:
    file = tmp_path / "small"
    file.write_bytes(bytes(300_000))
    before = shards.file_entry(file)["sample_sha256"]
    for place in range(0, 300_000, 30_011):
        changed = bytearray(300_000)
        changed[place] = 1
        file.write_bytes(changed)
        assert shards.file_entry(file)["sample_sha256"] != before


def test_large_vocabulary_takes_four_bytes() -> None:
    assert shards.dtype_for(65_536) == np.dtype("<u2")
    assert shards.dtype_for(65_537) == np.dtype("<u4")


@pytest.mark.parametrize("bad", [-1, 300])
def test_id_that_does_not_fit_is_never_written(tmp_path: Path, bad: int) -> None:
    writer = shards.ShardWriter(tmp_path, "a", "train", vocab_size=300, eos_token_id=0)
    with pytest.raises(ValueError, match="does not fit the vocabulary of 300"):
        writer.add(np.array([1, bad, 2]), 3, 0)
    writer.close()


def test_inspect_reports_what_is_there(prepared: Path, texts: dict[str, list[str]]) -> None:
    report = inspect(prepared)
    assert json.loads(json.dumps(report)) == report
    for domain, rows in texts.items():
        part = report["domains"][domain]
        assert part["documents"] == len(rows)
        assert part["bytes"] == sum(len(text.encode()) for text in rows)
        assert part["bytes_per_token"] == part["bytes"] / part["tokens"]
        assert part["splits"]["train"]["documents"] + part["splits"]["validation"]["documents"] == len(rows)
        assert any(text.startswith(part["samples"][0]["text"].removesuffix("<|endoftext|>")) for text in rows)
    assert report["documents"] == sum(map(len, texts.values()))
    assert inspect(prepared, seed=1) != report
    flip_target = prepared / "shards" / "book.train.bin"
    assert flip_target.stat().st_size == 2 * report["domains"]["book"]["splits"]["train"]["tokens"]
