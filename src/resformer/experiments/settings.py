"""From a suite to the exact settings of each run, and the name that these settings give it.

The id of a run is its variant and a hash of everything that its numbers depend on: the effective configuration and the
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

from resformer.core import registry
from resformer.errors import UserError
from resformer.experiments.spec import Planned, RunSpec
from resformer.train.checks import effective
from resformer.train.config import Config
from resformer.train.configure import configure, to_tree

Overrides = Mapping[str, Any] | Sequence[str]
"""Keys that the user replaces in every run: path -> value, or texts `section.key=value` as on the command line."""

OWN_KEYS = ("model.variant", "train.seed", "data.dir")  # what the suite itself sets
# Where files lie, how often something is written, and on which devices it is computed: nothing of this changes what is
# computed, but for its rounding. A run may move between machines without becoming another one.
WITHOUT_EFFECT = (
    "data.dir",
    "data.verify",
    "model.attention",
    "train.async_save",
    "train.checkpoint_every",
    "train.checkpointing",
    "train.compile",
    "train.device",
    "train.keep_every",
    "train.keep_last",
    "train.micro_batch_size",
    "train.threads",
    "parallel.",
    "track.",
)
# Keys that came after the first recorded runs, with the value that says what runs did before they existed: at it they
# do not enter the id, so that recorded runs are found again. (A test holds the ids of recorded runs; it fails for a new
# key that is missing here.)
ADDED_KEYS: Mapping[str, object] = {
    "model.attention_bias": False,
    "model.from_init": False,
    "model.config_json": None,
    "uptrain.source": None,
    "uptrain.kl": 0.0,
    "uptrain.temperature": 1.0,
    "uptrain.morph_steps": 0,
}
ADDED_OPTIONS: Mapping[tuple[str, str], object] = {}  # (variant, option), likewise


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One run of a suite, ready to be trained. `notes` say what was adjusted."""

    spec: RunSpec
    overrides: Mapping[str, object]
    config: Config
    notes: tuple[str, ...] = ()

    @property
    def seed(self) -> int:
        return self.config.train.seed

    def id(self, fingerprint: str) -> str:
        """`variant-hash8`, the same on every machine and under whatever name a suite calls the run."""
        return f"{self.spec.variant}-{digest(self.config, fingerprint)}"


def without_effect(path: str) -> bool:
    """Whether a key says nothing of what is computed; names that end in a dot are sections."""
    return any(path.startswith(name) if name.endswith(".") else path == name for name in WITHOUT_EFFECT)


def digest(config: Config, fingerprint: str) -> str:
    """Eight hexadecimal digits of SHA-256 over what the numbers depend on: the corpus and all settings, those of the
    variant with its defaults filled in.
    """
    tree = {
        path: value
        for section, table in to_tree(config).items()
        for key, value in table.items()
        if not without_effect(path := f"{section}.{key}") and not (path in ADDED_KEYS and value == ADDED_KEYS[path])
    }
    tree["model.variant_options"] = _options(config)
    text = json.dumps({"config": tree, "data": fingerprint}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _options(config: Config) -> dict[str, Any]:
    """All options of the run's variant."""
    name = config.model.variant
    options = {**registry.get(name).options(), **config.model.variant_options}
    return {
        option: list(value) if isinstance(value, tuple) else value
        for option, value in options.items()
        if not ((name, option) in ADDED_OPTIONS and value == ADDED_OPTIONS[name, option])
    }


def override_paths(overrides: Overrides) -> list[str]:
    if isinstance(overrides, Mapping):
        return list(overrides)
    return [text.partition("=")[0].strip() for text in overrides]


def resolve(
    planned: Planned, data: Path | str, overrides: Overrides = (), *, load_recipe: Callable[[str], Config] | None = None
) -> list[Settings]:
    """The settings of all runs of a suite at a scale, seed by seed, so that the first seed of all is done first.

    Args:
        planned: what to run.
        data: directory of the prepared corpus; it need not exist yet.
        overrides: what the user replaces in every run.
        load_recipe: recipe name -> Config; `resformer.recipes.recipe` when not given.

    Raises:
        UserError: unknown recipe, variant or key, or an override of something that the suite itself varies.
    """
    suite, scale = planned.suite, planned.scale
    varied = {*OWN_KEYS, *(path for run in planned.runs for path in planned.overrides(run))}
    for path in override_paths(overrides):
        if path in varied:
            raise UserError(
                f"{path} is set by the suite {suite.name!r} for each run and cannot be replaced; "
                "write a suite of your own to vary it"
            )
    base = configure((load_recipe or _installed_recipe)(scale.recipe), flags=scale.overrides)
    if isinstance(overrides, Mapping):
        shared = configure(base, flags=overrides)
    else:
        shared = configure(base, overrides=overrides)
    # On a CPU every run has one thread, so that several go on beside each other.
    threads = {} if scale.processes > 1 or "train.threads" in override_paths(overrides) else {"train.threads": 1}
    found = []
    for seed in scale.seeds:
        for run in planned.runs:
            own = {"model.variant": run.variant, "train.seed": seed, "data.dir": str(data)}
            given = planned.overrides(run)
            config, notes = effective(configure(shared, flags={**threads, **given, **own}))
            found.append(Settings(spec=run, overrides=given, config=config, notes=tuple(notes)))
    return found


def _installed_recipe(name: str) -> Config:
    """A recipe by name. Recipes build on this package, so they are looked up when a suite runs and never imported from
    here.
    """
    config = importlib.import_module("resformer.recipes").recipe(name)
    assert isinstance(config, Config), f"recipe {name!r} gave {type(config).__name__}"
    return config
