"""What a run will take, before it starts: memory of one process, and time at a given share of a device's peak."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from resformer.models import ResFormerConfig, ResFormerForCausalLM
from resformer.models.accounting import account
from resformer.models.compat import enable_checkpointing
from resformer.train.config import Config
from resformer.train.loss import CPU_CHUNK_ROWS
from resformer.train.reduced_loss import LOGITS
from resformer.train.usage import A100, H100_SXM

PEAKS = {"A100": A100, "H100 or H200": H100_SXM}
MFU = 0.4
DEVICE_BYTES = 80 * 10**9
STATES_BYTES = 16  # for each parameter: weight, gradient and two moments of AdamW, all fp32


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes at the peak of a training step of one process.

    Attributes:
        states: weights, gradients and optimizer.
        activations: what the forward pass of one micro-batch keeps for the backward pass.
        logits: the part of the logits that exists at a time, with its gradient.
    """

    states: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        return self.states + self.activations + self.logits


def estimate_memory(config: Config, described: ResFormerConfig) -> MemoryEstimate:
    """Weights, gradients and optimizer are shared by `parallel.shard` processes, if it is set.

    Count the tensors that a micro-batch's forward pass saves, on tensors without data.

    The count is that of eager code on a CPU; a compiled model on a GPU saves less, a caching allocator holds more. With
    checkpointing the peak has one block's own activations beside the blocks' inputs.
    """
    whole = _saved_bytes(config, described, checkpointing=False)
    activations = whole
    if config.train.checkpointing:
        activations = _saved_bytes(config, described, checkpointing=True) + whole // described.num_hidden_layers
    rows = config.micro_batch_size * config.data.sequence_length
    if config.train.dtype == "fp32":
        logits = 2 * 4 * min(CPU_CHUNK_ROWS, rows) * described.vocab_size
    else:  # and the gradient of the head, which is made in the forward pass
        logits = 2 * 4 * min(LOGITS, rows * described.vocab_size) + 4 * described.vocab_size * described.hidden_size
    return MemoryEstimate(
        states=STATES_BYTES * account(described).parameters // (config.parallel.shard or 1),
        activations=activations,
        logits=logits,
    )


def _saved_bytes(config: Config, described: ResFormerConfig, *, checkpointing: bool) -> int:
    """Bytes of the storages that autograd keeps for the backward pass of the blocks, parameters left out."""
    saved: dict[int, tuple[int, Any]] = {}
    with FakeTensorMode():
        model: Any = ResFormerForCausalLM(described)
        model.train()
        if checkpointing:
            enable_checkpointing(model)
        own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in own:
                saved[storage._cdata] = (storage.nbytes(), tensor)  # kept, so that no other storage takes its place
            return tensor

        ids = torch.zeros(config.micro_batch_size, config.data.sequence_length, dtype=torch.long)
        low = config.train.dtype == "bf16"
        with (
            torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
            torch.autocast("cpu", torch.bfloat16, enabled=low),
        ):
            model.base_model(input_ids=ids, use_cache=False)
    return sum(size for size, _ in saved.values())


def memory_line(estimate: MemoryEstimate, sequences: int) -> str:
    """The estimate for micro-batches of `sequences` in words, and what would fit a device of 80 GB."""
    each = estimate.activations / sequences
    fits = max(0, int((DEVICE_BYTES - estimate.states - estimate.logits) / each))
    up_to = f"train.micro_batch_size up to {fits}" if fits else "no train.micro_batch_size"
    micro = f"{up_to} fits a device of 80 GB"
    return (
        f"memory of one process: about {_size(estimate.total)} (weights, gradients and AdamW {_size(estimate.states)}, "
        f"activations of a micro-batch {_size(estimate.activations)}, logits {_size(estimate.logits)}), without what a "
        f"compiled model saves; {micro}"
    )


def time_line(flops: float) -> str:
    """How long `flops` floating-point operations take on one device."""
    times = ", ".join(
        f"{name} ({peak / 1e12:,.0f} TFLOP/s) {_time(flops / (MFU * peak))}" for name, peak in PEAKS.items()
    )
    return f"time on one device at {MFU:.0%} of its bf16 peak: {times}"


def _size(count: int) -> str:
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.0f} MiB"


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:,.1f} s"
    return f"{seconds / 3600:,.1f} h" if seconds < 2 * 86_400 else f"{seconds / 86_400:,.1f} days"
