"""A model with random weights and a tokenizer of bytes, for the tests of generation."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from resformer import ResFormerConfig, ResFormerForCausalLM

SIZES: dict[str, Any] = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 256,
    "bos_token_id": None,
    "pad_token_id": None,
}


def build_tokenizer(*, eos: bool = True) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer without merges: one byte is one token, id 256 ends a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(alphabet)} | {"<|end|>": 256}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>" if eos else None)


def build_model(variant: str = "learnable", **fields: Any) -> ResFormerForCausalLM:
    """A model with random weights whose logits differ enough for sampling to matter."""
    torch.manual_seed(0)
    config = ResFormerConfig(variant=variant, initializer_range=0.3, **{**SIZES, **fields})
    return ResFormerForCausalLM(config).eval()


def speak(model: Any, tokenizer: Any, text: str) -> None:
    """Make the model say `text` over and over, whatever it is asked: each byte is followed by the next of the text,
    which must hold none twice; any other byte by the first.
    """
    ids = tokenizer(text)["input_ids"]
    assert len(set(ids)) == len(ids)
    follower = torch.full((model.config.vocab_size,), ids[0])
    follower[ids] = torch.tensor([*ids[1:], ids[0]])

    def forward(input_ids: Any = None, **given: Any) -> Any:
        output = original(input_ids=input_ids, **given)
        wanted = follower[input_ids][:, -output.logits.shape[1] :]
        output.logits = output.logits * 0 + torch.nn.functional.one_hot(wanted, model.config.vocab_size) * 9.0
        return output

    original = model.forward
    model.forward = forward
