"""Tokens per second and peak memory of a whole training step: our engine, transformers' Trainer, litgpt and
x-transformers, eager and compiled, in turns in one process.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import peers
import turns
from peers import COMPILED, SHAPES, Runner, Shape

from resformer.errors import UserError

MODELS = (
    "transformer+compile",
    "learnable+compile",
    "hf-trainer+compile",
    "litgpt+compile",
    "x-transformers+compile",
    "transformer",
    "hf-trainer",
    "litgpt",
    "x-transformers",
)
ROUNDS = {"cpu": 12, "82m": 4}
LEAST_RATIO = 1.2


def start(names: Sequence[str], shape: Shape, tokens_BT1: Any) -> dict[str, Runner]:
    """Build everything and take two steps, so that compilation is over; what is not installed is reported and left
    out.
    """
    found = {}
    for name in names:
        started = time.perf_counter()
        try:
            runner = peers.build(name, shape, tokens_BT1)
        except UserError as error:
            print(f"{name}: left out: {error}", file=sys.stderr, flush=True)
            continue
        losses = [runner.step(), runner.step()]
        parameters = sum(parameter.numel() for parameter in runner.model.parameters())
        print(
            f"{name:24} {parameters:12,} parameters, loss {losses[0]:.4f}, {losses[1]:.4f}; ready after "
            f"{time.perf_counter() - started:.0f} s",
            flush=True,
        )
        found[name] = runner
    return found


def summarise(times: Mapping[str, Sequence[float]], base: str, tokens: int, seed: int) -> dict[str, dict[str, Any]]:
    """Per model the median tokens per second, and how many times as fast `base` is: the median over rounds of the
    paired ratio, with its interval.
    """
    return {
        name: {
            "tokens_per_second": tokens / statistics.median(seconds),
            "fastest_seconds": min(seconds),
            "base_is_faster_by": turns.summary(
                [own / of_base for own, of_base in zip(seconds, times[base], strict=True)], seed=seed
            ),
        }
        for name, seconds in times.items()
    }


def profile_of(runner: Runner, steps: int, most: int) -> list[dict[str, Any]]:
    """Where the time of a step goes: CPU milliseconds a step and share of the `most` costly operations."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        for _ in range(steps):
            runner.step()
    rows = sorted(recorded.key_averages(), key=lambda row: -row.self_cpu_time_total)
    total = sum(row.self_cpu_time_total for row in rows)
    return [
        {
            "operation": row.key,
            "ms": row.self_cpu_time_total / 1e3 / steps,
            "share": row.self_cpu_time_total / total,
            "calls": row.count / steps,
        }
        for row in rows[:most]
    ]


def main(
    *,
    shape: Literal["cpu", "82m"] = "cpu",
    models: tuple[str, ...] = MODELS,
    rounds: int | None = None,
    warmup: int = 1,
    batch_size: int | None = None,
    sequence_length: int | None = None,
    threads: int = 1,
    clock: Literal["wall", "cpu"] = "wall",
    profile: int = 0,
    seed: int = 0,
    json_file: Path | None = None,
    strict: bool = False,
) -> int:
    """Compare a whole training step of our engine with other libraries', eager and compiled, fp32 on the CPU.

    Args:
        shape: cpu (8 layers x 256, vocabulary 8,192, batch 4 x 512) or 82m (the paper's: 8 x 512, vocabulary 50,277,
            batch 2 x 512).
        models: Variants of ours, hf-trainer, litgpt, x-transformers, each also with +compile; the first one is what
            the others are compared with.
        rounds: Rounds that count, a step of each model in each; 12 (cpu) or 4 (82m) when not given.
        warmup: Rounds before them.
        batch_size: Sequences per step, in place of the shape's.
        sequence_length: Tokens per sequence, in place of the shape's.
        threads: Threads of torch.
        clock: Wall clock, or CPU seconds of this process (steadier on a busy machine; with one thread only).
        profile: Print this many of the most costly operations of each compiled model.
        seed: Seed of tokens, order and bootstrap.
        json_file: Write everything measured to this file.
        strict: Exit with 1 if the first model is not 1.2 times as fast as the fastest other library's.
    """
    chosen = tuple(dict.fromkeys(models))
    for name in chosen:
        peers.check_name(name)
    turns.prepare_process(threads)
    sizes = resized(SHAPES[shape], batch_size=batch_size, sequence_length=sequence_length)
    tokens_BT1 = turns.tokens(
        vocab_size=sizes.vocab_size, batch_size=sizes.batch_size, sequence_length=sizes.sequence_length, seed=seed
    )
    about, rounds = turns.about() | peers.versions(), ROUNDS[shape] if rounds is None else rounds
    print(
        f"shape {shape}: {sizes.layers} x {sizes.hidden_size}, vocabulary {sizes.vocab_size}, {sizes.batch_size} x "
        f"{sizes.sequence_length} tokens, fp32, {threads} thread(s), {rounds} rounds, {clock} clock"
    )
    runners = start(chosen, sizes, tokens_BT1)
    if not runners:
        raise UserError("none of --models could be built")
    base = next(iter(runners))
    gemm: list[float] = []
    times = turns.take_rounds(
        {name: runner.bare() for name, runner in runners.items()},
        rounds=rounds,
        warmup=warmup,
        clock=turns.CLOCKS[clock],
        seed=seed,
        after_round=lambda _: gemm.append(turns.gemm_flops(turns.CLOCKS[clock])),
    )
    results = summarise(times, base, sizes.tokens, seed)
    flops = peers.step_flops(sizes)
    for name, runner in runners.items():
        results[name]["peak_bytes"] = turns.peak_allocated(runner.bare())
        results[name]["mfu"] = flops / sizes.tokens * results[name]["tokens_per_second"] / statistics.median(gemm)
    show(results, base, statistics.median(gemm), flops / sizes.tokens)
    reached, verdict = judge(results, base)
    print(verdict)
    profiles = {}
    for name, runner in runners.items():
        if profile and name.endswith(COMPILED):
            profiles[name] = profile_of(runner, 3, profile)
            print(f"\n{name}")
            for row in profiles[name]:
                print(f"{row['ms']:9.1f} ms {row['share']:6.1%} {row['calls']:7.1f} x {row['operation'][:80]}")
    if json_file is not None:
        settings = {"threads": threads, "clock": clock, "rounds": rounds, "warmup": warmup, "seed": seed}
        turns.write(
            json_file,
            {
                "about": about,
                "settings": settings,
                "shape": sizes.as_dict(),
                "gemm_flops": gemm,
                "results": results,
                "profiles": profiles,
                "verdict": verdict,
            },
        )
    return int(strict and not reached)


def resized(shape: Shape, **changes: int | None) -> Shape:
    """`shape` with those of the sizes changed that are given."""
    return Shape(**shape.as_dict() | {name: value for name, value in changes.items() if value is not None})


def judge(results: Mapping[str, Mapping[str, Any]], base: str) -> tuple[bool, str]:
    """Whether `base` is fast enough against the fastest other library, and that in words."""
    others = {
        name: found["base_is_faster_by"]
        for name, found in results.items()
        if name.removesuffix(COMPILED) in peers.PEERS
    }
    if not others:
        return True, "no other library was measured"
    name = min(others, key=lambda name: others[name]["ratio"])
    found = others[name]
    reached = found["ratio_lower_95"] >= LEAST_RATIO
    return reached, (
        f"{base} is {found['ratio']:.3f} x as fast as the best of the others, {name} "
        f"({found['ratio_lower_95']:.3f} .. {found['ratio_upper_95']:.3f}): "
        f"{'reaches' if reached else 'MISSES'} {LEAST_RATIO}"
    )


def show(results: Mapping[str, Mapping[str, Any]], base: str, gemm: float, flops_per_token: float) -> None:
    """Print the table, the fastest first."""
    print(
        f"\nfp32 matrix product: {gemm / 1e9:.0f} GFLOP/s, which would allow {gemm / flops_per_token:,.0f} tokens/s\n"
        f"{'model':24} {'tok/s':>8} {'MFU':>6} {'peak MB':>8}   {base} is faster by"
    )
    for name, found in sorted(results.items(), key=lambda item: -item[1]["tokens_per_second"]):
        ratio = found["base_is_faster_by"]
        print(
            f"{name:24} {found['tokens_per_second']:8,.0f} {found['mfu']:6.1%} {found['peak_bytes'] / 1e6:8,.0f}   "
            f"{ratio['ratio']:.3f} ({ratio['ratio_lower_95']:.3f} .. {ratio['ratio_upper_95']:.3f})"
        )
