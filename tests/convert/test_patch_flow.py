"""Values belong to one forward call: threads, replicas, nested calls, errors in the middle, memory, wrappers."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import patch_families as families
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import resformer
from resformer.convert import patch_flow
from resformer.convert.patch import lambda_names

NAMES = ["llama", "gpt2", "vit"]


def patched(name: str = "llama", variant: str = "learnable", **options: Any) -> Any:
    model = resformer.patch(families.build(name), variant=variant, variant_options=options)
    with torch.no_grad():
        for parameter in lambda_names(model):
            model.get_parameter(parameter).add_(0.2 * torch.randn(model.get_parameter(parameter).shape))
    return model


def blocks(model: Any) -> nn.ModuleList:
    return next(m for m in model.modules() if isinstance(m, nn.ModuleList))


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[weakref.ref[Any]]]:
    """Every stream that is made."""
    made: list[weakref.ref[Any]] = []
    start = patch_flow.ValueStream.__init__

    def counted(self: Any, *args: Any) -> None:
        made.append(weakref.ref(self))
        start(self, *args)

    monkeypatch.setattr(patch_flow.ValueStream, "__init__", counted)
    yield made


def tensors_reached_from(model: nn.Module) -> int:
    """Tensors on modules, in whatever they hold."""
    seen: set[int] = set()
    todo: list[Any] = [vars(module) for module in model.modules()]
    count = 0
    while todo:
        item = todo.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        count += isinstance(item, Tensor)
        if isinstance(item, dict):
            todo += item.values()
        elif isinstance(item, list | tuple | set):
            todo += item
        elif type(item).__module__.startswith("resformer"):
            todo += vars(item).values() if hasattr(item, "__dict__") else []
    return count


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_nothing_is_left_after_a_forward_pass(name: str, checkpointed: bool, streams: list[weakref.ref[Any]]) -> None:
    """Neither on a module nor anywhere else, though nobody ran the pass backward."""
    model = patched(name, "learnable_plus").train()
    if checkpointed:
        families.checkpointing(model)
    families.logits(model, families.inputs(model))
    before = tensors_reached_from(model)
    out = families.logits(model, families.inputs(model, batch=3))
    assert tensors_reached_from(model) == before
    assert patch_flow._current.get() is None
    del out
    gc.collect()
    assert len(streams) == 2
    assert [stream() for stream in streams] == [None, None]


@pytest.mark.parametrize("name", NAMES)
def test_threads_do_not_mix(name: str) -> None:
    """Three forward passes with gradients at once, which wait for each other in front of every block."""
    model, count = patched(name, "dense"), 3
    given = [families.inputs(model, seed=n, batch=n + 1) for n in range(count)]
    expected = [families.logits(model, each) for each in given]
    weight = next(m for m in model.modules() if hasattr(m, "value_residual")).value_residual.weights
    wanted = [torch.autograd.grad(out.square().sum(), weight)[0] for out in expected]
    barrier = threading.Barrier(count, timeout=60)

    def wait(module: nn.Module, args: Any) -> None:
        barrier.wait()

    for module in model.modules():  # also between the attention's start and its projection
        module.register_forward_pre_hook(wait)
    got: dict[int, Tensor] = {}

    def run(n: int) -> None:
        got[n] = families.logits(model, given[n])

    threads = [threading.Thread(target=run, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n in range(count):
        assert torch.equal(got[n], expected[n])
        assert torch.equal(torch.autograd.grad(got[n].square().sum(), weight)[0], wanted[n])


def replica(model: nn.Module) -> Any:
    """What DataParallel puts on another device: modules that share tables of hooks, with plain tensors for weights."""
    twins: dict[nn.Module, Any] = {module: module._replicate_for_data_parallel() for module in model.modules()}
    for module, twin in twins.items():
        for name, child in module._modules.items():
            twin._modules[name] = None if child is None else twins[child]
        for name, parameter in module._parameters.items():
            setattr(twin, name, None if parameter is None else 1.0 * parameter)
    return twins[model]


@pytest.mark.parametrize("name", NAMES)
def test_replicas_work_on_themselves(name: str) -> None:
    model = patched(name, "learnable_plus")
    given = [families.inputs(model, seed=n) for n in range(2)]
    expected = [families.logits(model, each) for each in given]
    sum(out.square().sum() for out in expected).backward()
    wanted = families.gradients(model)
    twins = [replica(model), replica(model)]
    got: list[Any] = [None, None]

    def run(n: int) -> None:
        got[n] = families.logits(twins[n], given[n])

    threads = [threading.Thread(target=run, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sum(out.square().sum() for out in got).backward()
    for left, right in zip(got, expected, strict=True):
        assert torch.equal(left, right)
    for parameter, gradient in families.gradients(model).items():
        torch.testing.assert_close(gradient, wanted[parameter], atol=1e-4, rtol=1e-4, msg=parameter)


def test_a_forward_pass_inside_another_does_not_mix() -> None:
    model, other = patched("llama"), patched("llama")
    outside, inside = families.inputs(model), families.inputs(model, seed=5, batch=3)
    expected, wanted = families.logits(model, outside), families.logits(other, inside)
    projection = blocks(model)[2].self_attn.v_proj
    got: list[Tensor] = []

    def nested(module: nn.Module, args: Any) -> None:
        if not got:
            got.append(torch.empty(0))
            got[0] = families.logits(other, inside)
            got.append(families.logits(model, inside))  # the very model that is running

    projection.register_forward_pre_hook(nested)
    assert torch.equal(families.logits(model, outside), expected)
    assert torch.equal(got[0], wanted)
    assert torch.equal(got[1], families.logits(model, inside))


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("where", ["self_attn.v_proj", "self_attn.o_proj", "self_attn", "mlp"])
def test_an_error_in_the_middle_leaves_nothing_behind(
    where: str, checkpointed: bool, streams: list[weakref.ref[Any]]
) -> None:
    model = patched("llama", "neutreno").train()
    if checkpointed:
        families.checkpointing(model)
    given = families.inputs(model)
    expected = families.logits(model, given)

    def fail(module: nn.Module, args: Any) -> None:
        raise RuntimeError("out of memory")

    handle = blocks(model)[2].get_submodule(where).register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        families.logits(model, given)
    assert patch_flow._current.get() is None
    gc.collect()
    assert streams[-1]() is None
    handle.remove()
    assert torch.equal(families.logits(model, given), expected)


def test_the_projection_by_itself_is_the_plain_one() -> None:
    model = patched("llama")
    attention, x = blocks(model)[2].self_attn, torch.randn(1, 3, families.WIDTH)
    assert torch.equal(attention.v_proj(x), nn.functional.linear(x, attention.v_proj.weight))


def test_a_block_by_itself_says_what_it_lacks() -> None:
    model = patched("llama")
    with pytest.raises(resformer.UserError, match=r"did not reach attention of layer 2 \(model.layers.1.self_attn\)"):
        blocks(model)[1](torch.randn(1, 3, families.WIDTH))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("variant", ["learnable", "neutreno"])
def test_other_ways_to_checkpoint_are_exact_too(name: str, variant: str) -> None:
    """The whole model, and each block wrapped from outside (as torch's CheckpointWrapper does, which FSDP users have):
    then the hooks of a block's attention run again as well.
    """
    model = patched(name, variant).train()
    given = [families.inputs(model, seed=n) for n in (1, 2)]
    sum(families.loss(model, each) for each in given).backward()
    wanted = families.gradients(model)

    whole = [checkpoint(lambda each=each: families.loss(model, each), use_reentrant=False) for each in given]
    sum(whole).backward()
    assert all(torch.equal(g, wanted[n]) for n, g in families.gradients(model).items())

    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

    wrapped = copy.deepcopy(model)
    for n, block in enumerate(blocks(wrapped)):
        blocks(wrapped)[n] = CheckpointWrapper(block, preserve_rng_state=False)
    given = [{**each, **({} if name == "vit" else {"use_cache": False})} for each in given]
    sum(families.loss(wrapped, each) for each in given).backward()
    for parameter, gradient in families.gradients(wrapped).items():
        assert torch.equal(gradient, wanted[parameter.replace("_checkpoint_wrapped_module.", "")]), parameter


def test_recomputation_in_another_thread() -> None:
    """As on an accelerator, whose backward passes run in threads of their own."""
    model = patched("llama", "neutreno").train()
    given = [families.inputs(model, seed=n) for n in (1, 2)]
    sum(families.loss(model, each) for each in given).backward()
    wanted = families.gradients(model)
    families.checkpointing(model)
    total = sum(families.loss(model, each) for each in given)
    thread = threading.Thread(target=total.backward)
    thread.start()
    thread.join()
    got = families.gradients(model)
    assert got.keys() == wanted.keys()
    assert all(torch.equal(gradient, wanted[parameter]) for parameter, gradient in got.items())


def test_second_derivatives_through_a_checkpoint() -> None:
    model = patched("llama").double().train()
    model.set_attn_implementation("eager")
    given, weight = families.inputs(model), model.model.layers[0].self_attn.v_proj.weight

    def second() -> Tensor:
        (first,) = torch.autograd.grad(families.loss(model, given), weight, create_graph=True)
        return torch.autograd.grad(first.square().sum(), weight)[0]

    expected = second()
    families.checkpointing(model)
    torch.testing.assert_close(second(), expected)


@pytest.mark.parametrize("name", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[1:])])
def test_the_whole_model_compiles_to_one_graph(name: str) -> None:
    torch._dynamo.reset()
    model = patched(name, "learnable")
    del blocks(model)[2:]
    given = families.inputs(model)
    expected = families.loss(model, given)
    expected.backward()
    wanted = families.gradients(model)
    compiled: Callable[..., Any] = torch.compile(model, backend="aot_eager", fullgraph=True)
    got = families.loss(compiled, given)
    torch.testing.assert_close(got, expected)
    got.backward()
    for parameter, gradient in families.gradients(model).items():
        torch.testing.assert_close(gradient, wanted[parameter], atol=1e-5, rtol=1e-4, msg=parameter)


@pytest.mark.slow
def test_blocks_compile_one_by_one() -> None:
    torch._dynamo.reset()
    model = patched("llama", "learnable")
    given = families.inputs(model)
    expected = families.logits(model, given)
    for block in blocks(model):
        block.forward = torch.compile(block.forward, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(families.logits(model, given), expected)


def test_a_visit_that_was_traced_is_seen_outside_of_the_graph() -> None:
    """Attention may be compiled only in part; what runs eagerly in the middle must find the visit all the same."""
    current, traced = patch_flow._Current(), object()
    current.traced = traced  # type: ignore[assignment]
    assert current.get() is traced
    current.set(None)
    assert current.traced is None
    current.set(traced)  # type: ignore[arg-type]
    assert current.traced is None
    assert current.get() is traced


@pytest.mark.parametrize("bf16", [False, True])
def test_fsdp_keeps_values_and_gradients(bf16: bool) -> None:
    """FSDP2 rebuilds lists, tuples and dictionaries that go into a block in bf16; the stream is none of them."""
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = patched("llama").train()
    given = families.inputs(model)
    families.loss(model, given).backward()
    wanted = families.gradients(model)
    families.checkpointing(model)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if bf16 else None)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        for block in blocks(model):
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh)
        families.loss(model, {**given, "use_cache": False}).backward()
        got = {parameter: gradient.full_tensor() for parameter, gradient in families.gradients(model).items()}
    finally:
        dist.destroy_process_group()
    assert got.keys() == wanted.keys()
    for parameter, gradient in got.items():
        if bf16 and gradient.numel() == 1:
            assert gradient.abs() > 0, parameter  # of a sum over all tokens bf16 leaves little
        else:
            assert (gradient - wanted[parameter]).norm() < (0.1 if bf16 else 1e-5) * wanted[parameter].norm(), parameter
