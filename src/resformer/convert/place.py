"""A finished directory takes its name at once, or nothing is left."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import UserError

# What a model's directory may hold; anything else is somebody's work and is not removed.
_OF_A_MODEL = re.compile(r".+\.(json|safetensors|model|txt|jinja|md)|modeling_resformer\.py")


def check_target(target: Path, *, overwrite: bool, source: str = "") -> None:
    """See, before the work is done, that a directory may be written there.

    Raises:
        UserError: something is there that is not to be replaced, such as `source` itself, or it cannot be written.
    """
    here = Path(source).absolute() if source else None
    if here is not None and here.exists() and target.absolute().resolve() in (here.resolve(), *here.resolve().parents):
        raise UserError(f"--out {target} holds the model that is converted; choose another --out")
    parent = target.absolute().parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise UserError(f"--out {target}: {parent} cannot be written to; choose another --out")
    if target.is_symlink():
        raise UserError(f"--out {target} is a link; choose another --out")
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not target.is_dir():
        raise UserError(f"--out {target} is a file; expected a directory to write the model to")
    foreign = sorted(path.name for path in target.iterdir() if path.is_dir() or not _OF_A_MODEL.fullmatch(path.name))
    if foreign or not (target / "config.json").is_file():
        what = f"holds other files ({', '.join(foreign[:3])})" if foreign else "holds no model"
        raise UserError(f"--out {target} {what}; choose another --out")
    if not overwrite:
        raise UserError(f"--out {target} is there already; pass --overwrite or another --out")


@contextmanager
def new_directory(target: Path, *, overwrite: bool) -> Iterator[Path]:
    """A temporary directory beside `target` that takes its name when the block ends well, and is removed otherwise."""
    check_target(target, overwrite=overwrite)
    target = target.absolute()
    made = _missing_parents(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
    try:
        yield temporary
        _finish(temporary)
        check_target(target, overwrite=overwrite)
        if target.exists():
            old = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-old-"))
            os.replace(target, old / target.name)
            try:
                os.replace(temporary, target)
            except BaseException:
                os.replace(old / target.name, target)
                raise
            finally:
                shutil.rmtree(old)
        else:
            os.replace(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        for parent in made:
            if not any(parent.iterdir()):
                parent.rmdir()
        raise


def _missing_parents(target: Path) -> list[Path]:
    """Directories that will be made for it, the innermost first."""
    return [parent for parent in target.parents if not parent.exists()]


def _finish(directory: Path) -> None:
    """Ordinary rights, and all bytes on the disk."""
    for path in directory.iterdir():
        path.chmod(0o644)
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    directory.chmod(0o755)
