"""Numbers that must come out: parameter counts, cache sizes, weights of Plus."""

from __future__ import annotations

import pytest
import torch

from resformer import ResFormerConfig, ResFormerForCausalLM, build_cache
from resformer.models.accounting import account
from resformer.models.cache import cache_bytes
from resformer.models.compat import CACHE
from resformer.models.sizes import SIZES


@pytest.mark.parametrize(
    ("size", "variant", "parameters"),
    [
        ("82m", "transformer", 81_901_056),
        ("180m", "transformer", 179_874_048),
        ("468m", "transformer", 467_921_920),
        ("82m", "svformer", 80_066_048),
        ("82m", "learnable", 81_901_056 + 2 * 7),
        ("82m", "learnable_plus", 81_901_056 + 7 + 7 + 1),
    ],
)
def test_parameter_counts(size, variant, parameters):
    config = ResFormerConfig(variant=variant, **SIZES[size])
    assert account(config).parameters == parameters
    with torch.device("meta"):
        assert ResFormerForCausalLM(config).num_parameters() == parameters


@pytest.mark.parametrize(("layers", "kv_heads"), [(4, 4), (6, 2), (24, 1)])
def test_svformer_cache_is_half_after_a_thousand_tokens(layers, kv_heads):
    held = {}
    for variant in ("transformer", "svformer"):
        config = ResFormerConfig(
            variant=variant,
            vocab_size=50,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=kv_heads,
            max_position_embeddings=1000,
        )
        model, cache = ResFormerForCausalLM(config).eval(), build_cache(config)
        with torch.no_grad():
            model(torch.randint(0, 50, (1, 990)), logits_to_keep=1, **{CACHE: cache})
            for _ in range(10):
                model(torch.randint(0, 50, (1, 1)), **{CACHE: cache})
        held[variant] = cache_bytes(cache)
        values = {layer.values.data_ptr() for layer in cache.layers if layer.values.numel()}
        assert len(values) == (layers if variant == "transformer" else 1)
    assert held["svformer"] * 2 * layers == held["transformer"] * (layers + 1)


def test_plus_weights():
    """Softmax over the mixing layers: weights sum to the scale; linear logits end at 5.0616, zeros give 8/7."""
    sizes = {
        "num_hidden_layers": 8,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "vocab_size": 10,
    }
    linear = ResFormerForCausalLM(ResFormerConfig(variant="learnable_plus", **sizes)).lambda_map()
    zeros = ResFormerForCausalLM(
        ResFormerConfig(variant="learnable_plus", variant_options={"logit_init": "zeros"}, **sizes)
    ).lambda_map()
    assert linear["layers"] == zeros["layers"] == [2, 3, 4, 5, 6, 7, 8]
    assert sum(linear["first"]) == pytest.approx(8, abs=1e-5)
    assert linear["first"][-1] == pytest.approx(5.0616, abs=5e-5)
    assert zeros["first"] == pytest.approx([8 / 7] * 7)
    assert linear["own"] == [0.5] * 7


def test_identity_with_all_weight_on_the_first_value_is_svformer():
    sizes = {
        "num_hidden_layers": 4,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "vocab_size": 10,
    }
    identity = ResFormerForCausalLM(
        ResFormerConfig(variant="identity", variant_options={"first": 1.0, "own": 0.0}, **sizes)
    )
    shared = ResFormerForCausalLM(ResFormerConfig(variant="svformer", **sizes))
    report = shared.load_state_dict(identity.state_dict(), strict=False)
    assert not report.missing_keys
    assert report.unexpected_keys == [f"model.layers.{n}.self_attn.v_proj.weight" for n in (1, 2, 3)]
    ids = torch.arange(10)[None]
    assert (identity(ids).logits - shared(ids).logits).abs().max() < 1e-6


def test_gradient_of_first_value_projection_has_a_cross_term():
    """dL/dW_v of layer 1 moves with l1; with l1 = 0 it is the Transformer's."""
    sizes = {
        "num_hidden_layers": 3,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "vocab_size": 10,
    }
    ids, gradients = torch.arange(10)[None], {}
    torch.manual_seed(0)
    base = ResFormerForCausalLM(ResFormerConfig(variant="transformer", **sizes))
    for first in (None, 0.0, 1.0):
        model = base
        if first is not None:
            model = ResFormerForCausalLM(ResFormerConfig(variant="constant", variant_options={"first": first}, **sizes))
            model.load_state_dict(base.state_dict())
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        gradients[first] = model.model.layers[0].self_attn.v_proj.weight.grad.clone()
    assert torch.equal(gradients[None], gradients[0.0])
    assert (gradients[1.0] - gradients[0.0]).abs().max() > 0.1 * gradients[0.0].abs().max()
