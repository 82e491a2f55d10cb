"""Text from a model: streaming, with the speed and the cache that were really there.

Everything runs on transformers' own `generate`, so sampling means what it means everywhere else; this file adds a
seed that is local to the call, a clock between prompt and continuation, and a count of the bytes of the cache's real
tensors.

Shapes: B = 1 (one prompt), T = prompt tokens, S = prompt plus new tokens, V = vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import GenerationConfig, TextStreamer

from resformer.errors import UserError
from resformer.models.cache import build_cache, cache_bytes
from resformer.models.compat import CACHE
from resformer.models.configuration import ResFormerConfig


class Sink(Protocol):
    """Where text goes while it is made: `sys.stdout`, an open file, `io.StringIO`."""

    def write(self, text: str, /) -> Any: ...

    def flush(self) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One continuation and what it cost.

    `text` is the continuation without the prompt and without special tokens; `tokens` are the new ids (with the
    end-of-text id if one was made). `prefill_tokens_per_second` counts the prompt until the first new token,
    `decode_tokens_per_second` the tokens after the first (0.0 when there are none). `cache_bytes` is the size of the
    tensors in the cache after the last step, `cache_tokens` the positions it holds.
    """

    text: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    cache_bytes: int
    cache_tokens: int


class _Clock(TextStreamer):
    """Streams like transformers' TextStreamer, to any sink, and notes when each new token came."""

    def __init__(self, tokenizer: Any, sink: Sink | None) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.sink = sink
        self.times_seconds: list[float] = []

    def put(self, value: Tensor) -> None:
        if not self.next_tokens_are_prompt:
            self.times_seconds.append(time.perf_counter())
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if self.sink is not None and text:
            self.sink.write(text)
            self.sink.flush()


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
    largest, vocabulary = max(ids), int(model.config.vocab_size)
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
    max_new_tokens: int = 128,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    stream_to: Sink | None = None,
    echo: bool = False,
    warm_up: bool = False,
) -> Generation:
    """Continue `prompt` by at most `max_new_tokens` tokens, ending early at the end-of-text token.

    New text is written to `stream_to` as it comes, with `echo` after the prompt. `warm_up` reads the prompt once before
    the clock starts, so that what happens only once in a process does not count as speed.

    `temperature=0` is greedy and needs no seed; `top_k=0` and `top_p=1.0` switch those filters off. The same seed
    gives the same text on the same machine and thread count; the caller's random state is left as it was. For a
    `resformer` model the cache follows the model's plan (an SVFormer's later layers hold keys only), for any other
    model it is the one that `generate` would make.

    Raises UserError for sampling options out of range, an empty prompt that cannot be started, and a text longer than
    the model's positions.
    """
    _check_sampling(max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    ids_1T = prompt_ids(model, tokenizer, prompt)
    prompt_tokens = ids_1T.shape[1]
    _check_length(model, prompt_tokens=prompt_tokens, max_new_tokens=max_new_tokens)
    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p} if temperature > 0 else {}
    options = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=temperature > 0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
        use_cache=True,
        return_dict_in_generate=True,
        **sampling,
    )
    clock = _Clock(tokenizer, stream_to)
    devices = [model.device] if model.device.type == "cuda" else []
    with evaluating(model), torch.random.fork_rng(devices=devices), torch.inference_mode():
        if stream_to is not None and echo:
            stream_to.write(prompt)
        if warm_up:
            model(input_ids=ids_1T, use_cache=False)
        torch.manual_seed(seed)
        started = time.perf_counter()
        output = model.generate(
            ids_1T,
            attention_mask=torch.ones_like(ids_1T),
            generation_config=options,
            streamer=clock,
            **fresh_cache(model),
        )
    tokens = tuple(output.sequences[0, prompt_tokens:].tolist())
    times = clock.times_seconds
    held = output[CACHE]
    return Generation(
        text=tokenizer.decode(tokens, skip_special_tokens=True),
        tokens=tokens,
        prompt_tokens=prompt_tokens,
        prefill_tokens_per_second=prompt_tokens / max(times[0] - started, 1e-9),
        decode_tokens_per_second=(len(times) - 1) / max(times[-1] - times[0], 1e-9) if len(times) > 1 else 0.0,
        cache_bytes=cache_bytes(held),
        cache_tokens=int(held.get_seq_length()),
    )


def cache_difference(model: Any, tokenizer: Any, prompt: str, tokens: Sequence[int]) -> float:
    """Return the largest absolute difference between the logits with the cache and without it, over `prompt` and
    `tokens`.

    The cached pass reads the prompt at once and the new tokens one by one, as generation does. In fp32 the answer is
    rounding noise (below about 1e-4 for logits of ordinary size); more means that the cache changes what the model
    says.
    """
    prompt_1T = prompt_ids(model, tokenizer, prompt)
    new_1N = torch.tensor([list(tokens)], dtype=torch.long, device=prompt_1T.device)
    ids_1S = torch.cat([prompt_1T, new_1N], dim=1)
    with evaluating(model), torch.inference_mode():
        plain_1SV = model(input_ids=ids_1S, use_cache=False).logits
        cache = fresh_cache(model)
        pieces = []
        for piece_1N in (prompt_1T, *new_1N.split(1, dim=1)):
            output = model(input_ids=piece_1N, use_cache=True, **cache)
            cache = {CACHE: output[CACHE]}
            pieces.append(output.logits)
    return float((torch.cat(pieces, dim=1).float() - plain_1SV.float()).abs().max())


def fresh_cache(model: Any) -> dict[str, Any]:
    """The cache argument to start with: laid out by the plan for our models, left to the model for any other."""
    return {CACHE: build_cache(model)} if isinstance(model.config, ResFormerConfig) else {}


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Put the model in evaluation mode for a while."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def sample_text(model_dir: Path | str, prompt: str, max_new_tokens: int = 64, seed: int = 0) -> str:
    """Load the model in `model_dir` (a run or an exported directory) on the CPU and return one continuation at
    temperature 0.8.
    """
    from resformer.evaluate.loading import load_model

    model, tokenizer = load_model(model_dir, "cpu")
    return generate(model, tokenizer, prompt, max_new_tokens=max_new_tokens, seed=seed).text


def _check_sampling(*, max_new_tokens: int, temperature: float, top_k: int, top_p: float, seed: int) -> None:
    problems = []
    if max_new_tokens < 1:
        problems.append(f"max_new_tokens is {max_new_tokens}, expected 1 or more")
    if not 0 <= seed < 2**63:
        problems.append(f"seed is {seed}, expected 0 to {2**63 - 1}")
    if not 0 <= temperature < float("inf"):
        problems.append(f"temperature is {temperature}, expected 0 (greedy) or more")
    if top_k < 0:
        problems.append(f"top_k is {top_k}, expected 0 (off) or more")
    if not 0 < top_p <= 1:
        problems.append(f"top_p is {top_p}, expected more than 0 and at most 1 (off)")
    if problems:
        raise UserError("; ".join(problems))


def _check_length(model: Any, *, prompt_tokens: int, max_new_tokens: int) -> None:
    limit = getattr(model.config, "max_position_embeddings", None)
    total = prompt_tokens + max_new_tokens
    if limit is not None and total > limit:
        room = limit - prompt_tokens
        way_out = (
            f"shorten the prompt or ask for {room} or less" if room > 0 else f"shorten the prompt below {limit} tokens"
        )
        raise UserError(
            f"{prompt_tokens} prompt tokens and {max_new_tokens} new ones (max_new_tokens) make {total}, but the model "
            f"was built for {limit} positions; {way_out}"
        )
