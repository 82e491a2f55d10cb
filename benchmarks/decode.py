"""What the cache costs: bytes, speed of reading and continuing a context, and what fits into a fixed memory.

Our models and LlamaForCausalLM of the same size and weights take turns under transformers' own `generate`: in every
round each continues a copy of its cache by the same number of tokens, in random order. Then, one process a model, a
context grows until a fixed amount of memory beyond the weights is used up.

    python benchmarks/decode.py                                   # 24 layers x 128, contexts 512, 2,048 and 8,192
    python benchmarks/decode.py --contexts 512 2048 --rounds 20 --json-file decode.json --plot-file decode.png
    python benchmarks/decode.py --budget-mb 0                     # speed and bytes only
"""

from __future__ import annotations

import copy
import json
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import turns
import tyro

VARIANTS = ("llama", "transformer", "learnable", "svformer")
CHUNK_TOKENS = 256


def read_context(model: Any, ids_1T: Any) -> tuple[Any, float]:
    """The cache after all but the last token of `[1, T]`, and the tokens per second of reading them."""
    import torch

    from resformer.models.compat import CACHE

    context = ids_1T[:, :-1]
    with torch.inference_mode():
        started = time.perf_counter()
        outputs = model(context, use_cache=True, logits_to_keep=1)
        seconds = time.perf_counter() - started
    return getattr(outputs, CACHE), context.shape[1] / seconds


def continue_context(model: Any, ids_1T: Any, cache: Any, new_tokens: int) -> float:
    """Tokens per second of transformers' `generate`, greedy, from a cache that holds all but the last token."""
    import torch

    from resformer.models.compat import CACHE

    own = copy.deepcopy(cache)
    started = time.perf_counter()
    with torch.inference_mode():
        model.generate(
            ids_1T,
            **{CACHE: own},
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
        )
    return new_tokens / (time.perf_counter() - started)


def measure_context(models: dict[str, Any], length: int, *, new_tokens: int, rounds: int, seed: int) -> dict[str, Any]:
    """Bytes and speeds of all models at one context length."""
    import torch

    from resformer.models.cache import cache_bytes

    generator = torch.Generator().manual_seed(seed)
    vocab_size = next(iter(models.values())).config.vocab_size
    ids = torch.randint(1, vocab_size, (1, length + 1), generator=generator)
    caches, prefill = {}, {}
    for name, model in models.items():
        caches[name], prefill[name] = read_context(model, ids)
    order, speeds = random.Random(seed), {name: [] for name in models}
    for round_number in range(rounds + 1):
        for name in order.sample(list(models), len(models)):
            speed = continue_context(models[name], ids, caches[name], new_tokens)
            if round_number:
                speeds[name].append(speed)
    base = speeds["llama"] if "llama" in speeds else next(iter(speeds.values()))
    return {
        name: {
            "context": length,
            "cache_bytes_per_token": cache_bytes(caches[name]) / length,
            "prefill_tokens_per_second": prefill[name],
            "decode_tokens_per_second": statistics.median(speeds[name]),
            "decode_ratio": turns.summary([a / b for a, b in zip(speeds[name], base, strict=True)], seed=seed),
            "speeds": [round(speed, 3) for speed in speeds[name]],
        }
        for name in models
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
            [sys.executable, __file__, "--measure-capacity", request], capture_output=True, text=True, check=False
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
    for name in results[0]:
        contexts = [row[name]["context"] for row in results]
        mebibytes = [row[name]["cache_bytes_per_token"] * row[name]["context"] / 2**20 for row in results]
        left.plot(contexts, mebibytes, "o-", label=name)
        right.plot(contexts, [row[name]["decode_tokens_per_second"] for row in results], "o-", label=name)
    left.set(xlabel="context (tokens)", ylabel="cache (MiB)", title="Cache of one sequence")
    right.set(xlabel="context (tokens)", ylabel="tokens per second", title="Decoding", ylim=(0, None))
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    left.legend(frameon=False)
    figure.savefig(out, dpi=150)


def main(
    *,
    layers: int = 24,
    hidden_size: int = 128,
    heads: int | None = None,
    vocab_size: int = 4096,
    contexts: tuple[int, ...] = (512, 2048, 8192),
    new_tokens: int = 24,
    rounds: int = 12,
    variants: tuple[str, ...] = VARIANTS,
    budget_mb: int = 512,
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
        new_tokens: Tokens that each model adds in a round.
        rounds: Rounds that count.
        variants: Models; "llama" is LlamaForCausalLM, and the ratios are to it if it is there, else to the first.
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
    models = {name: model.eval() for name, model in turns.build_models(set(variants), shape, "sdpa").items()}
    models = {name: models[name] for name in variants}
    print(f"{layers} layers x {hidden_size}, fp32, {threads} thread(s), {rounds} rounds of {new_tokens} new tokens")
    print(f"{'model':14} {'context':>8} {'bytes/token':>12} {'prefill tok/s':>14} {'decode tok/s':>13}   ratio (95 %)")
    results = []
    for length in contexts:
        results.append(measure_context(models, length, new_tokens=new_tokens, rounds=rounds, seed=seed))
        for name, row in results[-1].items():
            ratio = row["decode_ratio"]
            print(
                f"{name:14} {length:8,} {row['cache_bytes_per_token']:12,.0f} "
                f"{row['prefill_tokens_per_second']:14,.0f} {row['decode_tokens_per_second']:13,.1f}   "
                f"{ratio['ratio']:.3f} ({ratio['ratio_lower_95']:.3f} .. {ratio['ratio_upper_95']:.3f})",
                flush=True,
            )
    held = capacities(variants, shape, budget_mb, batch_size) if budget_mb else {}
    for name, count in held.items():
        print(f"{name:14} holds {count:,} tokens x {batch_size} in {budget_mb} MiB beyond the weights")
    if json_file is not None:
        report = {"about": turns.about(), "shape": shape, "contexts": results, "capacity": held, "budget_mb": budget_mb}
        json_file.write_text(json.dumps(report, indent=2) + "\n")
    if plot_file is not None:
        plot(results, plot_file)
    return 0


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
