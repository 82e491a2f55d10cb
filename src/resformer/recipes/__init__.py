"""Recipes: functions that return a whole training configuration. A child is an edit of its parent.

`recipe("quick")` is `resformer.recipes.quick.quick()`; a recipe of one's own is any function that returns a `Config`.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from resformer.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from resformer.train.config import Config

_PAPER = ("2m", "82m", "180m", "468m", "1b6", "82m_512", "82m_8192", "82m_32000", "82m_64000")
# name -> module, which has a function of that name
_RECIPES = {
    "quick": "quick",
    "tiny": "tiny",
    "mini": "mini",
    "small": "small",
    "uptrain": "uptrain",
    **{f"paper_{size}": "paper" for size in _PAPER},
}


def names() -> list[str]:
    """All recipes."""
    return list(_RECIPES)


def unknown(name: str, known: Sequence[str]) -> UserError:
    """What to raise for a name that is none of `known`."""
    return UserError(f"unknown recipe {name!r}{did_you_mean(name, known)} (known: {', '.join(known)})")


def recipe(name: str) -> Config:
    """The configuration of a recipe.

    Raises:
        UserError: for an unknown name, with the nearest valid one.
    """
    if name not in _RECIPES:
        raise unknown(name, names())
    module = importlib.import_module(f"{__name__}.{_RECIPES[name]}")
    return getattr(module, name)()
