"""Variants by name: a duplicate is an error, an unknown name is an error with the nearest valid one.

A variant is a frozen dataclass whose fields are its options. Its file says the equation and where it comes from; the
plan and the policies follow from the options. The built-in ones live in `variants/`, one file each; a user's own come
through `register_variant` or the entry-point group `resformer.variants`.
"""

from __future__ import annotations

import importlib
import pkgutil
import types
import typing
import warnings
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, Literal

from ..errors import UserError, did_you_mean
from .plan import Plan, Row, link
from .policy import Coefficients, DepthAverage, Policy, Shape, TokenTables

FINITE = 1e300  # also refuses whole numbers that no float can hold
ENTRY_POINT_GROUP = "resformer.variants"


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Base of all variants. A subclass declares its options as fields and says what each layer does.

    Class attributes:
        name: set by `register_variant`.
        equation: the formula in one line, with the paper's symbols.
        reference: paper and equation, or the code that it comes from.
        when: when to use it, in a sentence or two (for the documentation).
        uncertain: what is not known about it, or was chosen here.
    """

    name: ClassVar[str] = ""
    equation: ClassVar[str] = ""
    reference: ClassVar[str] = ""
    when: ClassVar[str] = ""
    uncertain: ClassVar[str] = ""

    def plan(self, shape: Shape) -> Plan:
        """The variant's plan; the default has no reads: plain attention in every layer."""
        return link(Row(layer=n) for n in range(1, shape.layers + 1))

    def policy(self, row: Row, shape: Shape) -> Policy | None:
        """The formula of one layer, None for the default: attention on what the layer owns, or reads where it owns
        nothing.
        """
        return None

    def coefficients(self, plan: Plan, shape: Shape) -> Coefficients | None:
        """Parameters that span layers, None if there are none."""
        return None

    def depth(self, row: Row, shape: Shape) -> DepthAverage | None:
        """The formula on hidden states after one block, None for none."""
        return None

    def tables(self, plan: Plan, shape: Shape) -> TokenTables | None:
        """Token tables that layers read, None if there are none."""
        return None

    def neutral(self, shape: Shape) -> dict[str, Any] | None:
        """Options at which the variant equals the Transformer bit for bit in fp32, None if there are none."""
        return None

    def formula(self, shape: Shape) -> str:
        """The equation with this model's layers and initial values filled in."""
        return self.equation

    def check(self, shape: Shape) -> None:
        """Raise ValueError when the options make no sense for this model; the default resolves the plan."""
        self.plan(shape)

    @classmethod
    def options(cls) -> dict[str, Any]:
        """Option name -> default."""
        return {f.name: f.default if f.default is not MISSING else None for f in fields(cls)}


VariantClass = type[Variant]
_registered: dict[str, VariantClass] = {}
_loaded = False


def register_variant(name: str) -> Callable[[VariantClass], VariantClass]:
    """Class decorator that puts a `Variant` under `name`.

    Raises:
        UserError: if the name is taken.
    """

    def put(cls: VariantClass) -> VariantClass:
        taken = _registered.get(name)
        if taken is not None and (taken.__module__, taken.__qualname__) != (cls.__module__, cls.__qualname__):
            raise UserError(
                f"variant name {name!r} is taken by {taken.__module__}.{taken.__qualname__}; choose another name"
            )
        for option in fields(cls) if "__dataclass_fields__" in vars(cls) else ():
            if option.default is MISSING:
                raise UserError(f"variant {name!r}: option {option.name!r} has no default; give it one")
        cls.name = name
        _registered[name] = cls
        return cls

    return put


def _load() -> None:
    """Import the built-in variants and those that installed packages announce as entry points."""
    global _loaded
    if _loaded:
        return
    _loaded = True
    from importlib.metadata import entry_points

    from . import depth, variants

    for builtin in (variants, depth):
        for module in pkgutil.iter_modules(builtin.__path__):
            importlib.import_module(f"{builtin.__name__}.{module.name}")
    for point in entry_points(group=ENTRY_POINT_GROUP):
        try:
            point.load()
        except Exception as error:  # somebody else's package: say which one, and go on without it
            package = point.dist.name if point.dist is not None else point.value
            warnings.warn(
                f"the variants of package {package!r} (entry point {point.name!r}) are left out: "
                f"{type(error).__name__}: {error}",
                stacklevel=2,
            )


def names() -> list[str]:
    """All variant names, the baseline first, then sorted."""
    _load()
    return sorted(_registered, key=lambda name: (name != "transformer", name))


def get(name: str) -> VariantClass:
    """The variant class registered under `name`.

    Raises:
        UserError: for an unknown name, with the nearest valid one.
    """
    _load()
    if name not in _registered:
        raise UserError(f"unknown variant {name!r}{did_you_mean(str(name), names())} (known: {', '.join(names())})")
    return _registered[name]


def build(name: str, options: Mapping[str, Any] | None, shape: Shape) -> Variant:
    """The variant with its options checked against this model.

    Args:
        name: a registered name.
        options: option -> value; what is missing takes the default.
        shape: sizes of the model.

    Raises:
        UserError: one that lists every problem: unknown options (with the nearest valid name), wrong types, values out
            of range.
    """
    cls = get(name)
    options = dict(options or {})
    hints = typing.get_type_hints(cls)
    valid = cls.options()
    problems = []
    for key, value in options.items():
        if key not in valid:
            known = ", ".join(valid) or "none"
            problems.append(f"variant {name!r} has no option {key!r}{did_you_mean(str(key), valid)} (options: {known})")
        elif not _fits(value, hints[key]):
            problems.append(f"option {key!r} of variant {name!r} is {value!r}; expected {_describe(hints[key])}")
    if not problems:
        try:
            variant = cls(**{key: _frozen(value) for key, value in options.items()})
            variant.check(shape)
            return variant
        except ValueError as error:
            problems.append(f"variant {name!r}: {error}")
    raise UserError("; ".join(problems))


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _fits(value: Any, hint: Any) -> bool:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, part) for part in typing.get_args(hint))
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in typing.get_args(hint))
    if origin is tuple:
        item = typing.get_args(hint)[0]
        return isinstance(value, list | tuple) and all(_fits(part, item) for part in value)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < FINITE
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is type(None):
        return value is None
    return isinstance(value, hint)


def _describe(hint: Any) -> str:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_describe(part) for part in typing.get_args(hint))
    if origin is Literal:
        return "one of " + ", ".join(repr(choice) for choice in typing.get_args(hint))
    if origin is tuple:
        return "a list of whole numbers" if typing.get_args(hint)[0] is int else "a list of numbers"
    return {
        float: "a finite number",
        int: "a whole number",
        str: "a text",
        bool: "true or false",
        type(None): "nothing (null)",
    }[hint]
