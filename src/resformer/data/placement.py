"""Putting a finished corpus in its place: a working directory beside it, one rename, and care for what is already
there.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from resformer.data import shards
from resformer.errors import UserError

LOCK = ".lock"


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
        raise UserError(f"{target}: is a file, expected a directory to write into; choose another --out")
    if not any(target.iterdir()):
        return False
    if not (target / shards.INDEX).is_file():
        raise UserError(
            f"{target}: holds files but no {shards.INDEX}, so they are not from here; choose an empty or new directory"
        )
    if overwrite:
        return False
    index = shards.load_index(target)
    different = sorted(
        key for key in {*settings, *index["settings"]} if settings.get(key) != index["settings"].get(key)
    )
    if different:
        pairs = "; ".join(
            f"{key}: {_short(index['settings'].get(key))}, asked {_short(settings.get(key))}" for key in different
        )
        raise UserError(
            f"{target}: already prepared with other settings ({pairs}); pass --overwrite or choose another --out"
        )
    shards.verify(target, index, "none")
    return True


@contextmanager
def workplace(target: Path) -> Iterator[Path]:
    """A locked directory beside `target` to build in, removed at the end. Leftovers of killed builds (their lock is
    free) are removed first.
    """
    parent = target.absolute().parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(parent, target.name)
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=parent))
    except OSError as error:
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
    (work / LOCK).unlink()
    if not target.exists() or not any(target.iterdir()):
        try:
            os.rename(work, target)
            _sync(target.absolute().parent)
            return True
        except OSError:
            if already_there(target, settings, overwrite):
                return False
            if not overwrite:
                raise
    elif not overwrite:
        return not already_there(target, settings, overwrite)
    old = _listed(target)
    (target / shards.INDEX).unlink(missing_ok=True)
    for name in old:
        (target / name).unlink(missing_ok=True)
    new = sorted(
        (p.relative_to(work) for p in work.rglob("*") if p.is_file()), key=lambda p: (p.name == shards.INDEX, p)
    )
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


def _remove_leftovers(parent: Path, name: str) -> None:
    for leftover in parent.glob(f".{name}.partial-*"):
        try:
            with open(leftover / LOCK) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
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


def _short(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 24 else text[:12]
