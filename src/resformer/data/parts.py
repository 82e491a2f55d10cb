"""The state of a build: encoded parts of its sources, each there as a whole or not at all.

    .NAME.partial/               beside the corpus NAME that is being made
      state.json                 the settings that the parts depend on
      tokenizer.json ...         once it is there
      parts/SOURCE-00007.*       .bin token ids, .rows.npy one row a document, .json domains and report (written last)
      parts/SOURCE.done          the source is read to its end

SOURCE is a hash of what identifies the source. A build that was stopped, killed even, goes on where the last part ends;
several processes, on several machines with one file system, can share the sources among them.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from resformer.data.console import say
from resformer.data.encode import ROWS, Encoded
from resformer.data.guard import FULL
from resformer.data.placement import LOCK, flag, short, umask
from resformer.data.reading import Block, Report, Source
from resformer.errors import UserError

PART_BYTES = 1 << 25
_MAX_BLOCKS = 4096
_STATE = "state.json"
_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Part:
    """Consecutive documents of one source."""

    stem: Path
    blocks: int
    size: int
    text_bytes: int
    tokens: int
    domains: list[str]
    report: Report
    full: bool = False
    """The source gives nothing after it, for --max-bytes."""

    def ids(self, dtype: np.dtype) -> np.ndarray:
        """All token ids, memory-mapped."""
        if not self.tokens:
            return np.zeros(0, dtype)
        return np.memmap(self.stem.with_suffix(".bin"), dtype=dtype, mode="r", shape=(self.tokens,))

    def rows(self) -> np.ndarray:
        """One row a document (`encode.ROWS`)."""
        with open(self.stem.with_suffix(".rows.npy"), "rb") as handle:
            return np.lib.format.read_array(handle, allow_pickle=False)


class Parts:
    """The parts of all sources of a build."""

    def __init__(self, home: Path) -> None:
        self.home, self.directory = home, home / "parts"

    def any(self) -> bool:
        """Whether there is something that would be a loss."""
        return any(self.directory.glob("*.json"))

    def text_bytes(self) -> int:
        """Bytes of text in all parts."""
        files = self.directory.glob("*.json")
        return sum(int(json.loads(file.read_text(encoding="utf-8"))["text_bytes"]) for file in files)

    def finished(self, source: Source) -> bool:
        """Whether a source is read to its end."""
        return (self.directory / f"{key(source)}.done").exists()

    def of(self, source: Source) -> Iterator[Part]:
        """The parts of a source, in order."""
        for number in range(1 << 40):
            stem = self.directory / f"{key(source)}-{number:05d}"
            try:
                facts = json.loads(stem.with_suffix(".json").read_text(encoding="utf-8"))
            except FileNotFoundError:
                return
            yield Part(stem=stem, report=Report.from_state(facts.pop("report")), **facts)

    @contextmanager
    def held(self, source: Source) -> Iterator[bool]:
        """Keep others from adding to a source; False: somebody else does."""
        with open(self.directory / f"{key(source)}.lock", "a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True

    def add(self, source: Source, number: int, pieces: list[Encoded], *, full: bool) -> None:
        """Write the part `number` of a source, which the caller holds; it is there once its .json is."""
        stem = self.directory / f"{key(source)}-{number:05d}"
        names: dict[str, int] = {}
        report, rows = Report(), []
        for piece in pieces:
            report.add(piece.report)
            if len(piece.rows):
                to = np.array([names.setdefault(name, len(names)) for name in piece.domains], dtype="<u4")
                table = piece.rows.copy()
                table["domain"] = to[table["domain"]]
                rows.append(table)
        table = np.concatenate(rows) if rows else np.zeros(0, ROWS)
        with whole(stem.with_suffix(".bin")) as handle:
            for piece in pieces:
                handle.write(piece.ids.data)
        with whole(stem.with_suffix(".rows.npy")) as handle:
            np.lib.format.write_array(handle, table, allow_pickle=False)
        facts = {
            "blocks": len(pieces),
            "size": sum(piece.size for piece in pieces),
            "text_bytes": int(table["bytes"].sum()),
            "tokens": int(table["tokens"].sum()),
            "domains": list(names),
            "full": full,
            "report": report.state(),
        }
        with whole(stem.with_suffix(".json")) as handle:
            handle.write(json.dumps(facts).encode())

    def finish(self, source: Source) -> None:
        """Note that a source has no further part."""
        (self.directory / f"{key(source)}.done").touch()


class PartWriter:
    """Collects what is encoded of one source, and writes it in parts. Others are kept out while its blocks are read."""

    def __init__(self, kept: Parts, source: Source, quota: int | None) -> None:
        self.kept, self.source, self.quota = kept, source, quota
        self.pieces: list[Encoded] = []
        self.waiting = 0
        self.closed = self.left = False
        self.lock = ExitStack()
        self.look()

    def look(self) -> None:
        """See what is there already."""
        there = list(self.kept.of(self.source))
        self.number, self.skipped = len(there), sum(part.blocks for part in there)
        self.used, self.on_disk = sum(part.text_bytes for part in there), sum(part.size for part in there)
        self.documents = sum(len(part.rows()) for part in there) if self.quota is not None else 0
        self.full = any(part.full for part in there)

    def blocks(self) -> Iterator[Block]:
        """The blocks that are not in parts yet; none where another process works on the source."""
        if not self.lock.enter_context(self.kept.held(self.source)):
            say(f"{self.source.name}: another process works on it, left to that")
            self.left = True
            return
        self.look()  # somebody may have added to it meanwhile
        for block in islice(self.source.blocks(), self.skipped, None):
            if self.full:
                return
            yield block

    def add(self, piece: Encoded) -> None:
        """Take in the next block's documents, as far as the bound on the source allows."""
        if self.full:
            return
        if self.quota is not None:
            piece, self.full = piece.within(self.quota - self.used, max(0, 2 - self.documents))
            self.documents += len(piece.rows)
        size = int(piece.rows["bytes"].sum())
        self.used += size
        self.waiting += size
        self.pieces.append(piece)
        if self.waiting >= PART_BYTES or len(self.pieces) >= _MAX_BLOCKS:
            self.flush()

    def flush(self) -> None:
        """Write what is collected as a part."""
        if self.pieces:
            self.kept.add(self.source, self.number, self.pieces, full=self.full)
            self.number, self.pieces, self.waiting = self.number + 1, [], 0

    def close(self) -> None:
        """The source is at its end."""
        if not self.closed:
            self.flush()
            if not self.left and not self.kept.finished(self.source):
                self.kept.finish(self.source)
            self.lock.close()
            self.closed = True


def key(source: Source) -> str:
    """The name of a source's parts."""
    return hashlib.sha256(json.dumps(source.identity()).encode()).hexdigest()[:20]


@contextmanager
def whole(file: Path) -> Iterator[Any]:
    """A file to write, which is there once it is complete. Of two processes that write the same one, each renames a
    file of its own.
    """
    waiting = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with open(waiting, "wb") as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(waiting, file)
    finally:
        waiting.unlink(missing_ok=True)


def home_of(target: Path) -> Path:
    """Where the state of the build of `target` lies."""
    return target.absolute().parent / f".{target.name}.partial"


@contextmanager
def held(target: Path, *, shared: bool) -> Iterator[Path]:
    """The directory of the build of `target`, made if need be and locked; `shared` with other tasks of the build.

    It is removed where nothing in it would be a loss, and left for the next call where something would.
    """
    home = home_of(target)
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        made = not home.exists()
        home.mkdir(exist_ok=True)
        if made:
            os.chmod(home, 0o777 & ~umask())
        lock = open(home / LOCK, "a")  # noqa: SIM115 - closed below
    except OSError as error:
        if error.errno in FULL:
            raise
        raise UserError(
            f"{target}: cannot be written ({error.strerror}: {error.filename}); choose another --out"
        ) from error
    with lock:
        _lock(lock, fcntl.LOCK_SH if shared else fcntl.LOCK_EX, target)
        before = Parts(home).any()
        if not _same(lock, home / LOCK):  # the build that was waited for has ended and tidied up
            with held(target, shared=shared) as place:
                yield place
            return
        try:
            yield home
        except UserError:
            # What this call did is done again in seconds; what was there is somebody's.
            if not shared and not before and Parts(home).text_bytes() < PART_BYTES:
                shutil.rmtree(home, ignore_errors=True)
            raise
        finally:
            if not shared and home.exists() and not Parts(home).any():
                shutil.rmtree(home, ignore_errors=True)


def tidy(target: Path, settings: dict[str, Any]) -> None:
    """Remove what the build of a finished corpus was killed before it removed, wholly or in part."""
    home = home_of(target)
    if not home.is_dir():
        return
    with contextlib.suppress(OSError, ValueError), open(home / LOCK, "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file = home / _STATE
        if not file.exists() or json.loads(file.read_text(encoding="utf-8")) == {"version": _VERSION, **settings}:
            shutil.rmtree(home, ignore_errors=True)


def _same(handle: Any, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle.fileno()), file.stat())
    except OSError:
        return False


def _lock(lock: Any, how: int, target: Path) -> None:
    try:
        fcntl.flock(lock, how | fcntl.LOCK_NB)
    except BlockingIOError:
        say(f"{target}: another process prepares it, waiting for its end")
        fcntl.flock(lock, how)


def agree(home: Path, settings: dict[str, Any], target: Path, *, overwrite: bool, shared: bool) -> None:
    """Take up the state in `home` if it is that of these settings, else begin with none.

    UserError when parts of another build are there and `overwrite` does not allow to drop them. A build that goes on
    with "skip" after bad lines were errors is the same: what it has had no bad line.
    """
    file = home / _STATE
    wanted = {"version": _VERSION, **settings}
    found: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(file.read_text(encoding="utf-8"))
    different = sorted(k for k in {*wanted, *found} if found.get(k) != wanted.get(k))
    if different == ["on_bad_line"] and found.get("on_bad_line") == "error":
        different = []
    if (found and not different) or (shared and not found):
        with whole(file) as handle:
            handle.write(json.dumps(wanted).encode())
        return
    if shared or (found and Parts(home).any() and not overwrite):
        pairs = "; ".join(f"{flag(k)}: {short(found.get(k))}, asked {short(wanted.get(k))}" for k in different)
        raise UserError(
            f"{target}: the beginning of a preparation with other settings is in {home} ({pairs}); go on with those, "
            f"or {'remove it' if shared else 'pass --overwrite to drop it'}"
        )
    for child in home.iterdir():
        if child.name in (LOCK, "stdin"):
            continue
        shutil.rmtree(child, ignore_errors=True) if child.is_dir() else child.unlink(missing_ok=True)
    with whole(file) as handle:
        handle.write(json.dumps(wanted).encode())
