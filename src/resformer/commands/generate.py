"""The command that continues texts: prompts from flags, files or standard input; texts to standard output, everything
else to standard error.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from resformer import lookup
from resformer.errors import RunError, UserError
from resformer.shell import Text
from resformer.train.files import check_output, write_json

if TYPE_CHECKING:
    from resformer.evaluate.batch import Cost
    from resformer.evaluate.generation import Generation
    from resformer.evaluate.generation_cache import CacheCheck

SEPARATOR = "---"
"""The line between two texts."""


def generate(
    model: str,
    /,
    *,
    prompt: tuple[Text, ...] = (),
    prompt_file: Path | None = None,
    num_samples: int = 1,
    max_new_tokens: int = 128,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seed: int = 0,
    stop: tuple[Text, ...] = (),
    cache: Literal["dynamic", "static", "quantized", "offloaded", "tokens", "auto"] = "dynamic",
    compile: bool = False,
    stats: bool = False,
    check_cache: bool = False,
    strict: bool = False,
    json: Path | None = None,
    overwrite: bool = False,
    device: str = "auto",
    import_: tuple[Path, ...] = (),
) -> None:
    """Continue texts; one prompt and its continuation are printed as they come, several when all are done.

    Standard output gets the texts only (between several a line of three dashes), standard error the rest.

    Example: `resformer generate runs/mine --prompt "def read_lines(" --max-new-tokens 60 --stats`

    Args:
        model: A run directory, an exported directory or a hub name.
        prompt: A text to continue; may be given several times. - reads one text from standard input (without its last
            line break), an empty text starts a new document, --prompt=TEXT takes one that begins with a dash.
        prompt_file: A file with one prompt a line, blank lines skipped; - reads standard input.
        num_samples: Continuations of each prompt. A prompt's n-th one is the same however many are asked for.
        max_new_tokens: Tokens to add to each at most; the end-of-text token ends earlier.
        temperature: 0 is greedy; 1 samples from the model's own distribution.
        top_k: Sample among the k likeliest tokens only; 0 is off.
        top_p: Sample among the likeliest tokens that together have this probability (0 to 1); 1 is off.
        min_p: Sample among tokens that have at least this share (0 to 1) of the likeliest one's probability; 0 is off.
        repetition_penalty: Divide (or multiply, if negative) the logits of tokens that are there already by this; 1 is
            off, above 1 repeats less.
        seed: Seed of the sampling, 0 or more; what a prompt becomes does not depend on the other prompts.
        stop: A text before which a continuation ends; may be given several times.
        cache: Kind of cache: dynamic (grows), static (allocated once), quantized (lossy), offloaded (in the memory of
            the host), tokens (token ids for the first layer's values), auto (dynamic or tokens, whichever has the lower
            peak).
        compile: Decode with a compiled step and a static cache; compiling takes 10 to 60 seconds, once.
        stats: Print tokens per second, the bytes of the cache, counted on its real tensors, and the peak of memory.
        check_cache: Print the largest difference between the logits with and without a cache, over all texts.
        strict: Fail (exit code 1) if that difference is over its tolerance, and refuse (exit code 2) texts beyond the
            positions that the model was trained for.
        json: Write prompts, texts, token ids, reasons of the end, seeds and statistics to this file as well.
        overwrite: Replace that file if it is there already.
        device: auto, cpu, cuda or mps.
        import_: A Python file of yours that registers variants (@register_variant), run before anything is built; may
            be given several times.
    """
    if json is not None:
        check_output(json, overwrite=overwrite, flag="--json")
    prompts = read_prompts(prompt, prompt_file)
    lookup.check_range("--num-samples", num_samples, high=10**6)
    lookup.check_range("--max-new-tokens", max_new_tokens, high=10**9)
    lookup.import_variants(import_, using=(model,))
    from resformer.evaluate import generation
    from resformer.evaluate.loading import load_model

    lookup.quiet_libraries()
    loaded, tokenizer = load_model(model, device)
    single = len(prompts) * num_samples == 1
    sampling = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
    }
    try:
        made = generation.generate_many(
            loaded,
            tokenizer,
            prompts,
            num_samples=num_samples,
            max_new_tokens=max_new_tokens,
            **sampling,  # type: ignore[arg-type]
            seed=seed,
            stop=stop,
            cache=cache,
            compile=compile,
            strict=strict,
            warm_up=stats,
            measure_memory=stats,
            warn=lambda text: print(f"warning: {text}", file=sys.stderr),
            announce=lambda text: print(text, file=sys.stderr),
            stream_to=sys.stdout if single else None,
            echo=single,
        )
    except KeyboardInterrupt:
        if single:
            print(flush=True)  # what is there of the text keeps its own line
        raise
    print("" if single else f"\n{SEPARATOR}\n".join(one.prompt + one.text for one in made), flush=True)
    cost = made[0].cost
    if stats:
        for line in cost_lines(cost):
            print(line, file=sys.stderr)
    checked = generation.check_cache(loaded, tokenizer, made, cache=cache, compile=compile) if check_cache else None
    if json is not None:
        options = {"num_samples": num_samples, "max_new_tokens": max_new_tokens, **sampling, "stop": list(stop)}
        options |= {"seed": seed, "cache": cache, "compile": compile, "device": str(loaded.device)}
        write_json(json, {"model": model, "options": options, **as_json(made, checked)})
    if checked is not None:
        print(check_line(checked), file=sys.stderr)
        if strict and not checked.passed:
            raise RunError(
                f"the cache changes the logits by {checked.relative:.1e} of the largest, more than "
                f"{checked.tolerance:g}"
            )


def cost_lines(cost: Cost) -> list[str]:
    """What `--stats` prints."""
    several = f"{cost.sequences} sequences: " if cost.sequences > 1 else ""
    lines = [
        f"{several}prompt {cost.prompt_tokens} tokens at {cost.prefill_tokens_per_second:,.0f} tokens/s; "
        f"{cost.new_tokens} new tokens at {cost.decode_tokens_per_second:,.1f} tokens/s",
        f"cache {cost.cache_bytes:,} bytes for {cost.cache_tokens} tokens of {cost.sequences} sequence(s)"
        + (f", allocated for {cost.cache_capacity}" if cost.cache_capacity else "")
        + f" ({cost.cache_kind}): {cost.cache_bytes_per_token:,.1f} bytes a token",
    ]
    if cost.table_bytes:
        lines.append(
            f"table {cost.table_bytes:,} bytes, once for a model; {cost.gathered_bytes:,} bytes gathered and dropped "
            "in each step"
        )
    if cost.peak_memory is not None:
        peak = cost.peak_memory
        lines.append(f"peak memory {peak.added_bytes:,} bytes beyond the loaded model ({peak.source})")
    return lines


def check_line(checked: CacheCheck) -> str:
    """What `--check-cache` prints."""
    lossy = "; a quantized cache is lossy" if checked.lossy else ""
    verdict = "within" if checked.passed else "over"
    return (
        f"largest difference between logits with and without cache: {checked.difference:.3e}, {checked.relative:.1e} "
        f"of the largest logit, {verdict} the tolerance of {checked.tolerance:g}{lossy}"
    )


def as_json(made: list[Generation], checked: CacheCheck | None) -> dict[str, Any]:
    """The results and what they cost, as `--json` writes them."""
    cost = made[0].cost
    statistics: dict[str, Any] = {
        "sequences": cost.sequences,
        "prompt_tokens": cost.prompt_tokens,
        "new_tokens": cost.new_tokens,
        "prefill_tokens_per_second": cost.prefill_tokens_per_second,
        "decode_tokens_per_second": cost.decode_tokens_per_second,
        "cache": cost.cache_kind,
        "cache_bytes": cost.cache_bytes,
        "cache_tokens": cost.cache_tokens,
        "cache_bytes_per_token": cost.cache_bytes_per_token,
        "table_bytes": cost.table_bytes,
        "gathered_bytes": cost.gathered_bytes,
    }
    if cost.peak_memory is not None:
        statistics["peak_memory_bytes"] = cost.peak_memory.added_bytes
        statistics["peak_memory_source"] = cost.peak_memory.source
    if checked is not None:
        finite = checked.difference < float("inf")
        statistics["cache_difference"] = checked.difference if finite else None
        statistics["cache_difference_passed"] = checked.passed
    results = [
        {
            "prompt": one.prompt,
            "sample": one.sample,
            "seed": one.seed,
            "text": one.text,
            "finish": one.finish,
            "prompt_tokens": one.prompt_tokens,
            "tokens": list(one.tokens),
        }
        for one in made
    ]
    return {"results": results, "stats": statistics}


def read_prompts(prompts: tuple[str, ...], file: Path | None) -> list[str]:
    """The prompts of the flags, then those of the file.

    Raises:
        UserError: none at all, standard input named twice, or bytes that are no UTF-8.
    """
    if [*prompts, str(file) if file else ""].count("-") > 1:
        raise UserError("standard input can be read once; give - to one of --prompt and --prompt-file")
    found = [_standard_input("--prompt").removesuffix("\n") if text == "-" else text for text in prompts]
    if file is not None:
        name = f"--prompt-file {file}"
        content = _standard_input("--prompt-file") if str(file) == "-" else _decoded(_bytes(file, name), name)
        lines = [line for line in content.replace("\r\n", "\n").replace("\r", "\n").split("\n") if line.strip()]
        if not lines:
            raise UserError(f"{name} holds no prompt; expected one a line")
        found += lines
    if not found:
        raise UserError("a prompt is missing; give --prompt TEXT (- reads standard input) or --prompt-file FILE")
    return found


def _standard_input(flag: str) -> str:
    if sys.stdin is None:
        raise UserError(f"{flag} -: standard input is closed; pipe a text into it, or give the text after --prompt")
    raw = getattr(sys.stdin, "buffer", None)
    return sys.stdin.read() if raw is None else _decoded(raw.read(), f"{flag} -: standard input")


def _bytes(file: Path, name: str) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise UserError(f"{name}: {error.strerror}; name a file with one prompt a line") from None


def _decoded(content: bytes, name: str) -> str:
    try:
        return content.decode("utf-8-sig")  # a mark at the beginning is no text
    except UnicodeDecodeError as error:
        raise UserError(
            f"{name} is no UTF-8 (byte {error.start + 1} is 0x{error.object[error.start]:02x}); "
            "convert it, for example with iconv -t utf-8"
        ) from None
