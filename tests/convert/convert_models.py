"""Tiny random models of every family that can be converted."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB = 97
WINDOWED = ("mistral", "ministral", "qwen2", "qwen3", "smollm3")
BIASED = ("llama", "qwen3", "olmo2", "smollm3", "arcee", "seed_oss")
ROPES = (
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16, "mscale": 0.7, "mscale_all_dim": 0.9},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    {"rope_type": "longrope", "factor": 2.0, "original_max_position_embeddings": 16},
)


def random_fields(family: str, seed: int) -> dict[str, Any]:
    """Fields of a config of that family that `seed` chooses: heads, head width, ties, positions, biases, windows."""
    pick = random.Random(f"{family} {seed}")
    heads = pick.choice((2, 4, 6))
    kv_heads = pick.choice([n for n in (1, 2, 3, heads) if heads % n == 0])
    width = pick.choice((4, 6, 8))
    wide = family not in ("helium",) and pick.random() < 0.5  # head_dim need not be hidden_size / heads
    layers = pick.choice((2, 3, 5))
    rope = {**pick.choice(ROPES), "rope_theta": pick.choice((1e4, 1e5, 1e6))}
    if rope["rope_type"] == "longrope":
        half = (width + 4 * wide) // 2
        rope |= {"short_factor": [1.0 + 0.1 * n for n in range(half)], "long_factor": [2.0 + n for n in range(half)]}
    fields: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": heads * width,
        "intermediate_size": pick.choice((20, 32)),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": width + 4 * wide,
        "max_position_embeddings": pick.choice((24, 64)),
        "rms_norm_eps": pick.choice((1e-5, 1e-6)),
        "rope_parameters": rope,
        "tie_word_embeddings": pick.random() < 0.5,
        "hidden_act": "relu2" if family == "arcee" else pick.choice(("silu", "gelu")),
        "pad_token_id": None,
        "bos_token_id": 1,
        "eos_token_id": pick.choice((2, [2, 3])),
    }
    for name in ("attention_bias", "mlp_bias"):
        if family in BIASED and not (name == "mlp_bias" and family in ("qwen3", "olmo2")):
            fields[name] = pick.random() < 0.5
    if family == "helium":
        fields |= {"attention_bias": pick.random() < 0.5, "mlp_bias": pick.random() < 0.5}
    if family == "ernie4_5":
        fields["use_bias"] = pick.random() < 0.5
    if family == "seed_oss":
        fields |= {"attention_out_bias": pick.random() < 0.5, "residual_dropout": 0.0, "attention_dropout": 0.0}
    if family == "smollm3":
        fields["no_rope_layers"] = [pick.choice((0, 1)) for _ in range(layers)]
    if family in WINDOWED:
        fields |= _windows(family, pick, layers)
    return fields


def _windows(family: str, pick: random.Random, layers: int) -> dict[str, Any]:
    if pick.random() < 0.4 and family != "ministral":  # which cannot do without
        return {"sliding_window": None}
    found: dict[str, Any] = {"sliding_window": pick.choice((3, 9))}
    if family == "mistral":
        return found
    if family != "ministral":
        found["use_sliding_window"] = True
    if pick.random() < 0.5:
        found["layer_types"] = [pick.choice(("full_attention", "sliding_attention")) for _ in range(layers)]
    elif family in ("qwen2", "qwen3"):
        found["max_window_layers"] = pick.choice((0, 1))
    return found


def make(family: str, seed: int = 0, **changes: Any) -> Any:
    """A model whose weights all matter: large ones, norms and biases off 1 and 0."""
    config = AutoConfig.for_model(family, **{**random_fields(family, seed), **changes})
    return moved(AutoModelForCausalLM.from_config(config), seed)


def moved(model: Any, seed: int = 0) -> Any:
    """Weights from `seed`: whatever was there before."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.25 * noise if parameter.dim() > 1 else parameter + 0.2 * noise)
    return model.eval()


def ids(rows: int = 2, length: int = 40) -> Tensor:
    return torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(1))
