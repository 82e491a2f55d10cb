"""Users' files with variants of their own: run when a flag asks for it, remembered by the runs that used them.

A run directory remembers names and hashes, never code: no file is run because a checkpoint says so.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import sys
import tomllib
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from resformer.errors import UserError

ENVIRONMENT = "environment.json"
KEY = "imports"  # in environment.json


@dataclass(frozen=True, kw_only=True)
class Imported:
    """One file that was run: where it is, the SHA-256 of its text, the variants that it registered."""

    file: str
    sha256: str
    variants: tuple[str, ...]


_imported: dict[Path, Imported] = {}


def import_files(paths: Sequence[Path | str]) -> list[Imported]:
    """Run Python files that register variants, in order; a file that did not change is run once.

    Modules beside a file can be imported from it.

    Raises:
        UserError: one line with file and line number: no such file, a syntax error, an exception, a name that is
            taken, a class that is no variant.
    """
    return [_import_file(Path(path)) for path in paths]


def recorded() -> list[dict[str, Any]]:
    """The files run so far, as environment.json keeps them."""
    return [asdict(one) for one in _imported.values()]


def _import_file(path: Path) -> Imported:
    from resformer.core import registry

    if not path.is_file() or path.suffix != ".py":
        what = "is a directory" if path.is_dir() else "is no .py file" if path.exists() else "does not exist"
        raise UserError(f"--import {path} {what}; expected a Python file that registers variants")
    where = path.resolve()
    source = where.read_bytes()
    digest = hashlib.sha256(source).hexdigest()
    known = _imported.get(where)
    if known is not None and known.sha256 == digest:
        return known
    before = {name: registry.get(name) for name in registry.names()}
    _run(path, where, source)
    new = [name for name in registry.names() if registry.get(name) is not before.get(name)]
    for name in new:
        _check_class(path, name, registry.get(name))
    _imported[where] = Imported(file=str(where), sha256=digest, variants=tuple(new))
    return _imported[where]


def _run(path: Path, where: Path, source: bytes) -> None:
    """Run the file as a module of its own. Dataclasses look their module up, so it must be findable by name."""
    name = f"resformer_import_{hashlib.sha256(str(where).encode()).hexdigest()[:8]}_{where.stem}"
    spec = importlib.util.spec_from_file_location(name, where)
    assert spec is not None, f"no import spec for {where}"
    module: ModuleType = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(where.parent) not in sys.path:
        sys.path.append(str(where.parent))  # at the end: nothing that is installed is hidden by a file beside it
    try:
        exec(compile(source, str(where), "exec", dont_inherit=True), module.__dict__)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise UserError(f"--import {_place(path, where, error)}: {_said(error)}") from error


def _place(path: Path, where: Path, error: BaseException) -> str:
    """`file:line` of what went wrong, the line in the user's file."""
    if isinstance(error, SyntaxError) and error.filename == str(where):
        return f"{path}:{error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(where)]
    return f"{path}:{lines[-1]}" if lines else str(path)


def _said(error: BaseException) -> str:
    if isinstance(error, UserError):
        return str(error)
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return " ".join(f"{type(error).__name__}: {text}".split())


def _check_class(path: Path, name: str, cls: type) -> None:
    """Refuse the two mistakes that would show only much later, as something else."""
    from resformer.core.registry import Variant

    if not (isinstance(cls, type) and issubclass(cls, Variant)):
        raise UserError(
            f"--import {path}: variant {name!r} is {cls!r}; expected a class derived from resformer.core.registry."
            "Variant, or from a form in resformer.core.residual"
        )
    if vars(cls).get("__annotations__") and "__dataclass_params__" not in vars(cls):
        raise UserError(
            f"--import {path}: variant {name!r} declares options but is no dataclass, so it would have none; "
            "put @dataclass(frozen=True, kw_only=True) between @register_variant and the class"
        )
    assert dataclasses.is_dataclass(cls)


def check_available(place: Path | str) -> list[str]:
    """Look whether the variant of a run, or of an exported model, is there; return notes on what changed since.

    Args:
        place: a run directory or an exported one; anything else is left to whoever opens it.

    Raises:
        UserError: the variant is not registered; names the file that the run was made with, if it is known.
    """
    place = Path(place)
    name, files = _variant_of(place), _files_of(place)
    if name is None:
        return []
    from resformer.core import registry

    if name not in registry.names():
        made_with = [one["file"] for one in files if name in one["variants"]]
        flags = " ".join(f"--import {one['file']}" for one in files) if made_with else "--import FILE.py"
        raise UserError(
            f"{place} uses the variant {name!r}, which is not registered here: pass {flags} to run the file that "
            "registers it (no code is run unasked)"
        )
    loaded = {sha: one.file for one in _imported.values() for sha in (one.sha256,) if name in one.variants}
    then = [one["sha256"] for one in files if name in one["variants"]]
    if loaded and then and not set(loaded) & set(then):
        return [f"{next(iter(loaded.values()))} is not the file that {place} was made with: its text has changed"]
    return []


def _variant_of(place: Path) -> str | None:
    try:
        if (place / "config.json").is_file():
            config = json.loads((place / "config.json").read_text(encoding="utf-8"))
            return config.get("variant") if config.get("model_type") == "resformer" else None
        if (place / "config.toml").is_file():
            return tomllib.loads((place / "config.toml").read_text(encoding="utf-8")).get("model", {}).get("variant")
    except (OSError, ValueError, AttributeError):
        pass  # whoever opens it next says what is wrong with it
    return None


def _files_of(place: Path) -> list[dict[str, Any]]:
    """What environment.json says, of the run or of the one that an export lies in."""
    for directory in (place, place.parent):
        try:
            found = json.loads((directory / ENVIRONMENT).read_text(encoding="utf-8")).get(KEY, [])
            return [one for one in found if {"file", "sha256", "variants"} <= one.keys()]
        except (OSError, ValueError, AttributeError):
            continue
    return []
