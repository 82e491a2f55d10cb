"""Tiny models of every host form."""

from __future__ import annotations

import torch

from resformer import ResFormerConfig, ResFormerForCausalLM
from resformer.models.forms import GPT2_FORM

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
FORMS = {
    "no first residual": {"first_block_residual": False},
    "qk norm": {"qk_norm": True},
    "gpt2": GPT2_FORM,
    "sliding": {"sliding_window": 5},
    "sliding in part": {"sliding_window": 5, "sliding_layers": [1, 3]},
    "experts": {"num_experts": 4},
    "all at once": {
        "first_block_residual": False,
        "qk_norm": True,
        "position_embedding": "learned",
        "norm": "layernorm",
        "sliding_window": 6,
        "num_experts": 3,
        "num_experts_per_tok": 1,
    },
}


def make(variant: str, seed: int = 0, **changes) -> ResFormerForCausalLM:
    """A tiny model in evaluation mode; lambdas are off their initial values and weights large, so that all matter."""
    torch.manual_seed(seed)
    model = ResFormerForCausalLM(ResFormerConfig(variant=variant, **{**SIZES, **changes})).eval()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "value_" in name or "depth_average" in name:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
            elif parameter.dim() > 1:
                parameter.mul_(4.0)
            else:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def ids(rows: int = 2, length: int = 12, seed: int = 5) -> torch.Tensor:
    return torch.randint(1, SIZES["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(seed))


def left_padded() -> tuple[torch.Tensor, torch.Tensor]:
    """Three prompts of 3, 7 and 12 tokens, padded on the left with token 0."""
    x, mask = ids(3, 12), torch.ones(3, 12, dtype=torch.long)
    for row, length in enumerate((3, 7, 12)):
        x[row, : 12 - length], mask[row, : 12 - length] = 0, 0
    return x, mask
