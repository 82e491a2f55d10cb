"""Tiny models, tokenizers made on the spot, and the plainest way to score a text: one token after the other."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, processors
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from resformer import ResFormerConfig, ResFormerForCausalLM
from resformer.data.tokenizer import train

TRAINING = [
    "The river runs down to the sea, and the sea takes it.",
    "naïve café — 日本語 text, 日本 again",
    "a light is seen far above us\r\n",
] * 20
VOCAB = 320
POSITIONS = 24


def inner_tokenizer() -> Tokenizer:
    """Byte-level BPE with an end-of-text token."""
    return Tokenizer.from_str(train(TRAINING, VOCAB))


def plain_tokenizer() -> PreTrainedTokenizerFast:
    """One that adds nothing."""
    return PreTrainedTokenizerFast(tokenizer_object=inner_tokenizer(), eos_token="<|endoftext|>")


def bos_tokenizer() -> PreTrainedTokenizerFast:
    """One that puts its BOS before a text, as Llama's does."""
    inner = inner_tokenizer()
    inner.add_special_tokens(["<s>"])
    number = inner.token_to_id("<s>")
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", number)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|endoftext|>", bos_token="<s>")


def llama() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB + 8,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=POSITIONS,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


def gpt2() -> Any:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCAB + 8,
        n_embd=32,
        n_layer=2,
        n_head=2,
        n_positions=POSITIONS,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
    )
    return GPT2LMHeadModel(config).eval()


def ours(**fields: Any) -> Any:
    torch.manual_seed(0)
    config = ResFormerConfig(
        **{
            "variant": "learnable",
            "vocab_size": VOCAB + 8,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "max_position_embeddings": POSITIONS,
            "initializer_range": 0.3,
            "bos_token_id": None,
            "eos_token_id": 0,
            **fields,
        }
    )
    return ResFormerForCausalLM(config).eval()


def save(model: Any, tokenizer: Any, out: Path) -> Path:
    """As a directory that `resformer eval` and lm-eval take."""
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return out


@torch.no_grad()
def one_by_one(model: Any, before: Iterable[int], ids: Iterable[int], *, length: int, stride: int) -> list[float]:
    """Log-probability of each token of `ids` after `before`, each by a forward pass of its own, NaN without context.

    The window that a token is scored in is found by counting windows, not by cutting.
    """
    sequence = [*before, *ids]
    first = len(sequence) - len(list(ids))
    found = []
    for target in range(first, len(sequence)):
        start = 0
        while start + length < target:
            start += stride
        context = sequence[start:target]
        if not context:
            found.append(float("nan"))
            continue
        logits = model(input_ids=torch.tensor([context]), use_cache=False).logits[0, -1]
        found.append(float(logits.double().log_softmax(-1)[sequence[target]]))
    return found
