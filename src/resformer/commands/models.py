"""Commands that use a trained model."""

from __future__ import annotations

import sys
from pathlib import Path

from resformer import lookup, tables
from resformer.errors import RunError, UserError
from resformer.train.files import check_output, write_json


def evaluate(
    model: str,
    /,
    *,
    data: Path,
    sequence_length: int | None = None,
    batch_size: int = 16,
    max_tokens: int | None = None,
    device: str = "auto",
    json: Path | None = None,
    overwrite: bool = False,
    import_: tuple[Path, ...] = (),
) -> None:
    """Measure loss, perplexity and bits per byte on the validation text, by domain.

    The result is printed and written to eval.json in MODEL's directory.

    Args:
        model: A run directory, an exported directory or a hub name.
        data: A corpus written by `resformer data prepare`, with the model's tokenizer.
        sequence_length: Tokens per window; the model's number of positions, at most 2048, when not given.
        batch_size: Windows per forward pass.
        max_tokens: Validation tokens to score per domain; all of them when not given.
        device: auto, cpu, cuda or mps.
        json: Write the result to this file instead.
        overwrite: Replace a result that is there already.
        import_: A Python file of yours that registers variants (@register_variant), run before anything is built; may
            be given several times.
    """
    lookup.check_range("--sequence-length", sequence_length)
    lookup.check_range("--batch-size", batch_size)
    lookup.check_range("--max-tokens", max_tokens, high=10**15)
    target = json or (Path(model) / "eval.json" if Path(model).is_dir() else None)
    if target is not None:
        check_output(target, overwrite=overwrite, flag="--json" if json else "the result")
    lookup.import_variants(import_, using=(model,))
    from resformer.data import open_dataset
    from resformer.evaluate.loading import load_model
    from resformer.evaluate.loss import evaluate as measure

    dataset = open_dataset(data, verify="sample")
    lookup.quiet_libraries()
    loaded, tokenizer = load_model(model, device)
    lookup.check_tokenizer(model, tokenizer, dataset)
    positions = getattr(loaded.config, "max_position_embeddings", None) or 2048
    result = measure(
        loaded,
        dataset,
        sequence_length=sequence_length if sequence_length is not None else min(positions, 2048),
        batch_size=batch_size,
        max_tokens=max_tokens,
        device=loaded.device,
    )
    tables.show_evaluation(model, result)
    if target is not None:
        write_json(target, {"model": model, "data": str(data), "data_fingerprint": dataset.fingerprint, **result})
        print(f"written: {target}")


def generate(
    model: str,
    /,
    *,
    prompt: str,
    max_new_tokens: int = 128,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    stats: bool = False,
    check_cache: bool = False,
    strict: bool = False,
    device: str = "auto",
    import_: tuple[Path, ...] = (),
) -> None:
    """Continue a text; the prompt and its continuation are printed as they come.

    Example: `resformer generate runs/mine --prompt "def read_lines(" --max-new-tokens 60 --stats`

    Args:
        model: A run directory, an exported directory or a hub name.
        prompt: The text to continue; - reads it from standard input (without its last line break), an empty text starts
            a new document.
        max_new_tokens: Tokens to add at most; the end-of-text token ends earlier.
        temperature: 0 is greedy; 1 samples from the model's own distribution.
        top_k: Sample among the k likeliest tokens only; 0 is off.
        top_p: Sample among the likeliest tokens that together have this probability; 1 is off.
        seed: Seed of the sampling.
        stats: Print tokens per second and the bytes of the cache, counted on its real tensors.
        check_cache: Print the largest difference between the logits with and without a cache.
        strict: With --check-cache, fail (exit code 1) if that difference is over 1e-3.
        device: auto, cpu, cuda or mps.
        import_: A Python file of yours that registers variants (@register_variant), run before anything is built; may
            be given several times.
    """
    lookup.import_variants(import_, using=(model,))
    from resformer.evaluate.generation import cache_difference
    from resformer.evaluate.generation import generate as continue_text
    from resformer.evaluate.loading import load_model

    text = _standard_input() if prompt == "-" else prompt
    lookup.quiet_libraries()
    loaded, tokenizer = load_model(model, device)
    done = continue_text(
        loaded,
        tokenizer,
        text,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stream_to=sys.stdout,
        echo=True,
        warm_up=stats,
    )
    print()
    if stats:
        print(
            f"prompt {done.prompt_tokens} tokens at {done.prefill_tokens_per_second:,.0f} tokens/s; "
            f"{len(done.tokens)} new tokens at {done.decode_tokens_per_second:,.1f} tokens/s; "
            f"cache {done.cache_bytes:,} bytes for {done.cache_tokens} tokens"
        )
    if check_cache:
        difference = cache_difference(loaded, tokenizer, text, done.tokens)
        print(f"largest difference between logits with and without cache: {difference:.3e}")
        if strict and not difference <= 1e-3:
            raise RunError(f"the cache changes the logits by {difference:.3e}, more than 1e-3")


def _standard_input() -> str:
    """The prompt from standard input, without its last line break."""
    if sys.stdin is None:
        raise UserError("--prompt -: standard input is closed; pipe a text into it, or give the text after --prompt")
    raw = getattr(sys.stdin, "buffer", None)
    if raw is None:
        return sys.stdin.read().removesuffix("\n")
    try:
        return raw.read().decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UserError(
            f"--prompt -: standard input is no UTF-8 (byte {error.start + 1} is 0x{error.object[error.start]:02x}); "
            "convert it, for example with iconv -t utf-8"
        ) from None
