"""From the configuration to the model, and to the numerics it runs in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from resformer.errors import UserError
from resformer.models import ResFormerConfig, ResFormerForCausalLM
from resformer.models.compat import enable_checkpointing
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
    described = ResFormerConfig(
        variant=m.variant,
        variant_options=dict(m.variant_options),
        vocab_size=m.vocab_size or vocab_size,
        hidden_size=m.hidden_size,
        intermediate_size=m.intermediate_size,
        num_hidden_layers=m.num_hidden_layers,
        num_attention_heads=m.num_attention_heads,
        num_key_value_heads=m.num_key_value_heads,
        head_dim=m.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=m.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": m.rope_theta},
        first_block_residual=m.first_block_residual,
        qk_norm=m.qk_norm,
        position_embedding=m.position_embedding,
        norm=m.norm,
        layer_norm_eps=m.layer_norm_eps,
        mlp=m.mlp,
        hidden_act=m.hidden_act,
        sliding_window=m.sliding_window,
        sliding_layers=m.sliding_layers if isinstance(m.sliding_layers, str) else list(m.sliding_layers),
        num_experts=m.num_experts,
        num_experts_per_tok=m.num_experts_per_tok,
        router_aux_loss_coef=m.router_aux_loss_coef,
        attention_bias=m.attention_bias,
        mlp_bias=m.mlp_bias,
        tie_word_embeddings=m.tie_word_embeddings,
        initializer_range=m.initializer_range,
        eos_token_id=eos_token_id,
        bos_token_id=bos_token_id,
        pad_token_id=None,
    )
    described._attn_implementation = m.attention  # the constructor takes it too, but does not declare it
    return described


def build_model(config: Config, described: ResFormerConfig, device: torch.device) -> ResFormerForCausalLM:
    """A new model in training mode; its weights are a function of `train.seed` alone, whatever ran before."""
    torch.manual_seed(config.train.seed)
    model: Any = ResFormerForCausalLM(described)
    model.to(device=device, dtype=torch.float32)
    model.train()
    if config.train.checkpointing:
        enable_checkpointing(model)
    if config.train.compile:
        compile_blocks(model)
    return model


def compile_blocks(model: ResFormerForCausalLM) -> None:
    """Compile every block in place, so that names in checkpoints stay as they are; equal rows share a graph.

    Dynamo gives up on a code object after a few kinds of it and then runs eagerly without a word: plans whose layers
    all differ (dense) need as many as they have layers, each once more for the first step's and later tensors.
    """
    kinds, dynamo = 2 * len(set(model.model.plan)), torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, kinds)
    for layer in model.model.layers:
        layer.compile()


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
