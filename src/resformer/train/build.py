"""From the configuration to the model, and to the numerics it runs in."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from resformer.errors import UserError
from resformer.models import ResFormerConfig, ResFormerForCausalLM
from resformer.train.config import Config


def model_config(
    config: Config, *, vocab_size: int, eos_token_id: int | None = None, bos_token_id: int | None = None
) -> ResFormerConfig:
    """The model's own configuration for a vocabulary of `vocab_size` entries.

    Raises:
        UserError: model.vocab_size is set and smaller, or the model refuses its sizes.
    """
    m = config.model
    if m.vocab_size is not None and m.vocab_size < vocab_size:
        raise UserError(
            f"model.vocab_size {m.vocab_size} is smaller than the data's vocabulary {vocab_size}; "
            "raise it, or set it to none"
        )
    if m.config_json is not None:
        whole = json.loads(m.config_json)
        whole |= {} if m.attention == "auto" else {"attn_implementation": m.attention}
        return ResFormerConfig(**whole)
    # Every key of the section is a field of the same name, but for these.
    fields = {field.name: getattr(m, field.name) for field in dataclasses.fields(m)}
    attention, rope_theta = fields.pop("attention"), fields.pop("rope_theta")
    del fields["from_init"], fields["config_json"]
    fields["vocab_size"] = m.vocab_size or vocab_size
    fields["max_position_embeddings"] = config.max_position_embeddings
    described = ResFormerConfig(
        **copy.deepcopy(fields),
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
        eos_token_id=eos_token_id,
        bos_token_id=bos_token_id,
        pad_token_id=None,
    )
    if attention != "auto":  # the constructor takes it too, but does not declare it
        described._attn_implementation = attention
    return described


def build_model(config: Config, described: ResFormerConfig, device: torch.device) -> ResFormerForCausalLM:
    """A new model in training mode; its weights are a function of `train.seed` alone, whatever ran before."""
    torch.manual_seed(config.train.seed)
    model: Any = ResFormerForCausalLM(described)
    model.to(device=device, dtype=torch.float32)
    model.train()
    return model


def autocast(config: Config, device: torch.device) -> AbstractContextManager[object]:
    """The context of forward passes: bf16 arithmetic over fp32 weights, or nothing."""
    if config.train.dtype == "bf16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext()


@contextmanager
def numerics(config: Config, device: torch.device) -> Iterator[None]:
    """Thread count and, on the CPU, deterministic kernels; what the process had before comes back at the end."""
    memory: Any = torch.utils.deterministic
    threads, fill = torch.get_num_threads(), memory.fill_uninitialized_memory
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        if config.train.threads is not None:
            torch.set_num_threads(config.train.threads)
        if device.type == "cpu":
            torch.use_deterministic_algorithms(True, warn_only=True)
            memory.fill_uninitialized_memory = False  # a check for bugs that costs time
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        memory.fill_uninitialized_memory = fill
