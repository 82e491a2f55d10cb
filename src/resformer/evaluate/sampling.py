"""Sampling whose result belongs to a sequence, not to the batch it is drawn in.

transformers draws the next tokens of all rows from one random stream (`torch.multinomial`), so what a prompt becomes
depends on its neighbours and on its place. Here every row has a generator of its own, and the draw is an argmax: if
g_i are independent standard Gumbel variables, argmax_i (s_i + g_i) is distributed as softmax(s) (the Gumbel-max trick;
Maddison, Tarlow and Minka, "A* Sampling", NeurIPS 2014, section 2). So `generate` runs with `do_sample=False`, and the
last logits processor adds the row's own noise. All filters before it are transformers' own.

Shapes: B rows, S tokens so far, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

LOWEST_TEMPERATURE = 1e-6  # logits divided by less are infinite, and then all are alike


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen; the filters apply in the order of the fields, as in transformers.

    `repetition_penalty` divides positive and multiplies negative logits of tokens that are there already (1.0 is off;
    prompt included, also for greedy). `temperature` 0 is greedy. `top_k` keeps the k likeliest tokens (0 is off),
    `top_p` the likeliest that together have this probability (1.0 is off), `min_p` those that have this share of the
    likeliest token's probability (0.0 is off). Sample k of a prompt draws from a stream of its own, made of `seed`, k
    and the prompt.
    """

    repetition_penalty: float = 1.0
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def problems(self) -> list[str]:
        """What is out of range, in words."""
        found = []
        if not 0 <= self.seed < 2**63:
            found.append(f"seed is {self.seed}, expected 0 to {2**63 - 1}")
        if self.temperature != 0 and not LOWEST_TEMPERATURE <= self.temperature < float("inf"):
            found.append(f"temperature is {self.temperature}, expected 0 (greedy), or {LOWEST_TEMPERATURE:g} or more")
        if self.top_k < 0:
            found.append(f"top_k is {self.top_k}, expected 0 (off) or more")
        if not 0 < self.top_p <= 1:
            found.append(f"top_p is {self.top_p}, expected more than 0 and at most 1 (off)")
        if not 0 <= self.min_p <= 1:
            found.append(f"min_p is {self.min_p}, expected 0 (off) to 1")
        if not 0 < self.repetition_penalty < float("inf"):
            found.append(f"repetition_penalty is {self.repetition_penalty}, expected more than 0 (1 is off)")
        return found


def row_generator(seed: int, sample: int, prompt: Sequence[int]) -> torch.Generator:
    """The random stream of sample `sample` (counted from 0) of a prompt's ids under `seed`, on the CPU, so that every
    device draws the same.

    The prompt is part of it since two prompts with the same noise drift into the same words.
    """
    digest = hashlib.sha256(f"seed {seed}, sample {sample}, prompt {list(prompt)}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


class RowRepetition(LogitsProcessor):
    """transformers' repetition penalty, for each row without its padding: the id that pads would be punished in short
    prompts only.
    """

    def __init__(self, penalty: float, padding: Sequence[int]) -> None:
        self.inner = RepetitionPenaltyLogitsProcessor(penalty)
        self.padding = tuple(padding)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        rows = [
            self.inner(input_ids[row : row + 1, pad:], scores[row : row + 1]) for row, pad in enumerate(self.padding)
        ]
        return torch.cat(rows)


class GumbelMax(LogitsProcessor):
    """Adds standard Gumbel noise to each row's scores, from the row's own generator, so that their argmax is a sample.

    The noise is drawn on the CPU in float64: fp32 has no Gumbel value above about 17, too few for the rare tokens of a
    large vocabulary. A token that a filter has set to -inf stays there.
    """

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        self.generators = tuple(generators)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        exponential_BV = torch.empty(scores.shape, dtype=torch.float64)
        for row, generator in enumerate(self.generators):
            exponential_BV[row].exponential_(generator=generator)
        dtype = torch.float32 if scores.device.type == "mps" else torch.float64  # mps has no float64
        noise_BV = exponential_BV.log_().neg_().to(dtype)
        return scores.to(dtype) + noise_BV.to(scores.device)


def processors(sampling: Sampling, *, prompts: Sequence[Sequence[int]], samples: Sequence[int]) -> LogitsProcessorList:
    """What turns logits `[B, V]` into scores whose argmax is the next token, for rows with these prompts (ids, without
    the padding on the left) and sample numbers.
    """
    chain = LogitsProcessorList()
    if sampling.repetition_penalty != 1.0:
        width = max(map(len, prompts))
        chain.append(RowRepetition(sampling.repetition_penalty, [width - len(prompt) for prompt in prompts]))
    if sampling.temperature == 0:
        return chain
    if sampling.temperature != 1.0:
        chain.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        chain.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        chain.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0.0:
        chain.append(MinPLogitsWarper(sampling.min_p))
    streams = [row_generator(sampling.seed, *row) for row in zip(samples, prompts, strict=True)]
    chain.append(GumbelMax(streams))
    return chain
