"""Where a converted model starts: at the Transformer it was made of, exactly, if the variant can train from there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from ..core import registry
from ..core.plan import Plan, Row
from ..core.policy import Shape
from ..core.registry import Variant
from ..errors import UserError

DEFAULT_LAYERS = "last_third"
"""Layers that share a value in a converted model, unless told otherwise: sharing in all of them costs far more."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """Options of a variant for a converted model.

    Attributes:
        options: with which the model is made.
        exact: the model then computes what its source does.
        shares: layers lack projections that the source has, so that weights may be fitted.
        why: in words, where the start is not exact.
    """

    options: dict[str, Any]
    exact: bool
    shares: bool = False
    why: str = ""


def whole(row: Row) -> bool:
    """The layer has all the projections of a plain Transformer's, to their full width."""
    return row.owns_value and row.owns_key and row.owns_query and row.value_share == 1


def shares(plan: Plan) -> bool:
    """Some layer lacks a projection, or a part of one, that a plain Transformer has."""
    return not all(map(whole, plan))


def choose(name: str, options: Mapping[str, Any], shape: Shape, *, trained: bool = True) -> Start:
    """The options to start with: the user's, and the variant's neutral ones where these are values that training
    changes.

    A variant whose weights are constants would stay the Transformer for ever, and one that shares projections lacks
    some of the source's; neither has an exact start. Which layers share is chosen unless the user says it; so is whose
    value they share, if the source was `trained` with a value of every layer's own: then the one before them.

    Raises:
        UserError: unknown variant or option, options that make no sense for these sizes.
    """
    asked = registry.build(name, options, shape)
    plan = asked.plan(shape)
    if shares(plan):
        chosen = dict(options)
        if "layers" in type(asked).options() and "layers" not in options:
            chosen["layers"] = DEFAULT_LAYERS
            if trained and "anchors" in type(asked).options() and "anchors" not in options:
                chosen["anchors"] = _nearest(registry.build(name, chosen, shape).plan(shape))
            registry.build(name, chosen, shape)
        why = f"variant {name!r} shares projections of layers, which no weights make equal to the source"
        return Start(options=chosen, exact=False, shares=True, why=why)
    neutral = asked.neutral(shape)
    if neutral is None:
        return Start(options=dict(options), exact=False, why=f"variant {name!r} has no start that is the Transformer")
    clashes = [key for key in neutral if key in options and options[key] != neutral[key]]
    if clashes:
        pairs = ", ".join(f"{key}={options[key]!r} (exact: {neutral[key]!r})" for key in clashes)
        return Start(options=dict(options), exact=False, why=f"variant {name!r} starts elsewhere with {pairs}")
    for chosen in _neutral_options(options, neutral):
        try:
            variant = registry.build(name, chosen, shape)
        except UserError:  # options that exclude each other, such as a tied weight and its initial value
            continue
        if variant.plan(shape) == plan and _trains(variant, shape):
            return Start(options=chosen, exact=True)
        break
    return Start(
        options=dict(options),
        exact=False,
        why=f"variant {name!r} with these options mixes with constants, and at {dict(neutral)} would never train",
    )


def _nearest(plan: Plan) -> list[int]:
    """Layer 1, which is an anchor always, and the layer before the first one that shares: it has a value in the cache
    anyway, from which more of what those behind it attend to follows by a linear map than from layer 1's.
    """
    before = next(row.layer for row in plan if not row.owns_value) - 1
    return [1] if before == 1 else [1, before]


def _neutral_options(options: Mapping[str, Any], neutral: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The user's options with all neutral ones, then with fewer and fewer of them."""
    keys = [key for key in neutral if key not in options]
    sizes = range(len(keys), -1 if not keys else 0, -1)
    return [{**options, **{key: neutral[key] for key in some}} for size in sizes for some in combinations(keys, size)]


def _trains(variant: Variant, shape: Shape) -> bool:
    """Every layer that mixes has a parameter that can take it away from the Transformer."""
    plan = variant.plan(shape)
    shared = variant.coefficients(plan, shape)
    across = shared is not None and any(True for _ in shared.parameters())
    for row in plan:
        if not row.reads:
            continue
        policy, depth = variant.policy(row, shape), variant.depth(row, shape)
        own = [module for module in (policy, depth) if module is not None]
        if not across and not any(True for module in own for _ in module.parameters()):
            return False
    return True
