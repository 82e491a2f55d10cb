"""Parquet files as sources."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from resformer.data import tables
from resformer.data.reading import BLOCK_BYTES, Reading, Report, Source
from resformer.errors import UserError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def documents(source: Source, mode: str = "error") -> tuple[list[tuple[str, str]], Report]:
    report, found = Report(on_bad_line=mode), []
    for block in source.blocks():
        found += [(d.domain, d.text) for d in block.documents(report)]
    return found, report


def parquet(file: Path, columns: dict[str, Any], **options: Any) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), file, **options)
    return file


def source(file: Path, **reading: str) -> tables.ParquetSource:
    return tables.ParquetSource(file, file, "own", Reading(**reading))


def refused(source: Source, mode: str = "error") -> str:
    with pytest.raises(UserError) as caught:
        documents(source, mode)
    assert "\n" not in str(caught.value)
    return str(caught.value)


TEXTS = ["one", "zwei \u00e4\u2028", "three\r\n\0", "", "x" * 1000]
TYPES = {
    "string": pa.string(),
    "large_string": pa.large_string(),
    "string_view": pa.string_view(),
    "binary": pa.binary(),
    "large_binary": pa.large_binary(),
    "dictionary": pa.dictionary(pa.int32(), pa.string()),
}


@pytest.mark.parametrize("kind", TYPES)
def test_parquet_types_of_text(tmp_path: Path, kind: str) -> None:
    plain = pa.array([*TEXTS, *TEXTS], pa.string())
    if kind == "dictionary":
        array = plain.dictionary_encode()
    elif "binary" in kind:
        array = pa.array([text.encode() for text in plain.to_pylist()], TYPES[kind])
    else:
        array = pa.array(plain.to_pylist(), TYPES[kind])
    assert array.type == TYPES[kind]
    file = parquet(tmp_path / "a.parquet", {"text": array, "n": list(range(10))}, row_group_size=3)
    found, report = documents(source(file))
    assert found == [("own", text) for text in [*TEXTS, *TEXTS]]
    assert report.totals == {"files": 1}


def test_parquet_columns_may_be_fields_of_structs_or_json(tmp_path: Path) -> None:
    rows = [
        {
            "text": "a",
            "meta": {"redpajama_set_name": "RedPajamaC4", "source": "s"},
            "other": '{"lang": "EN", "t": "x"}',
        },
        {"text": "b", "meta": None, "other": '{"lang": "de", "t": "y"}'},
        {"text": "c", "meta": {"redpajama_set_name": None, "source": "s"}, "other": '{"lang": "fr", "t": "z"}'},
    ]
    file = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(rows), file)
    assert documents(source(file))[0] == [("c4", "a"), ("own", "b"), ("own", "c")]
    assert documents(source(file, domain_from="file"))[0] == [("own", "a"), ("own", "b"), ("own", "c")]
    assert documents(source(file, domain_from="other.lang"))[0] == [("en", "a"), ("de", "b"), ("fr", "c")]
    assert documents(source(file, text_column="other.t"))[0] == [("c4", "x"), ("own", "y"), ("own", "z")]
    assert documents(source(file, text_column="meta.source", domain_from="text"), "skip")[0] == [("a", "s"), ("c", "s")]
    pq.write_table(pa.table({"text": ["a"], "meta": [json.dumps({"redpajama_set_name": "RedPajamaBook"})]}), file)
    assert documents(source(file))[0] == [("book", "a")]
    pq.write_table(pa.table({"text": ["a"], "meta.redpajama_set_name": ["Github"]}), file)
    assert documents(source(file))[0] == [("github", "a")]
    pq.write_table(pa.table({"text": ["a"], "meta": [3]}), file)
    assert documents(source(file))[0] == [("own", "a")]


def test_parquet_rows_without_text_are_bad_lines(tmp_path: Path) -> None:
    file = parquet(tmp_path / "a.parquet", {"text": pa.array([b"a", None, b"\xff\xfe", b"d"], pa.binary())})
    assert f"{file}:2: expected a string in the field 'text', got NoneType" in refused(source(file))
    found, report = documents(source(file), "skip")
    assert [text for _, text in found] == ["a", "d"]
    assert report.totals == {"files": 1, "bad_lines": 2}
    sample = report.asdict(())["problems"][str(file)]["sample"]
    assert sample[1].startswith(f"{file}:3: 'text' is not UTF-8 (byte 0 of it)")
    # What says that it is UTF-8 need not be.
    claimed = pa.Array.from_buffers(pa.string(), 1, pa.array([b"a\xff"], pa.binary()).buffers())
    file = parquet(tmp_path / "b.parquet", {"text": claimed})
    assert "'text' is not UTF-8 (byte 1 of it)" in refused(source(file))
    file = parquet(tmp_path / "c.parquet", {"text": ["a", "b"], "set": ["x", None]})
    assert f"{file}:2: expected the domain's name in the field 'set'" in refused(source(file, domain_from="set"))
    file = parquet(tmp_path / "d.parquet", {"text": pa.nulls(3)})
    assert documents(source(file), "skip")[1].totals == {"files": 1, "bad_lines": 3}


def test_parquet_without_the_column(tmp_path: Path) -> None:
    meta = [{"title": "a", "n": 1}]
    file = parquet(tmp_path / "a.parquet", {"content": ["a"], "id": [1], "meta": meta})
    assert refused(source(file), "skip") == (
        f"{file}: no column 'text'; did you mean 'content'?; its text columns are content, meta.title; name one with "
        "--text-column"
    )
    assert "the column 'id' holds int64, not text" in refused(source(file, text_column="id"))
    assert "the column 'meta' holds struct<" in refused(source(file, text_column="meta"))
    assert "no column 'meta.x'" in refused(source(file, text_column="meta.x"))
    wrong = source(file, text_column="content", domain_from="domian")
    assert "no column 'domian'" in refused(wrong) and "name one with --domain-from" in refused(wrong)
    file = parquet(tmp_path / "b.parquet", {"id": [1]})
    assert "no column 'text'; it has id; name one" in refused(source(file))


def test_parquet_blocks(tmp_path: Path) -> None:
    """About `BLOCK_BYTES` each whatever the row groups, a longer text alone; sizes add up to the file's."""
    lengths = [10] * 5000 + [BLOCK_BYTES * 3, 5, BLOCK_BYTES // 2, BLOCK_BYTES // 2, 1, BLOCK_BYTES + 1] + [300] * 3000
    texts = [chr(97 + i % 26) * length for i, length in enumerate(lengths)]
    for rows in (100, len(texts)):
        for encode in (False, True):
            array = pa.array(texts)
            table = {"text": array.dictionary_encode() if encode else array}
            file = parquet(tmp_path / "a.parquet", table, row_group_size=rows)
            own = source(file)
            blocks = list(own.blocks())
            read = [[d.text for d in block.documents(Report())] for block in blocks]
            assert [text for block in read for text in block] == texts
            sizes = [sum(map(len, block)) for block in read]
            assert all(size <= BLOCK_BYTES or len(block) == 1 for size, block in zip(sizes, read, strict=True))
            assert sum(sizes) / len(sizes) > BLOCK_BYTES / 3
            assert sum(block.size for block in blocks) == own.size == file.stat().st_size
            again = [[d.text for d in block.documents(Report())] for block in source(file).blocks()]
            assert again == read
    names = [d.name for block in own.blocks() for d in block.documents(Report())]
    assert names == [f"{file}:{i + 1}" for i in range(len(texts))]


def test_parquet_empty(tmp_path: Path) -> None:
    file = parquet(tmp_path / "a.parquet", {"text": pa.array([], pa.string())})
    own = source(file)
    found, report = documents(own)
    assert found == [] and report.totals == {"files": 1}
    assert sum(block.size for block in own.blocks()) == own.size


def test_parquet_damaged(tmp_path: Path) -> None:
    file = parquet(tmp_path / "a.parquet", {"text": [f"text {i}" * 50 for i in range(2000)]}, row_group_size=200)
    data = file.read_bytes()
    for damaged in (b"", b"PAR1", data[: len(data) // 2], data[:-1], b"x" * 100):
        file.write_bytes(damaged)
        message = refused(source(file))
        assert message.startswith(f"{file}: is no whole parquet file (") and message.endswith("--on-bad-line skip")
        found, report = documents(source(file), "skip")
        assert found == [] and report.totals == {"files": 1, "bad_files": 1}
    middle = pq.ParquetFile(pa.BufferReader(data)).metadata.row_group(5).column(0).dictionary_page_offset
    file.write_bytes(data[:middle] + bytes(300) + data[middle + 300 :])
    found, report = documents(source(file), "skip")
    assert [text for _, text in found] == [f"text {i}" * 50 for i in range(len(found))]
    assert len(found) <= 1000 and report.totals == {"files": 1, "bad_files": 1}


def test_parquet_any_byte_changed(tmp_path: Path) -> None:
    """An error in words or other texts, never an exception of the package."""
    file = parquet(tmp_path / "a.parquet", {"text": ["a", "b" * 50, "c"], "meta": ['{"a": 1}'] * 3})
    data = file.read_bytes()
    for at in range(0, len(data), 3):
        file.write_bytes(data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :])
        with suppress(UserError):  # the name of a column
            documents(source(file), "skip")


_MEMORY = """
import sys
from pathlib import Path
import pyarrow
from resformer.data.tables import ParquetSource
from resformer.data.reading import Reading, Report
file = Path(sys.argv[1])
count = 0
for block in ParquetSource(file, file, "own", Reading()).blocks():
    for document in block.documents(Report()):
        count += len(document.text)
print(count, pyarrow.default_memory_pool().max_memory())
"""


@pytest.mark.parametrize("compression", ["zstd", "none"])
def test_parquet_memory_is_bounded_whatever_the_row_group(tmp_path: Path, compression: str) -> None:
    """One row group of 200 MB, and a column beside it that is not read."""
    import numpy as np

    generator = np.random.default_rng(0)
    rows, length = 20_000, 10_000
    file = tmp_path / "a.parquet"
    schema = pa.schema({"text": pa.string(), "vector": pa.binary()})
    letters = (generator.integers(97, 123, rows * 50 + length, dtype=np.uint8)).tobytes()
    texts = [letters[i * 50 : i * 50 + length] for i in range(rows)]
    table = pa.table({"text": pa.array(texts, pa.binary()).cast(pa.string()), "vector": texts}, schema)
    pq.write_table(table, file, row_group_size=rows, compression=compression, use_dictionary=False)
    assert pq.ParquetFile(file).num_row_groups == 1
    del table, texts
    done = subprocess.run([sys.executable, "-c", _MEMORY, str(file)], capture_output=True, text=True, check=True)
    count, most = map(int, done.stdout.split())
    assert count == rows * length and most < 50e6, most


def test_parquet_identity_and_rights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = parquet(tmp_path / "a.parquet", {"text": ["a"]})
    assert source(file).identity() == [str(file), file.stat().st_size, file.stat().st_mtime_ns]
    monkeypatch.setattr(tables.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs the package pyarrow; type: pip install 'resformer\[data\]'"):
        source(file)
    with pytest.raises(UserError, match=r"needs the package datasets; type: pip install 'resformer\[data\]'"):
        tables.DatasetSource("dataset:allenai/c4", Reading())
