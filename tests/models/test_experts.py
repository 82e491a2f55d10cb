"""The mixture of experts: against a loop over tokens, in its compiled form, and what it counts."""

from __future__ import annotations

import pytest
import torch
from form_models import SIZES, ids, make

from resformer import ResFormerConfig
from resformer.models.accounting import account
from resformer.models.grouped import grouped_linear
from resformer.models.mlp import MixtureOfExperts, load_balancing_loss


def mixture(experts: int = 4, k: int = 2) -> MixtureOfExperts:
    torch.manual_seed(0)
    config = ResFormerConfig(variant="transformer", num_experts=experts, num_experts_per_tok=k, **SIZES)
    module = MixtureOfExperts(config)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape))
    return module


def one_by_one(module: MixtureOfExperts, x: torch.Tensor, k: int) -> torch.Tensor:
    """Every token by itself, in plain Python."""
    rows = []
    for token in x.flatten(0, 1):
        probabilities = torch.exp(token @ module.gate.weight.T)
        probabilities = probabilities / probabilities.sum()
        best = sorted(range(len(probabilities)), key=lambda e: -probabilities[e].item())[:k]
        total = sum(probabilities[e] for e in best)
        row = torch.zeros_like(token)
        for e in best:
            gate, up = (module.experts.gate_up_proj[e] @ token).chunk(2)
            row = row + probabilities[e] / total * (module.experts.down_proj[e] @ (gate * torch.sigmoid(gate) * up))
        rows.append(row)
    return torch.stack(rows).view_as(x)


@pytest.mark.parametrize(("experts", "k"), [(2, 1), (4, 2), (5, 5)])
def test_output_and_gradients_equal_a_loop_over_tokens(experts, k):
    module = mixture(experts, k).double()
    x = torch.randn(2, 7, 32, dtype=torch.float64)
    probe = torch.randn(2, 7, 32, dtype=torch.float64)
    found = []
    for function in (lambda x: module(x)[0], lambda x: one_by_one(module, x, k)):
        module.zero_grad()
        given = x.clone().requires_grad_()
        out = function(given)
        (out * probe).sum().backward()
        found.append([out, given.grad, *(p.grad.clone() for p in module.parameters())])
    for ours, naive in zip(*found, strict=True):
        assert torch.allclose(ours, naive, rtol=0, atol=1e-10)


def test_no_token_is_dropped_when_all_choose_one_expert():
    module = mixture(4, 1)
    with torch.no_grad():
        module.gate.weight.zero_()
        module.gate.weight[2] = 1.0
    x = torch.rand(2, 9, 32)  # positive, so expert 2 has the largest logit for every token
    out, logits = module(x)
    assert (logits.argmax(-1) == 2).all()
    assert torch.allclose(out, one_by_one(module, x, 1), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_compiled_groups_equal_the_loop(dtype, autocast):
    """Without a graph break, forward and both gradients; one group is empty."""
    if autocast and dtype != torch.float32:
        pytest.skip("weights are fp32 under autocast")
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor([3, 0, 9, 4])
    x, weight = (torch.randn(*s, generator=generator).to(dtype) for s in ((16, 32), (4, 24, 32)))
    found = []
    for function in (grouped_linear, torch.compile(grouped_linear, fullgraph=True, backend="aot_eager")):
        given = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            out = function(*given, sizes)
        out.square().sum().backward()
        found.append([out, *(tensor.grad for tensor in given)])
    low = autocast or dtype == torch.bfloat16
    for eager, compiled in zip(*found, strict=True):
        assert eager.dtype == compiled.dtype
        assert torch.allclose(eager, compiled, rtol=0.05 if low else 1e-5, atol=0.5 if low else 1e-5)


def test_router_is_fp32_in_low_precision():
    module = mixture().bfloat16()
    out, logits = module(torch.randn(1, 5, 32, dtype=torch.bfloat16))
    assert out.dtype == torch.bfloat16 and logits.dtype == torch.float32


def test_load_balancing_loss():
    """k when spread evenly, E when all tokens take one expert with certainty; padding does not count."""
    even = torch.zeros(1, 8, 4)
    even[0, range(8), [0, 1, 2, 3] * 2] = 1e-4
    assert load_balancing_loss([even], 1) == pytest.approx(1.0, abs=1e-3)
    assert load_balancing_loss([even], 2) == pytest.approx(2.0, abs=1e-3)
    one = torch.zeros(1, 8, 4)
    one[..., 2] = 30.0
    assert load_balancing_loss([one], 1) == pytest.approx(4.0, abs=1e-3)
    both = torch.cat((even, one), dim=1)
    mask = torch.tensor([[1] * 8 + [0] * 8])
    assert load_balancing_loss([both], 1, mask) == pytest.approx(float(load_balancing_loss([even], 1)), abs=1e-6)


def test_balance_is_part_of_the_loss_and_moves_the_routers():
    model = make("learnable", num_experts=4, router_aux_loss_coef=3.0)
    out = model(ids(), labels=ids(), output_router_logits=True)
    assert len(out.router_logits) == 5 and out.router_logits[0].shape == (2, 12, 4)
    plain = make("learnable", num_experts=4, router_aux_loss_coef=0.0)(ids(), labels=ids())
    assert plain.router_logits is None
    assert torch.allclose(out.loss, plain.loss + 3.0 * out.aux_loss)
    assert make("learnable")(ids(), labels=ids()).__class__.__name__ == "CausalLMOutputWithPast"
    gate = model.model.layers[0].mlp.gate.weight
    with_balance = torch.autograd.grad(out.loss, gate, retain_graph=True)[0]
    without = torch.autograd.grad(out.loss - 3.0 * out.aux_loss, gate)[0]
    assert (with_balance - without).abs().max() > 1e-4


def test_active_parameters():
    config = make("transformer", num_experts=4, num_experts_per_tok=1).config
    costs, dense = account(config), account(make("transformer").config)
    expert = 3 * 32 * 48
    assert costs.parameters == dense.parameters + 5 * (3 * expert + 4 * 32)
    assert costs.active_parameters == dense.parameters + 5 * 4 * 32
    assert dense.active_parameters == dense.parameters
