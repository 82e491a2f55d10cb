"""With plain attention the host is Llama: same keys, same logits, same gradients."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from resformer import ResFormerConfig, ResFormerForCausalLM
from resformer.models.norm import RMSNorm

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}


def pair(**changes) -> tuple[LlamaForCausalLM, ResFormerForCausalLM]:
    torch.manual_seed(0)
    fields = {**SIZES, **changes}
    llama = LlamaForCausalLM(LlamaConfig(**fields, attn_implementation="sdpa"))
    with torch.no_grad():
        for parameter in llama.parameters():
            parameter.mul_(3.0)
    ours = ResFormerForCausalLM(ResFormerConfig(variant="transformer", **fields))
    assert not any(ours.load_state_dict(llama.state_dict()))
    return llama, ours


@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 2},
        {"num_key_value_heads": 1, "head_dim": 20},
        {"attention_bias": True, "mlp_bias": True},
        {"tie_word_embeddings": True},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}, "max_position_embeddings": 128},
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ],
    ids=lambda changes: ",".join(f"{k}={v['rope_type'] if isinstance(v, dict) else v}" for k, v in changes.items()),
)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_logits_and_gradients_equal_llama(changes, attention):
    llama, ours = pair(**changes)
    llama.set_attn_implementation(attention)
    ours.set_attn_implementation(attention)
    ids = torch.randint(0, 97, (2, 512), generator=torch.Generator().manual_seed(1))
    want, got = llama(ids, labels=ids, use_cache=False), ours(ids, labels=ids, use_cache=False)
    assert (want.logits - got.logits).abs().max() <= 1e-5
    want.loss.backward()
    got.loss.backward()
    for name, parameter in llama.named_parameters():
        gradient = ours.get_parameter(name).grad
        assert torch.allclose(parameter.grad, gradient, rtol=1e-4, atol=1e-6), name


def test_hidden_states_and_attentions_equal_llama():
    llama, ours = pair()
    llama.set_attn_implementation("eager")
    ours.set_attn_implementation("eager")
    ids = torch.arange(20)[None]
    with torch.no_grad():
        want = llama(ids, output_hidden_states=True, output_attentions=True)
        got = ours(ids, output_hidden_states=True, output_attentions=True)
    assert len(want.hidden_states) == len(got.hidden_states) == 4
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(want.hidden_states, got.hidden_states, strict=True))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(want.attentions, got.attentions, strict=True))


def test_padded_batches_equal_llama():
    llama, ours = pair(num_key_value_heads=2)
    ids, mask = torch.arange(24).view(2, 12), torch.ones(2, 12, dtype=torch.long)
    mask[0, :5] = 0
    with torch.no_grad():
        want, got = llama(ids, attention_mask=mask).logits, ours(ids, attention_mask=mask).logits
    assert (want - got)[mask.bool()].abs().max() <= 1e-5


@pytest.mark.parametrize("variant", ["transformer", "learnable_plus", "svformer"])
def test_packed_documents_do_not_see_each_other(variant):
    """Positions that restart mark documents; a training call must honour them although `use_cache` defaults to True in
    the config.
    """
    torch.manual_seed(0)
    model = ResFormerForCausalLM(ResFormerConfig(variant=variant, **SIZES)).train()
    a, b = torch.arange(7)[None], torch.arange(30, 41)[None]
    positions = torch.cat([torch.arange(7), torch.arange(11)])[None]
    packed = model(torch.cat([a, b], dim=1), position_ids=positions).logits
    alone = torch.cat([model(a).logits, model(b).logits], dim=1)
    assert (packed - alone).abs().max() < 1e-5


def test_norm_backward_is_the_derivative():
    """Our own backward pass, by finite differences in fp64, and a second derivative through it."""
    norm = RMSNorm(6, eps=1e-5).double()
    with torch.no_grad():
        norm.weight.copy_(torch.randn(6, dtype=torch.float64))
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)

    def apply(x, weight):
        return torch.func.functional_call(norm, {"weight": weight}, (x,))

    assert torch.autograd.gradcheck(apply, (x, norm.weight))
    assert torch.autograd.gradgradcheck(apply, (x, norm.weight))
