"""One rank of the FSDP2 test: `worker.py RANK WORLD_SIZE STORE`. Exits with an error when a check fails."""

from __future__ import annotations

import copy
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from resformer import ResFormerConfig, ResFormerForCausalLM
from resformer.core.registry import names

# Option sets with tensors or parameters that no variant's defaults have.
MORE = [
    ("learnable", {"granularity": "channel", "source": "previous"}),
    ("learnable_plus", {"granularity": "head"}),
    ("svformer", {"gamma": True, "key_group": 2, "anchors": [1, 3]}),
    ("cla", {"share": "q"}),
    ("value_embeddings", {"style": "modded_nanogpt", "tied": True}),
]


def build(variant: str, options: dict) -> ResFormerForCausalLM:
    """A tiny model, the same on every rank, with all parameters moved off values that hide mistakes."""
    torch.manual_seed(0)
    config = ResFormerConfig(
        variant=variant,
        variant_options=options,
        vocab_size=31,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = ResFormerForCausalLM(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.train()


def shard(model: ResFormerForCausalLM, mesh, **settings) -> ResFormerForCausalLM:
    """Each block, then the root."""
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, **settings)
    return fully_shard(model, mesh=mesh, **settings)


def check(label: str, model: ResFormerForCausalLM, mesh, rank: int, size: int) -> None:
    """A sharded step on a part of the batch gives the loss and gradients of an unsharded step on all of it."""
    tokens = torch.randint(0, 31, (2 * size, 8), generator=torch.Generator().manual_seed(2))
    mine = tokens[2 * rank : 2 * rank + 2]
    whole, mixed = copy.deepcopy(model), copy.deepcopy(model)

    want = whole(tokens, labels=tokens).loss
    want.backward()
    shard(model, mesh)
    got = model(mine, labels=mine).loss
    got.backward()
    mean = got.detach().clone()
    dist.all_reduce(mean)
    assert abs(mean / size - want.detach()) < 1e-5, f"{label}: loss {mean / size} instead of {want}"
    sharded = dict(model.named_parameters())
    for name, parameter in whole.named_parameters():
        gradient = sharded[name].grad.full_tensor()
        error = (gradient - parameter.grad).abs().max()
        assert error < 1e-5 * max(1.0, parameter.grad.abs().max().item()), f"{label}: {name} is off by {error}"

    shard(mixed, mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    loss = mixed(mine, labels=mine).loss
    loss.backward()
    assert abs(loss.detach() - got.detach()) < 0.1 * got.detach(), f"{label}: bf16 loss {loss}, fp32 loss {got}"
    for name, parameter in mixed.named_parameters():
        gradient = parameter.grad.full_tensor()
        assert gradient.dtype == torch.float32 and gradient.isfinite().all() and gradient.any(), f"{label}: {name} bf16"


def main() -> None:
    rank, size, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", (size,))
    cases = [*((name, {}) for name in names()), *MORE]
    for name, options in cases:
        check(f"{name} {options}", build(name, options), mesh, rank, size)
    print("checked", len(cases))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
