"""Registry, the mixing primitive, and the mechanism in an attention that is not ours."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from resformer.core import registry
from resformer.core.carry import Carry
from resformer.core.mixing import weighted_sum
from resformer.core.plan import Row
from resformer.core.policy import Policy, Shape
from resformer.core.registry import Variant, build, register_variant
from resformer.errors import UserError

SHAPE = Shape(layers=8, hidden_size=32, heads=4, kv_heads=2, head_dim=8)


def test_every_variant_says_what_it_is():
    for name in registry.names():
        cls = registry.get(name)
        assert cls.equation and cls.reference and cls.__doc__, name
        assert "\n" not in cls.equation, name


def test_registry_refuses_duplicates_and_unknown_names():
    registry.names()  # loads the built-in ones
    with pytest.raises(UserError, match="is taken by"):

        @register_variant("identity")
        @dataclass(frozen=True, kw_only=True)
        class Mine(Variant):
            pass

    with pytest.raises(UserError, match="did you mean 'svformer'"):
        registry.get("svforme")


def test_an_option_needs_a_default():
    with pytest.raises(UserError, match="option 'strength' has no default"):

        @register_variant("without_default")
        @dataclass(frozen=True, kw_only=True)
        class Mine(Variant):
            strength: float


def test_a_users_variant_is_one_class():
    """A new formula: registered, built by name, run by the host, and taken out again."""
    from resformer import ResFormerConfig, ResFormerForCausalLM

    class Halved(Policy):
        def mix(self, own, reads, hidden, coefficients):
            return own / 2

    try:

        @register_variant("halved")
        @dataclass(frozen=True, kw_only=True)
        class HalvedVariant(Variant):
            equation = "V_n <- V_n / 2"

            def policy(self, row, shape):
                return Halved()

        config = ResFormerConfig(
            variant="halved",
            vocab_size=9,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=2,
            num_attention_heads=2,
        )
        torch.manual_seed(0)
        model = ResFormerForCausalLM(config)
        plain = ResFormerForCausalLM(ResFormerConfig.from_dict({**config.to_dict(), "variant": "transformer"}))
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.v_proj.weight.mul_(2)
        weights = {k: v / 2 if "v_proj" in k else v for k, v in model.state_dict().items()}
        plain.load_state_dict(weights)
        assert torch.allclose(model(torch.arange(9)[None]).logits, plain(torch.arange(9)[None]).logits, atol=1e-6)
    finally:
        registry._registered.pop("halved")


def test_weighted_sum_rounds_once_in_low_precision():
    first, own = torch.tensor([1 / 3]), torch.tensor([0.123456789])
    a, b = torch.randn(2, 5, 2, 8).bfloat16(), torch.randn(2, 5, 2, 8).bfloat16()
    exact = first.double() * a.double() + own.double() * b.double()
    got = weighted_sum(first, a, own, b)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, exact.bfloat16())


class ForeignAttention(nn.Module):
    """An attention from somebody else's model: fused qkv, no RoPE, learned scale. Value residual takes three lines
    (marked).
    """

    def __init__(self, dim: int, heads: int, policy: Policy | None, row: Row) -> None:
        super().__init__()
        self.heads, self.row = heads, row
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.scale = nn.Parameter(torch.ones(heads, 1, 1))
        self.policy = policy or Policy()  # 1

    def forward(self, x, *received):
        B, T, C = x.shape
        q, k, own = self.qkv(x).view(B, T, 3, self.heads, -1).unbind(2)
        v = self.policy.mix(own, received, x, ())  # 2
        scores = torch.einsum("bthd,bshd->bhts", q, k) * self.scale / (C // self.heads) ** 0.5
        weights = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf).softmax(-1)
        y = self.out(torch.einsum("bhts,bshd->bthd", weights, v).reshape(B, T, C))
        return y, *([own] if self.row.sends else [])  # 3


@pytest.mark.parametrize("name", ["transformer", "identity", "constant", "sparse", "learnable"])
def test_the_mechanism_in_an_attention_that_is_not_ours(name):
    shape = Shape(layers=4, hidden_size=24, heads=3, kv_heads=3, head_dim=8)
    variant = build(name, {}, shape)
    plan = variant.plan(shape)
    torch.manual_seed(0)
    layers = nn.ModuleList(ForeignAttention(24, 3, variant.policy(row, shape), row) for row in plan)
    x = torch.randn(2, 6, 24)

    def forward(x):
        carry = Carry(plan)
        for row, layer in zip(plan, layers, strict=True):
            out, *sent = layer(x, *carry.received(row.layer))
            carry.keep(row.layer, sent)
            x = x + out
        return x

    y = forward(x)
    y.square().mean().backward()
    assert all(parameter.grad is not None for parameter in layers.parameters())

    # By hand, the residual form of these variants: first * V_1 + own * V_n.
    first, own = {"identity": (0.5, 0.5), "constant": (2.0, 1.0), "sparse": (5.0, 1.0), "learnable": (0.5, 0.5)}.get(
        name, (0, 1)
    )
    mixing = {"sparse": (2, 3, 4), "transformer": ()}.get(name, (2, 3, 4))
    h, v_1 = x, None
    for n, layer in enumerate(layers, start=1):
        q, k, v = layer.qkv(h).view(2, 6, 3, 3, 8).unbind(2)
        v_1 = v if v_1 is None else v_1
        used = first * v_1 + own * v if n in mixing else v
        weights = (
            (torch.einsum("bthd,bshd->bhts", q, k) / 8**0.5)
            .masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf)
            .softmax(-1)
        )
        h = h + layer.out(torch.einsum("bhts,bshd->bthd", weights, used).reshape(2, 6, 24))
    assert torch.allclose(y, h, atol=1e-6)


@pytest.mark.parametrize("contiguous", [True, False])
def test_weighted_sum_with_trained_scalars_is_its_own_derivative(contiguous):
    """The hand-written backward pass, by finite differences, first and second order."""
    a, b = (torch.randn(2, 2, 3, 2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    first, own = (torch.randn(1, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def mix(first, a, own, b):
        out = weighted_sum(first, a, own, b)
        return out if contiguous else out.transpose(1, 2) * 2

    assert torch.allclose(weighted_sum(first, a, own, b), b * own + a * first, rtol=0, atol=1e-15)
    assert torch.autograd.gradcheck(mix, (first, a, own, b))
    assert torch.autograd.gradgradcheck(mix, (first, a, own, b))
