"""What users bring: formats, encodings, damage. Each problem is an error with file and line, or is counted."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import sys
from collections import Counter
from pathlib import Path

import pytest

from resformer.data import readers
from resformer.data.documents import clean, domain_name
from resformer.data.readers import file_domain, list_files
from resformer.data.reading import Reading, Report, row_document
from resformer.data.sources import list_sources
from resformer.errors import UserError


def rows(*texts: str) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def documents(path: Path, mode: str = "error", **options: str) -> tuple[list[tuple[str, str]], Report]:
    report, reading = Report(on_bad_line=mode), Reading(on_bad_line=mode, **options)
    sources = list_sources([str(path)], reading, kind=None, token_dtype=None, max_bytes=None, report=report)
    blocks = [block for source in sources for block in source.blocks()]
    return [(d.domain, d.text) for block in blocks for d in block.documents(report)], report


def zst(data: bytes) -> bytes:
    return pytest.importorskip("zstandard").ZstdCompressor().compress(data)


COMPRESSORS = {"": lambda data: data, ".gz": gzip.compress, ".zst": zst, ".xz": lzma.compress, ".bz2": bz2.compress}


@pytest.mark.parametrize("suffix", COMPRESSORS)
def test_json_lines_plain_and_compressed(tmp_path: Path, suffix: str) -> None:
    texts = [
        "one",
        "line separator \u2028 inside, next line \u0085 too",
        "two\r\nlines",
        "\u00e4 \U0001f600",
        "x" * 200_000,
    ]
    file = tmp_path / f"wikipedia.jsonl{suffix}"
    # Raw separators inside the strings, CRLF between the lines, a blank line, no newline at the end,
    # two members or frames.
    lines = [json.dumps({"text": text}, ensure_ascii=False).encode() for text in texts]
    pack = COMPRESSORS[suffix]
    file.write_bytes(pack(b"\r\n".join(lines[:3]) + b"\r\n\r\n") + pack(b"\n".join(lines[3:])))
    assert documents(file)[0] == [("wikipedia", text) for text in texts]


def test_domain_from_meta_before_the_name_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "mixed.jsonl"
    metas = [
        {"redpajama_set_name": "RedPajamaArXiv"},
        json.dumps({"redpajama_set_name": "RedPajamaC4"}),
        "not json",
        None,
        {},
    ]
    file.write_text("".join(json.dumps({"text": str(i), "meta": meta}) + "\n" for i, meta in enumerate(metas)))
    assert [domain for domain, _ in documents(file)[0]] == ["arxiv", "c4", "mixed", "mixed", "mixed"]


@pytest.mark.parametrize(
    ("name", "domain"),
    [
        ("wikipedia.jsonl.zst", "wikipedia"),
        ("c4.jsonl", "c4"),
        ("c4-train.00000-of-01024.json.gz", "c4-train"),
        ("top/part-00001-of-00010.jsonl.gz", "top"),
        ("top/00017.jsonl", "top"),
        ("top/Stack Exchange_3.jsonl", "stack_exchange"),
        ("top/law/a.txt", "law"),
        ("top/law/deep/er.md", "law"),
    ],
)
def test_domain_names(tmp_path: Path, name: str, domain: str) -> None:
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("x")
    top = tmp_path / "top"
    assert file_domain(file, top if name.startswith("top/") else file) == domain
    assert domain_name(domain) == domain


def test_directory_in_a_fixed_order_hidden_and_unknown_files_passed_over(tmp_path: Path) -> None:
    top = tmp_path / "notes"
    for name in ("b.txt", "a.md", "sub/c.py", ".git/config.txt", "picture.png", "package.json"):
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text(name)
    got, report = documents(top)
    assert got == [("notes", "a.md"), ("notes", "b.txt"), ("sub", "sub/c.py")]
    assert report.passed_over == {".png": 1, ".json": 1}


def test_text_is_kept_but_for_marks_that_are_no_text() -> None:
    counts: Counter[str] = Counter()
    kept = "a\r\nb\0c\u2028d \U0001f600"
    assert clean(kept, counts) == kept
    assert clean("\ufeffstart", counts) == "start"
    assert clean("lone \ud83d and pair \ud83d\ude00", counts) == "lone \ufffd and pair \U0001f600"
    assert counts == {"crlf": 1, "nul": 1, "line_separator": 1, "byte_order_mark": 1, "lone_surrogate": 1}


def test_byte_order_marks_of_files(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + rows("first", "second"))
    got, report = documents(file)
    assert got == [("a", "first"), ("a", "second")]
    assert report.totals["byte_order_mark"] == 1


BAD_LINES = {
    b'{"text": "cut': "not valid JSON",
    b'["text"]': "expected a JSON object with a 'text' field, got list",
    b'{"content": "x"}': "expected a string in the field 'text', got keys ['content']",
    b'{"text": 5}': "expected a string in the field 'text', got int",
    b'{"text": "\xff"}': "not UTF-8",
    b"[" * 100_000: "JSON",
}


@pytest.mark.parametrize("bad", BAD_LINES, ids=[f"bad{i}" for i in range(len(BAD_LINES))])
def test_bad_line_is_an_error_with_file_and_line_or_is_counted(tmp_path: Path, bad: bytes) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(rows("one", "two") + bad + b"\n" + rows("three"))
    with pytest.raises(UserError) as error:
        documents(file)
    assert f"{file}:3: " in str(error.value)
    assert BAD_LINES[bad] in str(error.value)
    assert "--on-bad-line skip" in str(error.value)
    assert "\n" not in str(error.value)
    got, report = documents(file, "skip")
    assert [text for _, text in got] == ["one", "two", "three"]
    assert report.totals["bad_lines"] == 1
    problem = report.asdict(())["problems"][str(file)]
    assert problem["bad_lines"] == 1
    assert problem["sample"][0].startswith(f"{file}:3: ")


@pytest.mark.parametrize("suffix", [".gz", ".zst", ".xz", ".bz2"])
def test_archive_cut_in_the_middle_keeps_what_was_readable_only_when_allowed(tmp_path: Path, suffix: str) -> None:
    import random

    generator = random.Random(1)
    texts = ["".join(generator.choices("abcdefghij ", k=400)) for _ in range(6000)]
    whole = COMPRESSORS[suffix](rows(*texts))
    file = tmp_path / f"a.jsonl{suffix}"
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="the archive ends or breaks here"):
        documents(file)
    got, report = documents(file, "skip")
    assert 100 < len(got) < len(texts)
    assert [text for _, text in got] == texts[: len(got)]
    assert report.totals["truncated_files"] == 1
    assert report.totals["bad_lines"] == 0


def test_skippable_frames_and_padding_are_passed_over(tmp_path: Path) -> None:
    skippable = b"\x50\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"index"
    for suffix, between in ((".zst", skippable), (".gz", b"\0" * 700), (".xz", b"\0" * 8)):
        pack = COMPRESSORS[suffix]
        file = tmp_path / f"a.jsonl{suffix}"
        file.write_bytes(pack(rows("one")) + between + pack(rows("two")) + between)
        assert [text for _, text in documents(file)[0]] == ["one", "two"]


@pytest.mark.parametrize("suffix", [".gz", ".zst", ".xz", ".bz2"])
def test_archive_with_broken_bytes(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"a.jsonl{suffix}"
    file.write_bytes(b"this is no archive at all")
    with pytest.raises(UserError, match="broken archive"):
        documents(file)


def test_plain_file_that_is_not_utf8(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes("caf\u00e9".encode("latin-1"))
    with pytest.raises(UserError, match=r"a\.txt: is not UTF-8 \(byte 3"):
        documents(file)
    got, report = documents(file, "skip")
    assert got == []
    assert report.totals["bad_files"] == 1


def test_zst_without_the_package_says_what_to_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.jsonl.zst"
    file.write_bytes(b"\x28\xb5\x2f\xfd")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(UserError, match="pip install zstandard"):
        documents(file)


def test_unknown_file_type_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a.xlsx"
    file.write_bytes(b"x")
    with pytest.raises(UserError, match=r"cannot read the file type '\.xlsx'"):
        list_files(file)


def test_text_and_domain_by_the_names_of_columns(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    lines = [
        {"body": {"raw": "one"}, "kind": "News"},
        {"body": '{"raw": "two"}', "kind": "law"},
        {"body": {}, "kind": 3},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    got, report = documents(file, "skip", text_column="body.raw", domain_from="kind")
    assert got == [("news", "one"), ("law", "two")]
    assert report.asdict(())["problems"][str(file)]["sample"] == [
        f"{file}:3: expected a string in the field 'body.raw', got keys ['body', 'kind']"
    ]
    with pytest.raises(ValueError, match="expected the domain's name in the field 'kind', got 3"):
        row_document({"text": "x", "kind": 3}, domain="a", name="", reading=Reading(domain_from="kind"))
    row = {"text": "x", "meta": {"redpajama_set_name": "RedPajamaC4"}}
    assert row_document(row, domain="a", name="", reading=Reading(domain_from="file")).domain == "a"
    assert row_document({"a.b": "x"}, domain="a", name="", reading=Reading(text_column="a.b")).text == "x"


def test_a_long_file_is_read_in_ranges_with_the_right_line_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.jsonl"
    texts = [f"document {i} " + "x" * (i % 90) for i in range(300)]
    lines = rows(*texts).splitlines(keepends=True)
    lines[211] = b"broken\n"
    for ending in (b"", b"\n"):
        file.write_bytes(b"".join(lines).rstrip(b"\n") + ending)
        expected, whole = documents(file, "skip")
        for length in (1, 97, 1000, 5000):
            monkeypatch.setattr("resformer.data.sources._RANGE_BYTES", length)
            monkeypatch.setattr("resformer.data.sources._GROUP_BYTES", 0)
            monkeypatch.setattr(readers, "BLOCK_BYTES", 50)
            if length == 1:
                monkeypatch.setattr("resformer.data.sources._RANGE_BYTES", 13)
            got, report = documents(file, "skip")
            assert got == expected and len(got) == 299
            assert report.problems == whole.problems
            monkeypatch.undo()
    assert whole.asdict(())["problems"][str(file)]["sample"][0].startswith(f"{file}:212: ")


def test_patterns_and_small_files_in_order(tmp_path: Path) -> None:
    for name in ("b/2.txt", "b/10.txt", "a/x.txt", "a/y.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert [text for _, text in documents(tmp_path / "*" / "*.txt")[0]] == ["a/x.txt", "b/10.txt", "b/2.txt"]
    assert [text for _, text in documents(tmp_path / "**")[0]] == ["a/x.txt", "a/y.md", "b/10.txt", "b/2.txt"]
    with pytest.raises(UserError, match="no file matches the pattern"):
        documents(tmp_path / "*.json")
