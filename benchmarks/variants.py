"""Time of one training step of every variant relative to `transformer`, all of them in one run.

In a round each variant runs one step, in random order, and `transformer` one before, between and after them; a
variant's ratio is its time over the mean of its two neighbours. Reported are the median over rounds and a bootstrap
interval. Weights are those of the same LlamaForCausalLM as far as shapes allow.

    python benchmarks/variants.py --json-file benchmarks/results/variants.json     # then: make docs
    python benchmarks/variants.py --only learnable,gated --rounds 40
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Literal

import turns
import tyro

BASE = "transformer"


def chosen_variants(only: str) -> list[str]:
    """The registered variants, or those of a list with commas; the baseline is always there and not among them."""
    from resformer.core.registry import get, names

    if not only:
        return [name for name in names() if name != BASE]
    wanted = list(dict.fromkeys(name.strip() for name in only.split(",") if name.strip()))
    for name in wanted:
        get(name)
    return [name for name in wanted if name != BASE]


def main(
    *,
    only: str = "",
    layers: int = 8,
    hidden_size: int = 256,
    heads: int | None = None,
    intermediate_size: int | None = None,
    vocab_size: int = 4096,
    batch_size: int = 4,
    sequence_length: int = 256,
    rounds: int = 14,
    warmup: int = 1,
    threads: int = 1,
    optimizer: Literal["fused", "foreach"] = "fused",
    clock: Literal["wall", "cpu"] = "cpu",
    seed: int = 0,
    json_file: Path | None = None,
) -> int:
    """Measure the step time of variants relative to the Transformer, in fp32 on the CPU.

    Args:
        only: Variants to measure, with commas between them; all registered ones when not given.
        layers: Number of layers.
        hidden_size: Width.
        heads: Attention heads; hidden size / 32 when not given.
        intermediate_size: Feed-forward width; 2.75 x hidden size when not given.
        vocab_size: Entries of the vocabulary.
        batch_size: Sequences per step.
        sequence_length: Tokens per sequence.
        rounds: Rounds that count; each gives one ratio for every variant.
        warmup: Rounds before them.
        threads: Threads of torch.
        optimizer: Implementation of AdamW.
        clock: CPU seconds of this process, or the wall clock.
        seed: Seed of tokens, order and bootstrap.
        json_file: Write everything measured to this file (replaced if it is there).
    """
    turns.prepare_process(threads)
    variants = chosen_variants(only)
    sizes = turns.sizes(
        layers=layers,
        hidden_size=hidden_size,
        heads=heads,
        intermediate_size=intermediate_size,
        vocab_size=vocab_size,
        sequence_length=sequence_length,
    )
    # Each variant runs with the attention implementation that it chooses itself; for all but a few that is sdpa.
    models = turns.build_models({BASE, *variants}, sizes, None)
    batch = turns.tokens(vocab_size=vocab_size, batch_size=batch_size, sequence_length=sequence_length, seed=seed)
    steps = {name: turns.build_step(model, batch, foreach=optimizer == "foreach") for name, model in models.items()}

    about = turns.about()
    print(
        f"torch {about['torch']}, transformers {about['transformers']}, {threads} thread(s), fp32, {layers} x "
        f"{hidden_size}, {batch_size} x {sequence_length} tokens a step, vocabulary {vocab_size}; {len(variants)} "
        f"variants, {rounds} rounds, {clock} clock",
        flush=True,
    )
    started = time.perf_counter()

    def after_round(done: int) -> None:
        left = (time.perf_counter() - started) / done * (warmup + rounds - done)
        print(f"round {done} of {warmup + rounds}, {left / 60:.1f} minutes left", file=sys.stderr, flush=True)

    times = turns.go_round(
        steps[BASE],
        {name: steps[name] for name in variants},
        rounds=rounds,
        warmup=warmup,
        clock=turns.CLOCKS[clock],
        seed=seed,
        after_round=after_round,
    )
    base_seconds = statistics.median(base for pairs in times.values() for _, base in pairs) if variants else 0.0
    results = {name: _result(pairs, models[name], seed) for name, pairs in times.items()}
    results = {BASE: _baseline(base_seconds, models[BASE]), **results}
    print(f"{'variant':20} {'seconds':>8} {'ratio':>7}   95 % interval    attention")
    for name, found in results.items():
        bounds = f"{found['ratio_lower_95']:.3f} .. {found['ratio_upper_95']:.3f}"
        print(f"{name:20} {found['seconds']:8.3f} {found['ratio']:7.3f}   {bounds}   {found['attention']}")
    if json_file is not None:
        settings = {
            "threads": threads,
            "optimizer": optimizer,
            "clock": clock,
            "rounds": rounds,
            "warmup": warmup,
            "seed": seed,
            "minutes": round((time.perf_counter() - started) / 60, 2),
        }
        shape = {"batch_size": batch_size, "sequence_length": sequence_length, **sizes}
        json_file.parent.mkdir(parents=True, exist_ok=True)
        found = {"about": about, "settings": settings, "shape": shape, "results": results}
        json_file.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        print(f"written: {json_file}")
    return 0


def _result(pairs: list[tuple[float, float]], model: Any, seed: int) -> dict[str, Any]:
    return {
        "seconds": statistics.median(own for own, _ in pairs),
        "attention": model.config._attn_implementation,
        **turns.summary([own / base for own, base in pairs], seed=seed),
    }


def _baseline(seconds: float, model: Any) -> dict[str, Any]:
    attention = model.config._attn_implementation
    return {"seconds": seconds, "attention": attention, "ratio": 1.0, "ratio_lower_95": 1.0, "ratio_upper_95": 1.0}


if __name__ == "__main__":
    from resformer.errors import UserError

    try:
        sys.exit(tyro.cli(main, config=(tyro.conf.FlagCreatePairsOff,)))
    except UserError as error:
        print(f"variants: error: {error}", file=sys.stderr)
        sys.exit(2)
