"""Token files that others write: exactly the documents they say, or one line that says what does not fit.

The writers below follow the formats' own descriptions, by struct alone.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from resformer.data import tokenised
from resformer.data.reading import Report
from resformer.data.tokenised import is_tokenised, refuse_foreign_index, tokenised_source
from resformer.errors import UserError

VOCAB, EOS = 1000, 0
DOCUMENTS = [[5, 6, 7], [8], [999, 1, 1, 2], list(range(1, 40))]
CODES = {"B": 1, "b": 2, "h": 3, "i": 4, "q": 5, "H": 8}


def packed(code: str, ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(ids)}{code}", *ids)


def write_llmc(path: Path, ids: Sequence[int], *, magic: int = 20240520, version: int = 1, code: str = "H") -> Path:
    header = [magic, version, len(ids)] + [0] * 253
    path.write_bytes(packed("i", header) + packed(code, ids))
    return path


def write_megatron(path: Path, documents: Sequence[Sequence[Sequence[int]]], code: str = "H") -> Path:
    """documents[d][s] are the ids of the sequence s of the document d."""
    sequences = [sequence for document in documents for sequence in document]
    lengths = [len(sequence) for sequence in sequences]
    pointers, bounds = [], [0]
    for i in range(len(sequences)):
        pointers.append(sum(lengths[:i]) * struct.calcsize(code))
    for document in documents:
        bounds.append(bounds[-1] + len(document))
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, CODES[code], len(sequences), len(bounds))
    path.write_bytes(b"".join(packed(code, sequence) for sequence in sequences))
    path.with_suffix(".idx").write_bytes(header + packed("i", lengths) + packed("q", pointers) + packed("q", bounds))
    return path


def write_datatrove(path: Path, documents: Sequence[Sequence[int]], code: str = "H") -> Path:
    ends, total = [], 0
    for document in documents:
        total += len(document)
        ends.append(total)
    path.write_bytes(b"".join(packed(code, document) for document in documents))
    path.with_name(path.name + ".index").write_bytes(packed("Q", ends))
    path.with_name(path.name + ".metadata").write_text(f"gpt2|{struct.calcsize(code)}\n{total}\n")
    return path


def ended(documents: Sequence[Sequence[int]]) -> list[list[int]]:
    return [[*document, EOS] for document in documents]


def joined(documents: Sequence[Sequence[int]]) -> list[int]:
    return [token for document in documents for token in document]


def read(path: Path, dtype: str | None = None, form: str = "auto") -> list[list[int]]:
    source = tokenised_source(path, domain="d", vocab_size=VOCAB, eos_token_id=EOS, token_dtype=dtype, form=form)
    report, found, size = Report(), [], 0
    for block in source.blocks():
        size += block.size
        for document in block.documents(report):
            assert document.ids is not None and document.ids.dtype == np.int64 and document.text == ""
            assert document.domain == "d" and document.name.startswith(f"{path}:")
            found.append(document.ids.tolist())
    assert size == source.size == path.stat().st_size
    assert report.totals == {"files": 1}
    json.dumps(source.identity())
    return found


def megatron(path: Path) -> Path:
    return write_megatron(path / "a.bin", [[document] for document in ended(DOCUMENTS)])


def datatrove(path: Path) -> Path:
    return write_datatrove(path / "a.ds", ended(DOCUMENTS))


def llmc(path: Path) -> Path:
    return write_llmc(path / "a.bin", joined(ended(DOCUMENTS)))


@pytest.mark.parametrize("make", [megatron, datatrove, llmc])
def test_documents_as_written(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    assert read(make(tmp_path)) == DOCUMENTS


@pytest.mark.parametrize(("dtype", "code"), [("uint16", "H"), ("uint32", "I")])
def test_nanogpt(tmp_path: Path, dtype: str, code: str) -> None:
    file = tmp_path / "train.bin"
    after, before = joined(ended(DOCUMENTS)), joined([EOS, *document] for document in DOCUMENTS)
    for ids in (after, before, after[:-1], [EOS, EOS, *after, EOS]):
        file.write_bytes(packed(code, ids))
        assert read(file, dtype) == DOCUMENTS
    file.write_bytes(packed(code, DOCUMENTS[0]))  # none ends: one document
    assert read(file, dtype) == [DOCUMENTS[0]]
    file.write_bytes(b"")
    assert read(file, dtype) == []


@pytest.mark.parametrize("code", [*CODES])
def test_megatron_widths_and_sequences(tmp_path: Path, code: str) -> None:
    documents = [[[5, 6], [7, EOS]], [[]], [], [[8], [9], [EOS]], [[EOS]], [[4, EOS, 3]], [[1, 2]]]
    # The end-of-text id ends a document even where the index does not know.
    assert read(write_megatron(tmp_path / "a.bin", documents, code)) == [[5, 6, 7], [8, 9], [4], [3], [1, 2]]


def test_wide_ids(tmp_path: Path) -> None:
    assert read(write_datatrove(tmp_path / "a.ds", ended(DOCUMENTS), "I")) == DOCUMENTS
    ids = joined(ended(DOCUMENTS))
    assert read(write_llmc(tmp_path / "b.bin", ids, magic=20240801, version=7, code="I")) == DOCUMENTS
    assert read(write_datatrove(tmp_path / "c.ds", [])) == []
    assert read(write_megatron(tmp_path / "d.bin", [])) == []
    assert read(write_llmc(tmp_path / "e.bin", [])) == []


@pytest.mark.parametrize("kind", ["nanogpt", "megatron", "datatrove"])
def test_blocks_are_small_and_a_long_document_stays_whole(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenised, "BLOCK_TOKENS", 64)
    monkeypatch.setattr(tokenised, "_CHUNK_DOCUMENTS", 7)
    generator = np.random.default_rng(0)
    lengths = [*generator.integers(1, 30, 200), 500, 64, 63, 65, 1, 1000]
    documents = [generator.integers(1, VOCAB, length).tolist() for length in lengths]
    if kind == "nanogpt":
        file = tmp_path / "a.bin"
        file.write_bytes(packed("H", joined(ended(documents))))
    elif kind == "megatron":
        file = write_megatron(tmp_path / "a.bin", [[document] for document in ended(documents)])
    else:
        file = write_datatrove(tmp_path / "a.ds", ended([[], *documents]))
    dtype = "uint16" if kind == "nanogpt" else None
    assert read(file, dtype) == documents
    source = tokenised_source(file, domain="d", vocab_size=VOCAB, eos_token_id=EOS, token_dtype=dtype)
    blocks = [[document.ids for document in block.documents(Report())] for block in source.blocks()]
    assert all(sum(map(len, block)) <= 64 or len(block) <= 2 for block in blocks)
    assert len(blocks) < len(documents)


def test_documents_have_names(tmp_path: Path) -> None:
    def names(file: Path, dtype: str | None = None) -> list[str]:
        source = tokenised_source(file, domain="d", vocab_size=VOCAB, eos_token_id=EOS, token_dtype=dtype)
        return [d.name.removeprefix(f"{file}:") for block in source.blocks() for d in block.documents(Report())]

    assert names(megatron(tmp_path)) == ["1", "2", "3", "4"]
    file = tmp_path / "b.bin"
    file.write_bytes(packed("H", [5, 6, EOS, 7]))
    assert names(file, "uint16") == ["token 0", "token 3"]


def error(path: Path, dtype: str | None = None, form: str = "auto") -> str:
    with pytest.raises(UserError) as caught:
        read(path, dtype, form)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_ids_outside_the_vocabulary(tmp_path: Path) -> None:
    file = tmp_path / "a.bin"
    file.write_bytes(packed("H", [5, EOS, 6, 1000]))
    assert error(file, "uint16") == (
        f"{file}: token 3 is 1000, expected 0 to 999 for a vocabulary of 1000; check --token-dtype and --tokenizer"
    )
    file.write_bytes(packed("I", [5, 6, 7, 8]))
    assert read(file, "uint16") == [[5], [6], [7], [8]]  # nothing in the file says that this is wrong
    file.write_bytes(packed("H", [5, 6, 7, 8]))
    assert "token 0 is 393221" in error(file, "uint32")
    assert "token 1 is -1," in error(write_megatron(tmp_path / "b.bin", [[[5, -1]]], "i"))
    assert f"token 2 is {2**40}, expected 0 to 999" in error(write_megatron(tmp_path / "b.bin", [[[5, 6, 2**40]]], "q"))
    assert "token 1 is 4000" in error(write_datatrove(tmp_path / "c.ds", [[5, 4000]]))


def test_what_does_not_fit(tmp_path: Path) -> None:
    file = tmp_path / "a.bin"
    file.write_bytes(b"123")
    assert "say it with --token-dtype uint16" in error(file)
    assert "got 3 bytes, expected a multiple of 2 for uint16; check --token-dtype" in error(file, "uint16")
    assert "--token-dtype: got 'uint61', expected uint16 or uint32; did you mean 'uint16'?" in error(file, "uint61")
    assert "header of 1024" in error(file, form="llmc")
    assert "cannot be opened" in error(tmp_path / "none.bin", "uint16")
    file = write_llmc(tmp_path / "b.bin", [5, 6])
    file.write_bytes(file.read_bytes() + b"\0")
    assert "got 5 bytes after the header, expected 2 ids of 2 bytes" in error(file)
    assert "magic 20240520 version 3, expected 20240520 version 1" in error(write_llmc(file, [5], version=3))
    assert "no a.idx beside it" in error(tmp_path / "a.bin", form="megatron")
    file = datatrove(tmp_path)
    file.write_bytes(file.read_bytes()[:-2])
    assert "bytes, expected 102 or 204, as its index ends at token 51" in error(file)
    index = file.with_name("a.ds.index")
    index.write_bytes(packed("Q", [9, 4, 51]))
    file.write_bytes(bytes(102))
    assert "got 4 after 9 as document end" in error(file)
    index.write_bytes(b"1234567")
    assert "got 7 bytes, expected a multiple of 8" in error(file)
    index.unlink()
    assert "no a.ds.index beside it" in error(file)


@pytest.mark.parametrize(
    ("at", "new", "message"),
    [
        (0, b"X", "at its start"),
        (9, b"\2", "version 2, expected 1"),
        (17, b"\7", "dtype code 7, expected one of whole numbers (1 uint8"),
        (18, b"\5", "expected 134 for 5 sequences and 5 documents"),
        (26, b"\4", "expected 114 for 4 sequences and 4 documents"),
        (34, b"\3", "sequence 1 at byte 8, expected 6, the end of the one before"),
        (46, b"\x29", "expected 52 ids of 2 bytes, as its index says"),
        (49, b"\xff", "a sequence of -16777"),
        (50, b"\1", "sequence 0 at byte 1, expected 0"),
        (82, b"\1", "a first document from sequence 1 on, expected 0"),
        (90, b"\4", "got 2 after 4 as document end"),
        (114, b"\3", "got documents to sequence 3, expected all 4"),
    ],
)
def test_a_damaged_megatron_index(tmp_path: Path, at: int, new: bytes, message: str) -> None:
    file = megatron(tmp_path)
    index = file.with_suffix(".idx")
    data = index.read_bytes()
    index.write_bytes(data[:at] + new + data[at + 1 :])
    assert message in error(file)


def test_a_text_without_end_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenised, "BLOCK_TOKENS", 16)
    monkeypatch.setattr(tokenised, "MAX_DOCUMENT_TOKENS", 100)
    file = tmp_path / "a.bin"
    file.write_bytes(packed("H", [EOS, *[5] * 90, EOS, *[6] * 200]))
    assert "more than 100 tokens from token 92 on without the end-of-text id 0; check --tokenizer" in error(
        file, "uint16"
    )
    assert "more than 100 tokens from token 2 on" in error(write_datatrove(tmp_path / "a.ds", [[5, EOS], [6] * 200]))


def test_a_file_that_is_cut_while_it_is_read(tmp_path: Path) -> None:
    file = megatron(tmp_path)
    source = tokenised_source(file, domain="d", vocab_size=VOCAB, eos_token_id=EOS, token_dtype=None)
    blocks = list(source.blocks())
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(UserError, match="has become shorter"):
        list(blocks[0].documents(Report()))


def test_identity_follows_what_decides_the_content(tmp_path: Path) -> None:
    file = datatrove(tmp_path)

    def identity(vocab_size: int = VOCAB, eos: int = EOS) -> list:
        return tokenised_source(file, domain="d", vocab_size=vocab_size, eos_token_id=eos, token_dtype=None).identity()

    first = identity()
    assert first == identity() and first != identity(eos=1) and first != identity(vocab_size=2000)
    file.with_name("a.ds.index").write_bytes(packed("Q", [51]))
    assert identity() != first


def test_names_of_token_files() -> None:
    assert [is_tokenised(Path(name)) for name in ("a.bin", "b.ds", "C.BIN")] == [True] * 3
    others = ("a.idx", "b.ds.index", "b.ds.metadata", "b.ds.loss", "a.jsonl", "bin")
    assert not any(is_tokenised(Path(name)) for name in others)


def test_datasets_of_other_packages_are_refused_with_a_way_out(tmp_path: Path) -> None:
    index = tmp_path / "index.json"
    refuse_foreign_index(tmp_path)
    for harmless in ("{", "[1]", '{"shards": 3}', '{"shards": [{"format": "xsv"}, 1]}', "\udcff", '{"a": 1}'):
        index.write_bytes(harmless.encode("utf-8", "surrogateescape"))
        refuse_foreign_index(tmp_path)
    index.write_text(json.dumps({"version": 2, "shards": [{"format": "mds", "samples": 3}]}))
    with pytest.raises(UserError, match=r"MosaicML streaming \(MDS\).*write it as jsonl.*streaming\.StreamingDataset"):
        refuse_foreign_index(tmp_path)
    index.write_text(json.dumps({"chunks": [{"filename": "chunk-0-0.bin"}], "config": {}}))
    with pytest.raises(UserError, match=r"litdata.*write it as jsonl.*litdata\.StreamingDataset"):
        refuse_foreign_index(tmp_path)
