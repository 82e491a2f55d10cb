"""The forms of the host that converted models need: norms after, a norm over all heads, layers without positions."""

from __future__ import annotations

import json

import pytest
import torch
from convert_models import VOCAB, ids, moved

from resformer import ResFormerConfig, ResFormerForCausalLM, build_cache
from resformer.convert.check import logits
from resformer.core.registry import names
from resformer.errors import UserError
from resformer.models.accounting import account
from resformer.models.compat import CACHE, enable_checkpointing

FORM = {
    "norm_placement": "post",
    "qk_norm": True,
    "qk_norm_over": "all",
    "attention_bias": True,
    "attention_out_bias": False,
    "nope_layers": (2,),
}
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
SHARE_KEYS = ("cla", "cross_attention")


def make(variant: str, **changes) -> ResFormerForCausalLM:
    form = {**FORM, **({"nope_layers": None} if variant in SHARE_KEYS else {}), **changes}
    return moved(ResFormerForCausalLM(ResFormerConfig(variant=variant, **{**SIZES, **form})))


@pytest.mark.parametrize("variant", names())
def test_every_variant_lives_in_the_form(variant):
    """Costs are the counted ones, a cache changes nothing, every parameter learns, also recomputed, JSON keeps all."""
    model = make(variant)
    costs = account(model.config, sequence_length=5)
    assert costs.parameters == model.num_parameters() == sum(costs.parameters_by_group.values())
    whole, cached = logits(model, ids(2, 30), range(30))
    assert (whole - cached).abs().max() < 1e-4
    x = ids(2, 12)
    model.train()
    model(x, labels=x).loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    assert all(gradient.abs().max() > 0 for name, gradient in gradients.items() if "k_proj.bias" not in name)
    model.zero_grad()
    enable_checkpointing(model, use_reentrant=True)
    model(x, labels=x).loss.backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, gradients[name], rtol=1e-5, atol=1e-7), name
    again = ResFormerConfig.from_dict(json.loads(model.config.to_json_string(use_diff=False)))
    assert again.to_json_string() == model.config.to_json_string() and again.plan() == model.config.plan()


def test_values_come_from_the_stream_itself():
    """In the "post" placement V_n = H_{n-1} W_v; a cache of token ids knows it."""
    model = make("svformer")
    x = ids(2, 12)
    with torch.no_grad():
        want = model(x, use_cache=False).logits
        got = [
            model(part, **{CACHE: cache}).logits
            for cache in (build_cache(model, kind="tokens"),)
            for part in x.split(5, 1)
        ]
    assert (torch.cat(got, dim=1) - want).abs().max() < 1e-4


def test_a_layer_without_positions_does_not_know_the_order():
    """With one such layer alone, earlier tokens may change places."""
    model = make("transformer", num_hidden_layers=1, nope_layers=[1])
    x = ids(1, 9)
    swapped = torch.cat((x[:, :8].flip(1), x[:, 8:]), dim=1)
    with torch.no_grad():
        assert torch.allclose(model(x).logits[:, -1], model(swapped).logits[:, -1], atol=1e-5)
        turned = make("transformer", num_hidden_layers=1, nope_layers=None)
        assert not torch.allclose(turned(x).logits[:, -1], turned(swapped).logits[:, -1], atol=1e-3)


def test_it_compiles_without_graph_breaks():
    torch._dynamo.reset()
    model = make("learnable").train()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = ids(2, 12)
    got, want = (one(input_ids=x, labels=x, use_cache=False).loss for one in (compiled, model))
    assert torch.allclose(got, want, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_placement": "both"}, r"norm_placement is 'both'.*pre or post"),
        ({"qk_norm_over": "heads"}, "qk_norm_over is 'heads'; did you mean 'head'"),
        ({"nope_layers": [5]}, r"nope_layers is \[5\]; the model has layers 1 to 4"),
        ({"nope_layers": [1], "position_embedding": "learned"}, "leave one of them out"),
        ({"nope_layers": [2], "variant": "cla"}, "layer 2 attends to keys of layer 1.*let both be, or none"),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else "",
)
def test_wrong_fields_are_refused_in_one_line(changes, message):
    with pytest.raises(UserError, match=message) as caught:
        ResFormerConfig(**{"variant": "transformer", **SIZES, **changes})
    assert "\n" not in str(caught.value)
