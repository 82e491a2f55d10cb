"""Which cache planes an engine with paged attention is to allocate for a plan, which of them each layer attends to, and
which models cannot be served so. Knows no engine.

In a paged cache a layer's kernel reads the keys and values of all tokens from blocks, while the model computes those of
the new tokens only. So whatever a layer does to values must happen before they are stored: what its slot keeps is what
it attends to.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ..core.plan import Row
from ..core.policy import Policy
from ..core.residual import layer_names
from ..errors import UserError
from ..models.batching import LENGTH_DEPENDENT_ROPE
from ..models.configuration import ResFormerConfig

INSTEAD = "model.generate or `transformers serve` (docs/serving.md)"
Plane = tuple[int, Literal["key", "value"]]  # the layer (from 1) whose keys or values it holds


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where each layer finds what it attends to.

    Attributes:
        places: per layer the layers (from 1) whose keys and whose values it attends to.
        planes: all planes that are stored; one is `[tokens, H_kv, D]`.
        windows: how many tokens each layer sees, itself included, None for all.
    """

    places: tuple[tuple[int, int], ...]
    planes: tuple[Plane, ...]
    windows: tuple[int | None, ...]

    @property
    def paired(self) -> bool:
        """Every layer finds keys and values in the slot of one layer: an engine's own slots, which hold both, do."""
        return all(keys == values for keys, values in self.places)


def layout(config: ResFormerConfig) -> Layout:
    """The layout of a model's cache.

    Raises:
        UserError: one that lists everything for which a paged cache cannot serve the model, and what to do instead.
    """
    plan = config.plan()
    by_problem: dict[str, list[int]] = {}
    for row in plan:
        problem = _row_problem(config, row)
        if problem is not None:
            by_problem.setdefault(problem, []).append(row.layer)
    problems = [f"layer {layer_names(layers)} {problem}" for problem, layers in by_problem.items()]
    problems += _position_problems(config)
    if problems:
        raise UserError(
            f"variant {config.variant!r} cannot be served from a paged cache: {'; '.join(problems)}. Use {INSTEAD}"
        )
    places = tuple((_stored_in(row, "key"), _stored_in(row, "value")) for row in plan)
    planes: list[Plane] = []
    for row in plan:
        if row.owns_key:
            planes.append((row.layer, "key"))
        if row.stores != "none":
            planes.append((row.layer, "value"))
    found = Layout(places=places, planes=tuple(planes), windows=tuple(row.window for row in plan))
    _check_windows(config, found)
    return found


def _stored_in(row: Row, what: Literal["key", "value"]) -> int:
    """The layer whose slot holds the keys or values that a layer attends to."""
    owns = row.owns_key if what == "key" else row.stores != "none"
    return row.layer if owns else next(r.layer for r in row.reads if r.what == what and r.state == "stored")


def _row_problem(config: ResFormerConfig, row: Row) -> str | None:
    """Why a layer cannot attend to what is stored as it is stored."""
    stored = [read.layer for read in row.reads if read.what == "value" and read.state == "stored"]
    if row.extends:
        return "attends to two sets of keys in one softmax"
    if any(read.what == "attention" for read in row.reads):
        return "reads attention weights, which kernels do not give"
    if row.stores == "own" or len(stored) > 1:
        return "makes its values anew, of those of all tokens in several slots, each time that it attends"
    policy = config.build_variant().policy(row, config.shape()) if stored else None
    if policy is not None and type(policy).mix is not Policy.mix:
        return f"changes the values that it reads from the slot of layer {stored[0]}"
    return None


def _position_problems(config: ResFormerConfig) -> Iterator[str]:
    """What positions would make of requests that share a batch."""
    kind = config.rope()["rope_type"] if config.position_embedding == "rope" else None
    if kind in LENGTH_DEPENDENT_ROPE:
        yield f"rope_type {kind!r} turns all requests of a batch by the length of the longest"


def _check_windows(config: ResFormerConfig, found: Layout) -> None:
    """Refuse windows that differ among layers whose pages must come and go together."""
    if found.paired:
        tied = [(n, keys) for n, (keys, _) in enumerate(found.places, start=1)]
    else:  # keys and values of one layer lie in different slots, so all slots share one table of blocks
        tied = [(n, 1) for n in range(1, len(found.places) + 1)]
    for layer, other in tied:
        window, other_window = found.windows[layer - 1], found.windows[other - 1]
        if window != other_window:
            raise UserError(
                f"variant {config.variant!r} cannot be served from a paged cache with sliding_layers "
                f"{config.sliding_layers!r}: layer {layer} sees {window or 'all'} tokens and layer {other} "
                f"{other_window or 'all'}, but their pages come and go together; let all layers slide or none, or use "
                f"{INSTEAD}"
            )
