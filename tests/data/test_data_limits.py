"""Inputs that are large or odd in one respect: memory, open files, names, links."""

from __future__ import annotations

import gzip
import os
import random
import resource
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from data_helpers import write_rows

from resformer.data import archives, documents, open_dataset
from resformer.data.encode import cut_safely
from resformer.data.reading import Reading, Report
from resformer.data.sample import training_texts
from resformer.data.sources import list_sources
from resformer.errors import UserError


def sources(path: Path, report: Report | None = None) -> list:
    return list_sources([str(path)], Reading(), kind=None, token_dtype=None, max_bytes=None, report=report)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.jsonl.xz", "a.jsonl.bz2"])
def test_an_archive_that_swells_is_read_in_small_pieces(tmp_path: Path, name: str) -> None:
    import bz2
    import lzma

    data = b'{"text": "' + b"a" * 90 + b'"}\n'
    whole = data * 400_000  # 41 MB from some kB
    packs = {"gz": gzip.compress, "xz": lzma.compress, "bz2": bz2.compress}
    kind = name.rsplit(".", 1)[1]
    if kind == "zst":
        packs["zst"] = pytest.importorskip("zstandard").ZstdCompressor().compress
    (tmp_path / name).write_bytes(packs[kind](whole))
    sizes = [len(piece) for piece in archives.chunks(tmp_path / name)]
    assert sum(sizes) == len(whole) and max(sizes) < 24_000_000
    blocks = [len(block.data) for block in sources(tmp_path / name)[0].blocks()]
    assert sum(blocks) == len(whole)


def test_a_tokenizer_s_sample_keeps_to_its_bound_and_is_never_empty(tmp_path: Path) -> None:
    generator = random.Random(0)
    for i in range(12):
        words = [" ".join(generator.choices(["value", "residual", "layer"], k=20_000)) for _ in range(4)]
        write_rows(tmp_path / "in" / f"{i}.jsonl", words)
    for most in (1000, 100_000, 1_000_000):
        texts = training_texts(
            sources(tmp_path / "in"), Reading(), vocab_size=5000, most_bytes=most, validation_share=0.0, split_seed=0
        )
        assert 0 < sum(len(text.encode()) for text in texts) <= most
    for seed in range(8):  # one long file, whatever its hash
        (tmp_path / f"{seed}.txt").write_text(f"{seed} words " * 200_000)
        one = sources(tmp_path / f"{seed}.txt")
        texts = training_texts(one, Reading(), vocab_size=300, most_bytes=10**6, validation_share=0.0, split_seed=0)
        assert 0 < sum(map(len, texts)) <= 600_000


@pytest.mark.parametrize(
    "text", ["many words " * 60_000, "\u5b57\u3002" * 300_000, "ab+/" * 200_000, "x" * 9_000_000, "a\nb" * 300_000]
)
def test_long_documents_are_cut_and_nothing_is_lost(text: str) -> None:
    pieces = list(cut_safely(text))
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= (1 << 22)
    if "x" not in text:
        assert max(map(len, pieces)) <= (1 << 18)


def test_more_domains_than_open_files(build: Callable[..., Path], tmp_path: Path) -> None:
    rows = [{"text": f"document {i} of many", "kind": f"domain {i % 150}"} for i in range(600)]
    file = tmp_path / "a.jsonl"
    import json

    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, before[1]))
    try:
        dataset = open_dataset(build([file], domain_from="kind"), verify="none")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert len(dataset.domains) == 150
    assert sum(len(dataset.stream("train", d)) > 0 for d in dataset.domains) == 150


def test_names_of_domains() -> None:
    assert [documents.domain_name(n) for n in ("C++", "C#", "C", "F#")] == ["cpp", "csharp", "c", "fsharp"]
    assert documents.domain_name("\u65e5\u672c\u8a9e") == "\u65e5\u672c\u8a9e"
    long = [documents.domain_name("x" * 300 + end) for end in ("a", "b")]
    assert long[0] != long[1] and all(len(name.encode()) < 100 for name in long)
    assert documents.domain_name("../../etc") == "etc"


def test_links_and_pipes_are_counted_or_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "x.txt").write_text("text")
    top = tmp_path / "in"
    top.mkdir()
    (top / "linked").symlink_to(tmp_path / "real")
    (top / "broken.txt").symlink_to(tmp_path / "nowhere")
    os.mkfifo(top / "pipe.txt")
    (top / "a.txt").write_text("here")
    report = Report()
    assert len(sources(top, report)) == 1
    assert report.passed_over == {"(link to a directory)": 1, "(broken link)": 1, "(no regular file)": 1}
    with pytest.raises(UserError, match="is no regular file; pipe it to standard input"):
        sources(top / "pipe.txt")
    # As a hub's cache lies: the name of the directory counts, not that of what the link leads to.
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "wiki"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    (blobs / "11").write_text('{"text": "one"}\n')
    (snapshot / "train-00000-of-00001.jsonl").symlink_to(blobs / "11")
    assert sources(snapshot)[0].domain == "wiki"


def test_ids_of_four_bytes_read_as_two_are_noticed(build: Callable[..., Path], source: Path, tmp_path: Path) -> None:
    home = build([source], "vocabulary")
    ids = np.random.default_rng(0).integers(0, 300, 4000)
    ids[::50] = 0
    (tmp_path / "a.bin").write_bytes(ids.astype("<u4").tobytes())
    with pytest.raises(UserError, match="they look like 4 bytes: --token-dtype uint32"):
        build([tmp_path / "a.bin"], tokenizer=home, token_dtype="uint16")
    assert open_dataset(build([tmp_path / "a.bin"], tokenizer=home, token_dtype="uint32")).domains == ["a"]
