"""Token files damaged at random: exactly the documents that the bytes say, or one line; never an id outside the
vocabulary.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_data_tokenised import (
    CODES,
    EOS,
    VOCAB,
    ended,
    joined,
    read,
    write_datatrove,
    write_llmc,
    write_megatron,
)

from resformer.errors import UserError

# What the damaged file itself says, worked out from its bytes: the documents, or None where it contradicts itself.


def said_by_llmc(data: bytes) -> list[list[int]] | None:
    if len(data) < 1024 or struct.unpack_from("<3i", data) != (20240520, 1, (len(data) - 1024) / 2):
        return None
    return split(struct.unpack(f"<{(len(data) - 1024) // 2}H", data[1024:]))


def split(ids: Sequence[int]) -> list[list[int]]:
    pieces: list[list[int]] = [[]]
    for token in ids:
        if token == EOS:
            pieces.append([])
        else:
            pieces[-1].append(token)
    return [piece for piece in pieces if piece]


def said_by_datatrove(data: bytes, index: bytes) -> list[list[int]] | None:
    if len(index) % 8:
        return None
    ends = struct.unpack(f"<{len(index) // 8}Q", index)
    last = ends[-1] if ends else 0
    if list(ends) != sorted(ends) or len(data) not in (2 * last, 4 * last):
        return None
    ids = struct.unpack(f"<{last}{'H' if len(data) == 2 * last else 'I'}", data)
    return [piece for start, end in zip((0, *ends), ends, strict=False) for piece in split(ids[start:end])]


def said_by_megatron(data: bytes, index: bytes) -> list[list[int]] | None:
    if len(index) < 34 or index[:9] != b"MMIDIDX\0\0":
        return None
    version, code, sequences, documents = struct.unpack_from("<QBQQ", index, 9)
    codes = {number: letter for letter, number in CODES.items()}
    if version != 1 or code not in codes or len(index) != 34 + 12 * sequences + 8 * documents:
        return None
    width = struct.calcsize(codes[code])
    lengths = struct.unpack_from(f"<{sequences}i", index, 34)
    pointers = struct.unpack_from(f"<{sequences}q", index, 34 + 4 * sequences)
    bounds = struct.unpack_from(f"<{documents}q", index, 34 + 12 * sequences)
    starts = [width * sum(lengths[:i]) for i in range(sequences + 1)]
    if [*pointers, len(data)] != starts or list(bounds) != sorted(bounds) or any(length < 0 for length in lengths):
        return None
    if (bounds[0] if bounds else 0) != 0 or (bounds[-1] if bounds else 0) != sequences:
        return None
    ids = struct.unpack(f"<{len(data) // width}{codes[code]}", data)
    cuts = [starts[bound] // width for bound in bounds]
    return [piece for start, end in pairwise(cuts) for piece in split(ids[start:end])]


@st.composite
def damage(draw: st.DrawFn, data: bytes) -> bytes:
    """A prefix, a few bytes changed, or a longer file."""
    kind = draw(st.sampled_from(("prefix", "bytes", "bytes", "longer")))
    if kind == "prefix":
        return data[: draw(st.integers(0, len(data)))]
    if kind == "longer":
        return data + draw(st.binary(min_size=1, max_size=16))
    changed = bytearray(data)
    # Most of a header of llm.c says nothing.
    places = st.integers(0, len(data) - 1) | st.integers(0, min(len(data) - 1, 40)) if data else st.nothing()
    for _ in range(draw(st.integers(1, 3)) if data else 0):
        changed[draw(places)] = draw(st.integers(0, 255) | st.sampled_from((0, 1, 255)))
    return bytes(changed)


corpora = st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=6), max_size=5)


def held(path: Path, form: str, said: list[list[int]] | None) -> None:
    """Read it: exactly what the file says where all of it is in the vocabulary, else a UserError."""
    inside = said is not None and all(0 <= token < VOCAB for document in said for token in document)
    try:
        found = read(path, None, form)
    except UserError as caught:
        assert not inside, str(caught)
        assert str(path.stem) in str(caught) and "\n" not in str(caught)
    else:
        assert inside and found == said


many = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@many
@given(data=st.data(), documents=corpora, code=st.sampled_from(["H", "i", "q"]))
def test_megatron_any_damage(tmp_path: Path, data: st.DataObject, documents: list[list[int]], code: str) -> None:
    file = write_megatron(tmp_path / "a.bin", [[d[:2], d[2:]] if len(d) > 3 else [d] for d in documents], code)
    which = data.draw(st.sampled_from([file, file.with_suffix(".idx")]))
    which.write_bytes(data.draw(damage(which.read_bytes())))
    held(file, "megatron", said_by_megatron(file.read_bytes(), file.with_suffix(".idx").read_bytes()))


@many
@given(data=st.data(), documents=corpora, code=st.sampled_from(["H", "I"]))
def test_datatrove_any_damage(tmp_path: Path, data: st.DataObject, documents: list[list[int]], code: str) -> None:
    file = write_datatrove(tmp_path / "a.ds", documents, code)
    index = file.with_name("a.ds.index")
    which = data.draw(st.sampled_from([file, index]))
    which.write_bytes(data.draw(damage(which.read_bytes())))
    held(file, "datatrove", said_by_datatrove(file.read_bytes(), index.read_bytes()))


@many
@given(data=st.data(), documents=corpora)
def test_llmc_any_damage(tmp_path: Path, data: st.DataObject, documents: list[list[int]]) -> None:
    file = write_llmc(tmp_path / "a.bin", joined(ended(documents)))
    file.write_bytes(data.draw(damage(file.read_bytes())))
    held(file, "llmc", said_by_llmc(file.read_bytes()))
