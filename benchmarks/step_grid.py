"""Does a step cost what its operations say? Tokens per second and MFU over depth, width and sequence length."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import peers
import turns
from peers import COMPILED, SHAPES, Shape

TOKENS = 2048


def grid() -> dict[str, Shape]:
    """The CPU shape, and it with one size changed; a head always has 32 channels, a step 2,048 tokens."""
    base = SHAPES["cpu"]
    shapes = {f"depth {layers}": replace(base, layers=layers) for layers in (2, 4, 8, 16)}
    for width in (128, 256, 512):
        inner, heads = width * 11 // 4, width // 32
        shapes[f"width {width}"] = replace(base, hidden_size=width, intermediate_size=inner, heads=heads)
    for length in (128, 512, 2048):
        shapes[f"length {length}"] = replace(base, sequence_length=length, batch_size=TOKENS // length)
    return shapes


def measure(name: str, shape: Shape, *, rounds: int, warmup: int, clock: turns.Clock, seed: int) -> dict[str, Any]:
    """Median tokens per second and MFU of a step, a matrix product being timed before every step."""
    tokens_BT1 = turns.tokens(
        vocab_size=shape.vocab_size, batch_size=shape.batch_size, sequence_length=shape.sequence_length, seed=seed
    )
    step, flops = peers.build(name, shape, tokens_BT1).bare(), peers.step_flops(shape)
    pairs = []
    for number in range(warmup + rounds):
        gemm, seconds = turns.gemm_flops(clock), turns.timed(step, clock)
        if number >= warmup:
            pairs.append((gemm, seconds))
    return {
        "shape": shape.as_dict(),
        "flops": flops,
        "seconds": statistics.median(seconds for _, seconds in pairs),
        "tokens_per_second": shape.tokens / statistics.median(seconds for _, seconds in pairs),
        "gemm_flops": statistics.median(gemm for gemm, _ in pairs),
        "mfu": statistics.median(flops / seconds / gemm for gemm, seconds in pairs),
    }


def main(
    *,
    model: str = f"transformer{COMPILED}",
    rounds: int = 5,
    warmup: int = 2,
    threads: int = 1,
    clock: Literal["wall", "cpu"] = "wall",
    seed: int = 0,
    json_file: Path | None = None,
) -> int:
    """Tokens per second and MFU of a training step over depth, width and sequence length, fp32 on the CPU.

    MFU is against the rate of a product of two 1,024 x 1,024 matrices, which is timed before every step. If a step
    costs what its operations say, MFU is the same in every row.

    Args:
        model: A variant of ours or another library, with or without +compile.
        rounds: Steps that count, of each shape.
        warmup: Steps before them.
        threads: Threads of torch.
        clock: Wall clock, or CPU seconds of this process (with one thread only).
        seed: Seed of tokens.
        json_file: Write everything measured to this file.
    """
    peers.check_name(model)
    turns.prepare_process(threads)
    print(f"{model}, fp32, {TOKENS} tokens a step, {threads} thread(s), {rounds} steps each, {clock} clock")
    print(f"{'shape':14} {'GFLOP':>8} {'s':>8} {'tok/s':>8} {'GEMM GFLOP/s':>13} {'MFU':>6}")
    results: dict[str, dict[str, Any]] = {}
    for label, shape in grid().items():
        done = next((found for found in results.values() if found["shape"] == shape.as_dict()), None)
        results[label] = found = done or measure(
            model, shape, rounds=rounds, warmup=warmup, clock=turns.CLOCKS[clock], seed=seed
        )
        print(
            f"{label:14} {found['flops'] / 1e9:8.1f} {found['seconds']:8.3f} {found['tokens_per_second']:8,.0f} "
            f"{found['gemm_flops'] / 1e9:13.0f} {found['mfu']:6.1%}",
            flush=True,
        )
    if json_file is not None:
        settings = {
            "model": model,
            "threads": threads,
            "clock": clock,
            "rounds": rounds,
            "warmup": warmup,
            "seed": seed,
        }
        turns.write(json_file, {"about": turns.about(), "settings": settings, "results": results})
    return 0
