"""What `resformer train` costs beyond its model: the training loop's own share of a step.

Two ways at once, in one real run: of every step the time outside of gradients, clipping and optimizer; and between the
steps a bare step of an equal model, so that what the loop costs inside of these (other caches, other threads) shows as
well.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import peers
import turns
from peers import COMPILED, SHAPES, Shape

MOST_OVERHEAD = 0.03


class Watch:
    """Seconds of each step of a run: whole, inside the model's work, and of a bare step taken before it."""

    def __init__(self, bare: turns.Step) -> None:
        self.bare = bare
        self.whole: list[float] = []
        self.inside: list[float] = []
        self.alone: list[float] = []
        self.started: float | None = None
        self.work = 0.0

    def begin(self) -> None:
        """The run comes to its next step: the one before is over."""
        self.end()
        self.alone.append(turns.timed(self.bare, time.perf_counter))
        self.started, self.work = time.perf_counter(), 0.0

    def end(self) -> None:
        """The running step is over."""
        if self.started is not None:
            self.whole.append(time.perf_counter() - self.started)
            self.inside.append(self.work)
        self.started = None

    def counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, whose time counts as the model's work."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.work += time.perf_counter() - started

        return wrapped

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the training runs of this process."""
        import torch

        from resformer.train import fit

        step, validate = fit.Fit.step, fit.Fit.validate

        def watched_step(loop: Any, *args: Any) -> Any:
            self.begin()
            return step(loop, *args)

        def watched_validate(loop: Any, *args: Any) -> Any:  # after the last step; it does not belong to it
            self.end()
            return validate(loop, *args)

        with (
            mock.patch.object(fit.Fit, "step", watched_step),
            mock.patch.object(fit.Fit, "validate", watched_validate),
            mock.patch.object(fit, "accumulate", self.counted(fit.accumulate)),
            mock.patch.object(fit, "gradient_norms", self.counted(fit.gradient_norms)),
            mock.patch.object(fit, "clip_gradients", self.counted(fit.clip_gradients)),
            mock.patch.object(torch.optim.AdamW, "step", self.counted(torch.optim.AdamW.step)),
            mock.patch.object(torch.optim.AdamW, "zero_grad", self.counted(torch.optim.AdamW.zero_grad)),
        ):
            yield


def write_corpus(directory: Path, *, tokens: int) -> Path:
    """A corpus of at least `tokens` made-up tokens."""
    from resformer.data import prepare

    draw, path = random.Random(0), directory / "text.jsonl"
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 6))) for _ in range(500)]
    texts = (" ".join(draw.choices(words, k=400)) for _ in range(tokens // 300 + 100))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return prepare(str(path), directory / "data", vocab_size=400, validation_share=0.1, progress=False)


def training(shape: Shape, data: Path, *, steps: int, variant: str, compile: bool, threads: int) -> Any:
    """A run of `steps` steps of the shape, with one small validation and one checkpoint, at its end."""
    from resformer.recipes import recipe

    config = recipe("quick")
    model = replace(
        config.model,
        variant=variant,
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
    )
    run = replace(
        config.train,
        steps=steps,
        batch_size=shape.batch_size,
        micro_batch_size=None,
        device="cpu",
        compile=compile,
        threads=threads,
        validate_every=steps,
        checkpoint_every=steps,
        validation_tokens=shape.sequence_length,
    )
    return replace(
        config,
        model=model,
        train=run,
        data=replace(config.data, dir=str(data), sequence_length=shape.sequence_length),
        optim=replace(config.optim, lr=peers.LR, warmup_steps=0),
    )


def main(
    *,
    steps: int = 40,
    warmup: int = 3,
    variant: str = "transformer",
    compile: bool = True,
    threads: int = 1,
    seed: int = 0,
    sizes: Shape = SHAPES["cpu"],
    json_file: Path | None = None,
    strict: bool = False,
) -> int:
    """Share of a training step that `resformer train` spends outside its model, at the CPU shape.

    Args:
        steps: Steps of the run that count.
        warmup: Steps before them (compilation).
        variant: Variant to train.
        compile: Compile the blocks.
        threads: Threads of torch.
        seed: Seed of the bare step's tokens and of the bootstrap.
        sizes: Sizes of model and batch.
        json_file: Write everything measured to this file.
        strict: Exit with 1 if the share is 3 % or more.
    """
    peers.check_name(variant)
    turns.prepare_process(threads)
    from resformer.train.loop import train

    tokens_BT1 = turns.tokens(
        vocab_size=sizes.vocab_size, batch_size=sizes.batch_size, sequence_length=sizes.sequence_length, seed=seed
    )
    watch = Watch(peers.build(variant + COMPILED * compile, sizes, tokens_BT1).bare())
    with tempfile.TemporaryDirectory(prefix="loop-") as directory, watch.watching():
        place = Path(directory)
        data = write_corpus(place, tokens=20 * sizes.tokens)
        config = training(sizes, data, steps=warmup + steps, variant=variant, compile=compile, threads=threads)
        train(config, place / "run")
    whole, inside, alone = (times[warmup:] for times in (watch.whole, watch.inside, watch.alone))
    outside = turns.summary([1 - part / all_ for part, all_ in zip(inside, whole, strict=True)], seed=seed)
    against = turns.summary([all_ / bare - 1 for all_, bare in zip(whole, alone, strict=True)], seed=seed)
    print(
        f"\n{len(whole)} steps of {statistics.median(whole):.3f} s (bare: {statistics.median(alone):.3f} s)\n"
        f"outside of gradients, clipping and optimizer: {outside['ratio']:.2%} of a step "
        f"({outside['ratio_lower_95']:.2%} .. {outside['ratio_upper_95']:.2%})\n"
        f"a whole step against a bare one beside it: {against['ratio']:+.2%} "
        f"({against['ratio_lower_95']:+.2%} .. {against['ratio_upper_95']:+.2%})"
    )
    reached = outside["ratio"] < MOST_OVERHEAD
    print(f"{'reaches' if reached else 'MISSES'} less than {MOST_OVERHEAD:.0%}")
    if json_file is not None:
        settings = {"variant": variant, "compile": compile, "threads": threads, "steps": steps, "seed": seed}
        found = {"outside": outside, "against_bare": against, "whole_seconds": whole, "bare_seconds": alone}
        turns.write(
            json_file, {"about": turns.about(), "settings": settings, "shape": sizes.as_dict(), "results": found}
        )
    return int(strict and not reached)
