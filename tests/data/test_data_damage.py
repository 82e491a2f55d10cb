"""Damaged and odd inputs, each through the command: the documented outcome, never a traceback, never a wrong token."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from pathlib import Path

import pytest
from data_helpers import all_stored, write_rows
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from resformer import cli
from resformer.data import open_dataset, prepare
from resformer.data.documents import clean
from resformer.errors import UserError

GOOD = [f"a good document, number {i}" for i in range(60)]


def lines(texts: list[str]) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def zst(data: bytes) -> bytes:
    return pytest.importorskip("zstandard").ZstdCompressor().compress(data)


def big(seed: int = 0) -> bytes:
    """Rows that do not compress into one block."""
    import random

    generator = random.Random(seed)
    return lines(["".join(generator.choices("abcdefghij klm", k=300)) for _ in range(8000)])


# name -> (file name, content, message of "error", bad things counted by "skip" (None: nothing is wrong))
CASES: dict[str, tuple[str, bytes, str, str | None]] = {
    "torn line": ("a.jsonl", lines(GOOD) + b'{"text": "x\n', "a.jsonl:61: not valid JSON", "bad_lines"),
    "wrong type": ("a.jsonl", lines(GOOD) + b'{"text": 3}\n', "a.jsonl:61: expected a string", "bad_lines"),
    "null text": ("a.jsonl", lines(GOOD) + b'{"text": null}\n', "a.jsonl:61: expected a string", "bad_lines"),
    "no text": ("a.jsonl", b'{"body": "x"}\n' + lines(GOOD), "a.jsonl:1: expected a string", "bad_lines"),
    "a list": ("a.jsonl", lines(GOOD) + b"[1]\n", "a.jsonl:61: expected a JSON object", "bad_lines"),
    "not utf-8": ("a.jsonl", b'{"text": "\xff\xfe"}\n' + lines(GOOD), "a.jsonl:1: not UTF-8", "bad_lines"),
    "utf-16": ("a.jsonl", lines(GOOD).decode().encode("utf-16"), "a.jsonl:1: not UTF-8", "bad_lines"),
    "a long number": ("a.jsonl", lines(GOOD) + b'{"text": ' + b"1" * 9000 + b"}\n", "a.jsonl:61: ", "bad_lines"),
    "deep": ("a.jsonl", lines(GOOD) + b'{"a":' * 60_000 + b"\n", "a.jsonl:61: ", "bad_lines"),
    "cut gz": ("a.jsonl.gz", gzip.compress(big())[:-500_000], "archive ends or breaks", "truncated_files"),
    "cut zst": ("a.jsonl.zst", b"ZSTD", "archive ends or breaks", "truncated_files"),
    "cut xz": ("a.jsonl.xz", lzma.compress(big(), preset=0)[:-500_000], "archive ends or breaks", "truncated_files"),
    "cut bz2": ("a.jsonl.bz2", bz2.compress(big())[:-500_000], "archive ends or breaks", "truncated_files"),
    "no archive": ("a.jsonl.gz", lines(GOOD), "broken archive", "truncated_files"),
    "flipped gz": ("a.jsonl.gz", b"FLIP", "archive ends or breaks", "truncated_files"),
    "latin-1": ("in/a.txt", "caf\xe9".encode("latin-1"), "a.txt: is not UTF-8", "bad_files"),
    "cut txt.gz": ("in/a.txt.gz", gzip.compress(big())[:-9], "cannot be read to its end", "truncated_files"),
    "bom": ("a.jsonl", b"\xef\xbb\xbf" + lines(GOOD), "", None),
    "crlf": ("a.jsonl", lines(GOOD).replace(b"\n", b"\r\n"), "", None),
    "blank lines": ("a.jsonl", lines(GOOD).replace(b"\n", b"\n \n\n"), "", None),
    "no last newline": ("a.jsonl", lines(GOOD)[:-1], "", None),
    "separators": ("a.jsonl", lines([*GOOD, "a\u2028b\u0085c\x0bd\x1ce"]), "", None),
    "nul and surrogates": ("a.jsonl", lines([*GOOD, "a\0b", "\ud800x", "\ud83d\ude00"]), "", None),
    "special tokens": ("a.jsonl", lines([*GOOD, "<|endoftext|>", "x<|endoftext|><|endoftext|>y", "</s><s>"]), "", None),
    "empty": ("a.jsonl", lines([*GOOD, "", " \n\t", "\u00a0"]), "", None),
    "huge": ("a.jsonl", lines([*GOOD, "many words " * 60_000, "x" * 400_000, " " * 300_000 + "y"]), "", None),
    "duplicates": ("a.jsonl", lines(GOOD * 3), "", None),
    "duplicate keys": ("a.jsonl", lines(GOOD) + b'{"text": "one", "text": "two"}\n', "", None),
}


def content(data: bytes) -> bytes:
    """The two cases that need a package or a place in the file."""
    if data == b"ZSTD":
        return zst(big())[:-300_000]
    if data == b"FLIP":
        whole = bytearray(gzip.compress(big()))
        whole[len(whole) // 2] ^= 0x55
        return bytes(whole)
    return data


@pytest.mark.parametrize("name", CASES)
def test_damage_has_the_documented_outcome(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    file, data, message, kind = CASES[name]
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "in" / "other.jsonl", [f"other {i}" for i in range(10)])
    path = tmp_path / file if file.startswith("in/") else tmp_path / "in" / file
    path.write_bytes(content(data))
    command = ["data", "prepare", "--input", "in", "--vocab-size", "300", "--out"]
    if kind is None:
        assert cli.main([*command, "out"]) == 0
    else:
        assert cli.main([*command, "out"]) == 2
        said = capsys.readouterr().err.splitlines()
        assert message in said[-1] and said[-1].endswith("; mend the file or pass --on-bad-line skip")
        assert said[-1].startswith("resformer: error: in/")
        assert sorted(p.name for p in tmp_path.iterdir() if not p.name.startswith(".")) == ["in"]
        assert cli.main([*command, "out", "--on-bad-line", "skip"]) == 0
        said = capsys.readouterr().err.splitlines()
        assert any(str(path.relative_to(tmp_path)) in line and "skipped" in line for line in said)
    dataset = open_dataset("out")
    assert dataset.index["readers"]["totals"].get(kind or "bad_lines", 0) == (kind is not None) or name == "utf-16"
    texts = set(all_stored(dataset))
    assert len(texts) == len(all_stored(dataset))
    assert {f"other {i}" for i in range(10)} <= texts
    if kind == "bad_lines" and name != "utf-16":
        assert set(GOOD) <= texts and len(texts) == 70
    if kind is None:
        from collections import Counter

        rows = [json.loads(line)["text"] for line in data.decode("utf-8-sig").split("\n") if line.strip()]
        expected = {clean(row, Counter()) for row in rows}
        assert texts == {t for t in expected if t.strip()} | {f"other {i}" for i in range(10)}


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.lists(st.text(max_size=80), min_size=1, max_size=30),
    pieces=st.sampled_from(["", "<|endoftext|>", "\u0120a", "\u010a", "  \n"]),
)
def test_any_text_comes_back(tmp_path_factory: pytest.TempPathFactory, texts: list[str], pieces: str) -> None:
    from collections import Counter

    home = tmp_path_factory.mktemp("text")
    rows = [f"{text}{pieces}{i % 3}" for i, text in enumerate(texts)]
    write_rows(home / "a.jsonl", rows)
    dataset = open_dataset(
        prepare([home / "a.jsonl"], home / "out", vocab_size=280, validation_share=0, progress=False)
    )
    expected = dict.fromkeys(text for row in rows if (text := clean(row, Counter())) and not text.isspace())
    assert all_stored(dataset) == list(expected)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_changed_byte_of_a_corpus_is_found(prepared: Path, tmp_path_factory: pytest.TempPathFactory, data) -> None:  # type: ignore[no-untyped-def]
    import shutil

    home = Path(shutil.copytree(prepared, tmp_path_factory.mktemp("bytes") / "copy"))
    file = data.draw(st.sampled_from(sorted(p for p in home.rglob("*") if p.is_file())))
    whole = bytearray(file.read_bytes())
    how = data.draw(st.sampled_from(["flip", "cut", "add"]))
    at = data.draw(st.integers(0, len(whole) - 1))
    if how == "flip":
        whole[at] ^= data.draw(st.integers(1, 255))
    changed = {"flip": bytes(whole), "cut": bytes(whole[:at]), "add": bytes(whole) + b"\0"}[how]
    file.write_bytes(changed)
    try:
        same = open_dataset(home).index == open_dataset(prepared).index
    except UserError as error:
        assert "\n" not in str(error)
    else:  # white space of the index says nothing
        assert file.name == "index.json" and same
