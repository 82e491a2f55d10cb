"""Tiny models for the contract: every variant, multi-head and grouped-query attention."""

from __future__ import annotations

import pytest
import torch

from resformer import ResFormerConfig, ResFormerForCausalLM
from resformer.core.registry import names

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def make(variant: str, kv_heads: int = 4, seed: int = 0, **changes) -> ResFormerForCausalLM:
    """A tiny model in evaluation mode whose lambdas are moved off their initial values, so that they matter."""
    torch.manual_seed(seed)
    config = ResFormerConfig(variant=variant, num_key_value_heads=kv_heads, **{**SIZES, **changes})
    model = ResFormerForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "value_residual" in name or "value_coefficients" in name:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
            else:
                parameter.mul_(4.0 if parameter.dim() > 1 else 1.0)  # init 0.02 gives near-uniform attention: too easy
    return model


def ids(rows: int = 2, length: int = 12, seed: int = 5) -> torch.Tensor:
    return torch.randint(1, SIZES["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=names())
def variant(request) -> str:
    return request.param


@pytest.fixture(params=[4, 2], ids=["mha", "gqa"])
def kv_heads(request) -> int:
    return request.param
