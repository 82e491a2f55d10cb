"""prepare(): split, counts, checksums, and what happens to a place where something already is."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from data_helpers import DOMAINS, write_rows

from resformer.data import build as build_module
from resformer.data import inspect, open_dataset, prepare
from resformer.data.dataset import Dataset
from resformer.data.documents import draw, text_hash
from resformer.errors import UserError


def stored(dataset: Dataset, split: str, domain: str) -> list[str]:
    stream = dataset.stream(split, domain)
    ends = dataset.document_table(split, domain)[:, 0].astype(int).tolist()
    return [dataset.vocabulary.decode(stream[a : b - 1]) for a, b in zip([0, *ends], ends, strict=False)]


def tree(directory: Path) -> dict[str, bytes]:
    return {p.relative_to(directory).as_posix(): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def test_every_document_is_stored_once_with_its_bytes(prepared: Path, texts: dict[str, list[str]]) -> None:
    dataset = open_dataset(prepared)
    assert dataset.domains == sorted(DOMAINS)
    for domain, rows in texts.items():
        train, validation = (stored(dataset, split, domain) for split in ("train", "validation"))
        assert sorted(train + validation) == sorted(rows)
        assert validation
        for split, part in (("train", train), ("validation", validation)):
            entry = dataset.index["domains"][domain]["splits"][split]
            assert entry["bytes"] == sum(len(text.encode()) for text in part)
            assert entry["documents"] == len(part)
            sizes = np.diff(dataset.document_table(split, domain)[:, 1].astype(int), prepend=0).tolist()
            assert sizes == [len(text.encode()) for text in part]


def test_split_is_by_hash_of_text_and_seed_whatever_the_order(
    build: Callable[..., Path], texts: dict[str, list[str]], tmp_path: Path
) -> None:
    rows = texts["wikipedia"]
    expected = {text for text in rows if draw(text_hash(text.encode()), 5)[0] < 0.2 * 2**64}
    assert 3 < len(expected) < 25
    for i, order in enumerate((rows, rows[::-1])):
        file = write_rows(tmp_path / f"{i}" / "wikipedia.jsonl", order)
        dataset = open_dataset(build([file], f"out{i}", validation_share=0.2, split_seed=5))
        assert set(stored(dataset, "validation", "wikipedia")) == expected
    other = open_dataset(build([file], "other", validation_share=0.2, split_seed=6))
    assert set(stored(other, "validation", "wikipedia")) != expected


def test_bytes_on_disk_do_not_depend_on_the_order_of_the_input(
    build: Callable[..., Path], texts: dict[str, list[str]], tmp_path: Path
) -> None:
    results = []
    for i, order in enumerate((texts["github"], texts["github"][::-1])):
        file = write_rows(tmp_path / f"{i}" / "github.jsonl", order)
        results.append(open_dataset(build([file], f"out{i}")).fingerprint)
    assert results[0] == results[1]


def test_exact_duplicates_are_removed_and_cannot_straddle(build: Callable[..., Path], tmp_path: Path) -> None:
    rows = [f"document {i % 50}" for i in range(200)]
    random.Random(0).shuffle(rows)
    one = write_rows(tmp_path / "in" / "a.jsonl", rows)
    write_rows(tmp_path / "in" / "b.jsonl", [*rows[:30], "only in b", "and this"])
    dataset = open_dataset(build([one.parent], validation_share=0.3))
    everything = [text for d in "ab" for split in ("train", "validation") for text in stored(dataset, split, d)]
    assert len(everything) == len(set(everything)) == 52
    assert dataset.index["domains"]["a"]["counts"]["duplicate"] == 150
    assert dataset.index["domains"]["b"]["counts"] == {"documents_read": 32, "duplicate": 30}


def test_empty_and_odd_documents_are_counted(build: Callable[..., Path], tmp_path: Path) -> None:
    odd = ["", "  \n\t", "nul \0", "crlf \r\n", "lone \ud800", "\ufeffmark", "sep \u2028"]
    file = write_rows(tmp_path / "a.jsonl", odd + [f"plain {i}" for i in range(20)])
    dataset = open_dataset(build([file]))
    assert dataset.index["domains"]["a"]["counts"] == {
        "byte_order_mark": 1,
        "crlf": 1,
        "documents_read": 27,
        "empty": 2,
        "line_separator": 1,
        "lone_surrogate": 1,
        "nul": 1,
    }
    kept = stored(dataset, "train", "a") + stored(dataset, "validation", "a")
    assert {"nul \0", "crlf \r\n", "lone \ufffd", "mark", "sep \u2028"} <= set(kept)


def test_skipped_lines_are_counted_in_the_index(build: Callable[..., Path], tmp_path: Path) -> None:
    file = write_rows(tmp_path / "a.jsonl", [f"plain {i}" for i in range(20)])
    file.write_text(file.read_text() + '{"text": "x\n')
    with pytest.raises(UserError, match=r"a\.jsonl:21: not valid JSON"):
        build([file])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl"]
    report = open_dataset(build([file], on_bad_line="skip")).index["readers"]
    assert report["totals"]["bad_lines"] == 1
    assert report["problems"][str(file)]["sample"][0].startswith(f"{file}:21: ")


def test_a_small_domain_gets_one_validation_document(build: Callable[..., Path], tmp_path: Path) -> None:
    file = write_rows(tmp_path / "a.jsonl", ["first text", "second text"])
    for share in (0.001, 0.999):
        dataset = open_dataset(build([file], f"out{share}", validation_share=share))
        assert [dataset.index["domains"]["a"]["splits"][s]["documents"] for s in ("train", "validation")] == [1, 1]


def test_a_domain_of_one_document_says_the_way_out(build: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "input.txt").write_text("To be or not to be. " * 50)
    with pytest.raises(UserError, match=r"domain 'input' has one document.*validation_share=0"):
        build([tmp_path / "input.txt"])
    dataset = open_dataset(build([tmp_path / "input.txt"], validation_share=0))
    assert dataset.tokens("train", "input") > 100
    with pytest.raises(UserError, match="has no validation documents"):
        dataset.validation("input", sequence_length=8)


def test_second_call_returns_at_once_and_says_so(
    build: Callable[..., Path], source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = build([source])
    before, inode = tree(out), (out / "index.json").stat().st_ino
    capsys.readouterr()
    start = time.perf_counter()
    assert build([source]) == out
    assert time.perf_counter() - start < 2
    assert "already prepared" in capsys.readouterr().err
    assert (tree(out), (out / "index.json").stat().st_ino) == (before, inode)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_same_build_twice_gives_the_same_bytes(build: Callable[..., Path], source: Path) -> None:
    assert tree(build([source], "a")) == tree(build([source], "b"))


def test_other_settings_are_refused_unless_overwritten(build: Callable[..., Path], source: Path) -> None:
    out = build([source])
    before = tree(out)
    with pytest.raises(UserError, match=r"other settings \(vocab_size: 300, asked 310\); pass --overwrite"):
        build([source], vocab_size=310)
    assert tree(out) == before
    (out / "notes.txt").write_text("mine")
    (out / "shards" / "mine.bin").write_text("mine too")
    assert open_dataset(build([source], vocab_size=310, overwrite=True)).vocab_size == 310
    assert (out / "notes.txt").read_text() == "mine"
    assert (out / "shards" / "mine.bin").read_text() == "mine too"
    # A domain that is gone leaves no file behind.
    build([source / "book.jsonl"], overwrite=True)
    assert sorted(p.name for p in (out / "shards").iterdir() if p.name != "mine.bin") == [
        f"book.{split}.{kind}" for split in ("train", "validation") for kind in ("bin", "docs.npy")
    ]


def test_changed_input_is_noticed(build: Callable[..., Path], tmp_path: Path) -> None:
    file = write_rows(tmp_path / "a.jsonl", [f"plain {i}" for i in range(20)])
    build([file])
    write_rows(file, [f"plain {i}" for i in range(30)])
    with pytest.raises(UserError, match=r"other settings \(inputs"):
        build([file])


def test_overwrite_never_touches_what_it_did_not_write(
    build: Callable[..., Path], source: Path, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years")
    for overwrite in (False, True):
        with pytest.raises(UserError, match=r"holds files but no index\.json"):
            build([source], overwrite=overwrite)
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="is a file"):
        build([source], "file")
    assert tree(tmp_path) == {"out/thesis.txt": b"years", "file": b"x"}


def test_index_that_points_outside_removes_nothing(build: Callable[..., Path], source: Path, tmp_path: Path) -> None:
    out = build([source])
    (tmp_path / "precious").write_text("keep")
    index = json.loads((out / "index.json").read_text())
    index["files"]["../precious"] = {"bytes": 4, "sha256": "", "sample_sha256": ""}
    (out / "index.json").write_text(json.dumps(index))
    build([source], vocab_size=310, overwrite=True)
    assert (tmp_path / "precious").read_text() == "keep"


def test_a_kill_leaves_nothing_half_made_and_the_next_call_cleans_up(source: Path, tmp_path: Path) -> None:
    code = (
        "import sys, time; from resformer.data import prepare, shards\n"
        "def slow(*a, **k): print('writing', flush=True); time.sleep(60)\n"
        "shards.ShardWriter.add = slow\n"
        "prepare([sys.argv[1]], sys.argv[2], vocab_size=300, validation_share=0.1, progress=False)"
    )
    out = tmp_path / "out"
    child = subprocess.Popen([sys.executable, "-c", code, str(source), str(out)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline().strip() == "writing"
    assert not out.exists()
    alive = [p.name for p in tmp_path.iterdir()]
    assert len(alive) == 1
    # A second build of the same place leaves the working directory of a live one alone.
    prepare([source], out, vocab_size=300, validation_share=0.1, progress=False)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*alive, "out"])
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    prepare([source], out, vocab_size=310, validation_share=0.1, progress=False, overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert open_dataset(out).vocab_size == 310


def test_a_failure_while_overwriting_leaves_no_corpus_rather_than_a_mixture(
    build: Callable[..., Path], source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = build([source])

    def full_disk(old: Path, new: Path) -> None:
        if old.name.endswith(".bin"):
            raise OSError("no space left")
        os.rename(old, new)

    monkeypatch.setattr("resformer.data.placement.os.replace", full_disk)
    with pytest.raises(OSError, match="no space left"):
        build([source], vocab_size=310, overwrite=True)
    with pytest.raises(UserError, match=r"index\.json: missing"):
        open_dataset(out)


def test_two_builds_of_one_place_end_with_one_corpus(
    build: Callable[..., Path],
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = build_module._build

    def while_another_is_faster(plan: object, settings: dict, work: Path) -> dict:
        monkeypatch.setattr(build_module, "_build", whole)
        build([source])
        return whole(plan, settings, work)  # type: ignore[arg-type]

    monkeypatch.setattr(build_module, "_build", while_another_is_faster)
    out = build([source])
    assert "already prepared" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    open_dataset(out)


def test_out_may_be_a_link_or_an_empty_directory(build: Callable[..., Path], source: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    open_dataset(build([source], "link"))
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "index.json").is_file()


def test_max_bytes_keeps_a_random_sample_of_each_domain(build: Callable[..., Path], source: Path) -> None:
    whole, bounded = open_dataset(build([source], "whole")), open_dataset(build([source], "bounded", max_bytes=12_000))
    for domain in whole.domains:
        all_texts = set(stored(whole, "train", domain) + stored(whole, "validation", domain))
        kept = stored(bounded, "train", domain) + stored(bounded, "validation", domain)
        assert 2 <= len(kept) < len(all_texts)
        assert set(kept) < all_texts
        assert bounded.index["domains"][domain]["counts"]["left_out_by_max_bytes"] == len(all_texts) - len(kept)
    total = sum(inspect(bounded.directory)["domains"][d]["bytes"] for d in bounded.domains)
    assert 6_000 < total <= 12_000


def test_weights_default_to_training_tokens_and_can_be_given(build: Callable[..., Path], source: Path) -> None:
    dataset = open_dataset(build([source], "a"))
    tokens = {d: dataset.tokens("train", d) for d in dataset.domains}
    assert dataset.weights == pytest.approx({d: n / sum(tokens.values()) for d, n in tokens.items()})
    given = open_dataset(build([source], "b", weights={"book": 3, "github": 1}))
    assert given.weights == {"book": 0.75, "github": 0.25, "wikipedia": 0.0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inputs": []}, "inputs: got none"),
        ({"inputs": ["embeded"]}, "no file or directory 'embeded'; did you mean 'embedded'"),
        ({"validation_share": 2}, "validation_share: got 2, expected a share of at least 0 and below 1"),
        ({"on_bad_line": "skipp"}, "on_bad_line: got 'skipp', expected 'error' or 'skip'; did you mean 'skip'"),
        ({"weights": {"boook": 1.0}}, "unknown domain 'boook'; did you mean 'book'"),
        ({"weights": {"book": -1.0}}, r"weights.book: got -1.0, expected a number of at least 0"),
        ({"weights": {"book": 0.0}}, "all are 0"),
        ({"max_bytes": 0}, "max_bytes: got 0"),
    ],
)
def test_mistakes_are_named_and_write_nothing(
    source: Path, tmp_path: Path, options: dict[str, object], message: str
) -> None:
    settings = {"inputs": [source], "out": tmp_path / "out", "vocab_size": 300, "progress": False, **options}
    with pytest.raises(UserError, match=message):
        prepare(**settings)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_empty_corpus(build: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no document with text in it"):
        build([write_rows(tmp_path / "a.jsonl", ["", " "])])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no document with text in it"):
        build([tmp_path / "empty"])
