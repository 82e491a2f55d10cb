"""Writes that are whole or not there, also after a power cut."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from resformer.errors import UserError


def check_output(path: Path, *, overwrite: bool, flag: str) -> None:
    """See, before the work is done, that its result can be written to `path`; `flag` is what named it.

    Raises:
        UserError: the file is there and not to be replaced, or the directory is missing or not to be written to.
    """
    if path.is_dir():
        raise UserError(f"{flag} {path} is a directory; expected a file to write to")
    if not path.parent.is_dir():
        raise UserError(f"{flag} {path}: there is no directory {path.parent}; make it, or choose another file")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise UserError(f"{flag} {path}: the directory {path.parent} cannot be written to; choose another file")
    if path.exists() and not path.is_file():  # renaming a result into its place would remove a device or a pipe
        raise UserError(f"{flag} {path} is no regular file; choose a file to write to")
    if path.exists() and not overwrite:
        raise UserError(f"{path} exists; pass --overwrite to replace it or name another file")


def write_atomic(path: Path, text: str) -> None:
    """Write through a temporary file in the same directory, synced before it takes the name. A link stays one, and its
    target gets the text.
    """
    path = path.resolve() if path.is_symlink() else path
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise type(error)(error.errno, error.strerror, str(path)) from None  # a reader knows this name, not the other
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Write JSON that any reader takes (no NaN)."""
    write_atomic(path, json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False) + "\n")


def sync_file(path: Path) -> None:
    """Wait until the file's bytes are on the disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Wait until the directory's entries are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256(path: Path) -> str:
    """Hex digest of the file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


OLD = ".tmp-old-"


def put_back(parent: Path) -> None:
    """Undo what `put_directory` was killed in the middle of: give directories that lost their name it back."""
    for old in parent.glob(f"{OLD}*"):
        for directory in old.iterdir():
            if not (parent / directory.name).exists():
                os.replace(directory, parent / directory.name)


def put_directory(temporary: Path, target: Path) -> None:
    """Give a finished directory its name, in place of an older one of that name; at no moment is a half one visible.

    Between two renames the older one lies in a directory `OLD*` beside it: `put_back` finds it there after a kill.
    """
    for path in temporary.iterdir():
        path.chmod(0o644)  # temporary files are private
        sync_file(path)
    temporary.chmod(0o755)
    sync_directory(temporary)
    if target.exists():
        old = Path(tempfile.mkdtemp(dir=target.parent, prefix=OLD))
        os.replace(target, old / target.name)
        os.replace(temporary, target)
        shutil.rmtree(old)
    else:
        os.replace(temporary, target)
    sync_directory(target.parent)
