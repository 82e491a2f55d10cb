"""Configurations as published models have them, old spellings included: what they say of the model is carried over."""

from __future__ import annotations

import json
from typing import Any

import pytest

from resformer.convert.back import plain_config
from resformer.convert.checkpoint import _configs
from resformer.convert.source import open_source


def sizes(hidden, inner, layers, heads, kv_heads, vocabulary, positions, eps) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": positions,
        "rms_norm_eps": eps,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.45.0",
        "use_cache": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attention_dropout": 0.0,
    }


LLAMA3 = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
NO_ROPE = [int(n % 4 != 0) for n in range(1, 37)]
# Name -> model_type, sizes, what else the file says, and what of ours must follow.
PUBLISHED: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "SmolLM2": (
        "llama",
        sizes(576, 1536, 30, 9, 3, 49152, 8192, 1e-5),
        {
            "rope_theta": 100000,
            "rope_scaling": None,
            "rope_interleaved": False,
            "is_llama_config": True,
            "pretraining_tp": 1,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
        },
        {"rope_theta": 100000, "rope_type": "default", "head_dim": 64, "tie_word_embeddings": True},
    ),
    "Llama 3.2": (
        "llama",
        sizes(2048, 8192, 16, 32, 8, 128256, 131072, 1e-5),
        {"rope_theta": 5e5, "rope_scaling": LLAMA3, "head_dim": 64, "tie_word_embeddings": True, "mlp_bias": False},
        {"rope_theta": 5e5, **LLAMA3, "head_dim": 64},
    ),
    "a Llama with an old linear scaling": (
        "llama",
        sizes(2048, 5632, 22, 32, 4, 32000, 4096, 1e-5),
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "tie_word_embeddings": False},
        {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0, "tie_word_embeddings": False},
    ),
    "Mistral 7B": (
        "mistral",
        sizes(4096, 14336, 32, 32, 8, 32000, 32768, 1e-5),
        {"rope_theta": 1e4, "sliding_window": 4096, "tie_word_embeddings": False},
        {"sliding_window": 4096, "sliding_layers": "all", "head_dim": 128},
    ),
    "Qwen2.5": (
        "qwen2",
        sizes(896, 4864, 24, 14, 2, 151936, 32768, 1e-6),
        {
            "rope_theta": 1e6,
            "sliding_window": 32768,
            "use_sliding_window": False,
            "max_window_layers": 24,
            "use_mrope": False,
            "tie_word_embeddings": True,
        },
        {"rope_theta": 1e6, "attention_bias": True, "attention_out_bias": False, "sliding_window": None},
    ),
    "Qwen3": (
        "qwen3",
        sizes(1024, 3072, 28, 16, 8, 151936, 40960, 1e-6),
        {
            "rope_theta": 1e6,
            "rope_scaling": None,
            "head_dim": 128,
            "attention_bias": False,
            "sliding_window": None,
            "use_sliding_window": False,
            "max_window_layers": 28,
            "tie_word_embeddings": True,
        },
        {"rope_theta": 1e6, "head_dim": 128, "qk_norm": True, "qk_norm_over": "head", "attention_bias": False},
    ),
    "OLMo 2": (
        "olmo2",
        sizes(2048, 8192, 16, 16, 16, 100352, 4096, 1e-6),
        {"rope_theta": 5e5, "rope_scaling": None, "attention_bias": False, "tie_word_embeddings": False},
        {"rope_theta": 5e5, "qk_norm": True, "qk_norm_over": "all", "norm_placement": "post"},
    ),
    "SmolLM3": (
        "smollm3",
        sizes(2048, 11008, 36, 16, 4, 128256, 65536, 1e-6),
        {
            "rope_theta": 5e6,
            "rope_scaling": None,
            "no_rope_layers": NO_ROPE,
            "no_rope_layer_interval": 4,
            "layer_types": ["full_attention"] * 36,
            "max_window_layers": 28,
            "use_sliding_window": False,
            "sliding_window": None,
            "pretraining_tp": 2,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
        },
        {"rope_theta": 5e6, "nope_layers": [4, 8, 12, 16, 20, 24, 28, 32, 36], "sliding_window": None},
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_is_understood(tmp_path, name):
    family, given, more, expected = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, **given, **more}))
    source = open_source(str(tmp_path))
    _, ours, start = _configs(source, "learnable", {}, ())
    assert start.exact
    rope, shape = ours.rope(), ours.shape()
    found = {**ours.to_dict(), **rope, "head_dim": shape.head_dim, "num_key_value_heads": shape.kv_heads}
    carried = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    for key in (*carried, "vocab_size", "max_position_embeddings", "rms_norm_eps", "hidden_act"):
        assert found[key] == given[key], key
    for key, value in expected.items():
        kept = list(found[key]) if isinstance(found[key], tuple) else found[key]
        assert kept == value, key
    before, after = source.config.to_dict(), plain_config(ours).to_dict()
    assert {key for key, value in before.items() if after.get(key) != value} <= {"_name_or_path"}
