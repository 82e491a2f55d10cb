"""What the benchmarks share: models of equal weights, one training step, taking turns, medians with an interval."""

from __future__ import annotations

import gc
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

Step = Callable[[], None]
Clock = Callable[[], float]

CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}


def sizes(
    *,
    layers: int,
    hidden_size: int,
    heads: int | None,
    intermediate_size: int | None,
    vocab_size: int,
    sequence_length: int,
) -> dict[str, Any]:
    """The fields of a config; heads of 32 channels and a feed-forward width of 2.75 x hidden size when not given."""
    return {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size or hidden_size * 11 // 4,
        "num_hidden_layers": layers,
        "num_attention_heads": heads or max(1, hidden_size // 32),
        "max_position_embeddings": sequence_length,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5,
    }


def prepare_process(threads: int) -> None:
    """Threads, and memory kept as `resformer train` keeps it, so that page faults do not blur the comparison."""
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    import torch

    from resformer.train.memory import keep_freed_memory

    torch.set_num_threads(threads)
    keep_freed_memory()


def build_models(names: set[str], sizes: Mapping[str, Any], attention: str | None) -> dict[str, Any]:
    """Return the named models, with equal weights as far as shapes allow: ours take LlamaForCausalLM's state dict.

    `attention` None lets a variant choose (some run with one implementation only).
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from resformer import ResFormerConfig, ResFormerForCausalLM
    from resformer.core.policy import LAMBDA_NAMES, TABLES_NAME

    extras = {*LAMBDA_NAMES, TABLES_NAME}
    torch.manual_seed(0)
    chosen = {"attn_implementation": attention} if attention else {}
    llama = LlamaForCausalLM(LlamaConfig(**sizes, **chosen))
    models = {"llama": llama} if "llama" in names else {}
    for variant in sorted(names - {"llama"}):
        model = ResFormerForCausalLM(ResFormerConfig(variant=variant, **sizes, **chosen))
        own = model.state_dict()
        fits = {key: value for key, value in llama.state_dict().items() if key in own and own[key].shape == value.shape}
        report = model.load_state_dict(fits, strict=False)
        foreign = [
            key for key in report.missing_keys if not extras & set(key.split(".")) and not key.endswith("v_proj.weight")
        ]
        assert not foreign, f"{variant} does not take Llama's {foreign}"
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


def tokens(*, vocab_size: int, batch_size: int, sequence_length: int, seed: int) -> Any:
    """Random token ids `[B, T + 1]`."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (batch_size, sequence_length + 1), generator=generator)


def take_turns(
    left: Step, right: Step, *, rounds: int, steps: int, warmup: int, clock: Clock, seed: int
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
                seconds[name].append(timed(step, clock))
            if round_number >= warmup:
                times.append((min(seconds["left"]), min(seconds["right"])))
    finally:
        gc.enable()
    return times


def go_round(
    base: Step,
    others: Mapping[str, Step],
    *,
    rounds: int,
    warmup: int,
    clock: Clock,
    seed: int,
    after_round: Callable[[int], None] = lambda done: None,
) -> dict[str, list[tuple[float, float]]]:
    """Return for each of `others` (its seconds, the base's seconds) in every round.

    In a round every one of them runs once, in random order, and the base before, between and after them: the base's
    seconds are the mean of the step just before and the one just after, so that a slow drift of the machine cancels.
    """
    order = random.Random(seed)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in others}
    gc.collect()
    gc.disable()
    try:
        for round_number in range(warmup + rounds):
            before = timed(base, clock)
            for name in order.sample(list(others), len(others)):
                seconds = timed(others[name], clock)
                after = timed(base, clock)
                if round_number >= warmup:
                    times[name].append((seconds, (before + after) / 2))
                before = after
            after_round(round_number + 1)
    finally:
        gc.enable()
    return times


def take_rounds(
    steps: Mapping[str, Step],
    *,
    rounds: int,
    warmup: int,
    clock: Clock,
    seed: int,
    after_round: Callable[[int], None] = lambda done: None,
) -> dict[str, list[float]]:
    """Return the seconds of each of `steps` in every round; in a round each runs once, in random order."""
    order = random.Random(seed)
    times: dict[str, list[float]] = {name: [] for name in steps}
    gc.collect()
    gc.disable()
    try:
        for round_number in range(warmup + rounds):
            for name in order.sample(list(steps), len(steps)):
                seconds = timed(steps[name], clock)
                if round_number >= warmup:
                    times[name].append(seconds)
            after_round(round_number + 1)
    finally:
        gc.enable()
    return times


def timed(step: Step, clock: Clock) -> float:
    """Seconds that one step takes."""
    started = clock()
    step()
    return clock() - started


def interval(ratios: Sequence[float], *, seed: int, resamples: int = 4000) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the median of `ratios`, rounds resampled with replacement."""
    draw = random.Random(seed)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(resamples))
    return medians[int(0.025 * resamples)], medians[int(0.975 * resamples)]


def summary(ratios: Sequence[float], *, seed: int) -> dict[str, Any]:
    """Median, interval and the ratios themselves."""
    lower, upper = interval(ratios, seed=seed)
    return {
        "ratio": statistics.median(ratios),
        "ratio_lower_95": lower,
        "ratio_upper_95": upper,
        "ratios": [round(ratio, 5) for ratio in ratios],
    }


def peak_allocated(work: Step) -> int:
    """The most bytes of tensors that `work` holds at a time beyond those that were there before.

    They are counted by the events of torch's CPU allocator that its profiler records, so that what happens inside
    operators and compiled code counts as well, to the byte. The resident memory of the process would not do: freed
    memory stays in it (`resformer.train.memory`), and what the next tensor finds there depends on the past.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def gemm_flops(clock: Clock, *, size: int = 1024, seconds: float = 0.3) -> float:
    """FLOP/s of a product of two fp32 matrices `[size, size]`: the fastest of those that fit into `seconds`."""
    import torch

    left, right, out = torch.randn(size, size), torch.randn(size, size), torch.empty(size, size)
    fastest, started = float("inf"), time.perf_counter()
    while time.perf_counter() - started < seconds:
        fastest = min(fastest, timed(lambda: torch.mm(left, right, out=out), clock))
    return 2 * size**3 / fastest


def write(path: Path, found: Mapping[str, Any]) -> None:
    """Write what was measured as JSON, and say so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=2) + "\n")
    print(f"written: {path}")


def about() -> dict[str, Any]:
    """When, on what, with which versions: what a reader of the numbers needs."""
    import torch
    import transformers

    from resformer import __version__
    from resformer.train.environment import processor

    return {
        "date": datetime.now(UTC).date().isoformat(),
        "processor": processor(),
        "cpu_count": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "resformer": __version__,
    }
