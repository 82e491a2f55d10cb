"""The plan: which layers mix, what cannot be run, liveness, planes of the cache."""

from __future__ import annotations

import pytest

from resformer.core.plan import Read, Row, kv_ratio, last_reader, link, planes, select_layers, table
from resformer.core.policy import Shape
from resformer.core.registry import build

SHAPE = Shape(layers=8, hidden_size=32, heads=4, kv_heads=2, head_dim=8)


@pytest.mark.parametrize(
    ("spec", "total", "layers"),
    [
        ("all", 8, (2, 3, 4, 5, 6, 7, 8)),
        ("all", 1, ()),
        ("last:3", 8, (6, 7, 8)),
        ("last:8", 8, (2, 3, 4, 5, 6, 7, 8)),
        ("last_third", 8, (6, 7, 8)),
        ("last_third", 12, (9, 10, 11, 12)),
        ("last_third", 2, (2,)),
        ((7, 3), 8, (3, 7)),
    ],
)
def test_select_layers(spec, total, layers):
    assert select_layers(spec, total) == layers


@pytest.mark.parametrize(
    "spec", ["last:0", "last:", "last:x", "last:9", "first", "last:\u0663", (1,), (9,), (2, 2), (2.0,), (True,), ()]
)
def test_select_layers_refuses(spec):
    with pytest.raises(ValueError, match="layers is"):
        select_layers(spec, 8)


def test_svformer_plan():
    plan = build("svformer", {}, SHAPE).plan(SHAPE)
    assert planes(plan) == (8, 1)
    assert kv_ratio(plan) == 9 / 16
    assert plan[0].sends == (("value", "stored"),)
    assert last_reader(plan) == {(1, "value", "stored"): 8}
    assert plan[1] == plan[7], "rows of sharing layers are equal, so their blocks share a graph"
    anchored = build("svformer", {"anchors": [1, 5]}, SHAPE).plan(SHAPE)
    assert [row.reads[0].layer if row.reads else None for row in anchored] == [None, 1, 1, 1, None, 5, 5, 5]
    last = build("svformer", {"layers": "last_third"}, SHAPE).plan(SHAPE)
    assert planes(last) == (8, 5)
    assert table(last)[7] == {
        "layer": 8,
        "owns": ["key"],
        "reads": ["stored value of layer 1"],
        "sends": [],
        "stores": ["key"],
    }


# (plan, what the message says)
IMPOSSIBLE = [
    ([Row(layer=2)], "row 1 of the plan says it is layer 2"),
    ([Row(layer=1, reads=(Read(layer=1),))], "does not come before it"),
    ([Row(layer=1), Row(layer=2, reads=(Read(layer=2),))], "does not come before it"),
    (
        [Row(layer=1), Row(layer=2, reads=(Read(layer=0),))],
        "reads the raw value of layer 0, which does not come before",
    ),
    ([Row(layer=1), Row(layer=2, reads=(Read(layer=2, what="hidden"),))], "does not come before it"),
    ([Row(layer=1, reads=(Read(layer=1, what="table"),))], "token tables are numbered 0"),
    ([Row(layer=1, owns_value=False, stores="none")], "neither owns a value nor reads one"),
    ([Row(layer=1, owns_key=False)], "neither owns a key nor reads a stored one"),
    ([Row(layer=1, owns_query=False)], "neither owns a query nor reads one"),
    ([Row(layer=1), Row(layer=2, reads=(Read(layer=1, state="stored"),))], r"must read the new tokens \('raw'\)"),
    ([Row(layer=1), Row(layer=2, stores="own", reads=(Read(layer=1),))], r"must read all tokens \('stored'\)"),
    (
        [Row(layer=1), Row(layer=2, owns_value=False, stores="none", reads=(Read(layer=1),))],
        r"must read all tokens \('stored'\)",
    ),
    ([Row(layer=1), Row(layer=2, owns_value=False, reads=(Read(layer=1),))], "owns no value but stores 'mixed'"),
    ([Row(layer=1), Row(layer=2, owns_key=False, reads=(Read(layer=1, what="key"),))], "neither owns a key"),
    (
        [Row(layer=1), Row(layer=2, reads=(Read(layer=1, what="key", state="stored"),))],
        "owned keys mix with raw ones, others are stored",
    ),
    (
        [Row(layer=1), Row(layer=2, reads=(Read(layer=1, what="query", state="stored"),))],
        "only keys and values are stored",
    ),
    (
        [Row(layer=1), Row(layer=2, reads=(Read(layer=1, what="attention", state="stored"),))],
        "only keys and values are stored",
    ),
    (
        [
            Row(layer=1),
            Row(layer=2, owns_query=False, reads=(Read(layer=1, what="query"),)),
            Row(layer=3, reads=(Read(layer=2, what="query"),)),
        ],
        "reads the raw query of layer 2, which owns none",
    ),
    (
        [
            Row(layer=1),
            Row(layer=2, owns_value=False, stores="none", reads=(Read(layer=1, state="stored"),)),
            Row(layer=3, reads=(Read(layer=2),)),
        ],
        "reads the raw value of layer 2, which owns none",
    ),
    ([Row(layer=1, value_share=0.5)], "stores 'own'"),
    ([Row(layer=1, value_share=0.0)], "owns 0.0 of its value heads"),
    (
        [
            Row(layer=1),
            Row(layer=2, value_share=0.5, stores="own", reads=(Read(layer=1, state="stored"),)),
            Row(layer=3, reads=(Read(layer=2),)),
        ],
        "which owns only some of its heads",
    ),
    ([], "at least one row"),
]


@pytest.mark.parametrize(("rows", "message"), IMPOSSIBLE, ids=range(len(IMPOSSIBLE)))
def test_impossible_plans_are_refused(rows, message):
    with pytest.raises(AssertionError, match=message):
        link(rows)


def test_possible_plans_with_every_kind_of_read():
    plan = link(
        [
            Row(layer=1, reads=(Read(layer=0, what="table"), Read(layer=0, what="hidden"))),
            Row(layer=2, reads=(Read(layer=1), Read(layer=1, what="key"), Read(layer=1, what="attention"))),
            Row(layer=3, owns_query=False, reads=(Read(layer=1, what="query"), Read(layer=1, what="hidden"))),
            Row(
                layer=4,
                owns_key=False,
                owns_value=False,
                stores="none",
                reads=(Read(layer=1, what="key", state="stored"), Read(layer=1, state="stored")),
            ),
        ]
    )
    assert plan[0].sends == (
        ("value", "raw"),
        ("key", "raw"),
        ("attention", "raw"),
        ("query", "raw"),
        ("key", "stored"),
        ("value", "stored"),
    )
    assert [row.mixes for row in plan] == [True, True, False, True]
    assert [read.what for read in plan[0].received] == ["table"] and [read.what for read in plan[0].averaged] == [
        "hidden"
    ]
    assert last_reader(plan) == {
        (0, "hidden", "raw"): 1,
        (1, "value", "raw"): 2,
        (1, "key", "raw"): 2,
        (1, "attention", "raw"): 2,
        (1, "query", "raw"): 3,
        (1, "hidden", "raw"): 3,
        (1, "key", "stored"): 4,
        (1, "value", "stored"): 4,
    }


@pytest.mark.parametrize(
    ("name", "options", "keys", "values"),
    [
        ("transformer", {}, 8, 8),
        ("learnable", {}, 8, 8),
        ("cla", {}, 4, 4),
        ("cla", {"group": 3}, 3, 3),
        ("cla", {"group": 8}, 1, 1),
        ("cla", {"share": "k"}, 4, 8),
        ("cla", {"share": "v"}, 8, 4),
        ("cla", {"share": "q"}, 8, 8),
        ("skipv1", {}, 8, 4.5),
        ("skipv1", {"layers": "last:2"}, 8, 7),
        ("svformer", {"key_group": 2}, 4, 1),
        ("svformer", {"key_group": 8}, 1, 1),
        ("svformer", {"key_group": 3, "anchors": [1, 4, 7]}, 3, 3),
        ("cross_attention", {}, 8, 8),
        ("value_embeddings", {}, 8, 8),
    ],
)
def test_planes_and_ratio(name, options, keys, values):
    plan = build(name, options, SHAPE).plan(SHAPE)
    assert planes(plan) == (keys, values)
    assert kv_ratio(plan) == (keys + values) / 16


def test_rows_are_equal_when_their_blocks_are():
    plan = build("cla", {}, SHAPE).plan(SHAPE)
    assert plan[0] == plan[2] and plan[0] != plan[1]
    assert plan[1] != plan[3], "they read different layers"
    plan = build("skipv1", {}, SHAPE).plan(SHAPE)
    assert len(set(plan[1:])) == 1
