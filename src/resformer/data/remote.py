"""Corpora at an address (s3://, gs://, https://, memory://, whatever fsspec opens), kept in a local directory.

The index and the tokenizer are fetched when a corpus is opened, a shard when it is first read. What is fetched is
checked against its sha256, and what is there already is not fetched again, in whatever process.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
from pathlib import Path
from typing import Any

from resformer.data import shards, tokenizer
from resformer.data.wheels import cache_directory
from resformer.errors import UserError

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://.")
_COPY_BYTES = 1 << 22


def is_address(place: str | os.PathLike[str]) -> bool:
    """Whether a corpus lies elsewhere."""
    return _ADDRESS.match(str(place)) is not None


class Remote:
    """A corpus at an address. `directory` is where it is kept; `index` its index, checked."""

    def __init__(self, address: str, cache: Path | None = None) -> None:
        self.address = address.rstrip("/")
        self._files, self._root = _file_system(self.address)
        data = self._read(shards.INDEX)
        home = (cache or cache_directory() / "corpora") / hashlib.sha256(self.address.encode()).hexdigest()[:16]
        # Another corpus at the same address, later, is another directory.
        self.directory = home / hashlib.sha256(data).hexdigest()[:16]
        self.directory.mkdir(parents=True, exist_ok=True)
        waiting = self.directory / f".{shards.INDEX}.{os.getpid()}"
        waiting.write_bytes(data)
        os.replace(waiting, self.directory / shards.INDEX)
        try:
            self.index: dict[str, Any] = shards.load_index(self.directory)
        except UserError as error:
            raise UserError(str(error).replace(str(self.directory), self.address)) from error
        for name in (*tokenizer.FILES, "manifest.json"):
            if name in self.index["files"]:
                self.place(name)

    def place(self, name: str) -> Path:
        """The local copy of a file that the index lists, fetched if need be.

        UserError when it is missing at the address or does not fit the index.
        """
        entry, file = self.index["files"][name], self.directory / name
        if not file.resolve().is_relative_to(self.directory.resolve()):
            raise UserError(
                f"{self.address}: its index names the file {name!r}, which lies outside; take another corpus"
            )
        if file.exists() and file.stat().st_size == entry["bytes"]:
            return file
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file.with_name(f".{file.name}.lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (file.exists() and file.stat().st_size == entry["bytes"]):
                self._fetch(name, entry, file)
        return file

    def check(self, how: str) -> None:
        """Look at what is kept, as `shards.verify` does ("sample" or "full"); what does not fit is fetched anew when it
        is read.
        """
        for name, entry in self.index["files"].items():
            file = self.directory / name
            if file.is_file() and not shards.fits(file, entry, how):
                file.unlink()

    def place_all(self) -> None:
        """Fetch, and so check, every file."""
        for name in self.index["files"]:
            self.place(name)

    def _fetch(self, name: str, entry: dict[str, Any], file: Path) -> None:
        waiting, digest = file.with_name(f".{file.name}.fetching"), hashlib.sha256()
        try:
            with self._open(name) as source, open(waiting, "wb") as kept:
                while piece := source.read(_COPY_BYTES):
                    digest.update(piece)
                    kept.write(piece)
                kept.flush()
                os.fsync(kept.fileno())
            if digest.hexdigest() != entry["sha256"]:
                raise UserError(
                    f"{self.address}/{name}: does not fit the index (sha256 {digest.hexdigest()[:12]}, expected "
                    f"{entry['sha256'][:12]}): cut short or changed; copy the corpus there again"
                )
            os.replace(waiting, file)
        finally:
            waiting.unlink(missing_ok=True)

    def _read(self, name: str) -> bytes:
        with self._open(name) as handle:
            return bytes(handle.read())

    def _open(self, name: str) -> Any:
        try:
            return self._files.open(f"{self._root}/{name}", "rb")
        except FileNotFoundError as error:
            raise UserError(
                f"{self.address}/{name}: not found; expected the address of a corpus that `resformer data prepare` "
                "wrote"
            ) from error
        except Exception as error:  # every kind of store has errors of its own
            raise UserError(f"{self.address}/{name}: cannot be read ({_first_line(error)})") from error


def _file_system(address: str) -> tuple[Any, str]:
    from fsspec.core import url_to_fs

    try:
        return url_to_fs(address)
    except (ImportError, ValueError) as error:
        raise UserError(f"{address}: cannot be opened ({_first_line(error)})") from error
    except Exception as error:  # a store that cannot be reached, credentials that are missing
        raise UserError(f"{address}: cannot be reached ({_first_line(error)})") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
