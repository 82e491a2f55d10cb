"""Putting a finished corpus in its place: a working directory beside it, one rename, and care for what is already
there.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from resformer.data import shards
from resformer.data.guard import FULL
from resformer.errors import UserError

LOCK = ".lock"
_UNLOCKED_SECONDS = 60


def write_json(file: Path, value: Any) -> None:
    """Write JSON and flush it to the disk (the directory is moved into place later, as a whole)."""
    with open(file, "w", encoding="utf-8") as handle:
        json.dump(value, handle, indent=1, ensure_ascii=True)
        handle.write("\n")
        handle.flush()
        os.fsync(handle.fileno())


def already_there(target: Path, settings: dict[str, Any], overwrite: bool) -> bool:
    """Whether `target` holds this very corpus. UserError when it holds anything else that may not be replaced."""
    if not target.exists():
        return False
    if not target.is_dir():
        raise UserError(f"--out {target}: is a file, expected a directory to write into; choose another")
    if not any(target.iterdir()):
        return False
    if not (target / shards.INDEX).is_file():
        raise UserError(
            f"{target}: holds files but no {shards.INDEX}, so they are not from here; choose an empty or new directory"
        )
    _refuse_foreign(target / shards.INDEX)
    if overwrite:
        return False
    index = shards.load_index(target)
    different = sorted(
        key for key in {*settings, *index["settings"]} if settings.get(key) != index["settings"].get(key)
    )
    if different:
        pairs = "; ".join(
            f"{_flag(key)}: {_short(index['settings'].get(key))}, asked {_short(settings.get(key))}"
            for key in different
        )
        raise UserError(
            f"{target}: already prepared with other settings ({pairs}); pass --overwrite or choose another --out"
        )
    shards.verify(target, index, "none")
    return True


def _refuse_foreign(file: Path) -> None:
    """UserError unless an index.json was written by us, in whatever version and state: nothing else is replaced."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or found.get("format") != shards.FORMAT:
        raise UserError(
            f'{file}: not an index of prepared shards (no "format": "{shards.FORMAT}"), so it is not replaced, also '
            "not with --overwrite; choose another --out or remove the file"
        )


@contextmanager
def workplace(target: Path) -> Iterator[Path]:
    """A locked directory beside `target` to build in, removed at the end."""
    parent = target.absolute().parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=parent))
    except OSError as error:
        if error.errno in FULL:
            raise
        raise UserError(
            f"{target}: cannot be written ({error.strerror}: {error.filename}); choose another --out"
        ) from error
    # Locked before it has its name, so that nobody can meet it unlocked.
    with open(work / (LOCK + ".new"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.rename(lock.name, work / LOCK)
        os.chmod(work, 0o777 & ~_umask())
        try:
            yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)


def publish(work: Path, target: Path, settings: dict[str, Any], overwrite: bool) -> bool:
    """Move a finished build to `target`; False when another process has put the same corpus there meanwhile.

    With `overwrite`, only files that the old index lists are removed. The index goes first and comes last, so that a
    kill in between leaves a directory that says it is no corpus, never a mixture of two.
    """
    if not target.exists() or not any(target.iterdir()):
        try:
            os.rename(work, target)
            (target / LOCK).unlink()  # not before: a build that is killed here is found by its lock
            _sync(target.absolute().parent)
            return True
        except OSError:
            if already_there(target, settings, overwrite):
                return False
            if not overwrite:
                raise
    elif not overwrite:
        return not already_there(target, settings, overwrite)
    if (target / shards.INDEX).exists():
        _refuse_foreign(target / shards.INDEX)
    old = _listed(target)
    (target / shards.INDEX).unlink(missing_ok=True)
    for name in old:
        (target / name).unlink(missing_ok=True)
    files = (p.relative_to(work) for p in work.rglob("*") if p.is_file() and p != work / LOCK)
    new = sorted(files, key=lambda p: (p.name == shards.INDEX, p))
    for relative in new:
        (target / relative).parent.mkdir(parents=True, exist_ok=True)
        os.replace(work / relative, target / relative)
    _sync(target)
    return True


def _listed(target: Path) -> list[str]:
    """The files that the index at `target` lists and that lie inside `target`."""
    try:
        names = json.loads((target / shards.INDEX).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    root = target.resolve()
    return [name for name in names if (target / name).resolve().is_relative_to(root)]


def remove_leftovers(target: Path) -> None:
    """Remove the working directories of builds of `target` whose process is gone: their lock is free.

    One without a lock was killed while it was made or removed; it counts as dead after a minute.
    """
    for leftover in target.absolute().parent.glob(f".{glob.escape(target.name)}.partial-*"):
        try:
            with open(leftover / LOCK, "r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(leftover, ignore_errors=True)
        except FileNotFoundError:
            with contextlib.suppress(OSError):
                if time.time() - leftover.stat().st_mtime > _UNLOCKED_SECONDS:
                    shutil.rmtree(leftover, ignore_errors=True)
        except OSError:
            continue  # alive, or not ours


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _sync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _flag(key: str) -> str:
    return "--input" if key == "inputs" else f"--{key.replace('_', '-')}"


def _short(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 24 else text[:12]
