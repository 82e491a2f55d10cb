"""Twelve random models of each family: the same logits here as there, and the way back gives the same bits."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from convert_models import BIASES, ROPES, SEEDS, WINDOWED, ids, make, moved, our_fields, random_fields
from transformers import AutoConfig, PreTrainedConfig

from resformer import ResFormerConfig, ResFormerForCausalLM
from resformer.convert import families, weights
from resformer.convert.back import plain_config, to_plain
from resformer.convert.check import logits
from resformer.convert.checkpoint import in_memory
from resformer.errors import UserError
from resformer.models.accounting import account

EXACT = (
    ("learnable", {}),
    ("learnable", {"granularity": "head", "layers": "last_third"}),
    ("learnable_plus", {}),
    ("gated", {}),
    ("dense", {"tie": "lerp"}),
    ("denseformer", {}),
    ("learnable", {"source": "previous", "tie": "own_one"}),
    ("transformer", {}),
)


@pytest.mark.parametrize("family", families.FAMILIES)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_models_compute_the_same(family, seed):
    theirs = make(family, seed)
    variant, options = EXACT[seed % len(EXACT)]
    ours = in_memory(theirs, variant=variant, options=options)
    assert ours.config.variant == variant
    for attention in ("sdpa", "eager")[seed % 2 :]:
        theirs.set_attn_implementation(attention)
        ours.set_attn_implementation(attention)
        want = logits(theirs, ids(), range(40))
        gap = (logits(ours, ids(), range(40)) - want).abs().max()
        assert gap <= 1e-5 * max(1.0, want.abs().max()), (attention, random_fields(family, seed))
    assert ours.num_parameters() == account(ours.config).parameters
    back = to_plain(ours)
    assert type(back) is type(theirs)
    state = theirs.state_dict()
    assert state.keys() == back.state_dict().keys()
    assert all(torch.equal(state[name], x) for name, x in back.state_dict().items())
    before, after = theirs.config.to_dict(), back.config.to_dict()
    named = ("architectures", "dtype")  # which a config in memory has not
    assert {key: value for key, value in before.items() if after[key] != value and key not in named} == {}


@pytest.mark.parametrize("family", families.FAMILIES)
def test_the_twelve_meet_all_that_a_family_allows(family):
    """Chance must not leave out what the table of docs/convert.md claims."""
    drawn = [random_fields(family, seed) for seed in range(SEEDS)]

    def met(of):
        return {of(fields) for fields in drawn}

    assert met(lambda x: str({**x["rope_parameters"], "rope_theta": 0}.keys())) >= {
        str({**rope, "rope_theta": 0, **dict.fromkeys(("short_factor", "long_factor"))}.keys())
        if rope["rope_type"] == "longrope"
        else str({**rope, "rope_theta": 0}.keys())
        for rope in ROPES
    }
    assert met(lambda x: x["rope_parameters"]["rope_theta"]) == {1e4, 5e5, 1e6}
    assert met(lambda x: x["num_key_value_heads"] == 1) == met(lambda x: x["tie_word_embeddings"]) == {True, False}
    assert len(met(lambda x: x["num_attention_heads"] // x["num_key_value_heads"])) >= 3
    assert met(lambda x: x["num_attention_heads"] * x["head_dim"] == x["hidden_size"]) >= {True}
    assert family == "helium" or {False} <= met(lambda x: x["num_attention_heads"] * x["head_dim"] == x["hidden_size"])
    for name in BIASES.get(family, ()):
        assert met(lambda x, name=name: x[name]) == {True, False}
    if family in WINDOWED:
        assert met(lambda x: x["sliding_window"]) >= {3, 9} | ({None} if family != "ministral" else set())


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_models_of_ours_compute_the_same(seed):
    """A Transformer of ours in any form becomes another variant, and what a family can be becomes that family."""
    torch.manual_seed(seed)
    theirs = moved(ResFormerForCausalLM(ResFormerConfig(variant="transformer", **our_fields(seed))), seed)
    variant, options = EXACT[seed % len(EXACT)]
    ours = in_memory(theirs, variant=variant, options=options)
    assert ours.config.variant == variant and ours.num_parameters() == account(ours.config).parameters
    want = logits(theirs, ids(), range(40))
    assert (logits(ours, ids(), range(40)) - want).abs().max() <= 1e-5 * max(1.0, want.abs().max())
    back = in_memory(ours, variant="transformer")
    state, again = theirs.state_dict(), back.state_dict()
    assert state.keys() == again.keys() and all(torch.equal(x, again[name]) for name, x in state.items())


@pytest.mark.parametrize("family", families.FAMILIES)
def test_every_field_of_a_family_is_accounted_for(family):
    """A new version of transformers that adds one turns this red before a conversion drops it."""
    config = AutoConfig.for_model(family)
    base = {item.name for item in dataclasses.fields(PreTrainedConfig)}
    known = families.FAMILIES[family].known
    assert {item.name for item in dataclasses.fields(config)} - base <= known
    assert known & base <= set(families.META)  # what is common to all models says nothing about these


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"clip_qkv": 3.0}, "clip_qkv is 3.0.*--ignore-field clip_qkv"),
        ("llama", {"rope_interleaved": True}, "rope_interleaved is True"),
        ("llama", {"sliding_window": 5}, "sliding_window is 5.*supported: None"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config: quantised"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "0.5",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1]}},
            "mrope_section",
        ),
        ("mistral", {"attention_bias": True}, "attention_bias is True"),
        ("qwen3", {"layer_types": ["chunked_attention"] * 5}, "layer_types has chunked_attention"),
        ("olmo2", {"clip_qkv": 8.0}, "clip_qkv is 8.0, which the host model cannot do"),
        ("seed_oss", {"residual_dropout": 0.1}, "residual_dropout is 0.1"),
        (
            "smollm3",
            {"sliding_window": 4, "layer_types": ["sliding_attention"] * 5, "use_sliding_window": False},
            "use_sliding_window is False",
        ),
    ],
    ids=lambda x: "" if isinstance(x, dict) else str(x),
)
def test_what_cannot_be_carried_over_is_named(family, changes, message):
    fields = {**random_fields(family, 0), "num_hidden_layers": 5, "layer_types": None, "no_rope_layers": None}
    config = AutoConfig.for_model(family, **{**{k: v for k, v in fields.items() if v is not None}, **changes})
    with pytest.raises(UserError, match=message) as caught:
        families.our_fields(config)
    assert "\n" not in str(caught.value) and str(caught.value).startswith(families.FAMILIES[family].title)


def test_every_problem_is_named_at_once_and_a_note_can_be_ignored():
    config = AutoConfig.for_model("llama", clip_qkv=1.0, logit_cap=30.0, note_of_a_user=None, flag=False)
    with pytest.raises(UserError, match=r"clip_qkv.*logit_cap"):
        families.our_fields(config)
    assert families.our_fields(config, ignored=("clip_qkv", "logit_cap"))["rope_parameters"]["rope_theta"] == 1e4


def test_a_new_field_of_a_known_class_is_refused_unless_it_says_nothing(monkeypatch):
    monkeypatch.setattr(families, "DERIVED", tuple(x for x in families.DERIVED if x != "attention_dropout"))
    assert families.our_fields(AutoConfig.for_model("llama"))["attention_dropout"] == 0.0
    with pytest.raises(UserError, match=r"attention_dropout is 0.5, a field of LlamaConfig that is not known here"):
        families.our_fields(AutoConfig.for_model("llama", attention_dropout=0.5))


@pytest.mark.parametrize("name", ["gemma2", "granite", "olmo3", "phi3", "gpt2"])
def test_other_families_are_refused_with_a_list(name):
    with pytest.raises(UserError, match=rf"model_type is '{name}'.*supported are llama, mistral"):
        families.our_fields(AutoConfig.for_model(name))


def test_layers_of_different_sizes_are_refused():
    config = AutoConfig.for_model("llama", **random_fields("llama", 0), per_layer_config={0: {"intermediate_size": 8}})
    with pytest.raises(UserError, match="per_layer_config"):
        families.our_fields(config)


def test_reordering_for_rotary_pairs_is_undone():
    rows = torch.arange(24.0).view(12, 2)
    there = weights.half_split(rows, 6)
    assert there[:6, 0].tolist() == [0.0, 4.0, 8.0, 2.0, 6.0, 10.0]
    assert torch.equal(weights.interleaved(there, 6), rows)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "llama"),
        ({"attention_bias": True, "mlp_bias": True}, "llama"),
        ({"sliding_window": 4}, "mistral"),
        ({"sliding_window": 4, "sliding_layers": [2]}, "ministral"),
        ({"attention_bias": True, "attention_out_bias": False}, "qwen2"),
        ({"qk_norm": True}, "qwen3"),
        ({"qk_norm": True, "qk_norm_over": "all", "norm_placement": "post"}, "olmo2"),
        ({"nope_layers": [1]}, "smollm3"),
        ({"mlp": "plain"}, "arcee"),
        ({"attention_out_bias": True}, "seed_oss"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_model_made_here_finds_the_family_of_its_form(fields, expected):
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    config = ResFormerConfig(variant="learnable", num_attention_heads=4, **sizes, **fields)
    assert plain_config(config).model_type == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"norm": "layernorm"}, "in the way: norm"),
        ({"position_embedding": "learned"}, "in the way: position_embedding"),
        ({"num_experts": 2}, "in the way: num_experts"),
        ({"first_block_residual": False}, "in the way: first_block_residual"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_form_that_no_family_has_is_refused(fields, message):
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    with pytest.raises(UserError, match=message):
        plain_config(ResFormerConfig(variant="transformer", num_attention_heads=4, **sizes, **fields))
