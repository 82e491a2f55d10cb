"""Tiny random models of every family that can be converted."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB = 97
WINDOWED = ("mistral", "ministral", "qwen2", "qwen3", "smollm3")
BIASES = {
    **dict.fromkeys(("llama", "smollm3", "arcee", "helium"), ("attention_bias", "mlp_bias")),
    **dict.fromkeys(("qwen3", "olmo2"), ("attention_bias",)),
    "seed_oss": ("attention_bias", "mlp_bias", "attention_out_bias"),
    "ernie4_5": ("use_bias",),
}
"""What may be switched on and off; biases of Qwen2 are part of it."""
ROPES = (
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16, "mscale": 0.7, "mscale_all_dim": 0.9},
    {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "attention_factor": 1.2,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    {"rope_type": "longrope", "factor": 2.0, "original_max_position_embeddings": 16},
    {"rope_type": "longrope", "original_max_position_embeddings": 16, "attention_factor": 1.1},
)
SEEDS = 12


def dealt(family: str, what: str, choices: Sequence[Any], seed: int) -> Any:
    """One of the choices, so that seeds 0 to 11 meet each of them equally often: up to 12, all of them."""
    deck = [choices[n % len(choices)] for n in range(SEEDS)]
    random.Random(f"{family} {what}").shuffle(deck)
    return deck[seed % SEEDS]


def random_fields(family: str, seed: int) -> dict[str, Any]:
    """Fields of a config of that family that `seed` chooses: heads, head width, ties, positions, biases, windows."""

    def pick(what: str, *choices: Any) -> Any:
        return dealt(family, what, choices, seed)

    heads = pick("heads", 2, 4, 6)
    kv_heads = pick("kv heads", heads, 1, heads // 2)
    width = pick("width", 4, 6, 8)
    wide = family != "helium" and pick("wide", True, False)  # head_dim need not be hidden_size / heads
    layers = pick("layers", 2, 3, 5)
    rope = {**pick("rope", *ROPES), "rope_theta": pick("theta", 1e6, 1e4, 5e5)}
    if rope["rope_type"] == "longrope":
        half = (width + 4 * wide) // 2
        rope |= {"short_factor": [1.0 + 0.1 * n for n in range(half)], "long_factor": [2.0 + n for n in range(half)]}
    fields: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": heads * width,
        "intermediate_size": pick("mlp", 20, 32),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": width + 4 * wide,
        "max_position_embeddings": pick("positions", 24, 64),
        "rms_norm_eps": pick("eps", 1e-5, 1e-6),
        "rope_parameters": rope,
        "tie_word_embeddings": pick("tied", True, False),
        "hidden_act": "relu2" if family == "arcee" else pick("act", "silu", "gelu"),
        "pad_token_id": None,
        "bos_token_id": 1,
        "eos_token_id": pick("eos", 2, [2, 3]),
    }
    for name in BIASES.get(family, ()):
        fields[name] = pick(name, True, False)
    if family == "seed_oss":
        fields |= {"residual_dropout": 0.0, "attention_dropout": 0.0}
    if family == "smollm3":
        fields["no_rope_layers"] = [pick(f"turns {n}", 0, 1) for n in range(layers)]
    if family in WINDOWED:
        fields |= _windows(family, pick, layers)
    return fields


def _windows(family: str, pick: Callable[..., Any], layers: int) -> dict[str, Any]:
    if family != "ministral" and not pick("slides", True, True, False):  # which cannot do without
        return {"sliding_window": None}
    found: dict[str, Any] = {"sliding_window": pick("window", 3, 9)}
    if family == "mistral":
        return found
    if family != "ministral":
        found["use_sliding_window"] = True
    if pick("types", True, False):
        found["layer_types"] = [pick(f"type {n}", "full_attention", "sliding_attention") for n in range(layers)]
    elif family in ("qwen2", "qwen3"):
        found["max_window_layers"] = pick("max window layers", 0, 1)
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


def our_fields(seed: int) -> dict[str, Any]:
    """Fields of a config of ours without variant: forms that no family has as well."""

    def pick(what: str, *choices: Any) -> Any:
        return dealt("ours", what, choices, seed)

    heads, layers, position = pick("heads", 2, 4), pick("layers", 2, 3, 5), pick("position", "rope", "rope", "learned")
    rope = position == "rope"
    fields = {
        "vocab_size": VOCAB,
        "hidden_size": heads * 8,
        "intermediate_size": 20,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": pick("kv heads", heads, 1, heads // 2),
        "head_dim": pick("width", 8, 12),
        "max_position_embeddings": 64,
        "position_embedding": position,
        "tie_word_embeddings": pick("tied", True, False),
        "norm": pick("norm", "rmsnorm", "layernorm"),
        "norm_placement": pick("placement", "pre", "post"),
        "mlp": pick("mlp", "gated", "plain"),
        "qk_norm": pick("qk", True, False),
        "qk_norm_over": pick("over", "head", "all"),
        "attention_bias": pick("bias", True, False),
        "attention_out_bias": pick("out bias", True, False, None),
        "mlp_bias": pick("mlp bias", True, False),
        "sliding_window": (window := pick("window", None, 3, 9)),
        "sliding_layers": pick("slide", "all", [1]) if window else "all",
        "first_block_residual": pick("first", True, True, False),
    }
    if rope:
        fields["rope_parameters"] = {**pick("rope", *ROPES[:7]), "rope_theta": pick("theta", 1e6, 1e4)}
        fields["nope_layers"] = pick("nope", None, [2])
    return fields
