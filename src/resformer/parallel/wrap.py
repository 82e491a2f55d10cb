"""How a model is spread over processes: everything in one function, in one order.

The three ways are one mechanism, `torch.distributed.fsdp.fully_shard` (FSDP2) over a mesh `replicate x shard`:

| replicate | shard | name |
|---|---|---|
| 1 | n | FSDP: every process holds 1/n of weights, gradients and optimizer |
| n | 1 | DDP: every process holds all of them |
| r | s | HSDP: r groups of s processes, for fast links inside a machine and slow ones between |
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from resformer.errors import UserError
from resformer.models import ResFormerForCausalLM
from resformer.models.compat import enable_checkpointing

from .ranks import Ranks


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How many processes share one copy of the weights, and how many copies there are."""

    shard: int = 1
    replicate: int = 1

    @classmethod
    def of(cls, size: int, *, shard: int | None, replicate: int) -> Layout:
        """The layout of `size` processes; `shard` None is all that `replicate` leaves.

        Raises:
            UserError: the numbers do not fit.
        """
        if shard is None and size % replicate == 0:
            shard = size // replicate
        if shard is not None and shard * replicate == size:
            return cls(shard=shard, replicate=replicate)
        wanted = f"parallel.shard {'none' if shard is None else shard} x parallel.replicate {replicate}"
        if size == 1:
            number = (shard or 1) * replicate
            raise UserError(
                f"{wanted}: there is 1 process; start {number} (torchrun --nproc-per-node {number} -m resformer train "
                "...), or set both to 1"
            )
        raise UserError(f"{wanted}: there are {size} processes; the product must be {size}, or set shard to none")


def parallelize(
    model: ResFormerForCausalLM,
    ranks: Ranks,
    layout: Layout,
    *,
    checkpointing: bool = False,
    compile: bool = False,
    methods: tuple[Callable[..., Any], ...] = (),
) -> ResFormerForCausalLM:
    """Make `model` ready to train on all processes, in place: checkpointing, then compilation of each block, then
    sharding of each block and of what is left. Every process must come with the same weights.

    Gradients are summed over the processes, not averaged: a loss that is divided by the tokens of the global batch
    then has the gradient of one process, however unequal the processes' shares are. They are exchanged in every
    backward pass unless `synchronise(model, False)` came before it.

    Args:
        model: a model on its device.
        ranks: the processes.
        layout: how they are used.
        checkpointing: recompute the activations of each block in the backward pass.
        compile: torch.compile each block; blocks with equal rows share a graph.
        methods: functions `f(model, ...)` that compute with the model other than by its forward; they become methods of
            it under their names, before which weights are gathered.
    """
    if checkpointing:
        enable_checkpointing(model)
    if compile:
        compile_blocks(model)
    for method in methods:
        setattr(model, method.__name__, types.MethodType(method, model))
    if ranks.size > 1:
        shard(model, ranks, layout, [method.__name__ for method in methods])
    return model


def shard(model: ResFormerForCausalLM, ranks: Ranks, layout: Layout, methods: list[str]) -> None:
    """Apply FSDP2 to each block and to the rest."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

    # V_1 leaves its block as a view. Nothing ever changes it in place, which is what torch warns of.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    kind = ranks.device.type
    if layout.replicate == 1:
        mesh = init_device_mesh(kind, (layout.shard,), mesh_dim_names=("shard",))
    else:
        mesh = init_device_mesh(kind, (layout.replicate, layout.shard), mesh_dim_names=("replicate", "shard"))
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, reshard_after_forward=layout.shard > 1)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    for name in methods:
        register_fsdp_forward_method(model, name)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum


def synchronise(model: nn.Module, on: bool) -> None:
    """Whether the next backward pass is the last of its step, after which gradients are exchanged."""
    from torch.distributed.fsdp import FSDPModule

    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(on)
        model.set_is_last_backward(on)


def settle(model: nn.Module) -> None:
    """Let go of the weights that a forward pass without a backward pass has gathered. Until then `named_parameters` has
    them in place of the shards.
    """
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextmanager
def gathered(model: nn.Module, names: Iterable[str]) -> Iterator[None]:
    """Context in which these parameters are whole tensors in every process, to be read; nothing is trained in it."""
    replaced: list[tuple[nn.Module, str, Any]] = []
    try:
        for name in names:
            owner, _, leaf = name.rpartition(".")
            module = model.get_submodule(owner)
            parameter: Any = module._parameters[leaf]
            if isinstance(parameter, DTensor):
                replaced.append((module, leaf, parameter))
                module._parameters[leaf] = nn.Parameter(parameter.full_tensor().detach(), requires_grad=False)
        yield
    finally:
        for module, leaf, parameter in replaced:
            module._parameters[leaf] = parameter


def compile_blocks(model: ResFormerForCausalLM, **options: Any) -> None:
    """Compile every block in place, so that names in checkpoints stay as they are; equal rows share a graph.
    `options` are those of torch.compile.

    What is compiled is the block's `forward`: `block.compile()` would take the hooks of FSDP with it and then capture
    next to nothing, without a word.

    Dynamo gives up on a code object after a few kinds of it and then runs eagerly without a word either: plans whose
    layers all differ (dense) need as many as they have layers, each once more for the first step's and later tensors.
    """
    kinds, dynamo = 2 * len(set(model.model.plan)), torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, kinds)
    for block in model.model.layers:
        block.forward = torch.compile(block.forward, **options)
