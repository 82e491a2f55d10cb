"""Trackers: the rows of metrics.jsonl, shown elsewhere as they are written.

metrics.jsonl stays the record; a tracker that fails is dropped with a note, and the run goes on without it.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from resformer.errors import UserError
from resformer.train.config import Config
from resformer.train.configure import to_tree
from resformer.train.rundir import TENSORBOARD

TRAIN_FIELDS = ("loss", "kl", "lr", "grad_norm", "tokens_per_second", "memory_bytes", "mfu")
VALIDATION_FIELDS = ("loss", "bits_per_byte")


class Tracker(Protocol):
    """Takes scalars of one step, by name."""

    def log(self, scalars: dict[str, float], step: int) -> None: ...

    def close(self) -> None: ...


def scalars(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """What a row says as (name, value): "train/loss", "validation/DOMAIN/loss", "lambdas/first/LAYER"."""
    if row["split"] == "train":
        yield from ((f"train/{name}", row[name]) for name in TRAIN_FIELDS if name in row)
    elif row["split"] in ("validation", "source"):
        yield from ((f"{row['split']}/{row['domain']}/{name}", row[name]) for name in VALIDATION_FIELDS)
    elif row["split"] == "lambdas":
        for kind in ("first", "own"):
            yield from ((f"lambdas/{kind}/{n:02d}", x) for n, x in zip(row["layers"], row[kind], strict=True))


class TensorBoard:
    """Event files in the run directory; what an interrupted run wrote after its checkpoint is purged on resume."""

    def __init__(self, out: Path, config: Config, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(out / TENSORBOARD), purge_step=step + 1 if step else None)

    def log(self, scalars: dict[str, float], step: int) -> None:
        for name, value in scalars.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class Hosted:
    """Weights & Biases or trackio, whose functions have the same names; the run is called like its directory."""

    def __init__(self, module: str, project: str, out: Path, config: Config, step: int) -> None:
        self.module: Any = importlib.import_module(module)
        # Its name may be another run's too; a resumed run must find itself again.
        place = hashlib.sha256(str(out.resolve()).encode()).hexdigest()[:8]
        more = {"id": f"{out.name}-{place}"} if module == "wandb" else {}
        self.module.init(project=project, name=out.name, config=to_tree(config), resume="allow", **more)

    def log(self, scalars: dict[str, float], step: int) -> None:
        self.module.log(scalars, step=step)

    def close(self) -> None:
        self.module.finish()


def check_trackers(config: Config) -> None:
    """Raises UserError for a tracker whose package is not installed."""
    track = config.track
    for key, wanted in {"tensorboard": track.tensorboard, "wandb": track.wandb, "trackio": track.trackio}.items():
        if wanted and importlib.util.find_spec(key) is None:
            raise UserError(
                f"track.{key} needs the package {key}; install it with pip install 'resformer[{key}]', or leave it away"
            )


class Trackers:
    """All trackers of a run; call it with rows as they are written."""

    def __init__(self, config: Config, out: Path, step: int, note: Callable[[str], None]) -> None:
        self.note, self.open = note, dict[str, Tracker]()
        track = config.track
        made: dict[str, Callable[[], Tracker]] = {}
        if track.tensorboard:
            made["tensorboard"] = lambda: TensorBoard(out, config, step)
        for module, project in (("wandb", track.wandb), ("trackio", track.trackio)):
            if project:
                made[module] = lambda module=module, project=project: Hosted(module, project, out, config, step)  # type: ignore[misc]
        for name, make in made.items():
            self._guarded(name, lambda name=name, make=make: self.open.update({name: make()}))  # type: ignore[misc]

    def __call__(self, row: Mapping[str, Any]) -> None:
        found = dict(scalars(row))
        for name, tracker in list(self.open.items()):
            if found and not self._guarded(name, lambda tracker=tracker: tracker.log(found, row["step"])):  # type: ignore[misc]
                del self.open[name]

    def close(self) -> None:
        for name, tracker in self.open.items():
            self._guarded(name, tracker.close)

    def _guarded(self, name: str, action: Callable[[], object]) -> bool:
        try:
            action()
        except Exception as error:  # a service that is away must not end a training
            self.note(f"note: {name} failed and is left out from here on: {' '.join(str(error).split())}")
            return False
        return True
