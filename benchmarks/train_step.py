"""Speed of one whole training step (forward, loss, backward, AdamW), ours against peers, side by side in one run.

Two models at a time take turns: every round runs a few steps of each in random order on the same batch, so whatever
the machine does meanwhile hits both; of either side the fastest step of the round counts, as disturbances only ever
slow down. Reported are the median tokens per second of each and the median over rounds of the paired ratio, with a
bootstrap interval over rounds.

    python benchmarks/train_step.py                                      # 8 layers x 128, 16 x 256 tokens, fp32
    python benchmarks/train_step.py --hidden-size 256 --rounds 40 --json-file step.json
"""

from __future__ import annotations

import gc
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import tyro

Step = Callable[[], None]

# (ours, peer, the lower bound that a release must reach)
PAIRS = [("transformer", "llama", 0.97), ("learnable", "transformer", 0.96), ("svformer", "transformer", 0.99)]


def build_models(names: set[str], sizes: dict[str, Any], attention: str) -> dict[str, Any]:
    """Return the named models, as far as shapes allow with equal weights: ours take LlamaForCausalLM's state dict."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from resformer import ResFormerConfig, ResFormerForCausalLM

    torch.manual_seed(0)
    llama = LlamaForCausalLM(LlamaConfig(**sizes, attn_implementation=attention))
    models = {"llama": llama}
    for variant in sorted(names - {"llama"}):
        model = ResFormerForCausalLM(ResFormerConfig(variant=variant, **sizes, attn_implementation=attention))
        report = model.load_state_dict(llama.state_dict(), strict=False)
        foreign = [key for key in report.unexpected_keys if not key.endswith("v_proj.weight")]
        assert not foreign, f"{variant} does not take Llama's {foreign}"
        assert all("value_" in key for key in report.missing_keys), f"{variant} lacks {report.missing_keys}"
        models[variant] = model
    return models


def build_step(model: Any, tokens_BT1: Any, *, foreach: bool) -> Step:
    """Return a function that runs one training step of `model` on `tokens_BT1` `[B, T + 1]`."""
    import torch
    import torch.nn.functional as F

    from resformer import optimizer_groups

    groups = [
        {key: value for key, value in group.items() if key in ("params", "lr", "weight_decay")}
        for group in optimizer_groups(model, lr=1e-4, weight_decay=0.1)
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), foreach=foreach, fused=not foreach)
    inputs_BT, targets_BT = tokens_BT1[:, :-1].contiguous(), tokens_BT1[:, 1:].contiguous()
    model.train()

    def step() -> None:
        logits_BTV = model(input_ids=inputs_BT, use_cache=False).logits
        loss = F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def take_turns(
    left: Step, right: Step, *, rounds: int, steps: int, warmup: int, clock: Callable[[], float], seed: int
) -> list[tuple[float, float]]:
    """Return the seconds of the fastest of `steps` steps of both sides in each round.

    The order inside a round is random, warm-up rounds are not counted.
    """
    order = random.Random(seed)
    times: list[tuple[float, float]] = []
    gc.collect()
    gc.disable()
    try:
        for round_number in range(warmup + rounds):
            seconds: dict[str, list[float]] = {"left": [], "right": []}
            turns = [("left", left), ("right", right)] * steps
            for name, step in order.sample(turns, len(turns)):
                started = clock()
                step()
                seconds[name].append(clock() - started)
            if round_number >= warmup:
                times.append((min(seconds["left"]), min(seconds["right"])))
    finally:
        gc.enable()
    return times


def interval(ratios: list[float], *, seed: int, resamples: int = 4000) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the median of `ratios`, rounds resampled with replacement."""
    draw = random.Random(seed)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(resamples))
    return medians[int(0.025 * resamples)], medians[int(0.975 * resamples)]


def compare(
    left: Step, right: Step, *, tokens: int, rounds: int, steps: int, warmup: int, clock: Callable[[], float], seed: int
) -> dict[str, Any]:
    """Run `left` and `right` in turns and return medians, the paired ratio left / right of tokens per second, and its
    interval.
    """
    times = take_turns(left, right, rounds=rounds, steps=steps, warmup=warmup, clock=clock, seed=seed)
    ratios = [right_seconds / left_seconds for left_seconds, right_seconds in times]
    lower, upper = interval(ratios, seed=seed)
    return {
        "ours_tokens_per_second": tokens / statistics.median(a for a, _ in times),
        "peer_tokens_per_second": tokens / statistics.median(b for _, b in times),
        "ratio": statistics.median(ratios),
        "ratio_lower_95": lower,
        "ratio_upper_95": upper,
        "ratios": [round(ratio, 5) for ratio in ratios],
    }


def main(
    *,
    layers: int = 8,
    hidden_size: int = 128,
    heads: int | None = None,
    intermediate_size: int | None = None,
    vocab_size: int = 4096,
    batch_size: int = 16,
    sequence_length: int = 256,
    rounds: int = 24,
    steps_per_round: int = 3,
    warmup: int = 1,
    threads: int = 1,
    attention: Literal["sdpa", "eager"] = "sdpa",
    optimizer: Literal["fused", "foreach"] = "fused",
    clock: Literal["wall", "cpu"] = "wall",
    seed: int = 0,
    json_file: Path | None = None,
    strict: bool = False,
) -> int:
    """Compare one training step of our models with LlamaForCausalLM and with each other, in fp32 on the CPU.

    Args:
        layers: Number of layers.
        hidden_size: Width.
        heads: Attention heads; hidden size / 32 when not given.
        intermediate_size: Feed-forward width; 2.75 x hidden size when not given.
        vocab_size: Entries of the vocabulary.
        batch_size: Sequences per step.
        sequence_length: Tokens per sequence.
        rounds: Rounds that count; each gives one ratio.
        steps_per_round: Steps of either side in a round, in random order; the fastest of each side counts.
        warmup: Pairs of steps before them.
        threads: Threads of torch.
        attention: Attention implementation of both sides.
        optimizer: Implementation of AdamW on both sides.
        clock: Wall clock, or CPU seconds of this process (steadier on a machine that does other things too; use it
            with one thread).
        seed: Seed of tokens, order and bootstrap.
        json_file: Write everything measured to this file.
        strict: Exit with 1 if a lower bound is below what a release must reach.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    import torch
    import transformers

    from resformer.train.memory import keep_freed_memory

    torch.set_num_threads(threads)
    keep_freed_memory()  # as `resformer train` does; both sides gain, and page faults no longer blur the comparison
    sizes = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size or hidden_size * 11 // 4,
        "num_hidden_layers": layers,
        "num_attention_heads": heads or max(1, hidden_size // 32),
        "max_position_embeddings": sequence_length,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5,
    }
    models = build_models({name for ours, peer, _ in PAIRS for name in (ours, peer)}, sizes, attention)
    tokens_BT1 = torch.randint(
        0, vocab_size, (batch_size, sequence_length + 1), generator=torch.Generator().manual_seed(seed)
    )
    steps = {name: build_step(model, tokens_BT1, foreach=optimizer == "foreach") for name, model in models.items()}

    print(
        f"torch {torch.__version__}, transformers {transformers.__version__}, {threads} thread(s), {attention}, fp32, "
        f"{layers} x {hidden_size}, {batch_size} x {sequence_length} tokens a step, vocabulary {vocab_size}; "
        f"{rounds} rounds of {steps_per_round} steps each, {clock} clock"
    )
    print(f"{'ours':12} {'peer':12} {'tok/s ours':>11} {'tok/s peer':>11} {'ratio':>7}   95 % interval    lower bound")
    results = []
    for ours, peer, bound in PAIRS:
        measured = compare(
            steps[ours],
            steps[peer],
            tokens=batch_size * sequence_length,
            rounds=rounds,
            steps=steps_per_round,
            warmup=warmup,
            clock={"wall": time.perf_counter, "cpu": time.process_time}[clock],
            seed=seed,
        )
        reached = measured["ratio_lower_95"] >= bound
        results.append({"ours": ours, "peer": peer, "must_be": bound, "reached": reached, **measured})
        speeds = f"{measured['ours_tokens_per_second']:11,.0f} {measured['peer_tokens_per_second']:11,.0f}"
        bounds = f"{measured['ratio_lower_95']:.3f} .. {measured['ratio_upper_95']:.3f}"
        verdict = f"{'reaches' if reached else 'MISSES'} {bound}"
        print(f"{ours:12} {peer:12} {speeds} {measured['ratio']:7.3f}   {bounds}   {verdict}", flush=True)
    if json_file is not None:
        settings = {
            "threads": threads,
            "attention": attention,
            "optimizer": optimizer,
            "clock": clock,
            "rounds": rounds,
            "steps_per_round": steps_per_round,
            "seed": seed,
        }
        about = {"torch": torch.__version__, "transformers": transformers.__version__, "machine": platform.machine()}
        shape = {"batch_size": batch_size, "sequence_length": sequence_length, **sizes}
        json_file.write_text(
            json.dumps({"about": about, "settings": settings, "shape": shape, "results": results}, indent=2) + "\n"
        )
        print(f"written: {json_file}")
    return int(strict and not all(result["reached"] for result in results))


if __name__ == "__main__":
    sys.exit(tyro.cli(main, config=(tyro.conf.FlagCreatePairsOff,)))
