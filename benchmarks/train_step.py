"""Speed of one whole training step, side by side in one run.

    python benchmarks/train_step.py peers                # our engine against Trainer, litgpt, x-transformers
    python benchmarks/train_step.py peers --shape 82m --clock cpu
    python benchmarks/train_step.py memory               # peak memory of output head and loss
    python benchmarks/train_step.py grid                 # tokens/s and MFU over depth, width and sequence length
    python benchmarks/train_step.py loop                 # what the training loop costs beyond the model
    python benchmarks/train_step.py pairs                # our models against LlamaForCausalLM and each other

This file holds `pairs`. Two models at a time take turns: every round runs a few steps of each in random order on the
same batch, so whatever the machine does meanwhile hits both; of either side the fastest step of the round counts, as
disturbances only ever slow down. Reported are the median tokens per second of each and the median over rounds of the
paired ratio, with a bootstrap interval over rounds.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any, Literal

import step_grid
import step_loop
import step_memory
import step_peers
import turns
import tyro
from turns import Step

# (ours, peer, the lower bound that a release must reach)
PAIRS: list[tuple[str, str, float | None]] = [
    ("transformer", "llama", 0.97),
    ("learnable", "transformer", 0.96),
    ("svformer", "transformer", 0.99),
]


def chosen_pairs(texts: tuple[str, ...]) -> list[tuple[str, str, float | None]]:
    """The pairs named as OURS:PEER, all of PAIRS when none is; a pair that is not among PAIRS has no bound."""
    from resformer.core.registry import names
    from resformer.errors import UserError, did_you_mean

    if not texts:
        return PAIRS
    bounds, found = {(ours, peer): bound for ours, peer, bound in PAIRS}, []
    for text in texts:
        ours, colon, peer = text.partition(":")
        if not colon:
            raise UserError(f"--pairs: got {text!r}, expected OURS:PEER, for example learnable:transformer")
        for name in (ours, peer):
            if name not in (known := ["llama", *names()]):
                raise UserError(f"--pairs: unknown model {name!r}{did_you_mean(name, known)}")
        if ours == peer:
            raise UserError(f"--pairs: {text!r} compares a model with itself; expected two names")
        found.append((ours, peer, bounds.get((ours, peer))))
    return found


def compare(
    left: Step, right: Step, *, tokens: int, rounds: int, steps: int, warmup: int, clock: turns.Clock, seed: int
) -> dict[str, Any]:
    """Run `left` and `right` in turns and return medians, the paired ratio left / right of tokens per second, and its
    interval.
    """
    times = turns.take_turns(left, right, rounds=rounds, steps=steps, warmup=warmup, clock=clock, seed=seed)
    return {
        "ours_tokens_per_second": tokens / statistics.median(a for a, _ in times),
        "peer_tokens_per_second": tokens / statistics.median(b for _, b in times),
        **turns.summary([right_seconds / left_seconds for left_seconds, right_seconds in times], seed=seed),
    }


def show(ours: str, peer: str, measured: dict[str, Any]) -> None:
    """Print one line of the table."""
    speeds = f"{measured['ours_tokens_per_second']:11,.0f} {measured['peer_tokens_per_second']:11,.0f}"
    bounds = f"{measured['ratio_lower_95']:.3f} .. {measured['ratio_upper_95']:.3f}"
    bound = measured["must_be"]
    verdict = "no bound" if bound is None else f"{'reaches' if measured['reached'] else 'MISSES'} {bound}"
    print(f"{ours:12} {peer:12} {speeds} {measured['ratio']:7.3f}   {bounds}   {verdict}", flush=True)


def main(
    *,
    pairs: tuple[str, ...] = (),
    layers: int = 8,
    hidden_size: int = 256,
    heads: int | None = None,
    intermediate_size: int | None = None,
    vocab_size: int = 4096,
    batch_size: int = 2,
    sequence_length: int = 256,
    rounds: int = 60,
    steps_per_round: int = 6,
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
        pairs: Pairs to compare as OURS:PEER, names of variants or llama; the three that have a bound when not given.
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
    turns.prepare_process(threads)
    chosen = chosen_pairs(pairs)
    sizes = turns.sizes(
        layers=layers,
        hidden_size=hidden_size,
        heads=heads,
        intermediate_size=intermediate_size,
        vocab_size=vocab_size,
        sequence_length=sequence_length,
    )
    models = turns.build_models({name for ours, peer, _ in chosen for name in (ours, peer)}, sizes, attention)
    batch = turns.tokens(vocab_size=vocab_size, batch_size=batch_size, sequence_length=sequence_length, seed=seed)
    steps = {name: turns.build_step(model, batch, foreach=optimizer == "foreach") for name, model in models.items()}

    about = turns.about()
    print(
        f"torch {about['torch']}, transformers {about['transformers']}, {threads} thread(s), {attention}, fp32, "
        f"{layers} x {hidden_size}, {batch_size} x {sequence_length} tokens a step, vocabulary {vocab_size}; "
        f"{rounds} rounds of {steps_per_round} steps each, {clock} clock"
    )
    print(f"{'ours':12} {'peer':12} {'tok/s ours':>11} {'tok/s peer':>11} {'ratio':>7}   95 % interval    lower bound")
    results = []
    for ours, peer, bound in chosen:
        measured = compare(
            steps[ours],
            steps[peer],
            tokens=batch_size * sequence_length,
            rounds=rounds,
            steps=steps_per_round,
            warmup=warmup,
            clock=turns.CLOCKS[clock],
            seed=seed,
        )
        reached = bound is None or measured["ratio_lower_95"] >= bound
        results.append({"ours": ours, "peer": peer, "must_be": bound, "reached": reached, **measured})
        show(ours, peer, results[-1])
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
        shape = {"batch_size": batch_size, "sequence_length": sequence_length, **sizes}
        turns.write(json_file, {"about": about, "settings": settings, "shape": shape, "results": results})
    return int(strict and not all(result["reached"] for result in results))


COMMANDS = {
    "peers": step_peers.main,
    "memory": step_memory.main,
    "grid": step_grid.main,
    "loop": step_loop.main,
    "pairs": main,
}


if __name__ == "__main__":
    from resformer.errors import UserError

    try:
        sys.exit(tyro.extras.subcommand_cli_from_dict(COMMANDS, config=(tyro.conf.FlagCreatePairsOff,)))
    except UserError as error:
        print(f"train_step: error: {error}", file=sys.stderr)
        sys.exit(2)
