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
_PIECE_BYTES = 1 << 20
_SIP_BYTES = 1 << 11
_MORE = bytes(bytearray(b"more"))  # an object of its own, stands for "no new bytes": compared by identity
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
            yield from _inflate(raw, lambda: zlib.decompressobj(wbits=31), zlib.error, _by_tail)
        elif compression == ".xz":
            yield from _inflate(raw, lzma.LZMADecompressor, lzma.LZMAError, _by_need)
        elif compression == ".bz2":
            yield from _inflate(raw, bz2.BZ2Decompressor, OSError, _by_need)
        elif compression == ".zst":
            try:
                import zstandard
            except ImportError as error:
                raise UserError(f"{file}: .zst needs the package zstandard; type: pip install zstandard") from error
            # 2^31: frames written with --long=31 are legal and met in the wild.
            decoder = zstandard.ZstdDecompressor(max_window_size=2**31)
            yield from _inflate(raw, decoder.decompressobj, zstandard.ZstdError, _by_sips)
        else:
            yield from raw


def _counted(handle: Any, count: Callable[[int], None]) -> Iterator[bytes]:
    while data := handle.read(CHUNK_BYTES):
        count(len(data))
        yield data


Step = Callable[[Any, bytes], tuple[bytes, bytes]]
"""(decoder, compressed bytes) -> (some of what they hold, the bytes to give next)"""


def _by_tail(decoder: Any, data: bytes) -> tuple[bytes, bytes]:
    """Of gzip: a bounded piece; what was not looked at is given again."""
    return decoder.decompress(data, _PIECE_BYTES), decoder.unconsumed_tail


def _by_need(decoder: Any, data: bytes) -> tuple[bytes, bytes]:
    """Of xz and bz2: a bounded piece; they keep what was not looked at, and are asked on with nothing."""
    piece = decoder.decompress(b"" if data is _MORE else data, _PIECE_BYTES)
    return piece, b"" if decoder.eof or decoder.needs_input else _MORE


def _by_sips(decoder: Any, data: bytes) -> tuple[bytes, bytes]:
    """Of zst, which gives all that it can: little at a time, so that an archive that swells swells little at a time."""
    return decoder.decompress(data[:_SIP_BYTES]), data[_SIP_BYTES:]


def _inflate(raw: Iterator[bytes], new: Any, broken: type[Exception], step: Step) -> Iterator[bytes]:
    """Decompress members or frames one after the other. The stream readers of both libraries take a cut at some
    places for the end.
    """
    decoder, data, started = new(), b"", False
    for data in raw:
        while data:
            started = True
            try:
                piece, data = step(decoder, data)
            except broken as error:
                raise OSError(f"broken archive: {error}") from error
            if piece:
                yield piece
            if decoder.eof:
                # gzip allows zero padding between and after members.
                data = (decoder.unused_data + (b"" if data is _MORE else data)).lstrip(b"\0")
                decoder, started = new(), False
    if started:
        raise EOFError("archive cut short")
