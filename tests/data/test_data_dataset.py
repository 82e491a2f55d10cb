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

from resformer.data import Dataset, inspect, open_dataset, shards
from resformer.data.encode import Encoder
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


def by_hash(dataset: Dataset, domain: str) -> list[np.ndarray]:
    """The validation documents in the order of their identity."""
    table, stream = dataset.document_table("validation", domain), dataset.stream("validation", domain)
    starts = [0, *table[:-1, 0].tolist()]
    documents = [np.asarray(stream[a:b], dtype=np.int64) for a, b in zip(starts, table[:, 0].tolist(), strict=True)]
    return [documents[i] for i in sorted(range(len(table)), key=lambda i: (int(table[i, 2]), i))]


def test_cap_scores_exactly_that_many_tokens_in_hash_order_and_their_bytes(prepared: Path) -> None:
    dataset = open_dataset(prepared)
    domain = "wikipedia"
    documents = by_hash(dataset, domain)
    order = np.concatenate(documents)
    for cap in (1, 5, 100, len(documents[0]), len(documents[0]) + len(documents[1]), len(order) - 1):
        windows = list(dataset.validation(domain, sequence_length=16, max_tokens=cap))
        scored = np.concatenate([w.tokens[1:][w.mask] for w in windows])
        np.testing.assert_array_equal(scored, order[:cap])
        text = dataset.vocabulary.decode(scored[scored != dataset.eos_token_id])
        assert dataset.validation_bytes(domain, sequence_length=16, max_tokens=cap) == len(text.encode())
        assert dataset.covered(domain, max_tokens=cap) == (cap, len(text.encode()))
    entry = dataset.index["domains"][domain]["splits"]["validation"]
    for cap in (len(order), len(order) + 5):  # no cap: the order of the input
        windows = list(dataset.validation(domain, sequence_length=16, max_tokens=cap))
        scored = np.concatenate([w.tokens[1:][w.mask] for w in windows])
        np.testing.assert_array_equal(scored, dataset.stream("validation", domain)[:])
        assert dataset.covered(domain, max_tokens=cap) == (entry["tokens"], entry["bytes"])


def test_equal_hashes_keep_the_order_in_which_they_lie(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = open_dataset(prepared)
    table = dataset.document_table("validation", "wikipedia").copy()
    table[:, 2] = 7
    monkeypatch.setattr(dataset, "document_table", lambda split, domain: table)
    windows = list(dataset.validation("wikipedia", sequence_length=16, max_tokens=50))
    scored = np.concatenate([w.tokens[1:][w.mask] for w in windows])
    np.testing.assert_array_equal(scored, dataset.stream("validation", "wikipedia")[:50])


@pytest.mark.parametrize("length", [1, 7, 64])
@pytest.mark.parametrize("cap", [None, 1, 130])
def test_kept_apart_documents_restart_and_lose_their_first_token(prepared: Path, length: int, cap: int | None) -> None:
    dataset = open_dataset(prepared)
    how: dict[str, Any] = {"sequence_length": length, "max_tokens": cap}
    for domain in dataset.domains:
        plain = list(dataset.validation(domain, **how))
        apart = list(dataset.validation(domain, **how, document_mask=True))
        scored, first = [], []
        for one, other in zip(plain, apart, strict=True):
            np.testing.assert_array_equal(one.tokens, other.tokens)
            assert one.positions is None and other.positions is not None
            inputs, position = one.tokens[:-1], 0
            for i, token in enumerate(inputs.tolist()):
                position = 0 if i == 0 or inputs[i - 1] == dataset.eos_token_id else position + 1
                assert other.positions[i] == position
                assert other.mask[i] == (one.mask[i] and token != dataset.eos_token_id)
            scored += one.tokens[1:][other.mask].tolist()
            first += one.tokens[1:][one.mask & ~other.mask].tolist()
        assert len(scored) + len(first) == dataset.covered(domain, max_tokens=cap)[0]
        kept = len(dataset.vocabulary.decode(np.array(first)).encode())
        whole = dataset.validation_bytes(domain, **how)
        assert dataset.validation_bytes(domain, **how, document_mask=True) == whole - kept
        if cap is None:
            assert len(first) == dataset.documents("validation", domain)


def test_bytes_are_all_where_the_vocabulary_does_not_say(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = open_dataset(prepared)
    wrong = dataset.vocabulary.token_bytes() + 1
    monkeypatch.setattr(type(dataset.vocabulary), "token_bytes", lambda self: wrong)
    how: dict[str, Any] = {"sequence_length": 16}
    assert dataset.validation_bytes("book", **how, document_mask=True) == dataset.validation_bytes("book", **how)


def test_validation_needs_of_a_stream_its_length_and_slices(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = open_dataset(prepared)
    expected = {
        cap: [w.tokens.tolist() for w in dataset.validation("book", sequence_length=9, max_tokens=cap)]
        for cap in (None, 40)
    }
    real = dataset.stream
    monkeypatch.setattr(dataset, "stream", lambda split, domain: Slices(real(split, domain)))
    for cap, windows in expected.items():
        found = dataset.validation("book", sequence_length=9, max_tokens=cap, document_mask=True)
        assert [w.tokens.tolist() for w in found] == windows
    dataset.validation_bytes("book", sequence_length=9, document_mask=True)


class Slices:
    """What a stream promises, and nothing else."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, which: slice) -> np.ndarray:
        assert isinstance(which, slice) and which.step is None and which.start >= 0 and which.stop >= 0
        return np.array(self._array[which])


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
    lengths = [len(document) for document in by_hash(dataset, "a")]
    assert dataset.covered("a", max_tokens=1)[0] == lengths[0]
    assert dataset.covered("a", max_tokens=sum(lengths[:3]) + 1)[0] == sum(lengths[:4])
    order = np.argsort(dataset.document_table("validation", "a")[:, 2], kind="stable")
    text_bytes = np.diff(table[:, 1], prepend=0)[order]
    assert dataset.covered("a", max_tokens=sum(lengths[:3]) + 1)[1] == text_bytes[:4].sum()


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
    "flipped byte in a shard": ("shards/book.train.00000.bin", flip, "its sha256 does not fit"),
    "flipped byte in a document table": ("shards/book.validation.docs.npy", flip, "its sha256 does not fit"),
    "cut shard": ("shards/github.train.00000.bin", cut, "bytes, the index says"),
    "missing shard": ("shards/github.validation.00000.bin", Path.unlink, "missing"),
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
        lambda f: f.write_text(f.read_text().replace('"version": 2', '"version": 3', 1)),
        "has version 3, this release reads version 2",
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
    file = copy / "shards" / "book.train.00000.bin"
    ids = np.fromfile(file, dtype="<u2")
    ids[len(ids) // 2] = 320
    ids.tofile(file)
    reseal(copy, lambda index: None)
    with pytest.raises(UserError, match=r"book\.train\.00000\.bin: holds token id 320, the vocabulary has 320"):
        open_dataset(copy, verify=how)


def test_overlap_of_the_splits_is_found(copy: Path) -> None:
    for kind in ("00000.bin", "docs.npy"):
        shutil.copy(copy / "shards" / f"book.train.{kind}", copy / "shards" / f"book.validation.{kind}")

    def change(index: dict) -> None:
        splits = index["domains"]["book"]["splits"]
        names = [{**shard, "file": shard["file"].replace("train", "validation")} for shard in splits["train"]["shards"]]
        table = splits["validation"]["document_table"]
        splits["validation"] = {**splits["train"], "shards": names, "document_table": table}

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


@pytest.mark.parametrize("bad", [-1, 320])
def test_id_that_does_not_fit_is_never_written(prepared: Path, bad: int) -> None:
    vocabulary = open_dataset(prepared, verify="none").vocabulary
    encoder = Encoder(vocabulary, on_bad_line="error", split_seed=0, workers=1)
    with pytest.raises(UserError, match="does not fit the vocabulary of 320"):
        encoder.joined([np.array([1, 2]), np.array([1, bad, 2])])


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
    flip_target = prepared / "shards" / "book.train.00000.bin"
    assert flip_target.stat().st_size == 2 * report["domains"]["book"]["splits"]["train"]["tokens"]
