"""Schedule, groups, clipping."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from resformer import ResFormerConfig, ResFormerForCausalLM, UserError
from resformer.train.config import OptimConfig
from resformer.train.optim import (
    build_optimizers,
    clip_gradients,
    gradient_norms,
    norms_by_group,
    set_learning_rate,
)
from resformer.train.schedule import lr_at


def small_model(variant: str = "learnable", **more: Any) -> ResFormerForCausalLM:
    return ResFormerForCausalLM(
        ResFormerConfig(
            variant=variant,
            vocab_size=50,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=3,
            num_attention_heads=2,
            max_position_embeddings=16,
            **more,
        )
    )


@pytest.fixture
def one_process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(("warmup", "total"), [(120, 3.296), (1200, 3.264)])
def test_the_schedule_of_the_paper(warmup: int, total: float) -> None:
    def lr(step: int) -> float:
        return lr_at(step, steps=10_000, lr=6e-4, start_lr=1e-7, warmup_steps=warmup, min_lr_ratio=0.1)

    assert lr(0) == 1e-7
    assert lr(warmup) == 6e-4
    assert lr(10_000) == pytest.approx(6e-5, rel=1e-12)
    assert math.fsum(map(lr, range(1, 10_001))) == pytest.approx(total, abs=5e-4)
    assert lr(warmup // 2) == pytest.approx((6e-4 + 1e-7) / 2)
    assert lr((warmup + 10_000) // 2) == pytest.approx((6e-4 + 6e-5) / 2)


def test_the_schedule_at_its_edges() -> None:
    assert lr_at(1, steps=1, lr=1.0, warmup_steps=1) == 1.0
    assert lr_at(1, steps=1, lr=1.0) == pytest.approx(0.1)
    assert lr_at(1, steps=10, lr=1.0, warmup_steps=4) == 0.25
    assert lr_at(10, steps=10, lr=1.0, min_lr_ratio=0.0) == pytest.approx(0.0)


def test_linear_and_stable_schedules() -> None:
    def rates(schedule: str, **more: float) -> list[float]:
        common = {"steps": 10, "lr": 1.0, "warmup_steps": 2, "min_lr_ratio": 0.2, **more}
        return [round(lr_at(step, schedule=schedule, **common), 6) for step in range(1, 11)]

    assert rates("linear") == [0.5, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2]
    assert rates("wsd", decay_share=0.4) == [0.5, *[1.0] * 5, 0.8, 0.6, 0.4, 0.2]
    assert rates("wsd", decay_share=0.0) == [0.5, *[1.0] * 9]
    assert rates("wsd", decay_share=1.0) == rates("linear")


def test_learning_rates_by_parameter_name() -> None:
    optim = OptimConfig(
        lr=1e-2, warmup_steps=0, lambda_lr_scale=0.5, lr_scale={"model.layers.0.*": 2.0, "*norm.weight": 3.0}
    )
    (optimizer,) = build_optimizers(small_model(), optim)
    found = {name: group["lr"] for group in optimizer.param_groups for name in group["names"]}
    assert found["model.layers.0.mlp.up_proj.weight"] == found["model.layers.0.self_attn.v_proj.weight"] == 2e-2
    assert found["model.layers.0.input_layernorm.weight"] == pytest.approx(6e-2)  # both patterns fit
    assert found["model.norm.weight"] == pytest.approx(3e-2)
    assert found["model.layers.1.mlp.up_proj.weight"] == 1e-2
    assert found["model.layers.1.self_attn.value_residual.first"] == 5e-3
    assert len(found) == len(list(small_model().parameters()))
    assert [group["weight_decay"] for group in optimizer.param_groups if "matrices" in group["name"]] == [0.1, 0.1]
    with pytest.raises(UserError, match=r"optim\.lr_scale 'model\.layer\.0\.\*' fits no parameter"):
        build_optimizers(small_model(), OptimConfig(lr_scale={"model.layer.0.*": 2.0}))


def test_groups_keep_their_share_of_the_learning_rate() -> None:
    optim = OptimConfig(lr=1e-2, warmup_steps=4, lambda_lr_scale=0.5, weight_decay=0.3)
    (optimizer,) = build_optimizers(small_model(), optim)
    assert set_learning_rate([optimizer], optim, step=2, steps=10) == 5e-3
    found = {group["name"]: (group["lr"], group["weight_decay"]) for group in optimizer.param_groups}
    assert found == {"matrices": (5e-3, 0.3), "vectors": (5e-3, 0.0), "lambdas": (2.5e-3, 0.0)}


def test_one_step_is_adamw() -> None:
    optim = OptimConfig(lr=1e-2, warmup_steps=0, weight_decay=0.1, beta1=0.9, beta2=0.95, eps=1e-8)
    torch.manual_seed(0)
    model = small_model()
    (optimizer,) = build_optimizers(model, optim)
    before = {name: p.detach().double().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    lr = set_learning_rate([optimizer], optim, step=5, steps=10)
    optimizer.step()
    for name, p in model.named_parameters():
        g = p.grad.double()
        decayed = before[name] * (1 - lr * (0.1 if p.dim() >= 2 else 0.0))
        expected = decayed - lr * g / (g.abs() + 1e-8)  # both moments, bias-corrected, after one step
        torch.testing.assert_close(p.double(), expected, rtol=1e-5, atol=1e-7)


def test_clipping_scales_to_the_norm_and_reports_the_one_before() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(1))]
    for p in parameters:
        p.grad = torch.full_like(p, 2.0)
    norms = gradient_norms(parameters)
    assert clip_gradients(parameters, norms, 0.0).item() == 4.0
    assert torch.equal(parameters[0].grad, torch.full((3,), 2.0))  # type: ignore[arg-type]
    assert clip_gradients(parameters, norms, 1.0).item() == 4.0
    torch.testing.assert_close(parameters[0].grad, torch.full((3,), 0.5))


@pytest.mark.parametrize(("scale", "bad"), [(1e-3, None), (3.0, None), (1.0, math.inf), (1.0, math.nan)])
def test_clipping_is_that_of_torch_to_the_bit(scale: float, bad: float | None) -> None:
    """Norm and gradients, below and above the limit, and with numbers that are no numbers."""
    ours, torchs = list(small_model().parameters()), list(small_model().parameters())
    torch.manual_seed(3)
    for one, other in zip(ours, torchs, strict=True):
        one.grad = torch.randn_like(one) * scale
        if bad is not None and one is ours[2]:
            one.grad.view(-1)[1] = bad
        other.grad = one.grad.clone()
    total = clip_gradients(ours, gradient_norms(ours), 1.0)
    assert torch.equal(total.nan_to_num(-1.0), torch.nn.utils.clip_grad_norm_(torchs, 1.0).nan_to_num(-1.0))
    for one, other in zip(ours, torchs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=0, equal_nan=True)


def test_a_parameter_without_a_gradient_has_norm_0() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2, 2))]
    parameters[1].grad = torch.ones(2, 2)
    assert gradient_norms(parameters).tolist() == [0.0, 2.0]


def test_norms_by_group_name_what_is_not_finite_first() -> None:
    optimizers = build_optimizers(small_model(), OptimConfig())
    parameters = [p for o in optimizers for g in o.param_groups for p in g["params"]]
    names = [name for o in optimizers for g in o.param_groups for name in g["names"]]
    norms = torch.arange(1.0, len(parameters) + 1)
    norms[2] = float("nan")
    found = norms_by_group(optimizers, norms, largest=2)
    assert list(found)[-2:] == [names[2], names[-1]]
    assert math.isnan(found["matrices"])
    vectors = [i + 1.0 for i, name in enumerate(names) if name in optimizers[0].param_groups[1]["names"]]
    assert found["vectors"] == pytest.approx(math.hypot(*vectors))


def test_muon_takes_the_matrices_of_the_blocks_alone() -> None:
    torch.manual_seed(0)
    model, optim = small_model(), OptimConfig(matrices="muon", lr=1e-2, warmup_steps=0, weight_decay=0.1)
    adamw, muon = build_optimizers(model, optim)
    assert isinstance(muon, torch.optim.Muon)
    names = [name for group in muon.param_groups for name in group["names"]]
    assert names
    assert all(".layers." in name and name.endswith("proj.weight") for name in names)
    others = [name for group in adamw.param_groups for name in group["names"]]
    assert sorted(names + others) == sorted(name for name, _ in model.named_parameters())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    lr = set_learning_rate([adamw, muon], optim, step=1, steps=10)
    muon.step()
    name = names[0]
    change = before[name] * (1 - lr * 0.1) - model.get_parameter(name)
    singular = torch.linalg.svdvals(change.detach() / lr)
    rows, columns = change.shape
    assert (singular / (0.2 * max(rows, columns) ** 0.5)).mean() == pytest.approx(
        1.0, abs=0.25
    )  # orthogonal, as large as AdamW's


@pytest.mark.parametrize("variant", ["gated", "rwkv", "value_embeddings", "dense"])
def test_muon_leaves_routers_experts_gates_and_tables_to_adamw(variant: str) -> None:
    model = small_model(variant=variant, num_experts=4)
    adamw, muon = build_optimizers(model, OptimConfig(matrices="muon", lr_scale={"model.layers.0.*": 2.0}))
    kinds = {name.split(".")[-2] for group in muon.param_groups for name in group["names"]}
    assert kinds == {"q_proj", "k_proj", "v_proj", "o_proj"}
    rest = {name for group in adamw.param_groups for name in group["names"]}
    assert {"model.layers.1.mlp.gate.weight", "model.layers.1.mlp.experts.down_proj", "lm_head.weight"} <= rest
    assert [group["name"] for group in muon.param_groups] == ["matrices (muon)", "matrices x 2 (muon)"]


def test_muon_has_a_learning_rate_of_its_own() -> None:
    optim = OptimConfig(
        matrices="muon", muon_lr_scale=5.0, lr=1e-2, warmup_steps=0, lr_scale={"model.layers.0.*": 2.0}, min_lr_ratio=1
    )
    optimizers = build_optimizers(small_model(), optim)
    assert set_learning_rate(optimizers, optim, step=1, steps=10) == pytest.approx(1e-2)
    rates = {group["name"]: group["lr"] for optimizer in optimizers for group in optimizer.param_groups}
    assert rates["matrices"] == pytest.approx(1e-2)
    assert rates["matrices (muon)"] == pytest.approx(5e-2)
    assert rates["matrices x 2 (muon)"] == pytest.approx(0.1)


def test_muon_steps_a_spread_matrix_as_a_whole_one(one_process_group: None) -> None:
    """Two steps, so that momentum counts; the gradient is left as it was."""
    mesh = init_device_mesh("cpu", (1,))
    optim = OptimConfig(matrices="muon", lr=1e-2, warmup_steps=0)
    plain, spread = small_model(), small_model()
    spread.load_state_dict(plain.state_dict())
    for block in spread.model.layers:
        fully_shard(block, mesh=mesh)
    steppers = [build_optimizers(model, optim)[1] for model in (plain, spread)]
    for seed in range(2):
        for stepper in steppers:
            torch.manual_seed(seed)
            for group in stepper.param_groups:
                for p in group["params"]:
                    g = torch.randn(p.shape)
                    p.grad = distribute_tensor(g, mesh, p.placements) if isinstance(p, DTensor) else g
            before = [p.grad for group in stepper.param_groups for p in group["params"]]
            stepper.step()
            assert all(a is p.grad for a, p in zip(before, stepper.param_groups[0]["params"], strict=True))
    for (name, one), other in zip(plain.named_parameters(), spread.parameters(), strict=True):
        whole = other.full_tensor() if isinstance(other, DTensor) else other
        torch.testing.assert_close(whole, one, rtol=0, atol=1e-7, msg=name)
    state = steppers[1].state[steppers[1].param_groups[0]["params"][0]]
    assert isinstance(state["momentum_buffer"], DTensor)
