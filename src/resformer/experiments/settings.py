"""From a suite to the exact settings of each run, and the name that these settings give it.

The id of a run is its name and a hash of everything that its numbers depend on: the effective configuration and the
fingerprint of the data. So a finished run is found again by what it is, and a changed recipe, corpus or override makes
a new run instead of a wrong reuse.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resformer.errors import UserError
from resformer.experiments.spec import RunSpec, Suite
from resformer.train.checks import effective
from resformer.train.config import Config
from resformer.train.configure import configure, to_tree

Overrides = Mapping[str, Any] | Sequence[str]
"""Keys that the user replaces in every run: path -> value, or texts `section.key=value` as on the command line."""

OWN_KEYS = ("model.variant", "train.seed", "data.dir")  # what the suite itself sets
# Where files lie and how often something is written or shown changes no number.
_WITHOUT_EFFECT = ("data.dir", "data.verify", "train.checkpoint_every", "train.keep_last")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One run of a suite, ready to be trained. `notes` say what was adjusted."""

    spec: RunSpec
    config: Config
    notes: tuple[str, ...] = ()

    def id(self, fingerprint: str) -> str:
        """`name-hash8`, the same on every machine."""
        return f"{self.spec.name}-{digest(self.config, fingerprint)}"


def digest(config: Config, fingerprint: str) -> str:
    """Eight hexadecimal digits of SHA-256 over the settings that numbers depend on."""
    tree: dict[str, dict[str, Any]] = {
        section: dict(keys) for section, keys in to_tree(config).items() if section != "track"
    }
    for path in _WITHOUT_EFFECT:
        section, name = path.split(".")
        tree[section].pop(name, None)
    text = json.dumps({"config": tree, "data": fingerprint}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def override_paths(overrides: Overrides) -> list[str]:
    if isinstance(overrides, Mapping):
        return list(overrides)
    return [text.partition("=")[0].strip() for text in overrides]


def resolve(
    suite: Suite, data: Path, overrides: Overrides = (), *, load_recipe: Callable[[str], Config] | None = None
) -> list[Settings]:
    """The settings of all runs of a suite.

    Args:
        suite: what to run.
        data: directory of the prepared corpus; it need not exist yet.
        overrides: what the user replaces in every run.
        load_recipe: recipe name -> Config; `resformer.recipes.recipe` when not given.

    Raises:
        UserError: unknown recipe, variant or key, or an override of something that the suite itself varies.
    """
    varied = {*OWN_KEYS, *(path for run in suite.runs for path in run.overrides)}
    for path in override_paths(overrides):
        if path in varied:
            raise UserError(
                f"{path} is set by the suite {suite.name!r} for each run and cannot be replaced; "
                "write a suite of your own to vary it"
            )
    base = (load_recipe or _installed_recipe)(suite.recipe)
    if isinstance(overrides, Mapping):
        shared = configure(base, flags=overrides)
    else:
        shared = configure(base, overrides=overrides)
    threads = {} if "train.threads" in override_paths(overrides) else {"train.threads": 1}
    found = []
    for run in suite.runs:
        own = {"model.variant": run.variant, "train.seed": run.seed, "data.dir": str(data)}
        config, notes = effective(configure(shared, flags={**threads, **run.overrides, **own}))
        found.append(Settings(spec=run, config=config, notes=tuple(notes)))
    return found


def _installed_recipe(name: str) -> Config:
    """A recipe by name. Recipes build on this package, so they are looked up when a suite runs and never imported from
    here.
    """
    config = importlib.import_module("resformer.recipes").recipe(name)
    assert isinstance(config, Config), f"recipe {name!r} gave {type(config).__name__}"
    return config
