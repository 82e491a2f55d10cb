"""The plan: a static table, one row a layer, of what a layer owns, what it reads from earlier layers, and what its
cache slot stores.

Everything else is read off the plan and never decided again: which parameters exist, what a layer hands on, how long a
tensor must live, how the cache is laid out, how many bytes a token costs. This module imports no torch.

Layers are numbered from 1, as in the paper; number 0 stands for the embeddings.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

What = Literal["value", "key", "query", "attention", "hidden", "table"]
State = Literal["raw", "stored"]
Stores = Literal["mixed", "own", "none"]


@dataclass(frozen=True, kw_only=True)
class Read:
    """One tensor that a layer takes from an earlier one.

    B batch, T new tokens, S all tokens so far (S = T without a cache), H query heads, H_kv key/value heads, D head
    dimension, C hidden size.

    | `what` | `state` | the tensor |
    |---|---|---|
    | value | raw | the layer's own projection of the new tokens before any mixing, `[B, T, H_kv, D]` |
    | value | stored | what its cache slot returns, `[B, S, H_kv, D]` |
    | key | raw | keys of the new tokens, after QK-norm and before positions, `[B, T, H_kv, D]` |
    | key | stored | all keys, with positions, `[B, S, H_kv, D]` |
    | query | raw | queries of the new tokens, after QK-norm and before positions, `[B, T, H, D]` |
    | attention | raw | attention weights after the softmax, before any mixing, `[B, H, T, S]` |
    | hidden | raw | the block's output X_n, `[B, T, C]`; of layer 0 the embeddings H_0 |
    | table | raw | (layer 0) what a token table says for this layer, `[B, T, H_kv, D]` |
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
        owns_value, owns_key, owns_query: the layer has a W_v, W_k, W_q of its own.
        value_share: share of the KV heads whose value is the layer's own (SkipV1); W_v and the value slot shrink with
            it.
        reads: tensors taken from earlier layers, in the order in which the policy gets them.
        coefficients: number of tensors that parameters outside the blocks send to this layer (Learnable-Plus).
        stores: what the value slot of the layer's cache holds: the value after mixing ("mixed": only new tokens are
            mixed), the layer's own value before mixing ("own": mixing sees all tokens), or nothing ("none": values are
            read from another layer). Keys are stored where they are owned.
        extends: the stored keys and values that are read are attended to beside the layer's own (cross-layer
            attention), not mixed into them.
        sends: tensors that later layers read; filled by `link`.
        window: how many tokens a query sees, itself and those before it; None for all. Set by `with_windows`.
        slot_window: how many tokens the layer's cache slot must keep, None for all: those of its longest reader.
        received: reads that go into the block, in order.
        averaged: reads of hidden states, which are averaged with the block's output, in order.
    """

    layer: int = field(compare=False)
    owns_value: bool = True
    owns_key: bool = True
    owns_query: bool = True
    value_share: float = 1.0
    reads: tuple[Read, ...] = ()
    coefficients: int = 0
    stores: Stores = "mixed"
    extends: bool = False
    sends: tuple[tuple[What, State], ...] = ()
    window: int | None = None
    slot_window: int | None = None
    received: tuple[Read, ...] = field(init=False, compare=False, repr=False)
    averaged: tuple[Read, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        # Once, since the layer loop asks in every decoding step.
        object.__setattr__(self, "received", tuple(read for read in self.reads if read.what != "hidden"))
        object.__setattr__(self, "averaged", tuple(read for read in self.reads if read.what == "hidden"))

    @property
    def slots(self) -> tuple[int, ...]:
        """Layers whose cache slots hold what this one attends to: its own, if it stores anything, and what it reads."""
        own = (self.layer,) if self.owns_key or self.stores != "none" else ()
        return own + tuple(read.layer for read in self.reads if read.state == "stored")

    @property
    def mixes(self) -> bool:
        """The layer's value depends on another layer's, or on a token table."""
        return any(read.what in ("value", "table") for read in self.reads)


Plan = tuple[Row, ...]
Sent = tuple[int, What, State]


def link(rows: Iterable[Row]) -> Plan:
    """Fill each row's `sends` from what later rows read, check the plan, and return it.

    Hidden states are the blocks' outputs anyway, and token tables belong to no layer: neither is among `sends`.
    """
    rows = tuple(rows)
    wanted: dict[int, list[tuple[What, State]]] = {}
    for row in rows:
        for read in row.received:
            sends = wanted.setdefault(read.layer, [])
            if read.what != "table" and (read.what, read.state) not in sends:
                sends.append((read.what, read.state))
    plan = tuple(replace(row, sends=tuple(wanted.get(row.layer, ()))) for row in rows)
    validate(plan)
    return plan


def validate(plan: Sequence[Row]) -> None:
    """Check that a plan can be run: sources come earlier and own what is read from them, and every layer has queries,
    keys and a value to attend with.
    """
    assert plan, "a plan has at least one row"
    for number, row in enumerate(plan, start=1):
        assert row.layer == number, f"row {number} of the plan says it is layer {row.layer}"
        _validate_row(row)
        for read in row.reads:
            _validate_read(plan, row, read)


def _validate_row(row: Row) -> None:
    whats = {(read.what, read.state) for read in row.reads}
    assert row.owns_value or row.mixes, f"layer {row.layer} neither owns a value nor reads one"
    assert row.owns_key or ("key", "stored") in whats, f"layer {row.layer} neither owns a key nor reads a stored one"
    assert row.owns_query or ("query", "raw") in whats, f"layer {row.layer} neither owns a query nor reads one"
    if not row.owns_value:
        by_table = all(read.what == "table" for read in row.reads if read.what in ("value", "table"))
        assert row.stores == "none" or by_table, f"layer {row.layer} owns no value but stores {row.stores!r}"
    assert 0 < row.value_share <= 1, f"layer {row.layer} owns {row.value_share} of its value heads"
    assert row.value_share == 1 or row.stores == "own", (
        f"layer {row.layer} owns only some of its value heads, so the others are read from a slot and it stores 'own'"
    )


def _validate_read(plan: Sequence[Row], row: Row, read: Read) -> None:
    who = f"layer {row.layer} reads the {read.state} {read.what} of layer {read.layer}"
    if read.what == "table":
        assert read.layer == 0, f"{who}; token tables are numbered 0"
        return
    first = 0 if read.what == "hidden" else 1
    assert first <= read.layer < row.layer, f"{who}, which does not come before it"
    if read.what == "hidden":
        return
    source = plan[read.layer - 1]
    owns = {"value": source.owns_value, "key": source.owns_key, "query": source.owns_query}
    assert owns.get(read.what, True), f"{who}, which owns none"
    assert read.what != "value" or source.value_share == 1, f"{who}, which owns only some of its heads"
    if read.what in ("query", "attention"):
        assert read.state == "raw", f"{who}; only keys and values are stored"
    if row.extends:
        return
    if read.what == "value":
        assert read.state == "raw" or source.stores != "none", f"{who}, which has no slot for it"
        needs_all = row.stores != "mixed"
        assert needs_all == (read.state == "stored"), f"layer {row.layer} stores {row.stores!r} and so must read " + (
            "all tokens ('stored')" if needs_all else "the new tokens ('raw')"
        )
    if read.what == "key":
        assert (read.state == "stored") == (not row.owns_key), f"{who}; owned keys mix with raw ones, others are stored"


def with_windows(plan: Plan, window: int | None, layers: Collection[int]) -> Plan:
    """The plan with sliding-window attention in some layers, by number.

    A cache slot keeps what its longest reader sees: everything when a layer without a window reads it, also when the
    layer that fills it slides.

    Raises:
        ValueError: for layers that share attention weights or one softmax and would see different windows.
    """
    if window is None or not layers:
        return plan
    rows = [replace(row, window=window if row.layer in layers else None) for row in plan]
    for row in rows:
        for read in row.reads:
            tied = read.what == "attention" or (row.extends and read.state == "stored")
            if tied and rows[read.layer - 1].window != row.window:
                raise ValueError(
                    f"layer {row.layer} uses the {read.what} of layer {read.layer} together with its own, so both must "
                    "see the same window; let all layers slide, or none"
                )
    unlimited = {n for row in rows if row.window is None for n in row.slots}
    sliding = {row.layer for row in rows if row.layer in row.slots} - unlimited
    return tuple(replace(row, slot_window=row.window if row.layer in sliding else None) for row in rows)


def last_reader(plan: Plan) -> dict[Sent, int]:
    """(layer, what, state) of a tensor -> the last layer that reads it: after that one it may be dropped."""
    return {
        (read.layer, read.what, read.state): row.layer for row in plan for read in row.reads if read.what != "table"
    }


def planes(plan: Plan) -> tuple[int, float]:
    """Number of cached planes (keys, values); a plane is one `[B, S, H_kv, D]` tensor.

    A value slot that keeps only some of the heads counts as that part of a plane.
    """
    values = sum(row.value_share for row in plan if row.stores != "none")
    return sum(row.owns_key for row in plan), int(values) if values == int(values) else values


def kv_ratio(plan: Plan) -> float:
    """Cache size relative to a model in which every layer stores keys and values; SVFormer: (N + 1) / (2 N)."""
    return sum(planes(plan)) / (2 * len(plan))


def select_layers(spec: str | Sequence[int], total: int, *, lenient: bool = False, after: int = 1) -> tuple[int, ...]:
    """Resolve a choice of mixing layers to numbers from 1, in order.

    Args:
        spec: "all" (every layer after the source), "last:k", "last_third", or a list of layer numbers.
        total: number of layers of the model.
        lenient: let "last:k" ask for more layers than there are (used for a variant's default).
        after: the source: only later layers can read it. 0 when layer 1 can mix as well (token tables).

    A source is never mixed with itself; "last:k" leaves it and what comes before it out. A model of one layer has no
    mixing layer.

    Raises:
        ValueError: with what was got, what was expected.
    """
    mixing = range(after + 1, total + 1)
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
    if not chosen:
        raise ValueError("layers is an empty list; name at least one layer, or take the variant 'transformer'")
    if any(isinstance(n, bool) or not isinstance(n, int) for n in chosen):
        raise ValueError(f"layers is {list(chosen)!r}; expected whole numbers")
    if len(set(chosen)) != len(chosen):
        raise ValueError(f"layers is {list(chosen)!r}; a layer is named twice")
    outside = [n for n in chosen if n not in mixing]
    if outside:
        inside_model = all(1 <= n <= total for n in outside)
        why = (
            f"layer {after} is the source and only later layers can read it"
            if inside_model
            else f"the model has layers 1 to {total}"
        )
        if mixing:
            choose = f"choose among {mixing[0]} to {total}"
        else:
            choose = "no layer of this model can mix"
        raise ValueError(f"layers is {list(chosen)!r}; {why}: {choose}")
    return tuple(sorted(chosen))


def table(plan: Plan) -> list[dict[str, object]]:
    """The plan as plain rows for printing or JSON: per layer what it owns, reads, sends and stores, and how many tokens
    it and its slot see where any layer has a window.
    """
    windows = any(row.window for row in plan)
    return [
        {
            "layer": row.layer,
            **({"window": row.window, "slot_window": row.slot_window} if windows else {}),
            "owns": _owned(row),
            "reads": [_described(read) for read in row.reads],
            "sends": [f"{state} {what}" for what, state in row.sends],
            "stores": ["key"] * row.owns_key
            + ([] if row.stores == "none" else [f"{row.stores} value" if row.mixes else "value"]),
        }
        for row in plan
    ]


def _owned(row: Row) -> list[str]:
    value = "value" if row.value_share == 1 else f"{row.value_share:.3g} of the value heads"
    # Queries go without saying: a layer without its own shows whose it reads.
    return [name for name, owns in (("key", row.owns_key), (value, row.owns_value)) if owns]


def _described(read: Read) -> str:
    if read.what == "table":
        return "token table"
    if read.layer == 0:
        return "embeddings"
    return f"{read.state} {read.what} of layer {read.layer}"
