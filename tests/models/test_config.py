"""Mistakes in a config made in Python."""

from __future__ import annotations

import pytest

from resformer import ResFormerConfig
from resformer.errors import UserError


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_key_value_head": 2}, "unknown field 'num_key_value_head'; did you mean 'num_key_value_heads'"),
        ({"slidng_window": 4}, "did you mean 'sliding_window'"),
        ({"variant_option": {"first": 1.0}}, "did you mean 'variant_options'"),
        ({"variant_options": [1]}, r"variant_options is \[1\]; expected a dictionary"),
        ({"hidden_act": "foo"}, "hidden_act is 'foo'"),
        ({"varient": "svformer"}, "did you mean 'variant'"),
        ({"hidden_size": "32"}, "hidden_size is '32'; expected a whole number"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers is 2.0; expected a whole number"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True; expected a whole number"),
        ({"first_block_residual": "no"}, "first_block_residual is 'no'; expected true or false"),
        ({"attention_dropout": -3.0}, "attention_dropout is -3.0; expected a number of at least 0"),
        ({"sliding_layers": None}, "sliding_layers is None; expected 'all'"),
        ({"variant": "identity", "variant_options": {"first": 10**400}}, "expected a finite number"),
    ],
)
def test_a_mistake_is_named(fields, message):
    with pytest.raises(UserError, match=message):
        ResFormerConfig(**fields)


def test_what_transformers_and_other_models_put_into_configs_is_kept():
    others = {"dtype": "bfloat16", "architectures": ["X"], "pretraining_tp": 1, "rope_theta": 1e6, "torch_dtype": None}
    config = ResFormerConfig(**others, a_note_of_the_user=3)
    assert config.a_note_of_the_user == 3
    assert ResFormerConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()
