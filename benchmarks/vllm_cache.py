"""How many tokens vLLM's cache holds in a fixed memory, by model; and that its tokens are those of model.generate.

Needs vLLM and resformer installed beside each other (docs/vllm.md). The engines run one after the other, in this
process, and report the blocks that vLLM has allocated.

    python benchmarks/vllm_cache.py                        # 6 layers, 1 GiB
    python benchmarks/vllm_cache.py --layers 24 --json-file cache.json --strict
"""

from __future__ import annotations

import gc
import os
import platform
import random
import sys
import tempfile
import warnings
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import turns
import tyro

# An engine in this process, whose kernels are not bound to cores that others use.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "transformer": ("transformer", {}),
    "learnable": ("learnable", {}),
    "svformer": ("svformer", {}),
    "svformer-last-third": ("svformer", {"layers": "last_third", "gamma": True}),
    "svformer-keys-in-pairs": ("svformer", {"key_group": 2}),
    "cla": ("cla", {}),
}
BOUND = 1.7  # of SVFormer over the Transformer at 6 layers; 12/7 is what the planes say
NEW_TOKENS = 16
VOCABULARY = 97


def build(name: str, path: Path, sizes: dict[str, Any]) -> Any:
    """A model of random weights with sharp attention, saved to `path`."""
    import torch

    from resformer import ResFormerConfig, ResFormerForCausalLM

    torch.manual_seed(0)
    variant, options = MODELS[name]
    model = ResFormerForCausalLM(ResFormerConfig(variant=variant, variant_options=options, **sizes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.dim() > 1 else 1.0)
    model.save_pretrained(path)
    return model


def make_prompts(count: int, *, vocab_size: int, longest: int, seed: int) -> list[list[int]]:
    """Random prompts of mixed lengths, 1 to `longest`; every fourth begins with the same half of `longest` tokens."""
    draw = random.Random(seed)
    shared = [draw.randrange(vocab_size) for _ in range(longest // 2)]
    made = []
    for number in range(count):
        tokens = [draw.randrange(vocab_size) for _ in range(draw.randint(1, longest))]
        made.append((shared + tokens)[:longest] if number % 4 == 3 else tokens)
    return made


def expected(model: Any, prompt: list[int]) -> list[int]:
    """Greedy tokens of model.generate."""
    import torch

    ids = torch.tensor([prompt])
    settings: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
    with torch.inference_mode():
        # Without a mask generate would take token 0 for padding.
        made = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    return made[0, len(prompt) :].tolist()


def measure(path: Path, model: Any, prompts: list[list[int]], engine: dict[str, Any]) -> dict[str, Any]:
    """Tokens that the cache holds, and how many of the prompts get the tokens of model.generate, in two rounds."""
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    want = [expected(model, text) for text in prompts]
    llm = LLM(model=str(path), **engine)
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    equal, cached = [], 0
    for _ in range(2):
        done = llm.generate([{"prompt_token_ids": text} for text in prompts], sampling, use_tqdm=False)
        equal.append(sum(list(one.outputs[0].token_ids) == tokens for one, tokens in zip(done, want, strict=True)))
        cached = sum(one.num_cached_tokens or 0 for one in done)
    cache = llm.llm_engine.vllm_config.cache_config
    tokens = cache.num_gpu_blocks * cache.block_size
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()
    return {"cache_tokens": tokens, "prompts": len(prompts), "equal": equal, "prompt_tokens_from_prefix_cache": cached}


def sizes_of(*, layers: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, Any]:
    """The fields of a config that all models share."""
    return {
        **{"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": layers},
        **{"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim},
        **{"max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": None},
    }


def engine_of(*, dtype: str, batched_tokens: int, cache_gib: float) -> dict[str, Any]:
    """vLLM's arguments, but for the model: prompts in pieces, prefixes from the cache, no compilation."""
    return {
        **{"skip_tokenizer_init": True, "dtype": dtype, "enforce_eager": True, "seed": 0, "disable_log_stats": True},
        **{"max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": batched_tokens, "block_size": 32},
        **{"enable_chunked_prefill": True, "enable_prefix_caching": True},
        "kv_cache_memory_bytes": round(cache_gib * 2**30),
    }


def prepare() -> dict[str, Any]:
    """Set the environment that the engines read, and return the versions of what runs.

    Raises:
        UserError: without vLLM.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    warnings.filterwarnings("ignore")
    import torch
    import transformers

    from resformer import __version__
    from resformer.errors import UserError

    try:
        import vllm
    except ImportError:
        raise UserError("vLLM is not installed; docs/vllm.md says how") from None
    versions = {"vllm": vllm.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    when = datetime.now(UTC).date().isoformat()
    return {"date": when, "python": platform.python_version(), **versions, "resformer": __version__}


def compare(
    models: tuple[str, ...], texts: list[list[int]], sizes: dict[str, Any], engine: dict[str, Any]
) -> list[dict[str, Any]]:
    """Measure the models one after the other and print a line for each; ratios are to the first."""
    from resformer.core.plan import kv_ratio, planes

    print(
        f"{'model':24} {'planes':>6} {'cache tokens':>13} {'ratio':>6} {'planes say':>10}   prompts with equal tokens"
    )
    results: list[dict[str, Any]] = []
    for name in models:
        with tempfile.TemporaryDirectory() as folder:
            model = build(name, Path(folder), sizes)
            found = measure(Path(folder), model, texts, engine)
        plan = model.config.plan()
        found |= {"model": name, "planes": sum(planes(plan)), "kv_ratio": kv_ratio(plan)}
        results.append(found)
        found["ratio"] = found["cache_tokens"] / results[0]["cache_tokens"]
        found["theory"] = results[0]["kv_ratio"] / found["kv_ratio"]
        once, again = found["equal"]
        print(
            f"{name:24} {found['planes']:6} {found['cache_tokens']:13,} {found['ratio']:6.3f} {found['theory']:10.3f}"
            f"   {once} of {len(texts)}, again {again} with {found['prompt_tokens_from_prefix_cache']:,} prompt tokens "
            "from the prefix cache",
            flush=True,
        )
    return results


def main(
    *,
    models: tuple[str, ...] = tuple(MODELS),
    layers: int = 6,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    cache_gib: float = 1.0,
    dtype: str = "float32",
    prompts: int = 32,
    longest_prompt: int = 150,
    batched_tokens: int = 64,
    seed: int = 0,
    json_file: Path | None = None,
    strict: bool = False,
) -> int:
    """Compare how many tokens vLLM's cache holds.

    Args:
        models: Which, the first is what the others are divided by.
        layers: Number of layers.
        heads: Query heads.
        kv_heads: KV heads.
        head_dim: Channels of a head; vLLM's kernel for CPUs has 32, 64, 80, 96, 112, 128, ...
        cache_gib: Memory for the cache.
        dtype: float32, or bfloat16, in which near ties fall either way.
        prompts: Number of prompts whose tokens are compared.
        longest_prompt: Tokens of the longest.
        batched_tokens: Most tokens that vLLM reads in a step; longer prompts are read in pieces.
        seed: Seed of the prompts.
        json_file: Write everything measured to this file.
        strict: Exit with 1 if a prompt gets other tokens or, at 6 layers, svformer holds less than 1.7 times as much.
    """
    from resformer.errors import UserError, did_you_mean

    for name in models:
        if name not in MODELS:
            raise UserError(f"--models: unknown model {name!r}{did_you_mean(name, MODELS)}; known: {', '.join(MODELS)}")
    about = prepare()
    sizes = sizes_of(layers=layers, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    engine = engine_of(dtype=dtype, batched_tokens=batched_tokens, cache_gib=cache_gib)
    texts = make_prompts(prompts, vocab_size=VOCABULARY, longest=longest_prompt, seed=seed)
    print(
        f"vllm {about['vllm']}, torch {about['torch']}; {layers} layers, {kv_heads} KV heads of {head_dim}, {dtype}, "
        f"{cache_gib:g} GiB of cache; {prompts} prompts of 1 to {longest_prompt} tokens, {batched_tokens} a step"
    )
    results = compare(models, texts, sizes, engine)
    if json_file is not None:
        settings = {"cache_gib": cache_gib, "longest_prompt": longest_prompt, "new_tokens": NEW_TOKENS, "seed": seed}
        turns.write(
            json_file, {"about": about, "settings": settings, "sizes": sizes, "engine": engine, "results": results}
        )
    return int(strict and any(_falls_short(found, layers) for found in results))


def _falls_short(found: dict[str, Any], layers: int) -> bool:
    """A prompt got other tokens, or SVFormer's cache is not small."""
    small = found["model"] == "svformer" and layers == 6 and found["ratio"] < BOUND
    return small or min(found["equal"]) < found["prompts"]


if __name__ == "__main__":
    from resformer.errors import UserError

    try:
        sys.exit(tyro.cli(main, config=(tyro.conf.FlagCreatePairsOff,)))
    except UserError as error:
        print(f"vllm_cache: error: {error}", file=sys.stderr)
        sys.exit(2)
