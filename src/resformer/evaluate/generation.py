"""Text from a model: one prompt or many, streaming, with the speed, the cache and the memory that were really there.

Everything runs in transformers' own `generate`, so sampling means what it means everywhere else; around it are random
streams of each sequence's own (`sampling.py`), stop texts (`progress.py`), a compiled step (`compiled.py`), and a count
of the bytes of the cache's real tensors.

Shapes: B sequences (prompts x samples), T prompt tokens with padding on the left, S = T plus new tokens.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

from resformer.errors import UserError
from resformer.evaluate.batch import Batch, Cost, Notify, evaluating
from resformer.evaluate.generation_cache import CacheCheck, compare
from resformer.evaluate.positions import check_positions
from resformer.evaluate.progress import Finish, Row, Sink
from resformer.evaluate.sampling import Sampling, processors


class Options(TypedDict, total=False):
    """The options that `generate` and `generate_many` have in common; `generate_many` explains them."""

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int
    stop: Sequence[str]
    cache: str
    compile: bool
    strict: bool
    warm_up: bool
    measure_memory: bool
    warn: Notify | None
    announce: Notify | None


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One continuation.

    `text` is the continuation without the prompt, without special tokens, and without a stop text and what follows it;
    `tokens` are the new ids (with the end-of-text id if one was made, and those that the stop text came in).
    `finish` says why it ended: "stop", "end" or "length". `sample` counts from 0. `cost` is that of the whole batch.
    """

    prompt: str
    sample: int
    seed: int
    text: str
    tokens: tuple[int, ...]
    finish: Finish
    prompt_tokens: int
    cost: Cost

    @property
    def prefill_tokens_per_second(self) -> float:
        return self.cost.prefill_tokens_per_second

    @property
    def decode_tokens_per_second(self) -> float:
        return self.cost.decode_tokens_per_second

    @property
    def cache_bytes(self) -> int:
        return self.cost.cache_bytes

    @property
    def cache_tokens(self) -> int:
        return self.cost.cache_tokens


def prompt_ids(model: Any, tokenizer: Any, prompt: str) -> Tensor:
    """Return the prompt as ids `[1, T]` on the model's device; an empty prompt starts from the begin- or end-of-text
    token.

    Raises UserError when the prompt is empty and the tokenizer has neither token.
    """
    ids = tokenizer(prompt)["input_ids"] if prompt else []
    if not ids:
        start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        if start is None:
            raise UserError(
                "the prompt is empty and the tokenizer has no begin- or end-of-text token to start from; give a text"
            )
        ids = [start]
    largest, vocabulary = max(ids), int(model.config.get_text_config(decoder=True).vocab_size)
    if largest >= vocabulary:
        raise UserError(
            f"the tokenizer gives id {largest}, but the model's vocabulary has {vocabulary} entries; use its tokenizer"
        )
    return torch.tensor([ids], dtype=torch.long, device=model.device)


def generate(
    model: Any,
    tokenizer: Any,
    prompt: str,
    *,
    stream_to: Sink | None = None,
    echo: bool = False,
    **options: Unpack[Options],
) -> Generation:
    """Continue one prompt; `options` are those of `generate_many` (128 new tokens at temperature 0.8, seed 0).

    New text is written to `stream_to` as it comes, with `echo` after the prompt. What may be the beginning of a stop
    text, or half a character, waits until it is known.
    """
    return generate_many(model, tokenizer, [prompt], stream_to=stream_to, echo=echo, **options)[0]


def generate_many(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    *,
    num_samples: int = 1,
    max_new_tokens: int = 128,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seed: int = 0,
    stop: Sequence[str] = (),
    cache: str = "dynamic",
    compile: bool = False,
    strict: bool = False,
    warm_up: bool = False,
    measure_memory: bool = False,
    warn: Notify | None = None,
    announce: Notify | None = None,
    stream_to: Sink | None = None,
    echo: bool = False,
) -> list[Generation]:
    """Continue prompts as one batch; returns the samples of the first prompt, then those of the second, and so on.

    A text ends at the end-of-text token, before a text of `stop`, or after `max_new_tokens` tokens. What a prompt
    becomes depends on the prompt, the sampling options, the seed and the number of the sample, never on the rest of the
    batch (up to the rounding of its logits); equal prompts with the same seed and number get equal texts. The caller's
    random state is not touched.

    Args:
        model: Any causal LM of transformers.
        tokenizer: Its tokenizer.
        prompts: The texts to continue; an empty one starts a new document.
        num_samples: Continuations of each prompt.
        max_new_tokens: Tokens to add to each at most.
        temperature, top_k, top_p, min_p, repetition_penalty, seed: See `sampling.Sampling`.
        stop: Texts before which a continuation ends, also when they span tokens.
        cache: A kind of `resformer.models.cache.KINDS`; models of others take "dynamic", "static", "quantized" and
            "offloaded".
        compile: Decode with a compiled step and a static cache (`cache` may then be "dynamic", which means not chosen,
            or "static"). Compilation takes 10 to 60 s, once for each batch size and rounded-up length.
        strict: Raise, instead of warning, for texts beyond the positions that the model was trained for.
        warm_up: Read the prompts once before the clock starts, so that what happens only once in a process does not
            count as speed. Compilation never counts.
        measure_memory: Fill `Cost.peak_memory`.
        warn: Takes the warning about positions; `warnings.warn` when not given.
        announce: Takes the words that compilation has begun; standard error when not given.
        stream_to, echo: As in `generate`; for a single sequence.

    Raises:
        UserError: options out of range, an empty prompt that cannot be started, a kind of cache or a compilation that
            cannot work here, texts longer than a model with learned positions can read (or than the trained positions,
            with `strict`). All before the first token.
    """
    sampling = Sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )
    _check_options(sampling, prompts, num_samples, max_new_tokens, stop, cache, compile)
    ids = [prompt_ids(model, tokenizer, prompt)[0].tolist() for prompt in prompts]
    check_positions(model, max(map(len, ids)), max_new_tokens, strict=strict, warn=warn or warnings.warn)
    order = [(index, sample) for index in range(len(prompts)) for sample in range(num_samples)]
    if stream_to is not None and len(order) > 1:
        raise UserError(f"stream_to takes one sequence, but {len(order)} are made; leave it away")
    ends, begin = _end_ids(model, tokenizer), [ids[index] for index, _ in order]
    rows = [
        Row(tokenizer, one, end_ids=ends, stop=stop, max_new_tokens=max_new_tokens, sink=stream_to) for one in begin
    ]
    chain = processors(sampling, prompts=begin, samples=[sample for _, sample in order])
    job = Batch(model, begin, rows, chain, _pad_id(tokenizer), max_new_tokens)
    cost = job.run(
        kind="static" if compile else cache,
        compile=compile,
        warm_up=warm_up,
        measure_memory=measure_memory,
        announce=announce or (lambda text: print(text, file=sys.stderr)),
        before=(lambda: stream_to.write(prompts[0])) if stream_to is not None and echo else None,
    )
    return [
        Generation(
            prompt=prompts[index],
            sample=sample,
            seed=seed,
            text=row.text,
            tokens=tuple(row.tokens),
            finish=row.finish or "length",
            prompt_tokens=len(ids[index]),
            cost=cost,
        )
        for (index, sample), row in zip(order, rows, strict=True)
    ]


def cache_difference(
    model: Any, tokenizer: Any, prompt: str, tokens: Sequence[int], *, cache: str = "dynamic"
) -> float:
    """Return the largest absolute difference between the logits with the cache and without it, over `prompt` and
    `tokens`.

    The cached pass reads the prompt at once and the new tokens one by one, as generation does. In fp32 the answer is
    rounding noise (below about 1e-4 for logits of ordinary size); more means that the cache changes what the model
    says.
    """
    ids = prompt_ids(model, tokenizer, prompt)[0].tolist()
    with evaluating(model):
        return compare(model, [(ids, list(tokens))], kind=cache, pad=_pad_id(tokenizer)).difference


def check_cache(
    model: Any, tokenizer: Any, made: Sequence[Generation], *, cache: str = "dynamic", compile: bool = False
) -> CacheCheck:
    """Compare the logits with a cache of kind `cache` and without any, over prompts and new tokens of all of `made`,
    batched as they were made.

    `compile` takes the compiled step for the new tokens.
    """
    texts = [(prompt_ids(model, tokenizer, one.prompt)[0].tolist(), one.tokens) for one in made]
    with evaluating(model):
        return compare(model, texts, kind="static" if compile else cache, pad=_pad_id(tokenizer), compiled=compile)


def _check_options(
    sampling: Sampling,
    prompts: Sequence[str],
    num_samples: int,
    max_new_tokens: int,
    stop: Sequence[str],
    cache: str,
    compile: bool,
) -> None:
    problems = []
    if isinstance(prompts, str) or not prompts:
        problems.append("prompts must be a list of one or more texts")
    if num_samples < 1:
        problems.append(f"num_samples is {num_samples}, expected 1 or more")
    if max_new_tokens < 1:
        problems.append(f"max_new_tokens is {max_new_tokens}, expected 1 or more")
    problems += sampling.problems()
    if isinstance(stop, str) or not all(stop):
        problems.append("stop takes a list of texts, none of them empty")
    if compile and cache not in ("dynamic", "static"):
        problems.append(f"compile needs a static cache, but cache is {cache!r}; leave one of them away")
    if problems:
        raise UserError("; ".join(problems))


def _end_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """The ids that end a text: the tokenizer's, and those of the model's generation config."""
    more = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    listed = more if isinstance(more, list | tuple) else [more]
    return frozenset(int(one) for one in (tokenizer.eos_token_id, *listed) if one is not None)


def _pad_id(tokenizer: Any) -> int:
    """Any id will do, since masks hide it."""
    found = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return int(next(one for one in found if one is not None))
