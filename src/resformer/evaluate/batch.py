"""One call of transformers' `generate` for a batch of sequences, and what it cost.

Shapes: B sequences, T prompt tokens with padding on the left.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, StoppingCriteriaList

from resformer.evaluate import compiled
from resformer.evaluate.generation_cache import left_padded, make_cache
from resformer.evaluate.loss import evaluating
from resformer.evaluate.process_memory import Peak, PeakMemory
from resformer.evaluate.progress import Progress, Row
from resformer.models.cache import cache_parts
from resformer.models.compat import CACHE

Notify = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a batch of continuations took, all sequences together.

    `prefill_tokens_per_second` counts the prompts' tokens, without padding, until every sequence has its first new
    token; `decode_tokens_per_second` the tokens after the first of each (0.0 when there are none). `cache_bytes` is the
    size of the tensors in the cache after the last step and `cache_tokens` the positions that each sequence has in it,
    padding included; a static cache is allocated whole, for `cache_capacity` positions. Of a "tokens" cache
    `table_bytes` are the table that it reads from, and `gathered_bytes` the values that a step gathers and drops.
    `peak_memory` is None unless it was asked for.
    """

    sequences: int
    prompt_tokens: int
    new_tokens: int
    prefill_seconds: float
    decode_seconds: float
    cache_kind: str
    cache_bytes: int
    table_bytes: int
    gathered_bytes: int
    cache_tokens: int
    cache_capacity: int
    peak_memory: Peak | None

    @property
    def prefill_tokens_per_second(self) -> float:
        return self.prompt_tokens / max(self.prefill_seconds, 1e-9)

    @property
    def decode_tokens_per_second(self) -> float:
        return max(0, self.new_tokens - self.sequences) / max(self.decode_seconds, 1e-9)

    @property
    def cache_bytes_per_token(self) -> float:
        """Bytes of the cache for one position of one sequence."""
        return self.cache_bytes / max(1, self.sequences * max(self.cache_tokens, self.cache_capacity))


@dataclass
class Batch:
    """The sequences of one call of transformers' `generate`."""

    model: Any
    prompts: list[list[int]]
    rows: list[Row]
    chain: Any
    pad: int
    max_new_tokens: int

    def run(
        self,
        *,
        kind: str,
        compile: bool,
        warm_up: bool,
        measure_memory: bool,
        announce: Notify,
        before: Callable[[], Any] | None,
    ) -> Cost:
        model, progress = self.model, Progress(self.rows)
        ids_BT, mask_BT = left_padded(self.prompts, pad=self.pad, device=model.device)
        length = ids_BT.shape[1] + self.max_new_tokens
        length = compiled.rounded_length(length) if compile else length

        def fresh() -> Any:
            return make_cache(model, kind, length=length, rows=len(self.rows))

        with evaluating(model), torch.inference_mode(), _quiet_lengths():
            held = fresh()  # a kind that cannot work says so before anything else happens
            if compile:
                compiled.compile_for(model, ids_BT, mask_BT, fresh, announce)
            if warm_up or measure_memory:  # what a process does once: imports, pools of threads and memory
                model.generate(ids_BT[:, -1:], attention_mask=torch.ones_like(ids_BT[:, -1:]), **self._greedy(2))
            watch = PeakMemory(model.device) if measure_memory else None
            if warm_up:
                model(ids_BT, use_cache=False, **compiled.last_logits_only(model))
            if before is not None:
                before()
            started = time.perf_counter()
            try:
                output = model.generate(
                    ids_BT,
                    attention_mask=torch.ones_like(ids_BT) if mask_BT is None else mask_BT,
                    **self._greedy(self.max_new_tokens),
                    logits_processor=self.chain,
                    stopping_criteria=StoppingCriteriaList([progress]),
                    **({} if held is None else {CACHE: held}),
                    **({"custom_generate": compiled.compiled_generate} if compile else {}),
                )
            finally:
                progress.close()  # also after Ctrl-C: what was held back is shown
        times = progress.times_seconds
        held = output.get(CACHE, held)
        parts = cache_parts(held) if hasattr(held, "layers") else None
        chosen = kind if kind != "auto" else "tokens" if parts and parts.table else "dynamic"
        return Cost(
            sequences=len(self.rows),
            prompt_tokens=sum(map(len, self.prompts)),
            new_tokens=sum(len(row.tokens) for row in self.rows),
            prefill_seconds=times[0] - started,
            decode_seconds=times[-1] - times[0],
            cache_kind=chosen,
            cache_bytes=parts.stored if parts else 0,
            table_bytes=parts.table if parts else 0,
            gathered_bytes=parts.gathered if parts else 0,
            cache_tokens=int(held.get_seq_length()) if parts else 0,
            cache_capacity=length if kind == "static" else 0,
            peak_memory=watch.peak() if watch else None,
        )

    def _greedy(self, max_new_tokens: int) -> dict[str, GenerationConfig]:
        """Greedy for transformers: what the next token is, the processors have decided."""
        ends = sorted(self.rows[0].end_ids)
        config = GenerationConfig(
            max_new_tokens=max_new_tokens,
            do_sample=False,
            num_beams=1,
            repetition_penalty=1.0,
            eos_token_id=ends or None,
            pad_token_id=self.pad,
            use_cache=True,
            disable_compile=True,
            return_dict_in_generate=True,
        )
        return {"generation_config": config}


@contextmanager
def _quiet_lengths() -> Iterator[None]:
    """transformers repeats, in other words, the warning about positions that `check_positions` has given."""
    logger = logging.getLogger("transformers.generation.stopping_criteria")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
