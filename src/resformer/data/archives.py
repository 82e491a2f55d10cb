"""Bytes of files, compressed or not."""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from resformer.errors import UserError

COMPRESSED = frozenset({".gz", ".zst", ".xz", ".bz2"})
CHUNK_BYTES = 1 << 16
BROKEN = (EOFError, zlib.error, lzma.LZMAError, OSError)
"""What reading an archive raises that is cut short (EOFError) or broken."""


def suffixes(path: Path) -> tuple[str, str]:
    """(suffix that says the format, compression suffix or ""), lower case: a.jsonl.gz -> (".jsonl", ".gz")."""
    last = path.suffix.lower()
    if last in COMPRESSED:
        return path.with_suffix("").suffix.lower(), last
    return last, ""


def opened(file: Path) -> Any:
    """A file opened for reading bytes; UserError that names it."""
    try:
        return open(file, "rb")
    except OSError as error:
        raise UserError(f"{file}: cannot be opened ({error.strerror})") from error


def chunks(file: Path, count: Callable[[int], None] = lambda amount: None) -> Iterator[bytes]:
    """The decompressed bytes; `count` is told the bytes read from the disk. Raises what `BROKEN` lists when the archive
    is cut or broken.
    """
    compression = suffixes(file)[1]
    with opened(file) as handle:
        raw = _counted(handle, count)
        if compression == ".gz":
            yield from _inflate(raw, lambda: zlib.decompressobj(wbits=31), zlib.error)
        elif compression == ".xz":
            yield from _inflate(raw, lzma.LZMADecompressor, lzma.LZMAError)
        elif compression == ".bz2":
            yield from _inflate(raw, bz2.BZ2Decompressor, OSError)
        elif compression == ".zst":
            try:
                import zstandard
            except ImportError as error:
                raise UserError(f"{file}: .zst needs the package zstandard; type: pip install zstandard") from error
            # 2^31: frames written with --long=31 are legal and met in the wild.
            decoder = zstandard.ZstdDecompressor(max_window_size=2**31)
            yield from _inflate(raw, decoder.decompressobj, zstandard.ZstdError)
        else:
            yield from raw


def _counted(handle: Any, count: Callable[[int], None]) -> Iterator[bytes]:
    while data := handle.read(CHUNK_BYTES):
        count(len(data))
        yield data


def _inflate(raw: Iterator[bytes], new: Any, broken: type[Exception]) -> Iterator[bytes]:
    """Decompress members or frames one after the other. The stream readers of both libraries take a cut at some
    places for the end.
    """
    decoder, data, started = new(), b"", False
    for data in raw:
        while data:
            started = True
            try:
                piece = decoder.decompress(data)
            except broken as error:
                raise OSError(f"broken archive: {error}") from error
            if piece:
                yield piece
            data = b""
            if decoder.eof:
                # gzip allows zero padding between and after members.
                data = decoder.unused_data.lstrip(b"\0")
                decoder, started = new(), False
    if started:
        raise EOFError("archive cut short")
