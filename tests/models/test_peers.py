"""The host forms against models of transformers, with their weights: same logits, same gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from resformer import ResFormerConfig, ResFormerForCausalLM
from resformer.models.forms import GPT2_FORM

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}


def moved(model: torch.nn.Module) -> torch.nn.Module:
    """The model with weights that all matter: larger ones, norms and biases off 1 and 0."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3.0)
            else:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def tokens(rows: int = 2, length: int = 64) -> Tensor:
    return torch.randint(1, 97, (rows, length), generator=torch.Generator().manual_seed(2))


def assert_same(peer, ours, names=lambda name: name, x: Tensor | None = None, **inputs) -> None:
    """Logits to 1e-5 and every gradient."""
    x = tokens() if x is None else x
    want, got = peer(x, labels=x, use_cache=False, **inputs), ours(x, labels=x, use_cache=False, **inputs)
    assert (want.logits - got.logits).abs().max() <= 1e-5
    want.loss.backward()
    got.loss.backward()
    for name, parameter in peer.named_parameters():
        gradient = ours.get_parameter(names(name)).grad
        assert torch.allclose(parameter.grad, gradient, rtol=1e-4, atol=2e-6), name


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_qk_norm_is_qwen3(attention):
    torch.manual_seed(0)
    peer = moved(Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=20, attn_implementation=attention)))
    ours = ResFormerForCausalLM(ResFormerConfig(variant="transformer", qk_norm=True, head_dim=20, **SIZES))
    assert not any(ours.load_state_dict(peer.state_dict()))
    ours.set_attn_implementation(attention)
    assert_same(peer, ours)


def gpt2_names(state: dict[str, Tensor], hidden: int) -> dict[str, Tensor]:
    """GPT-2's weights under our names: `Conv1D` keeps its matrix transposed, and q, k and v lie side by side."""
    plain = {"wte": "embed_tokens", "wpe": "embed_positions", "ln_f": "norm"}
    inside = {
        "ln_1": "input_layernorm",
        "ln_2": "post_attention_layernorm",
        "attn.c_proj": "self_attn.o_proj",
        "mlp.c_fc": "mlp.up_proj",
        "mlp.c_proj": "mlp.down_proj",
    }
    found = {}
    for key, value in state.items():
        name, _, kind = key.removeprefix("transformer.").rpartition(".")
        if name == "lm_head":
            found[f"lm_head.{kind}"] = value
        elif not name.startswith("h."):
            found[f"model.{plain[name]}.{kind}"] = value
        else:
            _, layer, part = name.split(".", 2)
            value = value.T if kind == "weight" and part not in ("ln_1", "ln_2") else value
            if part == "attn.c_attn":
                for letter, piece in zip("qkv", value.split(hidden), strict=True):
                    found[f"model.layers.{layer}.self_attn.{letter}_proj.{kind}"] = piece
            else:
                found[f"model.layers.{layer}.{inside[part]}.{kind}"] = value
    return found


def gpt2_pair() -> tuple[GPT2LMHeadModel, ResFormerForCausalLM]:
    torch.manual_seed(0)
    drop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(vocab_size=97, n_embd=64, n_layer=3, n_head=4, n_inner=96, n_positions=128, **drop)
    peer = moved(GPT2LMHeadModel(config))
    sizes = {**SIZES, **GPT2_FORM, "num_key_value_heads": 4}
    ours = ResFormerForCausalLM(ResFormerConfig(variant="transformer", **sizes)).eval()
    state = {key: value for key, value in peer.state_dict().items() if not key.endswith((".attn.bias", "masked_bias"))}
    assert not any(ours.load_state_dict(gpt2_names(state, 64)))
    return peer, ours


def test_gpt2_form_is_gpt2():
    peer, ours = gpt2_pair()
    x = tokens()
    want, got = peer(x, labels=x), ours(x, labels=x)
    assert (want.logits - got.logits).abs().max() <= 1e-5
    want.loss.backward()
    got.loss.backward()
    gradients = gpt2_names({name: parameter.grad for name, parameter in peer.named_parameters()}, 64)
    for name, gradient in gradients.items():
        assert torch.allclose(gradient, ours.get_parameter(name).grad, rtol=1e-4, atol=2e-6), name


def test_gpt2_form_generates_as_gpt2_from_a_padded_batch():
    peer, ours = gpt2_pair()
    x, mask = tokens(2, 10), torch.ones(2, 10, dtype=torch.long)
    x[0, :6], mask[0, :6] = 0, 0
    common = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(peer.generate(x, **common), ours.generate(x, **common))
    with torch.no_grad():  # without `generate` positions come from the mask too
        alone = ours(x[:1, 6:]).logits
        assert (ours(x, attention_mask=mask).logits[:1, 6:] - alone).abs().max() < 1e-5


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_sliding_window_is_mistral(attention):
    torch.manual_seed(0)
    config = MistralConfig(**SIZES, sliding_window=9, head_dim=16, attn_implementation=attention)
    peer = moved(MistralForCausalLM(config))
    ours = ResFormerForCausalLM(ResFormerConfig(variant="transformer", sliding_window=9, **SIZES)).eval()
    assert not any(ours.load_state_dict(peer.state_dict()))
    ours.set_attn_implementation(attention)
    assert_same(peer, ours)
    x, mask = tokens(2, 20), torch.ones(2, 20, dtype=torch.long)
    x[0, :7], mask[0, :7] = 0, 0
    common = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(peer.generate(x, **common), ours.generate(x, **common))


@pytest.mark.parametrize("experts_per_token", [1, 2, 3])
def test_experts_are_mixtral(experts_per_token):
    """Logits, the loss with its load-balancing part, and gradients, with padding as well."""
    torch.manual_seed(0)
    routing = {"num_experts_per_tok": experts_per_token, "router_aux_loss_coef": 0.5}
    config = MixtralConfig(**SIZES, **routing, num_local_experts=4, output_router_logits=True, sliding_window=None)
    peer = moved(MixtralForCausalLM(config))
    ours = ResFormerForCausalLM(ResFormerConfig(variant="transformer", num_experts=4, **routing, **SIZES)).eval()
    assert not any(ours.load_state_dict(peer.state_dict()))
    assert_same(peer, ours)
    mask = torch.ones(2, 64, dtype=torch.long)
    mask[0, :30] = 0
    x = tokens()
    with torch.no_grad():
        want, got = peer(x, attention_mask=mask, labels=x), ours(x, attention_mask=mask, labels=x)
    assert torch.allclose(want.aux_loss, got.aux_loss, atol=1e-6)
    assert torch.allclose(want.loss, got.loss, atol=1e-5)
    assert (want.logits - got.logits)[mask.bool()].abs().max() <= 1e-5
