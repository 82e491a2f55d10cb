"""The plan: a static table, one row a layer, of who owns a value, what each layer reads, and what its cache slot
stores.

Everything else is read off the plan and never decided again: which parameters exist, what a layer hands on, how long a
tensor must live, how the cache is laid out, how many bytes a token costs. This module imports no torch.

Layers are numbered from 1, as in the paper.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

What = Literal["value"]
State = Literal["raw", "stored"]
Stores = Literal["mixed", "own", "none"]


@dataclass(frozen=True, kw_only=True)
class Read:
    """One tensor that a layer takes from an earlier one.

    `state` "raw": the projection of the new tokens before any mixing, `[B, T, H_kv, D]`.
    `state` "stored": what the source's cache slot returns, all tokens so far, `[B, S, H_kv, D]` (S = T without a
    cache).
    """

    layer: int
    what: What = "value"
    state: State = "raw"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One layer of a plan.

    Two rows are equal when their blocks compute the same graph; so the layer's number does not take part in the
    comparison.

    Attributes:
        layer: number of the layer, from 1.
        owns_value: the layer has a W_v of its own.
        reads: tensors taken from earlier layers, in the order in which `Policy.mix` gets them.
        coefficients: number of tensors that parameters outside the blocks send to this layer (Learnable-Plus).
        stores: what the value slot of the layer's cache holds: the value after mixing ("mixed": only new tokens are
            mixed), the layer's own value before mixing ("own": mixing sees all tokens), or nothing ("none": values are
            read from another layer).
        sends: tensors that later layers read; filled by `link`.
    """

    layer: int = field(compare=False)
    owns_value: bool = True
    reads: tuple[Read, ...] = ()
    coefficients: int = 0
    stores: Stores = "mixed"
    sends: tuple[tuple[What, State], ...] = ()

    @property
    def mixes(self) -> bool:
        """The layer reads another layer's value."""
        return bool(self.reads)


Plan = tuple[Row, ...]


def link(rows: Iterable[Row]) -> Plan:
    """Fill each row's `sends` from what later rows read, check the plan, and return it."""
    rows = tuple(rows)
    wanted: dict[int, list[tuple[What, State]]] = {}
    for row in rows:
        for read in row.reads:
            sends = wanted.setdefault(read.layer, [])
            if (read.what, read.state) not in sends:
                sends.append((read.what, read.state))
    plan = tuple(replace(row, sends=tuple(wanted.get(row.layer, ()))) for row in rows)
    validate(plan)
    return plan


def validate(plan: Sequence[Row]) -> None:
    """Check that a plan can be run: sources come earlier and own what is read from them, and every layer has a value to
    attend to.
    """
    assert plan, "a plan has at least one row"
    for number, row in enumerate(plan, start=1):
        assert row.layer == number, f"row {number} of the plan says it is layer {row.layer}"
        assert row.owns_value or row.reads, f"layer {number} neither owns a value nor reads one"
        assert row.owns_value or row.stores == "none", f"layer {number} owns no value but stores {row.stores!r}"
        for read in row.reads:
            assert 1 <= read.layer < number, f"layer {number} reads layer {read.layer}, which does not come before it"
            source = plan[read.layer - 1]
            assert source.owns_value, f"layer {number} reads the value of layer {read.layer}, which owns none"
            assert read.state == "raw" or source.stores != "none", (
                f"layer {number} reads a slot that layer {read.layer} lacks"
            )
            needs_all = row.stores != "mixed"
            assert needs_all == (read.state == "stored"), f"layer {number} stores {row.stores!r} and so must read " + (
                "all tokens ('stored')" if needs_all else "the new tokens ('raw')"
            )


def last_reader(plan: Plan) -> dict[int, int]:
    """Source layer -> the last layer that reads it: after that one its tensors may be dropped."""
    return {read.layer: row.layer for row in plan for read in row.reads}


def planes(plan: Plan) -> tuple[int, int]:
    """Number of cached planes (keys, values); a plane is one `[B, S, H_kv, D]` tensor."""
    return len(plan), sum(row.stores != "none" for row in plan)


def kv_ratio(plan: Plan) -> float:
    """Cache size relative to a model in which every layer stores keys and values; SVFormer: (N + 1) / (2 N)."""
    return sum(planes(plan)) / (2 * len(plan))


def select_layers(spec: str | Sequence[int], total: int, *, lenient: bool = False) -> tuple[int, ...]:
    """Resolve a choice of mixing layers to numbers from 1, in order.

    Args:
        spec: "all" (every layer but the first), "last:k", "last_third", or a list of layer numbers.
        total: number of layers of the model.
        lenient: let "last:k" ask for more layers than there are (used for a variant's default).

    Layer 1 is the source and is never mixed with itself; "last:k" leaves it out. A model of one layer has no mixing
    layer.

    Raises:
        ValueError: with what was got, what was expected.
    """
    mixing = range(2, total + 1)
    if isinstance(spec, str):
        if spec == "all":
            return tuple(mixing)
        if spec == "last_third":
            return tuple(mixing)[-max(1, round(total / 3)) :]
        head, _, count = spec.partition(":")
        if head != "last" or not count.isascii() or not count.isdigit() or int(count) < 1:
            raise ValueError(
                f"layers is {spec!r}; expected 'all', 'last:k' with k >= 1, 'last_third' or a list of layer numbers"
            )
        if int(count) > total and not lenient:
            raise ValueError(f"layers is {spec!r}, but the model has only {total} layers")
        return tuple(mixing)[-int(count) :]
    chosen = tuple(spec)
    if any(isinstance(n, bool) or not isinstance(n, int) for n in chosen):
        raise ValueError(f"layers is {list(chosen)!r}; expected whole numbers")
    if len(set(chosen)) != len(chosen):
        raise ValueError(f"layers is {list(chosen)!r}; a layer is named twice")
    outside = [n for n in chosen if n not in mixing]
    if outside:
        why = (
            "layer 1 is the source and has no earlier value to read"
            if outside == [1]
            else f"the model has layers 1 to {total}"
        )
        raise ValueError(f"layers is {list(chosen)!r}; {why}: choose among 2 to {total}")
    return tuple(sorted(chosen))


def table(plan: Plan) -> list[dict[str, object]]:
    """The plan as plain rows for printing or JSON: per layer what it owns, reads, sends and stores."""
    return [
        {
            "layer": row.layer,
            "owns": ["key", "value"] if row.owns_value else ["key"],
            "reads": [f"{read.state} {read.what} of layer {read.layer}" for read in row.reads],
            "sends": [f"{state} {what}" for what, state in row.sends],
            "stores": ["key"] + ([] if row.stores == "none" else [f"{row.stores} value" if row.mixes else "value"]),
        }
        for row in plan
    ]
