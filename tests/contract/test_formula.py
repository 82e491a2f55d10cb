"""What a variant computes, against references written from the equations."""

from __future__ import annotations

import pytest
import torch
from conftest import SIZES, ids, make
from naive import FORMULAS, naive_logits

from resformer import ResFormerConfig, ResFormerForCausalLM
from resformer.core.plan import validate
from resformer.core.policy import Policy
from resformer.core.registry import build, names
from resformer.models.compat import enable_checkpointing


def test_every_variant_has_a_reference():
    assert sorted(names()) == sorted(FORMULAS)


def test_plan_is_valid(variant, kv_heads):
    shape = make(variant, kv_heads).config.shape()
    validate(build(variant, {}, shape).plan(shape))


def test_mix_equals_the_equation_in_float64(variant, kv_heads):
    """Forward and every gradient of `mix`, layer by layer, to 1e-10."""
    model = make(variant, kv_heads).double()
    state = {k: v.detach().double().requires_grad_() for k, v in model.state_dict().items()}
    shape = model.config.shape()
    N = shape.layers
    generator = torch.Generator().manual_seed(3)
    raw = {
        n: torch.randn(2, 6, kv_heads, shape.head_dim, generator=generator, dtype=torch.float64)
        for n in range(1, N + 1)
    }
    ours = {n: v.clone().requires_grad_() for n, v in raw.items()}
    theirs = {n: v.clone().requires_grad_() for n, v in raw.items()}
    coefficients = model.model.layer_coefficients()
    for row, layer in zip(model.model.plan, model.model.layers, strict=True):
        n = row.layer
        policy = layer.self_attn.value_residual or Policy()
        own = ours[n] if row.owns_value else None
        got = policy.mix(own, tuple(ours[read.layer] for read in row.reads), torch.zeros(()), coefficients[n - 1])
        want = FORMULAS[variant](n, theirs, {}, lambda name: N if name == "layers" else state[name])
        assert torch.allclose(got, want, rtol=0, atol=1e-10), f"layer {n}"
        probe = torch.randn(got.shape, generator=generator, dtype=torch.float64)
        (got * probe).sum().backward(retain_graph=True)
        (want * probe).sum().backward(retain_graph=True)
    for n in ours:
        if theirs[n].grad is None:
            assert ours[n].grad is None
        else:
            assert torch.allclose(ours[n].grad, theirs[n].grad, rtol=0, atol=1e-10), f"gradient of V_{n}"
    for name, parameter in model.named_parameters():
        if state[name].grad is not None:
            assert torch.allclose(parameter.grad, state[name].grad, rtol=0, atol=1e-10), f"gradient of {name}"


def test_whole_model_equals_the_naive_model(variant, kv_heads):
    model = make(variant, kv_heads)
    state = {k: v.detach().double() for k, v in model.state_dict().items()}
    with torch.no_grad():
        assert (model(ids()).logits - naive_logits(state, model.config, ids())).abs().max() < 1e-5


def test_neutral_options_give_the_transformer_bit_for_bit(variant, kv_heads):
    base = make("transformer", kv_heads)
    shape = base.config.shape()
    neutral = build(variant, {}, shape).neutral(shape)
    if neutral is None:
        pytest.skip(f"{variant} has no neutral options")
    config = ResFormerConfig(variant=variant, variant_options=neutral, num_key_value_heads=kv_heads, **SIZES)
    model = ResFormerForCausalLM(config).eval()
    report = model.load_state_dict(base.state_dict(), strict=False)
    assert not report.unexpected_keys
    assert all("value_" in key for key in report.missing_keys)
    x = ids()
    got, want = model(x, labels=x), base(x, labels=x)
    assert torch.equal(got.logits, want.logits)
    got.loss.backward()
    want.loss.backward()
    for name, parameter in base.named_parameters():
        assert torch.equal(parameter.grad, model.get_parameter(name).grad), name


def test_one_layer_is_the_transformer_without_extra_parameters(variant):
    base, model = make("transformer", num_hidden_layers=1), make(variant, num_hidden_layers=1)
    assert base.state_dict().keys() == model.state_dict().keys()
    model.load_state_dict(base.state_dict())
    assert torch.equal(model(ids()).logits, base(ids()).logits)


def test_every_parameter_gets_a_gradient(variant, kv_heads):
    """No parameter may exist that training cannot move (DDP would hang on it), and V_1 must not be detached."""
    model = make(variant, kv_heads).train()
    model(ids(), labels=ids()).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


def test_first_value_is_not_detached(variant):
    """W_v of layer 1 gets more gradient paths than in the Transformer: its gradient depends on the later layers'
    weights.
    """
    model = make(variant).train()
    if not any(row.mixes for row in model.model.plan):
        pytest.skip(f"{variant} mixes nothing")
    first = model.model.layers[0].self_attn
    full = torch.autograd.grad(model(ids(), labels=ids()).loss, first.v_proj.weight)[0]
    handle = model.model.layers[0].register_forward_hook(
        lambda module, args, out: (out[0], *(t.detach() for t in out[1:]))
    )
    cut = torch.autograd.grad(model(ids(), labels=ids()).loss, first.v_proj.weight)[0]
    handle.remove()
    assert (full - cut).abs().max() > 1e-3 * full.abs().max()


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_checkpointing_changes_no_gradient(variant, kv_heads, reentrant):
    """Also with two forward passes before one backward pass, where values kept on modules would be mixed up."""
    model = make(variant, kv_heads).train()

    def gradients():
        model.zero_grad()
        a, b = model(ids(seed=1), labels=ids(seed=1)).loss, model(ids(seed=2), labels=ids(seed=2)).loss
        (a + 2 * b).backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}, a.item()

    plain, plain_loss = gradients()
    enable_checkpointing(model, use_reentrant=reentrant)
    calls = []
    model.model.layers[1].self_attn.q_proj.register_forward_hook(lambda *_: calls.append(1))
    recomputed, loss = gradients()
    assert len(calls) == 4, "the layers were not recomputed: checkpointing was silently off"
    assert loss == plain_loss
    for name in plain:
        assert torch.allclose(plain[name], recomputed[name], rtol=1e-5, atol=1e-7), name


def test_correct_is_applied_after_attention_with_heads_repeated():
    """A user's NeuTRENO under grouped queries: U_n = A_n V_n + 0.4 (V_1 - V_n), per query head, before o_proj."""
    from dataclasses import dataclass

    from resformer.core import registry
    from resformer.core.residual import residual_plan

    class Correction(Policy):
        corrects = True

        def correct(self, out, mixed, own, reads):
            return out + 0.4 * (reads[0] - mixed)

    try:

        @registry.register_variant("corrected")
        @dataclass(frozen=True, kw_only=True)
        class Corrected(registry.Variant):
            def plan(self, shape):
                return residual_plan(shape, range(2, shape.layers + 1))

            def policy(self, row, shape):
                return Correction() if row.mixes else None

        model, seen = make("corrected", 2), []
        base = make("transformer", 2)
        base.load_state_dict(model.state_dict())
        for source in (model, base):
            layers = source.model.layers
            layers[0].self_attn.v_proj.register_forward_hook(lambda m, i, out: seen.append(out))
            layers[1].self_attn.v_proj.register_forward_hook(lambda m, i, out: seen.append(out))
            layers[1].self_attn.o_proj.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
        with torch.no_grad():
            model(ids())
            base(ids())
        first, own, got, _, _, plain = seen[:6]
        correction = (first - own).view(2, 12, 2, 1, 8).expand(2, 12, 2, 2, 8).reshape(2, 12, 32)
        assert torch.allclose(got, plain + 0.4 * correction, atol=1e-6)
    finally:
        registry._registered.pop("corrected")
