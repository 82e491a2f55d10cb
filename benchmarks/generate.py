"""Speed of `resformer generate --compile` against transformers' default `generate`, the same model, taking turns.

Both sides continue the same prompt by the same number of tokens. The peer is `model.generate(...)` as it comes: dynamic
cache, eager. Ours is `resformer.evaluate.generation.generate` as the command calls it, without streaming. A whole call
is timed on either side, reading the prompt included; compilation is not. Every round runs both in random order; of
either side the fastest of its calls counts. Reported are medians and the median over rounds of the paired ratio, with a
bootstrap interval over rounds.

    python benchmarks/generate.py                                       # 8 layers x 128, greedy, one sequence
    python benchmarks/generate.py --models svformer llama --temperature 0.8 --json-file generate.json
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import turns
import tyro

BOUND = 2.0
"""What a release must reach: the lower 95 % bound of the ratio, greedy and compiled, in the default setting."""


class Words:
    """A tokenizer without a text, for models that never learned one: the prompt is a list of numbers."""

    bos_token_id = eos_token_id = pad_token_id = None

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [int(word) for word in text.split()]}

    def decode(self, ids: list[int], **_: Any) -> str:
        return " ".join(map(str, ids))


def sides(
    model: Any, *, prompt: str, new_tokens: int, temperature: float, compile: bool
) -> tuple[turns.Step, turns.Step]:
    """The call of ours and the call of transformers' own, both of which make all of `new_tokens`."""
    import torch

    from resformer.evaluate.generation import generate

    words = Words()
    ids = torch.tensor([words(prompt)["input_ids"]])
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}

    def ours() -> None:
        made = generate(
            model,
            words,
            prompt,
            max_new_tokens=new_tokens,
            temperature=temperature,
            compile=compile,
            announce=lambda text: print(f"  {text}", file=sys.stderr),
        )
        assert len(made.tokens) == new_tokens

    def default() -> None:
        with torch.inference_mode():
            made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, **sampling)
        assert made.shape[1] == ids.shape[1] + new_tokens

    return ours, default


def measure(
    name: str, model: Any, *, new_tokens: int, rounds: int, calls: int, clock: str, seed: int, **options: Any
) -> dict[str, Any]:
    """Tokens per second of both sides and their ratio."""
    ours, default = sides(model, new_tokens=new_tokens, **options)
    ours()  # compiles
    times = turns.take_turns(ours, default, rounds=rounds, steps=calls, warmup=1, clock=turns.CLOCKS[clock], seed=seed)
    return {
        "model": name,
        "ours_tokens_per_second": new_tokens / statistics.median(a for a, _ in times),
        "default_tokens_per_second": new_tokens / statistics.median(b for _, b in times),
        **turns.summary([b / a for a, b in times], seed=seed),
    }


def main(
    *,
    models: tuple[str, ...] = ("transformer", "svformer"),
    layers: int = 8,
    hidden_size: int = 128,
    vocab_size: int = 4096,
    prompt_tokens: int = 32,
    new_tokens: int = 128,
    temperature: float = 0.0,
    compile: bool = True,
    rounds: int = 20,
    calls_per_round: int = 2,
    threads: int = 1,
    clock: str = "wall",
    seed: int = 0,
    json_file: Path | None = None,
    strict: bool = False,
) -> int:
    """Compare generation by `resformer generate` with transformers' default generate, in fp32 on the CPU.

    Args:
        models: Variants, or llama for LlamaForCausalLM.
        layers: Number of layers.
        hidden_size: Width.
        vocab_size: Entries of the vocabulary.
        prompt_tokens: Tokens of the prompt.
        new_tokens: Tokens that each call makes.
        temperature: 0 is greedy.
        compile: Whether our side decodes with the compiled step.
        rounds: Rounds that count; each gives one ratio.
        calls_per_round: Calls of either side in a round, in random order; the fastest of each side counts.
        threads: Threads of torch.
        clock: wall, or cpu for the CPU seconds of this process.
        seed: Seed of the prompt, the order and the bootstrap.
        json_file: Write everything measured to this file.
        strict: Exit with 1 if a lower bound is below 2.
    """
    turns.prepare_process(threads)
    from resformer.core.registry import names
    from resformer.errors import UserError, did_you_mean

    for name in models:
        if name not in (known := ["llama", *names()]):
            raise UserError(f"--models: unknown model {name!r}{did_you_mean(name, known)}")
    if clock not in turns.CLOCKS:
        raise UserError(f"--clock is {clock!r}; expected {' or '.join(turns.CLOCKS)}")
    shape = turns.sizes(
        layers=layers,
        hidden_size=hidden_size,
        heads=None,
        intermediate_size=None,
        vocab_size=vocab_size,
        sequence_length=prompt_tokens + new_tokens,
    )
    shape |= {"eos_token_id": None, "pad_token_id": None, "bos_token_id": None}
    built = turns.build_models(set(models), shape, None)
    ids = turns.tokens(vocab_size=vocab_size, batch_size=1, sequence_length=prompt_tokens - 1, seed=seed)[0].tolist()
    about = turns.about()
    print(
        f"torch {about['torch']}, transformers {about['transformers']}, {threads} thread(s), fp32, {layers} x "
        f"{hidden_size}, vocabulary {vocab_size}; {prompt_tokens} + {new_tokens} tokens, temperature {temperature:g}, "
        f"{'compiled' if compile else 'not compiled'}; {rounds} rounds, {clock} clock"
    )
    print(f"{'model':16} {'tok/s ours':>11} {'tok/s default':>13} {'ratio':>7}   95 % interval")
    results = []
    for name in models:
        found = measure(
            name,
            built[name].eval(),
            prompt=" ".join(map(str, ids)),
            new_tokens=new_tokens,
            temperature=temperature,
            compile=compile,
            rounds=rounds,
            calls=calls_per_round,
            clock=clock,
            seed=seed,
        )
        results.append(found)
        print(
            f"{name:16} {found['ours_tokens_per_second']:11,.1f} {found['default_tokens_per_second']:13,.1f} "
            f"{found['ratio']:7.2f}   {found['ratio_lower_95']:.2f} .. {found['ratio_upper_95']:.2f}",
            flush=True,
        )
    if json_file is not None:
        settings = {"threads": threads, "temperature": temperature, "compile": compile, "clock": clock}
        counts = {"rounds": rounds, "calls_per_round": calls_per_round, "seed": seed}
        tokens = {"prompt_tokens": prompt_tokens, "new_tokens": new_tokens}
        written = {"about": about, "settings": settings | counts | tokens, "shape": shape, "results": results}
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(written, indent=2) + "\n")
        print(f"written: {json_file}")
    return int(strict and any(found["ratio_lower_95"] < BOUND for found in results))


if __name__ == "__main__":
    from resformer.errors import UserError

    try:
        sys.exit(tyro.cli(main, config=(tyro.conf.FlagCreatePairsOff,)))
    except UserError as error:
        print(f"generate: error: {error}", file=sys.stderr)
        sys.exit(2)
