"""prepare(): split, counts, checksums, and what happens to a place where something already is."""

from __future__ import annotations

import errno
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
from data_helpers import DOMAINS, stored, tree, write_rows

from resformer import cli
from resformer.data import inspect, merge, open_dataset, parts, placement, prepare, shards
from resformer.data.documents import draw, text_hash
from resformer.data.reading import Reading
from resformer.data.sources import list_sources
from resformer.errors import UserError


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
    expected = {text for text in rows if draw(text_hash(text.encode()), 5) < 0.2 * 2**64}
    assert 3 < len(expected) < 25
    for i, order in enumerate((rows, rows[::-1])):
        file = write_rows(tmp_path / f"{i}" / "wikipedia.jsonl", order)
        dataset = open_dataset(build([file], f"out{i}", validation_share=0.2, split_seed=5))
        assert set(stored(dataset, "validation", "wikipedia")) == expected
    other = open_dataset(build([file], "other", validation_share=0.2, split_seed=6))
    assert set(stored(other, "validation", "wikipedia")) != expected


def test_documents_are_stored_in_the_order_of_the_input(
    build: Callable[..., Path], texts: dict[str, list[str]], tmp_path: Path
) -> None:
    rows = texts["github"]
    for i, order in enumerate((rows, rows[::-1])):
        dataset = open_dataset(build([write_rows(tmp_path / f"{i}" / "github.jsonl", order)], f"out{i}"))
        for split in shards.SPLITS:
            kept = set(stored(dataset, split, "github"))
            assert stored(dataset, split, "github") == [text for text in order if text in kept]


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


def test_a_domain_without_a_new_document_is_said_and_its_counts_kept(
    build: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [f"document {i}" for i in range(20)]
    write_rows(tmp_path / "in" / "a.jsonl", [*rows, rows[0]])
    write_rows(tmp_path / "in" / "b.jsonl", [*rows[:5], ""])
    (tmp_path / "in" / "c.pdf").write_text("x")
    index = open_dataset(build([tmp_path / "in"])).index
    assert list(index["domains"]) == ["a"]
    assert index["readers"]["domains_left_out"] == {"b": {"documents_read": 6, "duplicate": 5, "empty": 1}}
    said = capsys.readouterr().err
    assert "domain 'b' is left out, no document of it is new: 5 exact duplicates, 1 empty document\n" in said
    assert "left out of the domains: 1 exact duplicate\n" in said
    assert "passed over 1 files of types that are not read: .pdf 1\n" in said


def test_inspect_reads_a_corpus_from_before_left_out_domains_were_kept(copy: Path) -> None:
    index = json.loads((copy / "index.json").read_text())
    del index["readers"]["domains_left_out"]
    (copy / "index.json").write_text(json.dumps(shards.seal({k: v for k, v in index.items() if k != "index_sha256"})))
    assert inspect(copy)["losses"] == []


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


def test_skipped_lines_are_counted_and_said(
    build: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_rows(tmp_path / "a.jsonl", [f"plain {i}" for i in range(20)])
    file.write_text(file.read_text() + '{"text": "x\n')
    with pytest.raises(UserError, match=r"a\.jsonl:21: not valid JSON"):
        build([file])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl"]
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "one"}\n{"text": "two"}\nno\n[]\n{}\n\xff\n')
    capsys.readouterr()
    found = inspect(build([file, tmp_path / "b.jsonl"], on_bad_line="skip"))
    said = capsys.readouterr().err
    assert f"{file}: skipped 1 bad line ({file}:21: not valid JSON" in said
    assert f"b.jsonl: skipped 4 bad lines ({tmp_path}/b.jsonl:3: not valid JSON" in said
    assert "skipped in all: 5 bad lines\n" in said
    assert all(line in said for line in found["losses"]) and len(found["losses"]) == 3
    report = found["readers"]
    assert report["totals"]["bad_lines"] == 5
    assert report["problems"][str(file)]["sample"][0].startswith(f"{file}:21: ")


def test_a_small_domain_gets_one_validation_document(build: Callable[..., Path], tmp_path: Path) -> None:
    file = write_rows(tmp_path / "a.jsonl", ["first text", "second text"])
    for share in (0.001, 0.999):
        dataset = open_dataset(build([file], f"out{share}", validation_share=share))
        assert [dataset.index["domains"]["a"]["splits"][s]["documents"] for s in ("train", "validation")] == [1, 1]


def test_a_domain_of_one_document_says_the_way_out(build: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "input.txt").write_text("To be or not to be. " * 50)
    with pytest.raises(UserError, match=r"domain 'input' has one document.*--validation-share 0"):
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
    with pytest.raises(UserError, match=r"other settings \(--vocab-size: 300, asked 310\); pass --overwrite"):
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
        f"book.{split}.{kind}" for split in ("train", "validation") for kind in ("00000.bin", "docs.npy")
    ]


def test_changed_input_is_noticed(build: Callable[..., Path], tmp_path: Path) -> None:
    file = write_rows(tmp_path / "a.jsonl", [f"plain {i}" for i in range(20)])
    build([file])
    write_rows(file, [f"plain {i}" for i in range(30)])
    with pytest.raises(UserError, match=r"other settings \(--input:"):
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


@pytest.mark.parametrize("content", ["{torn", "[]", '{"format": "sphinx"}', '{"a": 1}', ""])
def test_a_foreign_index_is_never_replaced(
    build: Callable[..., Path], source: Path, tmp_path: Path, content: str
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "index.json").write_text(content)
    for overwrite in (False, True):
        with pytest.raises(UserError, match=r"out/index\.json: not an index of prepared shards"):
            build([source], overwrite=overwrite)
    assert tree(tmp_path) == {"out/index.json": content.encode()}


def test_index_that_points_outside_removes_nothing(build: Callable[..., Path], source: Path, tmp_path: Path) -> None:
    out = build([source])
    (tmp_path / "precious").write_text("keep")
    index = json.loads((out / "index.json").read_text())
    index["files"]["../precious"] = {"bytes": 4, "sha256": "", "sample_sha256": ""}
    (out / "index.json").write_text(json.dumps(index))
    build([source], vocab_size=310, overwrite=True)
    assert (tmp_path / "precious").read_text() == "keep"


def slow_build(source: Path, out: Path, *, at: str = "shards.ShardWriter.add") -> subprocess.Popen[str]:
    """A build that stands still at a place."""
    code = (
        "import sys, time; from resformer import cli; from resformer.data import shards, tokenizer\n"
        "def slow(*a, **k): print('writing', flush=True); time.sleep(60)\n"
        f"{at} = slow\n"
        "sys.exit(cli.main(['data', 'prepare', '--input', sys.argv[1], '--out', sys.argv[2], '--vocab-size', '300',"
        " '--validation-share', '0.1']))"
    )
    command = [sys.executable, "-c", code, str(source), str(out)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline().strip() == "writing"
    return child


def test_a_killed_build_is_gone_on_with_and_gives_the_same_bytes(
    build: Callable[..., Path], source: Path, tmp_path: Path
) -> None:
    expected = tree(build([source], "whole"))
    out = tmp_path / "out"
    child = slow_build(source, out)
    assert not out.exists()
    home = parts.home_of(out)
    made = {p: p.stat().st_mtime_ns for p in (home / "parts").iterdir()}
    assert any(p.suffix == ".bin" for p in made)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert {p: p.stat().st_mtime_ns for p in (home / "parts").iterdir()} == made
    assert tree(build([source])) == expected
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "whole"]


def test_the_beginning_of_another_build_is_not_dropped_in_silence(
    build: Callable[..., Path], source: Path, tmp_path: Path
) -> None:
    child = slow_build(source, tmp_path / "out")
    child.kill()
    child.wait()
    with pytest.raises(UserError, match=r"the beginning of a preparation with other settings .*--vocab-size: 300"):
        build([source], vocab_size=310)
    assert open_dataset(build([source], vocab_size=310, overwrite=True)).vocab_size == 310
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_tokenizer_of_another_split_is_not_gone_on_with(
    build: Callable[..., Path], source: Path, tmp_path: Path
) -> None:
    """It was trained on documents that would be held out now."""
    child = slow_build(source, tmp_path / "out")
    child.kill()
    child.wait()
    with pytest.raises(UserError, match=r"other settings .*--validation-share: 0\.1, asked 0\.4"):
        build([source], validation_share=0.4)
    expected = tree(build([source], "whole", validation_share=0.4))
    assert tree(build([source], validation_share=0.4, overwrite=True)) == expected


def test_skipping_bad_lines_goes_on_with_what_had_none(
    build: Callable[..., Path], source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", 1000)  # less than this would not be kept after a mistake
    broken = write_rows(tmp_path / "in" / "z.jsonl", ["one", "two", "three"])
    broken.write_text(broken.read_text() + "{\n")
    with pytest.raises(UserError, match=r"z\.jsonl:4: not valid JSON"):
        build([source, broken], tokenizer=build([source], "vocabulary"))
    home = parts.home_of(tmp_path / "out")
    kept = sorted(p.name for p in (home / "parts").glob("*.bin"))
    assert len(kept) == 3
    added: list[int] = []
    whole = parts.Parts.add
    monkeypatch.setattr(parts.Parts, "add", lambda self, *a, **k: (added.append(1), whole(self, *a, **k))[1])
    dataset = open_dataset(build([source, broken], tokenizer=tmp_path / "vocabulary", on_bad_line="skip"))
    assert "z" in dataset.domains and len(added) == 1


def test_tasks_share_the_work_and_the_result_is_the_same(
    build: Callable[..., Path], source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = tree(build([source], "whole"))
    capsys.readouterr()
    for task in ("2/2", "1/2"):
        build([source], task=task)
        assert not (tmp_path / "out").exists()
    said = capsys.readouterr().err
    assert "task 2 of 2 is done (1 of 3 inputs); 2 are left to others" in said
    assert "task 1 of 2 is done (2 of 3 inputs); all are done: the same command without --task goes on" in said
    assert tree(build([source])) == expected
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "whole"]
    with pytest.raises(UserError, match=r"--task: got '3/2', expected i/n with i from 1 to n"):
        build([source], "other", task="3/2")


def test_a_build_killed_when_it_was_done_leaves_nothing_for_long(
    build: Callable[..., Path], source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resformer.data.build.shutil.rmtree", lambda *a, **k: None)
    build([source])
    monkeypatch.undo()
    assert sorted(p.name for p in tmp_path.iterdir()) == [".out.partial", "out"]
    build([source])
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_source_that_another_process_works_on_is_left_to_it(
    build: Callable[..., Path], source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = tree(build([source], "whole"))
    build([source], task="2/2")
    found = list(list_sources([str(source)], Reading(), kind=None, token_dtype=None, max_bytes=None))
    with parts.Parts(parts.home_of(tmp_path / "out")).held(found[0]) as mine:
        assert mine
        build([source], task="1/2")
        said = capsys.readouterr().err
        assert "book.jsonl: another process works on it, left to that" in said and "1 are left to others" in said
    assert tree(build([source])) == expected


def test_max_bytes_is_kept_by_an_interrupted_build(
    build: Callable[..., Path], source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where an input was cut is remembered, not worked out anew."""
    monkeypatch.setattr("resformer.data.readers.BLOCK_BYTES", 500)
    monkeypatch.setattr(parts, "PART_BYTES", 1000)
    expected = tree(build([source], "whole", max_bytes=9_000))
    finish = parts.Parts.finish
    for stops in range(2):
        calls: list[int] = []

        def stop(self: parts.Parts, one: object, stops: int = stops, calls: list[int] = calls) -> None:
            calls.append(1)
            if len(calls) > stops:
                raise KeyboardInterrupt
            finish(self, one)  # type: ignore[arg-type]

        monkeypatch.setattr(parts.Parts, "finish", stop)
        with pytest.raises(KeyboardInterrupt):
            build([source], max_bytes=9_000)
        monkeypatch.setattr(parts.Parts, "finish", finish)
    assert tree(build([source], max_bytes=9_000)) == expected


@pytest.mark.parametrize("workers", [1, 5])
def test_the_number_of_workers_and_parts_changes_nothing(
    build: Callable[..., Path], source: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    expected = tree(build([source], "whole"))
    monkeypatch.setattr("resformer.data.reading.BLOCK_BYTES", 500)
    monkeypatch.setattr("resformer.data.readers.BLOCK_BYTES", 500)
    monkeypatch.setattr(parts, "PART_BYTES", 3000)
    monkeypatch.setattr(merge, "_SORTED_DOCUMENTS", 10)
    assert tree(build([source], workers=workers)) == expected


def test_long_splits_are_several_files(
    build: Callable[..., Path], source: Path, texts: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = open_dataset(build([source], "whole"))
    monkeypatch.setattr(shards, "SHARD_BYTES", 1000)
    dataset = open_dataset(build([source]))
    entry = dataset.index["domains"]["wikipedia"]["splits"]["train"]
    assert len(entry["shards"]) > 5
    assert all(shard["tokens"] * 2 <= 1000 for shard in entry["shards"])
    one, many = (d.stream("train", "wikipedia") for d in (whole, dataset))
    assert len(one) == len(many) and np.array_equal(one[:], many[:])
    for start, stop in ((0, 1), (400, 1700), (len(one) - 5, len(one) + 5), (7, 7)):
        assert np.array_equal(one[start:stop], many[start:stop])
    assert stored(dataset, "train", "wikipedia") == stored(whole, "train", "wikipedia")


def test_sigterm_keeps_what_is_done_and_says_so(source: Path, tmp_path: Path) -> None:
    child = slow_build(source, tmp_path / "out")
    child.terminate()
    _, said = child.communicate(timeout=30)
    assert child.returncode == 143
    home = parts.home_of(tmp_path / "out")
    assert said.splitlines()[-2:] == [
        f"stopped by SIGTERM; {tmp_path / 'out'} was not prepared",
        f"{home}: keeps what is done so far; the same command goes on with it",
    ]


def test_sigterm_before_anything_is_done_leaves_nothing(source: Path, tmp_path: Path) -> None:
    child = slow_build(source, tmp_path / "out", at="tokenizer.train")
    child.terminate()
    _, said = child.communicate(timeout=30)
    assert child.returncode == 143
    assert said.splitlines()[-1] == f"stopped by SIGTERM; {tmp_path / 'out'} was not prepared"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["parts", "shards", "index"])
def test_a_full_disk_is_one_line_with_the_place(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    whole = {"parts": (parts.Parts, "add"), "shards": (shards.ShardWriter, "add"), "index": (placement, "write_json")}
    monkeypatch.setattr(*whole[place], full)
    out = str(tmp_path / "out")
    command = ["data", "prepare", "--input", str(source), "--out", out, "--vocab-size", "300"]
    assert cli.main(command) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert line == f"resformer: error: {out}: No space left on device; free some space or take another --out"
    assert [p.name for p in tmp_path.iterdir()] == ([] if place == "parts" else [".out.partial"])
    monkeypatch.undo()
    assert cli.main(command) == 0
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


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


def test_a_second_build_of_one_place_waits_for_the_first(
    build: Callable[..., Path], source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    with parts.held(out, shared=False):
        command = [sys.executable, "-m", "resformer", "data", "prepare", "--input", str(source), "--out", str(out)]
        child = subprocess.Popen([*command, "--vocab-size", "300"], stderr=subprocess.PIPE, text=True)
        assert child.stderr is not None
        assert "another process prepares it, waiting" in child.stderr.readline()
        time.sleep(0.2)
        assert child.poll() is None and not out.exists()
    assert child.wait(60) == 0
    open_dataset(out)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_out_may_be_a_link_or_an_empty_directory(build: Callable[..., Path], source: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    open_dataset(build([source], "link"))
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "index.json").is_file()


def test_max_bytes_keeps_the_beginning_of_each_input(
    build: Callable[..., Path], source: Path, texts: dict[str, list[str]]
) -> None:
    bounded = open_dataset(build([source], "bounded", max_bytes=12_000))
    sizes = {name: sum(len(text.encode()) for text in rows) for name, rows in texts.items()}
    for domain, rows in texts.items():
        kept = set(stored(bounded, "train", domain) + stored(bounded, "validation", domain))
        assert kept == set(rows[: len(kept)])
        found = sum(len(text.encode()) for text in kept)
        share = 12_000 * sizes[domain] / sum(sizes.values())
        assert share - max(len(text.encode()) for text in rows) < found <= share
    assert inspect(bounded.directory)["losses"] == ["--max-bytes: of 3 inputs only the beginning was taken"]


def test_weights_default_to_training_tokens_and_can_be_given(build: Callable[..., Path], source: Path) -> None:
    dataset = open_dataset(build([source], "a"))
    tokens = {d: dataset.tokens("train", d) for d in dataset.domains}
    assert dataset.weights == pytest.approx({d: n / sum(tokens.values()) for d, n in tokens.items()})
    given = open_dataset(build([source], "b", weights={"book": 3, "github": 1}))
    assert given.weights == {"book": 0.75, "github": 0.25, "wikipedia": 0.0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "papr"}, "--weights: no mixture 'papr'; did you mean 'paper'"),
        ({"workers": 0}, "--workers: got 0, expected at least 1"),
        ({"task": "0/2"}, "--task: got '0/2'"),
        ({"token_dtype": "int8"}, "--token-dtype: got 'int8', expected 'uint16' or 'uint32'"),
        ({"text_column": ""}, "--text-column: got an empty name"),
        ({"tokenizer": "missing/name.json"}, "--tokenizer: (no file|there is no file)"),
        ({"inputs": []}, "--input: got none"),
        ({"inputs": ["embeded"]}, "no file or directory 'embeded'; did you mean 'embedded'"),
        ({"validation_share": 2}, "--validation-share: got 2, expected a share of at least 0 and below 1"),
        ({"on_bad_line": "skipp"}, "--on-bad-line: got 'skipp', expected 'error' or 'skip'; did you mean 'skip'"),
        ({"weights": {"boook": 1.0}}, "unknown domain 'boook'; did you mean 'book'"),
        ({"weights": {"book": -1.0}}, "--weights: got book=-1.0, expected a number of at least 0"),
        ({"weights": {"book": 0.0}}, "all are 0"),
        ({"max_bytes": 0}, "--max-bytes: got 0"),
        ({"inputs": [""]}, "--input: got an empty path"),
        ({"inputs": ""}, "--input: got an empty path"),
        ({"out": ""}, "--out: got an empty path"),
        ({"tokenizer": ""}, "--tokenizer: got an empty path"),
        ({"split_seed": -1}, r"--split-seed: got -1, expected a whole number from 0 to 9223372036854775807"),
        ({"split_seed": 2**63}, "--split-seed: got 9223372036854775808"),
        ({"vocab_size": 999_999_999_999}, "--vocab-size: got 999999999999, expected 257 .* to 16777216"),
    ],
)
def test_mistakes_are_named_and_write_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, object], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
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
