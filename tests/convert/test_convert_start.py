"""Which variants start as their source, with which options, and why the others do not."""

from __future__ import annotations

import pytest

from resformer.convert.start import choose
from resformer.core.policy import Shape
from resformer.core.registry import names
from resformer.errors import UserError

SHAPE = Shape(layers=9, hidden_size=32, heads=4, kv_heads=2, head_dim=8, vocab_size=97)
EXACT = {
    "transformer": {},
    "learnable": {"init_first": 0.0, "init_own": 1.0},
    "learnable_plus": {"scale_init": 0.0, "init_own": 1.0},
    "dense": {"init_first": 0.0, "init_own": 1.0},
    "gated": {"activation": "tanh"},
    "denseformer": {},
}
SHARING = {"svformer": {"layers": "last_third", "anchors": [1, 6]}, "skipv1": {"layers": "last_third"}, "cla": {}}


@pytest.mark.parametrize("name", names())
def test_every_variant_has_a_start_or_a_reason(name):
    start = choose(name, {}, SHAPE)
    if name in EXACT:
        assert start.exact and not start.shares and not start.why and start.options == EXACT[name]
    else:
        assert not start.exact and start.why
        assert start.shares == (name in SHARING) and start.options == SHARING.get(name, {})


@pytest.mark.parametrize(
    ("name", "options", "chosen"),
    [
        ("learnable", {"tie": "lerp"}, {"tie": "lerp", "init_first": 0.0}),
        ("learnable", {"tie": "own_one", "granularity": "channel"}, None),
        ("learnable", {"init_first": 0.0, "init_own": 1.0}, {"init_first": 0.0, "init_own": 1.0}),
        ("learnable_plus", {"tie": "lerp"}, {"tie": "lerp", "scale_init": 0.0}),
        ("dense", {"layers": [3, 9], "source": 2}, None),
    ],
)
def test_options_of_the_user_are_kept(name, options, chosen):
    start = choose(name, options, SHAPE)
    assert start.exact and options.items() <= start.options.items()
    assert chosen is None or start.options == chosen


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("gated", {"activation": "relu"}, r"activation='relu' \(exact: 'tanh'\)"),
        ("gated", {"activation": "sigmoid"}, r"activation='sigmoid' \(exact: 'tanh'\)"),
        ("learnable", {"init_first": 0.5}, r"init_first=0.5 \(exact: 0.0\)"),
        ("dense", {"mode": "mean"}, "mixes with constants"),
        ("identity", {}, "mixes with constants"),
        ("identity", {"first": 0.0, "own": 1.0}, "would never train"),
        ("rwkv", {}, "no start that is the Transformer"),
        ("svformer", {"layers": "all"}, "shares projections"),
    ],
)
def test_a_start_that_is_not_exact_says_why(name, options, why):
    start = choose(name, options, SHAPE)
    assert not start.exact
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(start.why)


def test_whose_value_is_shared():
    """That of the layer before, unless the user says which layers share, or whose value, or the source shares V_1."""
    assert choose("svformer", {"gamma": True}, SHAPE).options == {
        "gamma": True,
        "layers": "last_third",
        "anchors": [1, 6],
    }
    assert choose("svformer", {"layers": "last:2"}, SHAPE).options == {"layers": "last:2"}
    assert choose("svformer", {"anchors": [1, 3]}, SHAPE).options == {"layers": "last_third", "anchors": [1, 3]}
    assert choose("svformer", {}, SHAPE, trained=False).options == {"layers": "last_third"}
    few = Shape(layers=2, hidden_size=32, heads=4, kv_heads=2, head_dim=8)
    assert choose("svformer", {}, few).options["anchors"] == [1]


def test_options_that_make_no_sense_are_refused():
    with pytest.raises(UserError, match="did you mean 'init_first'"):
        choose("learnable", {"init_frist": 0.0}, SHAPE)
    with pytest.raises(UserError, match="unknown variant"):
        choose("learnabel", {}, SHAPE)


@pytest.mark.parametrize("name", ["svformer", "cla", "learnable", "identity"])
def test_one_layer_is_the_transformer_whatever_the_variant(name):
    start = choose(name, {}, Shape(layers=1, hidden_size=32, heads=4, kv_heads=2, head_dim=8))
    assert start.exact
