"""Generation: seeds, greedy, streaming, the bytes of the cache, and the check of the cache against no cache."""

from __future__ import annotations

import io

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from resformer import ResFormerConfig, ResFormerForCausalLM
from resformer.errors import UserError
from resformer.evaluate import generation
from resformer.evaluate.generation import cache_difference, generate

SIZES = {
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


def build_model(variant: str = "learnable") -> ResFormerForCausalLM:
    """A model with random weights whose logits differ enough for sampling to matter."""
    torch.manual_seed(0)
    return ResFormerForCausalLM(ResFormerConfig(variant=variant, initializer_range=0.3, **SIZES)).eval()


def test_the_same_seed_gives_the_same_text_and_seed_0_is_a_seed() -> None:
    model, tokenizer = build_model(), build_tokenizer()
    texts = [
        generate(model, tokenizer, "abc", max_new_tokens=20, temperature=1.0, seed=seed).tokens for seed in (0, 0, 1)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_the_callers_random_state_is_left_alone() -> None:
    model, tokenizer = build_model(), build_tokenizer()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    generate(model, tokenizer, "abc", max_new_tokens=4, temperature=1.0, seed=9)
    assert torch.equal(torch.rand(3), expected)


def test_temperature_0_is_greedy_and_ignores_the_seed() -> None:
    model, tokenizer = build_model(), build_tokenizer()
    done = generate(model, tokenizer, "abc", max_new_tokens=12, temperature=0.0, seed=1)
    ids = torch.tensor([tokenizer("abc")["input_ids"]])
    for token in done.tokens:
        with torch.no_grad():
            assert int(model(input_ids=ids, use_cache=False).logits[0, -1].argmax()) == token
        ids = torch.cat([ids, torch.tensor([[token]])], dim=1)


def test_top_k_1_is_greedy() -> None:
    model, tokenizer = build_model(), build_tokenizer()
    greedy = generate(model, tokenizer, "abc", max_new_tokens=12, temperature=0.0)
    assert (
        generate(model, tokenizer, "abc", max_new_tokens=12, temperature=1.0, top_k=1, seed=3).tokens == greedy.tokens
    )


def test_what_is_streamed_is_the_text() -> None:
    model, tokenizer = build_model(), build_tokenizer()
    sink = io.StringIO()
    done = generate(model, tokenizer, "abc", max_new_tokens=30, temperature=1.0, seed=2, stream_to=sink)
    assert sink.getvalue() == done.text
    assert len(done.tokens) == 30 or done.tokens[-1] == tokenizer.eos_token_id


def test_generation_stops_at_the_end_of_text_token() -> None:
    model, tokenizer = build_model(), build_tokenizer()
    with torch.no_grad():
        model.lm_head.weight.zero_()  # all logits equal: greedy takes id 0 ...
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(0)  # ... which now ends the text
    done = generate(model, tokenizer, "abc", max_new_tokens=9, temperature=0.0)
    assert done.tokens == (0,)
    assert done.decode_tokens_per_second == 0.0 < done.prefill_tokens_per_second


@pytest.mark.parametrize(("variant", "planes"), [("transformer", 8), ("learnable", 8), ("svformer", 5)])
def test_cache_bytes_are_those_of_the_planes_that_are_kept(variant: str, planes: int) -> None:
    done = generate(build_model(variant), build_tokenizer(), "abcdef", max_new_tokens=10, temperature=0.0)
    assert done.cache_tokens == done.prompt_tokens + len(done.tokens) - 1  # the last token was never fed back
    plane_bytes = done.cache_tokens * 2 * 8 * 4  # KV heads, head dim, fp32
    assert done.cache_bytes == planes * plane_bytes


@pytest.mark.parametrize("variant", ["transformer", "learnable_plus", "svformer"])
def test_the_cache_does_not_change_the_logits(variant: str) -> None:
    assert cache_difference(build_model(variant), build_tokenizer(), "abc", list(range(20))) < 1e-4


def test_a_broken_cache_is_found() -> None:
    model = build_model()
    update, calls = model.model.layers[2].self_attn.k_proj.forward, []

    def forgetful(hidden: torch.Tensor) -> torch.Tensor:
        calls.append(hidden.shape[1])
        return update(hidden) * (1.0 if hidden.shape[1] > 1 else 0.0)  # keys of single tokens are lost

    model.model.layers[2].self_attn.k_proj.forward = forgetful
    assert cache_difference(model, build_tokenizer(), "abc", list(range(20))) > 1e-2
    assert 1 in calls


def test_other_models_generate_too() -> None:
    torch.manual_seed(0)
    llama = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    done = generate(llama, build_tokenizer(), "abc", max_new_tokens=5, temperature=0.0)
    assert done.cache_bytes == 8 * done.cache_tokens * 2 * 8 * 4
    assert cache_difference(llama, build_tokenizer(), "abc", done.tokens) < 1e-4


def test_an_empty_prompt_starts_from_the_end_of_text_token() -> None:
    model, tokenizer = build_model(), build_tokenizer()
    assert generate(model, tokenizer, "", max_new_tokens=3).prompt_tokens == 1
    assert generation.prompt_ids(model, tokenizer, "").tolist() == [[256]]
    with pytest.raises(UserError, match="prompt is empty"):
        generate(model, build_tokenizer(eos=False), "", max_new_tokens=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0, expected 1"),
        ({"temperature": -1.0}, r"temperature is -1.0, expected 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.1, "top_k": -2}, "top_k is -2.*; top_p is 1.1"),
        ({"seed": -1}, "seed is -1, expected 0 to 9223372036854775807"),
        ({"seed": 99999999999999999999999}, "seed is 99999999999999999999999, expected 0 to"),
        ({"max_new_tokens": 126}, "make 129, but the model was built for 128 positions.* 125 or less"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        generate(build_model(), build_tokenizer(), "abc", **options)  # type: ignore[arg-type]


def test_a_prompt_that_fills_the_model_is_told_to_shrink() -> None:
    with pytest.raises(UserError, match=r"built for 128 positions; shorten the prompt below 128 tokens$"):
        generate(build_model(), build_tokenizer(), "a" * 128, max_new_tokens=1)


def test_a_tokenizer_that_does_not_fit_is_refused() -> None:
    torch.manual_seed(0)
    model = ResFormerForCausalLM(ResFormerConfig(**{**SIZES, "vocab_size": 50, "eos_token_id": 1}))
    with pytest.raises(UserError, match="vocabulary has 50 entries"):
        generate(model, build_tokenizer(), "zzz", max_new_tokens=3)


def test_the_models_mode_is_restored() -> None:
    model = build_model().train()
    generate(model, build_tokenizer(), "abc", max_new_tokens=2)
    assert model.training
