"""Tiny random models of the families that `resformer.patch` is held to, and what to do with any of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

LAYERS, WIDTH, HEADS, VOCAB, TOKENS = 4, 32, 4, 61, 10
DECODER = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GEMMA = {**DECODER, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 6}


def llama(**more: Any) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**DECODER, **more}))


def mistral() -> Any:
    return transformers.MistralForCausalLM(transformers.MistralConfig(**DECODER, sliding_window=6))


def qwen2() -> Any:  # biases on queries, keys and values
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**DECODER))


def qwen3() -> Any:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**DECODER, head_dim=16))


def gemma2() -> Any:
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**GEMMA))


def gemma3() -> Any:
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**GEMMA))


def olmo2() -> Any:
    return transformers.Olmo2ForCausalLM(transformers.Olmo2Config(**DECODER))


def gpt2() -> Any:
    sizes = {"vocab_size": VOCAB, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 64}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **dropout, **tokens))


def vit() -> Any:
    sizes = {"image_size": 16, "patch_size": 4, "hidden_size": WIDTH, "intermediate_size": 48}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.ViTConfig(**sizes, **dropout, num_hidden_layers=LAYERS, num_attention_heads=HEADS)
    return transformers.ViTForImageClassification(config)


def phi3() -> Any:
    return transformers.Phi3ForCausalLM(transformers.Phi3Config(**DECODER))


def gpt_neox() -> Any:
    sizes = {name: value for name, value in DECODER.items() if name != "num_key_value_heads"}
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**sizes))


EIGHT: dict[str, Callable[..., Any]] = {
    "llama": llama,
    "mistral": mistral,
    "qwen3": qwen3,
    "gemma2": gemma2,
    "gemma3": gemma3,
    "olmo2": olmo2,
    "gpt2": gpt2,
    "vit": vit,
}
FAMILIES = {**EIGHT, "qwen2": qwen2, "phi3": phi3, "gpt_neox": gpt_neox}
LANGUAGE = [name for name in FAMILIES if name != "vit"]


def build(name: str, *, seed: int = 0) -> Any:
    """A model of a family in evaluation mode, its weights large enough that layers differ and matter."""
    torch.manual_seed(seed)
    model = FAMILIES[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.25)
    return model


def inputs(model: nn.Module, *, seed: int = 1, batch: int = 2) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    if isinstance(model, transformers.ViTForImageClassification):
        return {"pixel_values": torch.randn(batch, 3, 16, 16, generator=generator)}
    return {"input_ids": torch.randint(3, VOCAB, (batch, TOKENS), generator=generator)}


def logits(model: Any, given: dict[str, Tensor]) -> Tensor:
    return model(**given).logits


def loss(model: Any, given: dict[str, Tensor]) -> Tensor:
    """A number that depends on every logit."""
    return logits(model, given).float().logsumexp(-1).square().mean()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradients by name, taken away from the model."""
    taken = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return taken


def checkpointing(model: Any, *, reentrant: bool = False) -> None:
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})
