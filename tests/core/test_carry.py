"""The carry hands tensors to the layers that read them and keeps none longer than its last reader needs it."""

from __future__ import annotations

import weakref

import pytest
import torch

from resformer.core.carry import Carry
from resformer.core.plan import Read, Row, link
from resformer.core.policy import Shape
from resformer.core.registry import build

SHAPE = Shape(layers=8, hidden_size=32, heads=4, kv_heads=2, head_dim=8)


def tracked(size: int = 3) -> tuple[torch.Tensor, weakref.ref]:
    tensor = torch.zeros(size)
    return tensor, weakref.ref(tensor)


def test_carry_drops_a_tensor_after_its_last_reader():
    plan = build("sparse", {"layers": [2, 4]}, SHAPE).plan(SHAPE)
    carry, (tensor, alive) = Carry(plan), tracked()
    carry.keep(1, [tensor])
    del tensor
    seen = []
    for layer in range(2, 9):
        assert len(carry.received(layer)) == (1 if layer in (2, 4) else 0)
        carry.keep(layer, [])
        seen.append(alive() is not None)
    assert seen == [True, True, False, False, False, False, False]


def test_carry_drops_each_of_several_tensors_after_its_own_last_reader():
    """Layer 1 sends four tensors that are read for different lengths of time."""
    stored_key, stored_value = (Read(layer=1, what=what, state="stored") for what in ("key", "value"))
    plan = link(
        [
            Row(layer=1),
            Row(layer=2, reads=(Read(layer=1), Read(layer=1, what="query"))),
            Row(layer=3, owns_key=False, reads=(stored_key, Read(layer=1))),
            Row(layer=4, owns_value=False, stores="none", reads=(stored_value,)),
            Row(layer=5),
        ]
    )
    carry, alive, order = Carry(plan), {}, []
    sent = []
    for what, state in plan[0].sends:
        tensor, alive[what, state] = tracked()
        sent.append(tensor)
        order.append(id(tensor))
    carry.keep(1, sent)
    del sent, tensor
    names = [("value", "raw"), ("query", "raw"), ("key", "stored"), ("value", "stored")]
    assert list(plan[0].sends) == names
    assert [id(tensor) for tensor in carry.received(3)] == [order[2], order[0]], "in the order of the row"
    for layer, living in [(2, {0, 2, 3}), (3, {3}), (4, set()), (5, set())]:
        carry.keep(layer, [])
        assert {i for i, name in enumerate(names) if alive[name]() is not None} == living, f"after layer {layer}"


def test_carry_drops_the_layer_before_after_one_layer():
    plan = build("learnable", {"source": "previous"}, SHAPE).plan(SHAPE)
    carry, living = Carry(plan), {}
    for layer in range(1, 9):
        received = carry.received(layer)
        assert len(received) == (layer > 1)
        assert layer == 1 or received[0] is living[layer - 1]()
        del received
        tensor, living[layer] = tracked()
        carry.keep(layer, [tensor] if plan[layer - 1].sends else [])
        del tensor
        assert [n for n, alive in living.items() if alive() is not None] == ([layer] if layer < 8 else [])


def test_carry_keeps_hidden_states_until_they_are_averaged():
    """Block n averages after it has sent its own tensors, so a state outlives `keep` of the block that averages it."""
    plan = build("denseformer", {"dilation": 2, "period": 3}, SHAPE).plan(SHAPE)
    assert [[read.layer for read in row.averaged] for row in plan] == [[], [], [1], [], [], [0, 2, 4], [], []]
    carry, alive = Carry(plan), {}
    tensor, alive[0] = tracked()
    carry.keep_hidden(0, tensor)
    living = []
    for layer in range(1, 9):
        assert carry.received(layer) == ()
        carry.keep(layer, [])
        tensor, alive[layer] = tracked()
        carry.keep_hidden(layer, tensor)
        averaged = carry.averaged(layer)
        assert all(state is alive[read.layer]() for state, read in zip(averaged, plan[layer - 1].averaged, strict=True))
        del tensor, averaged
        living.append([n for n, state in alive.items() if state() is not None])
    assert living == [[0, 1], [0, 1, 2], [0, 1, 2], [0, 2, 4], [0, 2, 4], [0, 2, 4], [], []]


def test_carry_keeps_no_hidden_state_that_nobody_averages():
    carry, (tensor, alive) = Carry(build("learnable", {}, SHAPE).plan(SHAPE)), tracked()
    carry.keep_hidden(0, tensor)
    del tensor
    assert alive() is None


def test_carry_hands_out_token_tables_by_layer():
    plan = build("value_embeddings", {"layers": [1, 3]}, SHAPE).plan(SHAPE)
    tables = [torch.zeros(1), None, torch.ones(1), *[None] * 5]
    carry = Carry(plan, tables=tables)
    assert carry.received(1)[0] is tables[0] and carry.received(3)[0] is tables[2] and carry.received(2) == ()
    with pytest.raises(AssertionError, match="layer 3 reads a token table, but none says anything for it"):
        Carry(plan, tables=[None] * 8).received(3)


def test_carry_refuses_a_wrong_number_of_tensors():
    with pytest.raises(AssertionError, match="layer 1 sent 0 tensors, its row says 1"):
        Carry(build("svformer", {}, SHAPE).plan(SHAPE)).keep(1, [])
