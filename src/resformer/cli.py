"""The command line: every command is a function with plain types that Python users can call too.

Nothing heavy is imported before a command runs, so `resformer --help` stays fast. What an exit code means, and how an
error becomes one line, is in `shell.py`; what is printed as a table, in `tables.py`.
"""

from __future__ import annotations

import json as json_module
import sys
from pathlib import Path
from typing import Literal

from resformer import lookup, shell, tables
from resformer.errors import UserError


def plan(
    recipe: str,
    /,
    *,
    variant: str | None = None,
    config: Path | None = None,
    set: tuple[str, ...] = (),
    sequence_length: int | None = None,
    vocab_size: int | None = None,
    json: bool = False,
) -> None:
    """Show what each layer owns, reads and stores; parameters, FLOPs per token, KV bytes per token.

    Example: `resformer plan 82m --variant svformer --vocab-size 50277`

    Args:
        recipe: A recipe (quick, ...) or one of the paper's sizes (2m, 82m, 180m, 468m).
        variant: The variant to plan; the recipe's own when not given.
        config: A TOML file whose keys replace the recipe's.
        set: Single keys to replace, as section.key=value: `--set model.hidden_size=256 model.variant_options.first=2`.
        sequence_length: Tokens per sequence, for the FLOPs of attention; the recipe's when not given.
        vocab_size: Entries of the vocabulary; a size's own (50277) or 4096 when not given. Training takes the data's.
        json: Print one JSON object instead of tables.
    """
    from resformer.models.accounting import account, plan_rows

    chosen = lookup.model_config(recipe, config=config, overrides=set, variant=variant, vocab_size=vocab_size)
    totals = account(chosen, sequence_length=sequence_length).asdict()
    rows = plan_rows(chosen)
    head = {"recipe": recipe, "variant": chosen.variant, "formula": chosen.variant_formula}
    if json:
        print(json_module.dumps({**head, **totals, "layers": rows}, indent=2))
    else:
        tables.show_plan(head, totals, rows)


def data_prepare(
    *,
    input: tuple[str, ...],
    out: Path,
    tokenizer: str | None = None,
    vocab_size: int = 4096,
    validation_share: float = 0.02,
    split_seed: int = 0,
    on_bad_line: Literal["error", "skip"] = "error",
    weights: tuple[str, ...] = (),
    max_bytes: int | None = None,
    overwrite: bool = False,
) -> None:
    """Turn text into a tokenizer and token shards.

    The input named embedded is the corpus that comes with the installation: real text in several domains, without a
    download from a hub. Documents are split into train and validation by their hash, before anything else. A
    directory that was prepared with the same settings is kept as it is.

    Example: `resformer data prepare --input embedded --out data/embedded`

    Args:
        input: Files or directories with text (.txt, .jsonl, .jsonl.gz, .jsonl.zst), or the word embedded.
        out: Directory for index.json, the tokenizer and the shards.
        tokenizer: A tokenizer to use instead of training one: a directory or a tokenizer.json.
        vocab_size: Entries of the byte-level BPE vocabulary that is trained when no tokenizer is given.
        validation_share: Share of the documents of each domain that is held out, between 0 and 1.
        split_seed: Seed of the split (and of nothing else).
        on_bad_line: What to do with a line that cannot be read: stop and name it, or skip and count it.
        weights: Mixture weights as domain=number, `--weights github=0.3 wikipedia=0.7`; the corpus's own, or by size,
            when not given.
        max_bytes: Bytes of text to take at most, over all domains; everything when not given.
        overwrite: Replace a corpus that was prepared with other settings.
    """
    from resformer.data import prepare

    prepare(
        list(input),
        out,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        validation_share=validation_share,
        split_seed=split_seed,
        on_bad_line=on_bad_line,
        weights=lookup.weights(weights),
        max_bytes=max_bytes,
        overwrite=overwrite,
    )


def data_inspect(
    directory: Path, /, *, verify: Literal["full", "sample", "none"] = "full", samples: int = 1, json: bool = False
) -> None:
    """Show what a prepared corpus holds, after checking its files against their checksums.

    Args:
        directory: A directory written by `resformer data prepare`.
        verify: Check every byte of the shards, a sample of them, or nothing.
        samples: Beginnings of training documents to decode and show from each domain.
        json: Print one JSON object instead of a table.
    """
    from resformer.data import inspect

    found = inspect(directory, verify, samples=samples)
    if json:
        print(json_module.dumps(found, indent=2, ensure_ascii=False))
    else:
        tables.show_corpus(found)


def train(
    recipe: str,
    /,
    *,
    out: Path,
    data: Path | None = None,
    variant: str | None = None,
    steps: int | None = None,
    seed: int | None = None,
    config: Path | None = None,
    set: tuple[str, ...] = (),
    resume: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
) -> None:
    """Train one model; the run directory holds everything needed to repeat, resume and use it.

    Keys are taken from the recipe, then `--config`, then `--set`, then the flags below; the last word wins.

    Example: `resformer train quick --data data/embedded --out runs/a --variant svformer --set optim.lr=1e-3`

    Args:
        recipe: The recipe to start from (quick, tiny, ...).
        out: The run directory; refused if it holds a run already, unless --resume or --overwrite.
        data: A corpus written by `resformer data prepare` (the key data.dir).
        variant: The variant to train (model.variant), with its default options.
        steps: Optimizer steps (train.steps); the recipe's when not given.
        seed: Seed of the weights and of the order of the data (train.seed); the recipe's when not given.
        config: A TOML file whose keys replace the recipe's, for example the config.toml of another run.
        set: Single keys to replace, as section.key=value: `--set optim.lr=1e-3 train.batch_size=32`.
        resume: Go on from the last checkpoint of the run in --out.
        overwrite: Start anew in --out; only files that a run wrote are removed.
        dry_run: Print the full configuration, parameters and FLOPs, and stop before training.
    """
    from resformer.train.loop import train as run_training

    flags = {"data.dir": data, "model.variant": variant, "train.steps": steps, "train.seed": seed}
    lookup.quiet_libraries()
    effective = lookup.run_config(recipe, file=config, overrides=set, flags=flags)
    run_training(effective, out, resume=resume, overwrite=overwrite, dry_run=dry_run, command=_command_line())


def export(run: Path, /, *, step: int | None = None, out: Path | None = None, overwrite: bool = False) -> None:
    """Write a run's model as a Hugging Face directory with tokenizer, generation config and model card.

    Args:
        run: A run directory.
        step: The checkpoint to export, by step; the last one when not given.
        out: Where to write; RUN/model when not given.
        overwrite: Replace an export that is there already.
    """
    from resformer.train.export import export_run

    lookup.quiet_libraries()
    print(f"model: {export_run(run, step=step, out=out, overwrite=overwrite)}")


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
    """
    target = json or (Path(model) / "eval.json" if Path(model).is_dir() else None)
    if target is not None and target.exists() and not overwrite:
        raise UserError(f"{target} exists; pass --overwrite to replace it or --json FILE to write elsewhere")
    from resformer.data import open_dataset
    from resformer.evaluate.loading import load_model
    from resformer.evaluate.loss import evaluate as measure

    dataset = open_dataset(data, verify="sample")
    lookup.quiet_libraries()
    loaded, tokenizer = load_model(model, device)
    lookup.check_tokenizer(model, tokenizer, dataset)
    result = measure(
        loaded,
        dataset,
        sequence_length=sequence_length or min(loaded.config.max_position_embeddings, 2048),
        batch_size=batch_size,
        max_tokens=max_tokens,
        device=loaded.device,
    )
    tables.show_evaluation(model, result)
    if target is not None:
        from resformer.train.files import write_json

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
    """
    from resformer.evaluate.generation import cache_difference
    from resformer.evaluate.generation import generate as continue_text
    from resformer.evaluate.loading import load_model

    text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
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
            raise RuntimeError(f"the cache changes the logits by {difference:.3e}, more than 1e-3")


def suite_list() -> None:
    """List the suites: experiments of several runs with what they claim."""
    rows = [(name, [run.name for run in suite.runs], suite.title) for name, suite in lookup.suites().items()]
    tables.show("suites", ["name", "runs", "what"], rows)


def suite_run(
    name: str,
    /,
    *,
    out: Path | None = None,
    jobs: int = 2,
    set: tuple[str, ...] = (),
) -> None:
    """Train every run of a suite, evaluate them, and write the report; what is done already is kept.

    Example: `resformer suite run quick --out runs/quick`

    Args:
        name: The suite; `resformer suite list` names them.
        out: The suite's directory (corpus, runs, report.html); runs/NAME when not given.
        jobs: Runs to train at the same time, each on one CPU thread.
        set: Keys to replace in every run, as section.key=value.
    """
    from resformer.experiments.suite import run_suite

    code = run_suite(lookup.suite(name), _suite_directory(name, out), jobs=jobs, config_overrides=set)
    if code != 0:
        raise SystemExit(code)


def suite_status(name: str, /, *, out: Path | None = None) -> None:
    """Show how far each run of a suite is.

    Args:
        name: The suite.
        out: The suite's directory; runs/NAME when not given.
    """
    lookup.suite(name)
    from resformer.experiments.suite import suite_status as status

    status(_suite_directory(name, out))


def suite_report(name: str, /, *, out: Path | None = None) -> None:
    """Write the report of a suite again from what its runs have left so far.

    Args:
        name: The suite.
        out: The suite's directory; runs/NAME when not given.
    """
    lookup.suite(name)
    from resformer.experiments.suite import show_report

    show_report(_suite_directory(name, out))


COMMANDS: dict[str, shell.Command] = {
    "plan": plan,
    "data prepare": data_prepare,
    "data inspect": data_inspect,
    "train": train,
    "export": export,
    "eval": evaluate,
    "generate": generate,
    "suite list": suite_list,
    "suite run": suite_run,
    "suite status": suite_status,
    "suite report": suite_report,
}


def _suite_directory(name: str, out: Path | None) -> Path:
    return out if out is not None else Path("runs") / name


def _command_line() -> list[str]:
    """The command as it was typed, for the run's records."""
    return [Path(sys.argv[0]).name, *sys.argv[1:]]


def main(arguments: list[str] | None = None) -> int:
    """Run the command line (sys.argv by default) and return the exit code; see `resformer.shell` for the codes."""
    from resformer import __version__

    return shell.run(
        COMMANDS,
        sys.argv[1:] if arguments is None else arguments,
        program="resformer",
        about="Value residual learning (ResFormer, SVFormer): train it, compare it, look at it.",
        version=__version__,
    )
