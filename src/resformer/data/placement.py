"""Putting a finished corpus in its place: one rename, and care for what is already there."""

from __future__ import annotations

import json
import os
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
        raise UserError(f"--out {target}: is a file, expected a directory to write into; choose another")
    if os.path.ismount(target):
        raise UserError(f"--out {target}: is a mount point, whose place nothing can take; choose a directory inside it")
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
            f"{flag(key)}: {short(index['settings'].get(key))}, asked {short(settings.get(key))}" for key in different
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


def publish(work: Path, target: Path, settings: dict[str, Any], overwrite: bool) -> bool:
    """Move a finished build to `target`; False when another process has put the same corpus there meanwhile.

    With `overwrite`, only files that the old index lists are removed. The index goes first and comes last, so that a
    kill in between leaves a directory that says it is no corpus, never a mixture of two.
    """
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
    if (target / shards.INDEX).exists():
        _refuse_foreign(target / shards.INDEX)
    old = _listed(target)
    (target / shards.INDEX).unlink(missing_ok=True)
    for name in old:
        (target / name).unlink(missing_ok=True)
    files = (p.relative_to(work) for p in work.rglob("*") if p.is_file())
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


def umask() -> int:
    """The mode bits that new files of this process do not get."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _sync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def flag(key: str) -> str:
    """The flag of the command that a setting comes from."""
    return "--input" if key == "inputs" else f"--{key.replace('_', '-')}"


def short(value: Any) -> str:
    """A setting for a message."""
    text = "none" if value is None else str(value)
    return text if len(text) <= 24 else text[:12]
