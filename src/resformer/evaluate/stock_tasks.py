"""Which tasks the installed lm-eval has, found without building its index, which takes a quarter of a minute."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from resformer.errors import UserError

OLDEST = (0, 4, 12)
_NAME = re.compile(rb"""^["']?(task|group)["']?:[ \t]*["']?([^\s"'#\[]+)["']?[ \t]*(?:#.*)?\r?$""", re.M)
_TAG = re.compile(rb"""^["']?tag["']?:[ \t]*([^#\[\r\n]*)\r?$((?:\r?\n[ \t]*- .*)*)""", re.M)


def check_installed() -> None:
    """UserError with what to type where lm-eval, or what it needs for models of transformers, is missing or too old."""
    for package in ("lm_eval", "datasets", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise UserError(f"--tasks needs {package}; type: pip install 'resformer[eval]'")
    found = version("lm_eval")
    if tuple(int(number) for number in re.findall(r"\d+", found)[:3]) < OLDEST:
        least = ".".join(map(str, OLDEST))
        raise UserError(f"lm-eval {found} is too old; type: pip install 'lm-eval>={least}'")


@lru_cache(maxsize=1)
def names() -> Mapping[str, tuple[str, Path | None]]:
    """(kind, file) of every name: kind is "task", "group" or "tag", which has no file."""
    found: dict[str, tuple[str, Path | None]] = {}
    tags: set[str] = set()
    for path in sorted(_home().rglob("*yaml")):
        if not path.is_file():
            continue
        text = path.read_bytes()
        if path.suffix == ".yaml":
            for kind, name in _NAME.findall(text):
                found.setdefault(name.decode(), (kind.decode(), path))
        for one, many in _TAG.findall(text):
            listed = [line.strip().removeprefix(b"- ") for line in many.splitlines()]
            tags |= {tag.decode().strip("\"' ") for tag in (one, *listed)}
    return {**{tag: ("tag", None) for tag in tags if tag and tag != "null"}, **found}


def file_of(name: str) -> Path | None:
    """The YAML of a task or group; None where the name is of neither."""
    return names().get(name, ("", None))[1]


def children(name: str) -> list[str]:
    """Names of the tasks of a group; [] where these are not all plain names."""
    some = config(name).get("task", [])
    return list(some) if isinstance(some, list) and all(isinstance(one, str) for one in some) else []


def config(name: str) -> Mapping[str, Any]:
    """What the YAML of a task or group says, without the files that it includes."""
    import yaml

    class Loader(yaml.SafeLoader):
        """Functions of lm-eval stay names."""

    file = file_of(name)
    if file is None:
        return {}
    Loader.add_constructor("!function", lambda loader, node: loader.construct_scalar(node))
    found = yaml.load(file.read_text(encoding="utf-8"), Loader=Loader)
    return found if isinstance(found, dict) else {}


def directories(wanted: Iterable[str]) -> list[Path] | None:
    """Directories whose YAMLs are enough to load these names; None where only the whole index is."""
    found: set[Path] = set()
    left, seen = list(wanted), set()
    while left:
        name = left.pop()
        if name in seen:
            continue
        seen.add(name)
        kind, file = names().get(name, ("", None))
        if file is None:
            return None
        if kind == "group":
            inner = children(name)
            if not inner:
                return None
            left += inner
        found.add(file.parent)
    return sorted(path for path in found if not any(other in path.parents for other in found))


def _home() -> Path:
    """Where lm-eval keeps its tasks; the package is not imported for that."""
    spec = importlib.util.find_spec("lm_eval")
    assert spec is not None and spec.submodule_search_locations, "check_installed comes first"
    return Path(next(iter(spec.submodule_search_locations))) / "tasks"
