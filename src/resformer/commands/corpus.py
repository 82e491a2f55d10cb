"""Commands that turn text into a corpus."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Literal

from resformer import lookup, tables


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
    directory that was prepared with the same settings is kept as it is. What was left out (bad lines, duplicates,
    other file types) is said at the end. The work is done in a directory .NAME.partial-* beside --out; a stop by
    Ctrl-C or SIGTERM removes it (exit code 130 or 143), and what a kill -9 leaves goes with the next call.

    Example: `resformer data prepare --input embedded --out data/embedded`

    Args:
        input: Files or directories with text (.txt, .jsonl, .jsonl.gz, .jsonl.zst), or the word embedded.
        out: Directory for index.json, the tokenizer and the shards.
        tokenizer: A tokenizer to use instead of training one: a directory or a tokenizer.json.
        vocab_size: Entries of the byte-level BPE vocabulary that is trained when no tokenizer is given, from 257.
        validation_share: Share of the documents of each domain that is held out, between 0 and 1.
        split_seed: Seed of the split (and of nothing else), from 0 to 2**63 - 1.
        on_bad_line: What to do with a line that cannot be read: stop and name it, or skip it and say
            how many of each file were skipped.
        weights: Mixture weights as domain=number, `--weights github=0.3 wikipedia=0.7`; the corpus's own, or by size,
            when not given.
        max_bytes: Bytes of text to take at most, over all domains; everything when not given.
        overwrite: Replace a corpus that was prepared with other settings; never anything else.
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
