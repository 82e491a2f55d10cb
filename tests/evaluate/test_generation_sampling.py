"""Sampling: the Gumbel-max draw has the right distribution, and a prompt's text is its own."""

from __future__ import annotations

import pytest
import torch
from generation_helpers import build_model, build_tokenizer
from scipy.stats import chisquare

from resformer.evaluate.generation import generate, generate_many
from resformer.evaluate.sampling import GumbelMax, Sampling, processors, row_generator

PROMPTS = ["abc", "hello there", "a", "what is it"]


def test_draws_are_distributed_as_softmax() -> None:
    scores = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -3.0, -float("inf")])
    draw, count = GumbelMax([row_generator(3, 0, [1])]), 20_000
    made = torch.stack([draw(torch.zeros(1, 1), scores[None]).argmax() for _ in range(count)])
    seen = torch.bincount(made, minlength=8)
    assert seen[-1] == 0  # what a filter took out stays out
    expected = scores.softmax(-1)[:-1].double() * count
    assert chisquare(seen[:-1].numpy(), (expected * count / expected.sum()).numpy()).pvalue > 0.01
    wrong = (scores[:-1] * 1.1).softmax(-1).double()
    assert chisquare(seen[:-1].numpy(), (wrong * count / wrong.sum()).numpy()).pvalue < 1e-4  # it would be noticed


def test_samples_of_a_model_are_distributed_as_its_softmax() -> None:
    model, tokenizer, count = build_model(), build_tokenizer(), 3000
    with torch.no_grad():
        model.lm_head.weight[8:].zero_()
        probabilities = (model(torch.tensor([tokenizer("abc")["input_ids"]])).logits[0, -1] / 0.9).softmax(-1)
    made = generate_many(model, tokenizer, ["abc"], num_samples=count, max_new_tokens=1, temperature=0.9)
    seen = torch.bincount(torch.tensor([one.tokens[0] for one in made]), minlength=257).double()
    groups = torch.cat([torch.arange(8), torch.full((249,), 8)])  # the rest are equal: one group
    observed, expected = (torch.zeros(9).double().index_add(0, groups, v.double()) for v in (seen, probabilities))
    assert chisquare(observed.numpy(), (expected / expected.sum() * count).numpy()).pvalue > 0.01


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.0},
        {"temperature": 0.0, "repetition_penalty": 1.5},
        {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.3},
    ],
)
def test_a_prompt_says_the_same_alone_and_in_any_company(options: dict[str, float]) -> None:
    model, tokenizer = build_model("svformer"), build_tokenizer()
    alone = [generate(model, tokenizer, prompt, max_new_tokens=16, **options).tokens for prompt in PROMPTS]  # type: ignore[arg-type]
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 1, 0]):
        made = generate_many(model, tokenizer, [PROMPTS[i] for i in order], max_new_tokens=16, **options)  # type: ignore[arg-type]
        assert [one.tokens for one in made] == [alone[i] for i in order]


def test_the_nth_sample_does_not_depend_on_how_many_there_are() -> None:
    model, tokenizer = build_model(), build_tokenizer()
    few = generate_many(model, tokenizer, ["abc"], num_samples=2, max_new_tokens=12, temperature=1.0)
    many = generate_many(model, tokenizer, ["x", "abc"], num_samples=4, max_new_tokens=12, temperature=1.0)
    assert [(one.prompt, one.sample) for one in many] == [(p, k) for p in ("x", "abc") for k in range(4)]
    assert [one.tokens for one in few] == [one.tokens for one in many[4:6]]
    assert len({one.tokens for one in many}) == 8
    assert few[0].tokens == generate(model, tokenizer, "abc", max_new_tokens=12, temperature=1.0).tokens


def test_two_prompts_do_not_share_their_noise() -> None:
    draw = [torch.rand(4, generator=row_generator(0, 0, prompt)) for prompt in ([1], [2], [1])]
    assert torch.equal(draw[0], draw[2]) and not torch.equal(draw[0], draw[1])


def test_the_penalty_leaves_the_padding_alone() -> None:
    """The id that pads is the end-of-text id, whose logit must not suffer from a longer neighbour."""
    chain = processors(Sampling(temperature=0.0, repetition_penalty=2.0), prompts=[[5], [5, 6, 7]], samples=[0, 0])
    scores = chain(torch.tensor([[9, 9, 5], [5, 6, 7]]), torch.ones(2, 10))
    assert scores[0].tolist() == [1.0] * 5 + [0.5] + [1.0] * 4
    assert scores[1].tolist() == [1.0] * 5 + [0.5] * 3 + [1.0] * 2


def test_filters_are_transformers_own() -> None:
    names = [
        type(one).__name__
        for one in processors(
            Sampling(temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, repetition_penalty=1.1), prompts=[[1]], samples=[0]
        )
    ]
    assert names == [
        "RowRepetition",
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "MinPLogitsWarper",
        "GumbelMax",
    ]
    assert not processors(Sampling(temperature=0.0, top_k=3), prompts=[[1]], samples=[0])


def test_what_a_models_generation_config_says_about_sampling_is_ours_to_decide() -> None:
    model, tokenizer = build_model(), build_tokenizer()
    plain = generate(model, tokenizer, "abc", max_new_tokens=12, temperature=1.0)
    model.generation_config.repetition_penalty, model.generation_config.temperature = 1.9, 0.2
    model.generation_config.do_sample = True
    assert generate(model, tokenizer, "abc", max_new_tokens=12, temperature=1.0).tokens == plain.tokens
