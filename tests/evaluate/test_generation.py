"""Generation: seeds, greedy, streaming, the bytes of the cache, and the check of the cache against no cache."""

from __future__ import annotations

import io

import pytest
import torch
from generation_helpers import SIZES, build_model, build_tokenizer
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, cache_utils

from resformer import ResFormerConfig, ResFormerForCausalLM
from resformer.errors import UserError
from resformer.evaluate import generation
from resformer.evaluate.generation import cache_difference, check_cache, generate, generate_many


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


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_caches_of_other_models(kind: str) -> None:
    torch.manual_seed(0)
    llama, tokenizer = LlamaForCausalLM(LlamaConfig(**SIZES)).eval(), build_tokenizer()
    made = generate_many(llama, tokenizer, ["abc", "abcdef"], max_new_tokens=5, temperature=0.0, cache=kind)
    positions = 6 + (5 if kind == "static" else 4)  # the last token was never fed back
    assert made[0].cost.cache_bytes == 2 * 8 * positions * 2 * 8 * 4
    assert made[0].cost.cache_bytes_per_token == 8 * 2 * 8 * 4
    assert check_cache(llama, tokenizer, made, cache=kind).passed
    for missing, message in (("tokens", "has not; use one of dynamic, static"), ("offloaded", "on 'cpu'")):
        with pytest.raises(UserError, match=message):
            generate(llama, tokenizer, "abc", max_new_tokens=5, cache=missing)


@pytest.mark.parametrize("kind", ["static", "tokens", "auto"])
def test_every_exact_kind_of_cache_says_the_same(kind: str) -> None:
    model, tokenizer, prompts = build_model("svformer"), build_tokenizer(), ["abc", "hello there"]
    plain, other = (
        generate_many(model, tokenizer, prompts, max_new_tokens=12, temperature=1.0, cache=one)
        for one in ("dynamic", kind)
    )
    assert [one.tokens for one in plain] == [one.tokens for one in other]
    found = check_cache(model, tokenizer, other, cache=kind)
    assert found.passed and not found.lossy and found.tolerance == 1e-4
    parts = other[0].cost
    assert (parts.table_bytes > 0) == (parts.gathered_bytes > 0) == (parts.cache_kind == "tokens") == (kind == "tokens")


@pytest.mark.skipif(not hasattr(cache_utils, "Fp8QuantizedLayer"), reason="this transformers has no fp8 cache")
def test_a_quantized_cache_says_that_it_is_lossy() -> None:
    model, tokenizer = build_model("svformer"), build_tokenizer()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(0.1 if weight.dim() > 1 else 1.0)  # weights as training begins with: attention is even
    made = generate_many(model, tokenizer, ["abcdef", "hello there"], max_new_tokens=9, cache="quantized")
    found = check_cache(model, tokenizer, made, cache="quantized")
    assert found.lossy and found.passed and found.tolerance == 0.1
    assert found.relative > check_cache(model, tokenizer, made).relative * 10


def test_bf16_has_a_tolerance_of_its_own() -> None:
    model, tokenizer = build_model("svformer").to(torch.bfloat16), build_tokenizer()
    made = generate_many(model, tokenizer, ["abcdef", "hello there", "x"], max_new_tokens=20)
    found = check_cache(model, tokenizer, made)
    assert 1e-4 < found.relative <= found.tolerance == 0.1


def test_the_check_looks_at_every_row_of_a_padded_batch() -> None:
    model, tokenizer = build_model(), build_tokenizer()
    made = generate_many(model, tokenizer, ["hello there", "abc"], max_new_tokens=8)
    assert check_cache(model, tokenizer, made).passed
    project = model.model.layers[2].self_attn.k_proj.forward

    def forgetful(hidden: torch.Tensor) -> torch.Tensor:
        keys = project(hidden).clone()
        if hidden.shape[0] == 2:
            keys[1, -1] = 0  # the last key of the short row is lost
        return keys

    model.model.layers[2].self_attn.k_proj.forward = forgetful
    assert not check_cache(model, tokenizer, made).passed


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
        ({"temperature": 1e-40}, "expected 0 .greedy., or 1e-06 or more"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.1, "top_k": -2}, "top_k is -2.*; top_p is 1.1"),
        ({"seed": -1}, "seed is -1, expected 0 to 9223372036854775807"),
        ({"seed": 99999999999999999999999}, "seed is 99999999999999999999999, expected 0 to"),
        ({"min_p": 1.5}, "min_p is 1.5, expected 0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0, expected more than 0"),
        ({"stop": "."}, "stop takes a list"),
        ({"stop": [""]}, "none of them empty"),
        ({"cache": "statik"}, "cache kind is 'statik'.*did you mean 'static'"),
        ({"cache": "offloaded"}, "on 'cpu'; use the kind 'dynamic'"),
        ({"cache": "tokens", "compile": True}, "compile needs a static cache, but cache is 'tokens'"),
        (
            {"max_new_tokens": 126, "strict": True},
            "make 129, but the model was built for 128 positions.* 125 or less",
        ),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        generate(build_model(), build_tokenizer(), "abc", **{"max_new_tokens": 9, **options})  # type: ignore[arg-type]


def test_a_prompt_that_fills_the_model_is_told_to_shrink() -> None:
    with pytest.raises(UserError, match=r"built for 128 positions; shorten the prompt below 128 tokens$"):
        generate(build_model(), build_tokenizer(), "a" * 128, max_new_tokens=1, strict=True)


def test_beyond_the_trained_positions_there_is_one_warning_with_the_numbers() -> None:
    model, tokenizer = build_model(max_position_embeddings=16), build_tokenizer()
    with pytest.warns(UserWarning) as said:
        done = generate(model, tokenizer, "abcdefgh", max_new_tokens=14, temperature=0.0)
    assert [str(one.message) for one in said] == [
        "8 prompt tokens and 14 new ones (max_new_tokens) make 22; the model was trained for 16 positions, and text "
        "beyond may be poor"
    ]
    assert len(done.tokens) == 14


@pytest.mark.parametrize("other", [False, True])
def test_learned_positions_have_an_end(other: bool) -> None:
    sizes = {"vocab_size": 257, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 16}
    model = (
        GPT2LMHeadModel(GPT2Config(**sizes, eos_token_id=256, bos_token_id=None)).eval()
        if other
        else build_model("transformer", max_position_embeddings=16, position_embedding="learned")
    )
    made = generate_many(model, build_tokenizer(), ["abcdefgh", "a"], max_new_tokens=8, temperature=0.0)
    assert [len(one.tokens) for one in made] == [8, 8]
    with pytest.raises(UserError, match=r"built for 16 positions, which it learned: there are no more.* 8 or less"):
        generate_many(model, build_tokenizer(), ["abcdefgh", "a"], max_new_tokens=9, temperature=0.0)


def test_a_tokenizer_that_does_not_fit_is_refused() -> None:
    torch.manual_seed(0)
    model = ResFormerForCausalLM(ResFormerConfig(**{**SIZES, "vocab_size": 50, "eos_token_id": 1}))
    with pytest.raises(UserError, match="vocabulary has 50 entries"):
        generate(model, build_tokenizer(), "zzz", max_new_tokens=3)


def test_the_models_mode_is_restored() -> None:
    model = build_model().train()
    generate(model, build_tokenizer(), "abc", max_new_tokens=2)
    assert model.training
