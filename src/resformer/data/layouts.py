"""Where token ids and the ends of documents stand in the files that others write (`tokenised`).

Sizes, headers and indices are checked against each other as a whole before any id is read: what they say then is what
there is. Nothing is repaired. UserError with file, got, expected and the way out.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np

from resformer.data.archives import opened
from resformer.errors import UserError

_CHUNK_ENTRIES = 1 << 20
LLMC_MAGICS = (20240520, 20240801)
_HEADER_BYTES = 1024
# (magic, version) of llm.c's files -> dtype
_LLMC = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
_MEGATRON_MAGIC = b"MMIDIDX\0\0"
_MEGATRON_HEADER_BYTES = 34
_MEGATRON_DTYPES = {1: "|u1", 2: "|i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


class Ends:
    """Ends of documents in tokens, read a piece at a time. starts: of sequences (in bytes); None: the entries of
    `documents` are ends already.
    """

    def __init__(self, documents: np.ndarray, starts: np.ndarray | None, itemsize: int, total: int) -> None:
        self.documents, self.starts, self.itemsize, self.total = documents, starts, itemsize, total

    def __len__(self) -> int:
        return len(self.documents)

    def ends(self, start: int, stop: int) -> np.ndarray:
        """int64 `[stop - start]`."""
        entries = np.asarray(self.documents[start:stop]).astype(np.int64)
        if self.starts is None:
            return entries
        # A document ends where the sequence after its last one starts.
        inner = entries < len(self.starts)
        found = np.full(len(entries), self.total, np.int64)
        found[inner] = self.starts[entries[inner]] // self.itemsize
        return found


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where the ids stand in a file. offset in bytes; documents None: end-of-text ids tell them apart."""

    dtype: np.dtype
    offset: int
    tokens: int
    index: Path | None = None
    documents: Ends | None = None


def _nanogpt(path: Path, size: int, token_dtype: str | None) -> Layout:
    if token_dtype is None:
        raise UserError(
            f"{path}: nothing in the file says how wide its ids are; say it with --token-dtype uint16 (as nanoGPT "
            "writes) or uint32"
        )
    dtype = np.dtype(token_dtype).newbyteorder("<")
    if size % dtype.itemsize:
        _misfit(path, f"{size} bytes", f"a multiple of {dtype.itemsize} for {token_dtype}", "check --token-dtype")
    if token_dtype == "uint16" and size >= 64 and size % 4 == 0:
        first = _entries(path, "<u2", 0, min(size // 2, 1 << 15) // 2 * 2)
        if not first[1::2].any():
            _misfit(path, "a 0 in every second place", "ids of 2 bytes", "they look like 4 bytes: --token-dtype uint32")
    return Layout(dtype=dtype, offset=0, tokens=size // dtype.itemsize)


def _llmc(path: Path, size: int, token_dtype: str | None) -> Layout:
    if size < _HEADER_BYTES:
        _misfit(path, f"{size} bytes", f"a header of {_HEADER_BYTES}", "copy the file again")
    with opened(path) as handle:
        magic, version, count = np.frombuffer(handle.read(12), "<i4").tolist()
    if (magic, version) not in _LLMC:
        known = ", ".join(f"{number} version {which}" for number, which in _LLMC)
        _misfit(
            path, f"magic {magic} version {version}", known, "write the file with llm.c's or modded-nanogpt's script"
        )
    dtype = np.dtype(_LLMC[magic, version])
    if size - _HEADER_BYTES != count * dtype.itemsize:
        got = f"{size - _HEADER_BYTES} bytes after the header"
        _misfit(path, got, f"{count} ids of {dtype.itemsize} bytes", "copy the file again")
    return Layout(dtype=dtype, offset=_HEADER_BYTES, tokens=count)


def _datatrove(path: Path, size: int, token_dtype: str | None) -> Layout:
    again = "copy both files again"
    index = path.with_name(path.name + ".index")
    if not index.is_file():
        raise UserError(f"{path}: no {index.name} beside it, which says where documents end; copy it there")
    ends = _entries(index, "<u8", 0, _whole(index, 8, again))
    last = int(ends[-1]) if len(ends) else 0
    sizes = {last * 2: "<u2", last * 4: "<u4"}
    if size not in sizes:
        _misfit(path, f"{size} bytes", f"{last * 2} or {last * 4}, as its index ends at token {last}", again)
    _check_rising(index, ends, again)
    dtype = np.dtype(sizes[size])
    return Layout(dtype=dtype, offset=0, tokens=last, index=index, documents=Ends(ends, None, dtype.itemsize, last))


def _megatron(path: Path, size: int, token_dtype: str | None) -> Layout:
    again = "copy .bin and .idx again, or preprocess anew"
    index = path.with_suffix(".idx")
    if not index.is_file():
        raise UserError(f"{path}: no {index.name} beside it, which says where documents end; copy it there")
    with opened(index) as handle:
        header = handle.read(_MEGATRON_HEADER_BYTES)
    index_size = index.stat().st_size
    if not header.startswith(_MEGATRON_MAGIC):
        _misfit(index, f"{header[:9]!r} at its start", f"{_MEGATRON_MAGIC!r} of Megatron's indexed dataset", again)
    if len(header) < _MEGATRON_HEADER_BYTES:
        _misfit(index, f"{index_size} bytes", f"a header of {_MEGATRON_HEADER_BYTES}", again)
    version, sequences, documents = (int.from_bytes(header[i : i + 8], "little") for i in (9, 18, 26))
    if version != 1:
        _misfit(index, f"version {version}", "1", again)
    if header[17] not in _MEGATRON_DTYPES:
        _misfit(index, f"dtype code {header[17]}", f"one of whole numbers ({_listed(_MEGATRON_DTYPES)})", again)
    dtype = np.dtype(_MEGATRON_DTYPES[header[17]])
    expected = _MEGATRON_HEADER_BYTES + 12 * sequences + 8 * documents
    if index_size != expected:
        _misfit(index, f"{index_size} bytes", f"{expected} for {sequences} sequences and {documents} documents", again)
    pointers_at = _MEGATRON_HEADER_BYTES + 4 * sequences
    lengths = _entries(index, "<i4", _MEGATRON_HEADER_BYTES, sequences)
    pointers = _entries(index, "<i8", pointers_at, sequences)
    bounds = _entries(index, "<i8", pointers_at + 8 * sequences, documents)
    tokens = _check_pointers(index, lengths, pointers, dtype.itemsize, again)
    if size != tokens * dtype.itemsize:
        _misfit(path, f"{size} bytes", f"{tokens} ids of {dtype.itemsize} bytes, as its index says", again)
    if documents and int(bounds[0]) != 0:
        _misfit(index, f"a first document from sequence {bounds[0]} on", "0", again)
    if (int(bounds[-1]) if documents else 0) != sequences:
        got = f"documents to sequence {bounds[-1]}" if documents else "no document"
        _misfit(index, got, f"all {sequences}", again)
    _check_rising(index, bounds, again)
    ends = Ends(bounds[1:], pointers, dtype.itemsize, tokens)
    return Layout(dtype=dtype, offset=0, tokens=tokens, index=index, documents=ends)


def _check_rising(file: Path, entries: np.ndarray, way: str) -> None:
    """UserError where an entry of an index is below the one before (compared as they are: uint64 may be huge)."""
    for at in range(0, len(entries), _CHUNK_ENTRIES):
        piece = np.asarray(entries[max(0, at - 1) : at + _CHUNK_ENTRIES])
        falls = np.flatnonzero(piece[1:] < piece[:-1])
        if len(falls):
            i = int(falls[0])
            _misfit(file, f"{piece[i + 1]} after {piece[i]} as document end", "ends that do not fall", way)


def _check_pointers(file: Path, lengths: np.ndarray, pointers: np.ndarray, itemsize: int, way: str) -> int:
    """The number of tokens; UserError unless each sequence starts where the one before ends."""
    total = 0
    for at in range(0, len(lengths), _CHUNK_ENTRIES):
        piece = np.asarray(lengths[at : at + _CHUNK_ENTRIES]).astype(np.int64)
        if (piece < 0).any():
            _misfit(file, f"a sequence of {piece.min()} tokens", "at least 0", way)
        ends = total + np.cumsum(piece)
        starts = np.asarray(pointers[at : at + _CHUNK_ENTRIES])
        wrong = np.flatnonzero(starts != (ends - piece) * itemsize)
        if len(wrong):
            i = int(wrong[0])
            expected = f"{(ends[i] - piece[i]) * itemsize}, the end of the one before"
            _misfit(file, f"sequence {at + i} at byte {starts[i]}", expected, way)
        total = int(ends[-1])
    return total


def _entries(file: Path, dtype: str, offset: int, count: int) -> np.ndarray:
    """A part of an index, memory-mapped."""
    if not count:
        return np.zeros(0, dtype)
    return np.memmap(file, dtype=dtype, mode="r", offset=offset, shape=(count,))


def _whole(file: Path, itemsize: int, way: str) -> int:
    opened(file).close()
    size = file.stat().st_size
    if size % itemsize:
        _misfit(file, f"{size} bytes", f"a multiple of {itemsize}", way)
    return size // itemsize


def _listed(codes: dict[int, str]) -> str:
    return ", ".join(f"{code} {np.dtype(name).name}" for code, name in codes.items())


def _misfit(file: Path, got: str, expected: str, way: str) -> NoReturn:
    raise UserError(f"{file}: got {got}, expected {expected}; {way}")


LAYOUTS = {"nanogpt": _nanogpt, "llmc": _llmc, "datatrove": _datatrove, "megatron": _megatron}
