"""Options that make no sense are refused, in one line that says what was got, what was expected and the way out."""

from __future__ import annotations

import pytest
import torch
from cases import SIZES, Case, ids, make

from resformer import ResFormerConfig, ResFormerForCausalLM
from resformer.errors import UserError

# (variant, options, other changes of the config, what the message says)
REFUSED = [
    ("sparse", {"layers": [7, 8]}, {}, r"layers is \[7, 8\]; the model has layers 1 to 5: choose among 2 to 5"),
    ("sparse", {"layers": "last:6"}, {}, "layers is 'last:6', but the model has only 5 layers"),
    ("sparse", {"layers": "last:0"}, {}, "expected 'all', 'last:k' with k >= 1, 'last_third' or a list"),
    (
        "identity",
        {"layers": [1, 2]},
        {},
        "layer 1 is the source and only later layers can read it: choose among 2 to 5",
    ),
    ("identity", {"layers": [2, 2]}, {}, "a layer is named twice"),
    ("identity", {"layers": [2]}, {"num_hidden_layers": 1}, "no layer of this model can mix"),
    ("learnable", {"source": 3, "layers": [2, 4]}, {}, "layer 3 is the source .*: choose among 4 to 5"),
    ("learnable", {"source": 5}, {}, "source is 5, but only a layer from 1 to 4 has layers after it"),
    ("learnable", {"source": 0}, {}, "source is 0, but only a layer from 1 to 4"),
    ("neutreno", {"source": 9}, {}, "source is 9, .*choose one of these"),
    ("learnable", {"source": "last"}, {}, "option 'source' .* is 'last'; expected a whole number or one of 'previous'"),
    ("dense", {"source": "previous"}, {}, "expected a whole number"),
    ("dense", {"mode": "mean", "tie": "own_one"}, {}, "trains no weights to tie"),
    ("learnable", {"tie": "lerp", "init_own": 0.1}, {}, "leave one of them out"),
    ("svformer", {"anchors": [1, 1]}, {}, "a layer is named twice"),
    ("svformer", {"layers": [2], "anchors": [1, 2]}, {}, "either shares a value or takes a fresh one"),
    ("rwkv", {"rank": 10**12}, {}, "the hidden size"),
    ("dense", {"mode": "mean", "granularity": "head"}, {}, "mode 'mean' trains no weights"),
    ("dense", {"mode": "median"}, {}, "expected one of 'learnable', 'mean'"),
    ("identity", {"first": 0.3, "own": 0.3, "tie": "lerp"}, {}, "own is 0.3, but tie 'lerp' makes it 0.7"),
    ("constant", {"own": 2.0, "tie": "own_one"}, {}, "own is 2.0, but tie 'own_one' makes it 1.0"),
    ("identity", {"first": [0.1, 0.2]}, {}, "first is a list of 2 numbers; granularity 'scalar' takes a number"),
    (
        "identity",
        {"first": [0.1] * 3, "granularity": "head"},
        {},
        "first is a list of 3 .* takes a number or 4 of them",
    ),
    ("sparse", {"own": [1.0] * 4, "granularity": "channel"}, {}, "own is a list of 4 .* takes a number or 32 of them"),
    ("identity", {"granularity": "token"}, {}, "expected one of 'scalar', 'head', 'channel'"),
    ("learnable", {"tie": "one"}, {}, "expected one of 'free', 'lerp', 'own_one'"),
    ("learnable", {"init_frist": 0.1}, {}, "no option 'init_frist'; did you mean 'init_first'"),
    ("transformer", {"first": 0.1}, {}, r"no option 'first' \(options: none\)"),
    ("learnable", {"init_first": "half"}, {}, "option 'init_first' .* is 'half'; expected a finite number"),
    ("learnable", {"init_first": True}, {}, "is True; expected a finite number"),
    ("learnable", {"init_own": float("nan")}, {}, "is nan; expected a finite number"),
    ("svformer", {"anchors": [1, 2.5]}, {}, r"is \[1, 2.5\]; expected a list of whole numbers"),
    ("svformer", {"anchors": [3]}, {}, r"anchors is \[3\]; it must contain layer 1"),
    ("svformer", {"anchors": [1, 9]}, {}, r"anchors is \[1, 9\]; the model has layers 1 to 5"),
    ("svformer", {"key_group": 6}, {}, "key_group is 6; the model has 5 layers to group"),
    ("svformer", {"key_group": 0}, {}, "key_group is 0"),
    ("svformer", {"gamma": 1}, {}, "is 1; expected true or false"),
    ("cla", {"group": 6}, {}, "group is 6; expected 1 to 5, the number of layers"),
    ("cla", {"group": 0}, {}, "group is 0; expected 1 to 5"),
    ("cla", {"share": "o"}, {}, "expected one of 'kv', 'k', 'v', 'q'"),
    ("denseformer", {"period": 0}, {}, "period is 0; expected 1 to 5, the number of layers"),
    ("denseformer", {"dilation": 6}, {}, "dilation is 6; expected 1 to 5, the number of layers"),
    ("hidden_residual", {"layers": [1]}, {}, "choose among 2 to 5"),
    ("skipv1", {}, {"num_key_value_heads": 1}, "one KV head, which cannot be split between two layers"),
    ("skipv1", {"share": 0.3}, {}, "share is 0.3 of 4 KV heads; expected one of 0.25, 0.5, 0.75"),
    ("skipv1", {"share": 0.25}, {"num_key_value_heads": 2}, "share is 0.25 of 2 KV heads; expected one of 0.5"),
    ("skipv1", {"share": 1.0}, {}, "share is 1 of 4 KV heads"),
    ("skipv1", {"source": "previous"}, {}, "expected a whole number"),
    ("gated", {"activation": "gelu"}, {}, "expected one of 'tanh', 'relu', 'sigmoid'"),
    ("rwkv", {"rank": 0}, {}, "rank is 0; expected 1 to 32"),
    ("value_embeddings", {"style": "nanogpt"}, {}, "expected one of 'nanochat', 'modded_nanogpt'"),
    ("value_embeddings", {"layers": "ends:0"}, {}, "layers is 'ends:0'; expected 'ends:k' with k >= 1"),
    ("value_embeddings", {"layers": "ends:6"}, {}, "layers is 'ends:6', but the model has only 5 layers"),
    ("value_embeddings", {"layers": [0]}, {}, "the model has layers 1 to 5: choose among 1 to 5"),
    ("svforme", {}, {}, "unknown variant 'svforme'; did you mean 'svformer'"),
]


@pytest.mark.parametrize(("variant", "options", "changes", "message"), REFUSED, ids=lambda x: str(x)[:40])
def test_refused_with_the_reason(variant, options, changes, message):
    sizes = {**SIZES, "num_key_value_heads": 4, **changes}
    with pytest.raises(UserError, match=message) as caught:
        ResFormerConfig(variant=variant, variant_options=options, **sizes)
    assert "\n" not in str(caught.value)


def test_every_problem_is_listed_at_once():
    with pytest.raises(UserError) as caught:
        Case("learnable", {"init_frist": 0.1, "tie": 3}).config()
    assert "init_first" in str(caught.value) and "option 'tie'" in str(caught.value)


@pytest.mark.parametrize(
    ("variant", "implementation", "allowed"),
    [
        ("attention_residual", "sdpa", "'eager'"),
        ("attention_residual", "flex_attention", "'eager'"),
        ("cross_attention", "flex_attention", "'sdpa' or 'eager'"),
        ("cross_attention", "flash_attention_2", "'sdpa' or 'eager'"),
    ],
)
def test_attention_implementations_that_cannot_run_a_plan_are_refused(variant, implementation, allowed):
    message = f"attention implementation is '{implementation}', but variant '{variant}' runs only with {allowed}"
    config = Case(variant).config(attn_implementation=implementation)
    with pytest.raises(UserError, match=message):
        ResFormerForCausalLM(config)
    model = make(variant)
    with pytest.raises(UserError, match=message):
        model.set_attn_implementation(implementation)
    assert model.config._attn_implementation in allowed


def test_token_tables_need_token_ids():
    model = make("value_embeddings")
    embedded = model.get_input_embeddings()(ids())
    with pytest.raises(UserError, match="reads token tables and needs input_ids; it got only inputs_embeds"):
        model(inputs_embeds=embedded)
    plain = make("transformer")
    with torch.no_grad():
        assert torch.equal(plain(inputs_embeds=plain.get_input_embeddings()(ids())).logits, plain(ids()).logits)


@pytest.mark.parametrize(
    ("variant", "options"), [("sparse", {}), ("cla", {}), ("value_embeddings", {"style": "modded_nanogpt"})]
)
def test_defaults_fit_models_with_fewer_layers(variant, options):
    """A default must not be refused: "last:3", pairs and "ends:3" take what there is."""
    for layers in (1, 2):
        model = Case(variant, options).make(num_hidden_layers=layers)
        assert model(ids()).logits.isfinite().all()
