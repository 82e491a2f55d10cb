"""A patched model computes the formula: against a hand-written loop in plain tensors, and against our own model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import patch_families as families
import pytest
import torch
from torch import Tensor

import resformer
from resformer import ResFormerConfig, ResFormerForCausalLM
from resformer.convert.patch import lambda_names
from resformer.core import registry
from resformer.core.plan import Row
from resformer.core.policy import Policy, Shape
from resformer.core.residual import SourceForm

Mix = Callable[[int, Tensor, list[Tensor]], Tensor]

# Every variant that can be patched in, and options that move it away from its start.
PATCHABLE: dict[str, list[dict[str, Any]]] = {
    "identity": [{}, {"source": 2, "granularity": "head", "first": [0.2, 0.7], "own": [0.9, -0.1]}],
    "constant": [{}, {"source": "previous"}],
    "sparse": [{}, {"layers": [2, 4], "first": 3.0}],
    "learnable": [{}, {"granularity": "channel"}, {"tie": "lerp", "layers": "last:2"}],
    "learnable_plus": [{}, {"logit_init": "zeros", "granularity": "head"}],
    "dense": [{}, {"mode": "mean"}, {"source": 2}],
    "gated": [{}, {"activation": "relu"}, {"activation": "sigmoid"}],
    "rwkv": [{"rank": 4}],
    "neutreno": [{}],
    "neutreno_resformer": [{}],
    "identity_mapping": [{}],
}
CASES = [(name, options) for name, many in PATCHABLE.items() for options in many]


def naive_llama(weights: dict[str, Tensor], config: Any, ids: Tensor, mix: Mix) -> Tensor:
    """Logits of Llama, one operation after another; `mix(layer, own, values)` gets the raw values of layers 1 to n."""
    heads, kv_heads, batch, length = config.num_attention_heads, config.num_key_value_heads, *ids.shape
    size = config.hidden_size // heads
    turns = torch.arange(length, dtype=torch.float64)[:, None] / 10000.0 ** (torch.arange(0, size, 2).double() / size)
    cos, sin = torch.cat((turns, turns), -1).cos(), torch.cat((turns, turns), -1).sin()

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * weights[name]

    def rotate(x: Tensor) -> Tensor:
        turned = torch.cat((-x[..., size // 2 :], x[..., : size // 2]), -1)
        return x * cos[:, None] + turned * sin[:, None]

    hidden, values = weights["model.embed_tokens.weight"][ids], []
    allowed = torch.ones(length, length, dtype=torch.bool).tril()
    for index in range(config.num_hidden_layers):
        at = f"model.layers.{index}."
        normed = norm(hidden, f"{at}input_layernorm.weight")
        q, k, v = (normed @ weights[f"{at}self_attn.{x}_proj.weight"].T for x in "qkv")
        q, k = rotate(q.view(batch, length, heads, size)), rotate(k.view(batch, length, kv_heads, size))
        values.append(v.view(batch, length, kv_heads, size))
        used = mix(index + 1, values[-1], values)
        groups = heads // kv_heads
        outs = []
        for h in range(heads):
            scores = q[:, :, h] @ k[:, :, h // groups].transpose(1, 2) / size**0.5
            outs.append(scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ used[:, :, h // groups])
        hidden = hidden + torch.cat(outs, -1) @ weights[f"{at}self_attn.o_proj.weight"].T
        normed = norm(hidden, f"{at}post_attention_layernorm.weight")
        gate, up = (normed @ weights[f"{at}mlp.{x}_proj.weight"].T for x in ("gate", "up"))
        hidden = hidden + (torch.nn.functional.silu(gate) * up) @ weights[f"{at}mlp.down_proj.weight"].T
    return norm(hidden, "model.norm.weight") @ weights["lm_head.weight"].T


def reference(model: Any, ids: Tensor, mix: Callable[[dict[str, Tensor]], Mix]) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits of the loop in float64, and the gradients of a loss on them."""
    weights = {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}
    out = naive_llama(weights, model.config, ids, mix(weights))
    out.logsumexp(-1).square().mean().backward()
    return out, {name: w.grad for name, w in weights.items() if w.grad is not None}


def identity(weights: dict[str, Tensor]) -> Mix:
    return lambda n, own, values: own if n == 1 else 0.5 * values[0] + 0.5 * own


def learnable(weights: dict[str, Tensor]) -> Mix:
    def mix(n: int, own: Tensor, values: list[Tensor]) -> Tensor:
        if n == 1:
            return own
        at = f"model.layers.{n - 1}.self_attn.value_residual."
        return weights[f"{at}first"] * values[0] + weights[f"{at}own"] * own

    return mix


def sparse(weights: dict[str, Tensor]) -> Mix:
    return lambda n, own, values: own + 3.0 * values[0] if n in (2, 4) else own


@pytest.mark.parametrize(
    ("variant", "options", "mix"),
    [("identity", {}, identity), ("learnable", {}, learnable), ("sparse", {"layers": [2, 4], "first": 3.0}, sparse)],
)
def test_logits_and_every_gradient_equal_a_loop_in_plain_tensors(
    variant: str, options: dict[str, Any], mix: Callable[[dict[str, Tensor]], Mix]
) -> None:
    model = resformer.patch(families.build("llama"), variant=variant, variant_options=options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "value_residual" in name:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    given = families.inputs(model)
    expected, wanted = reference(model, given["input_ids"], mix)
    torch.testing.assert_close(families.logits(model, given).double(), expected, atol=1e-4, rtol=1e-4)

    families.loss(model, given).backward()
    got = families.gradients(model)
    assert got.keys() == wanted.keys()
    for name, gradient in got.items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(gradient.double(), wanted[name], atol=1e-4, rtol=1e-3, msg=name)


def test_the_gradient_of_w_v_of_layer_1_passes_through_every_layer_that_mixes() -> None:
    """Detached, or with V_1 mixed, it would be another one."""
    model = resformer.patch(families.build("llama"), variant="identity")
    given = families.inputs(model)
    families.loss(model, given).backward()
    got = families.gradients(model)["model.layers.0.self_attn.v_proj.weight"].double()

    def detached(weights: dict[str, Tensor]) -> Mix:
        return lambda n, own, values: own if n == 1 else 0.5 * values[0].detach() + 0.5 * own

    _, wanted = reference(model, given["input_ids"], identity)
    _, wrong = reference(model, given["input_ids"], detached)
    name = "model.layers.0.self_attn.v_proj.weight"
    torch.testing.assert_close(got, wanted[name], atol=1e-4, rtol=1e-3)
    assert (got - wrong[name]).norm() > 0.1 * got.norm()


@pytest.mark.parametrize(("variant", "options"), CASES)
def test_a_patched_llama_is_our_model_of_that_variant(variant: str, options: dict[str, Any]) -> None:
    """The same names in the state dict, the same logits, the same gradients."""
    model = resformer.patch(families.build("llama"), variant=variant, variant_options=options)
    sizes = {name: value for name, value in families.DECODER.items() if not name.endswith("token_id")}
    config = ResFormerConfig(**sizes, rms_norm_eps=1e-6, variant=variant, variant_options=options)
    with torch.no_grad():
        for name in lambda_names(model):
            model.get_parameter(name).add_(0.1 * torch.randn(model.get_parameter(name).shape))
    ours = ResFormerForCausalLM(config).eval()
    ours.load_state_dict(model.state_dict())
    given = families.inputs(model)
    torch.testing.assert_close(families.logits(model, given), families.logits(ours, given), atol=2e-5, rtol=1e-4)

    families.loss(model, given).backward()
    families.loss(ours, given).backward()
    wanted = families.gradients(ours)
    for name, gradient in families.gradients(model).items():
        torch.testing.assert_close(gradient, wanted[name], atol=1e-4, rtol=1e-3, msg=name)


@dataclass(frozen=True, kw_only=True)
class Squared(SourceForm):
    """V_n + share V_1^2, which nobody needs."""

    share: float = 0.5

    def policy(self, row: Row, shape: Shape) -> Policy | None:
        return SquaredPolicy(self.share) if row.mixes else None


class SquaredPolicy(Policy):
    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def mix(self, own: Any, reads: Any, hidden: Tensor, coefficients: Any) -> Tensor:
        return own + self.share * reads[0] ** 2


def test_a_variant_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {name: registry.get(name) for name in registry.names()})
    resformer.register_variant("squared")(Squared)
    model = resformer.patch(families.build("llama"), variant="squared", variant_options={"share": 0.25})
    given = families.inputs(model)

    def mix(weights: dict[str, Tensor]) -> Mix:
        return lambda n, own, values: own if n == 1 else own + 0.25 * values[0] ** 2

    expected, _ = reference(model, given["input_ids"], mix)
    torch.testing.assert_close(families.logits(model, given).double(), expected, atol=1e-4, rtol=1e-4)


def test_in_bf16_lambdas_stay_fp32_and_the_values_bf16() -> None:
    model = resformer.patch(families.build("llama").to(torch.bfloat16), variant="learnable")
    assert model.get_parameter("model.layers.1.self_attn.value_residual.first").dtype == torch.float32
    assert model.dtype == torch.bfloat16
    given = families.inputs(model)
    families.loss(model, given).backward()
    assert families.logits(model, given).dtype == torch.bfloat16
    assert families.gradients(model)["model.layers.1.self_attn.value_residual.first"].abs() > 0
