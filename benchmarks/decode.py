"""What the cache costs: bytes, speed of reading and continuing a context, and what fits into a fixed memory.

Our models and LlamaForCausalLM of the same size and weights take turns under transformers' own `generate`: in every
round each continues a copy of its cache by the same number of tokens, several times, in random order, and the fastest
of its calls counts. Reading a context takes turns likewise. Then, one process a model, a context grows until a fixed
amount of memory beyond the weights is used up.

    python benchmarks/decode.py                                   # 24 layers x 256, contexts 512, 2,048 and 8,192
    python benchmarks/decode.py --contexts 512 2048 --rounds 20 --json-file decode.json --plot-file decode.png
    python benchmarks/decode.py --budget-mb 0                     # speed and bytes only
"""

from __future__ import annotations

import copy
import json
import os
import random
import resource
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import turns
import tyro

VARIANTS = ("llama", "transformer", "learnable", "svformer")
PAIRS = ("transformer:llama", "learnable:llama", "svformer:llama", "svformer:transformer", "learnable:transformer")
# glibc serves tensors below a threshold, which it raises as it goes, from a heap that growing caches tear into pieces.
# With a fixed one every plane of a cache goes back to the system when it is freed; all models are measured so.
FIXED_THRESHOLD = {"MALLOC_MMAP_THRESHOLD_": "65536"}
CHUNK_TOKENS = 256


def read_context(model: Any, ids_1T: Any, clock: turns.Clock) -> tuple[Any, float]:
    """The cache after all but the last token of `[1, T]`, and the tokens per second of reading them."""
    import torch

    from resformer.models.compat import CACHE

    context = ids_1T[:, :-1]
    with torch.inference_mode():
        started = clock()
        outputs = model(context, use_cache=True, logits_to_keep=1)
        seconds = clock() - started
    return getattr(outputs, CACHE), context.shape[1] / seconds


def continue_context(model: Any, ids_1T: Any, cache: Any, new_tokens: int, clock: turns.Clock) -> float:
    """Tokens per second of transformers' `generate`, greedy, from a cache that holds all but the last token."""
    import torch

    from resformer.models.compat import CACHE

    own = copy.deepcopy(cache)
    started = clock()
    with torch.inference_mode():
        model.generate(
            ids_1T,
            **{CACHE: own},
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
        )
    return new_tokens / (clock() - started)


def measure_context(
    models: dict[str, Any],
    length: int,
    *,
    pairs: Sequence[str],
    new_tokens: int,
    rounds: int,
    calls: int,
    clock: turns.Clock,
    seed: int,
) -> dict[str, Any]:
    """Bytes and speeds of all models at one context length, and ratios of decoding speed of the pairs."""
    import torch

    from resformer.models.cache import cache_bytes

    generator = torch.Generator().manual_seed(seed)
    vocab_size = next(iter(models.values())).config.vocab_size
    ids = torch.randint(1, vocab_size, (1, length + 1), generator=generator)
    caches: dict[str, Any] = {}
    order, prefill, speeds = random.Random(seed), {name: [] for name in models}, {name: [] for name in models}
    for _ in range(3):
        for name in order.sample(list(models), len(models)):
            caches[name], speed = read_context(models[name], ids, clock)
            prefill[name].append(speed)
    for round_number in range(rounds + 1):
        fastest = dict.fromkeys(models, 0.0)
        for name in order.sample(list(models) * calls, len(models) * calls):
            speed = continue_context(models[name], ids, caches[name], new_tokens, clock)
            fastest[name] = max(fastest[name], speed)
        for name in models if round_number else ():  # the first round warms up
            speeds[name].append(fastest[name])
    ratios = {}
    for pair in pairs:
        ours, peer = pair.split(":")
        paired = [a / b for a, b in zip(speeds[ours], speeds[peer], strict=True)]
        ratios[pair] = turns.summary(paired, seed=seed)
    return {
        "context": length,
        "models": {
            name: {
                "cache_bytes_per_token": cache_bytes(caches[name]) / length,
                "prefill_tokens_per_second": max(prefill[name]),
                "decode_tokens_per_second": statistics.median(speeds[name]),
            }
            for name in models
        },
        "ratios": ratios,
    }


def capacity(name: str, shape: dict[str, Any], budget_mb: int, batch_size: int) -> int:
    """Tokens per sequence that fit into `budget_mb` beyond the loaded model, grown in this process until memory is
    refused.
    """
    import torch

    from resformer.models.compat import CACHE

    model = turns.build_models({name}, shape, "sdpa")[name].eval()
    ids = torch.randint(1, shape["vocab_size"], (batch_size, CHUNK_TOKENS))
    with torch.inference_mode():
        outputs = model(ids, use_cache=True, logits_to_keep=1)  # what is loaded once is not the context's
        del outputs
        limit = data_bytes() + budget_mb * 2**20
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        cache, held = None, 0
        while held + CHUNK_TOKENS <= shape["max_position_embeddings"]:
            try:
                outputs = model(ids, **{CACHE: cache}, use_cache=True, logits_to_keep=1)
            except (RuntimeError, MemoryError) as error:
                if "memory" not in str(error).lower() and not isinstance(error, MemoryError):
                    raise
                break
            cache = getattr(outputs, CACHE)
            held += CHUNK_TOKENS
    return held


def data_bytes() -> int:
    """Private writable memory of this process, which RLIMIT_DATA limits (Linux)."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmData"))
    return int(line.split()[1]) * 1024


def capacities(names: Sequence[str], shape: dict[str, Any], budget_mb: int, batch_size: int) -> dict[str, int]:
    """`capacity` of each model in a process of its own."""
    found = {}
    for name in names:
        request = json.dumps({"name": name, "shape": shape, "budget_mb": budget_mb, "batch_size": batch_size})
        done = subprocess.run(
            [sys.executable, __file__, "--measure-capacity", request],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, **FIXED_THRESHOLD},
        )
        if done.returncode:
            raise RuntimeError(f"the capacity of {name} could not be measured: {done.stderr.strip()[-400:]}")
        found[name] = int(done.stdout.split()[-1])
    return found


def plot(results: list[dict[str, Any]], out: Path) -> None:
    """Cache bytes and decoding speed against context length, one line a model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    contexts = [row["context"] for row in results]
    for number, name in enumerate(results[0]["models"]):
        rows = [row["models"][name] for row in results]
        style = {"label": name, "color": f"C{number}", "linestyle": "--" if name == "llama" else "-", "marker": "o"}
        left.plot(
            contexts, [row["cache_bytes_per_token"] * n / 2**20 for row, n in zip(rows, contexts, strict=True)], **style
        )
        right.plot(contexts, [row["decode_tokens_per_second"] for row in rows], **style)
    left.set(xlabel="context (tokens)", ylabel="cache (MiB)", title="Cache of one sequence", ylim=(0, None))
    right.set(xlabel="context (tokens)", ylabel="tokens per second", title="Decoding", ylim=(0, None))
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    right.legend(frameon=False)
    figure.savefig(out, dpi=150)


def show(row: dict[str, Any]) -> None:
    """What was measured at one context length."""
    for name, found in row["models"].items():
        print(
            f"{row['context']:8,} {name:14} {found['cache_bytes_per_token']:12,.0f} "
            f"{found['prefill_tokens_per_second']:14,.0f} {found['decode_tokens_per_second']:14,.1f}"
        )
    for pair, ratio in row["ratios"].items():
        low, high = ratio["ratio_lower_95"], ratio["ratio_upper_95"]
        print(f"         {pair.replace(':', ' / '):24} decodes at {ratio['ratio']:.3f} ({low:.3f} .. {high:.3f})")
    sys.stdout.flush()


def main(
    *,
    layers: int = 24,
    hidden_size: int = 256,
    heads: int | None = None,
    vocab_size: int = 4096,
    contexts: tuple[int, ...] = (512, 2048, 8192),
    new_tokens: int = 16,
    rounds: int = 12,
    calls: int = 3,
    pairs: tuple[str, ...] = PAIRS,
    clock: Literal["wall", "cpu"] = "cpu",
    budget_mb: int = 256,
    batch_size: int = 1,
    threads: int = 1,
    seed: int = 0,
    json_file: Path | None = None,
    plot_file: Path | None = None,
    measure_capacity: str | None = None,
) -> int:
    """Compare cache bytes, prefill and decoding speed, and the context that fits into a fixed memory, on the CPU.

    Args:
        layers: Number of layers.
        hidden_size: Width.
        heads: Attention heads; hidden size / 32 when not given.
        vocab_size: Entries of the vocabulary.
        contexts: Context lengths in tokens.
        new_tokens: Tokens that each model adds in a call.
        rounds: Rounds that count.
        calls: Calls of each model in a round, of which the fastest counts.
        pairs: Whose decoding speed to divide by whose, ours:peer; "llama" is LlamaForCausalLM, others are variants.
        clock: cpu (seconds of this process, for a busy machine) or wall.
        budget_mb: Memory beyond the weights for the capacity, in MiB; 0 leaves it out.
        batch_size: Sequences for the capacity.
        threads: Threads of torch.
        seed: Seed of tokens, order and bootstrap.
        json_file: Write everything measured to this file.
        plot_file: Draw bytes and speed against context length.
        measure_capacity: (internal) one capacity as JSON, in this process.
    """
    import torch

    torch.set_num_threads(threads)
    if measure_capacity is not None:
        print(capacity(**json.loads(measure_capacity)))
        return 0
    shape = turns.sizes(
        layers=layers,
        hidden_size=hidden_size,
        heads=heads,
        intermediate_size=None,
        vocab_size=vocab_size,
        sequence_length=max(*contexts, 2**20) + new_tokens + 1,
    )
    names = tuple(dict.fromkeys(name for pair in pairs for name in reversed(pair.split(":"))))
    models = {name: model.eval() for name, model in turns.build_models(set(names), shape, "sdpa").items()}
    models = {name: models[name] for name in names}
    print(
        f"{layers} layers x {hidden_size}, fp32, {threads} thread(s), {clock} clock, {rounds} rounds of {calls} calls, "
        f"{new_tokens} new tokens each"
    )
    print(f"{'context':>8} {'model':14} {'bytes/token':>12} {'prefill tok/s':>14} {'decode tok/s':>14}")
    results = []
    settings = {"pairs": pairs, "new_tokens": new_tokens, "rounds": rounds, "calls": calls, "seed": seed}
    for length in contexts:
        results.append(measure_context(models, length, clock=turns.CLOCKS[clock], **settings))
        show(results[-1])
    held = capacities(names, shape, budget_mb, batch_size) if budget_mb else {}
    for name, count in held.items():
        print(f"{name:14} holds {count:,} tokens x {batch_size} in {budget_mb} MiB beyond the weights")
    if json_file is not None:
        report = {
            "about": turns.about(),
            "shape": shape,
            "settings": {**settings, "clock": clock, "threads": threads},
            "contexts": results,
            "capacity": {"tokens": held, "budget_mb": budget_mb, "batch_size": batch_size},
        }
        json_file.write_text(json.dumps(report, indent=2) + "\n")
    if plot_file is not None:
        plot(results, plot_file)
    return 0


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
