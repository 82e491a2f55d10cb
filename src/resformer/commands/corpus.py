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
    tokenizer_bytes: int = 16_000_000,
    validation_share: float = 0.02,
    split_seed: int = 0,
    on_bad_line: Literal["error", "skip"] = "error",
    text_column: str = "text",
    domain_from: str = "auto",
    token_dtype: Literal["uint16", "uint32"] | None = None,
    weights: tuple[str, ...] = (),
    max_bytes: int | None = None,
    workers: int | None = None,
    task: str | None = None,
    overwrite: bool = False,
) -> None:
    """Turn text into a tokenizer and token shards.

    The input named embedded is the corpus that comes with the installation: real text in several domains, without a
    download from a hub. Documents are split into train and validation by their hash, and stored in the order of the
    input; exact duplicates are stored once. A directory that was prepared with the same settings is kept as it is.
    What was left out (bad lines, duplicates, other file types) is said at the end.

    The work is done in a directory .NAME.partial beside --out. After Ctrl-C, SIGTERM (exit code 130 or 143) or a kill
    the same command goes on with what is there, and the result is the same to the byte.

    Example: `resformer data prepare --input embedded --out data/embedded`

    Args:
        input: Files, directories or patterns with text (.txt, .md, code, .jsonl, .parquet; also .gz, .zst, .xz, .bz2)
            or token ids (.bin of nanoGPT, llm.c and Megatron, .ds of datatrove); dataset:NAME[:CONFIG][:SPLIT] for
            the datasets library, - for standard input, or the word embedded.
        out: Directory for index.json, the tokenizer and the shards.
        tokenizer: A tokenizer to use instead of training one: a directory, a tokenizer.json, or a name on the hub.
        vocab_size: Entries of the byte-level BPE vocabulary that is trained when no tokenizer is given, from 257.
        tokenizer_bytes: Bytes of text that it is trained on at most; needs about 25 times as much memory.
        validation_share: Share of the documents of each domain that is held out, between 0 and 1.
        split_seed: Seed of the split (and of nothing else), from 0 to 2**63 - 1.
        on_bad_line: What to do with a line that cannot be read: stop and name it, or skip it and say
            how many of each file were skipped.
        text_column: Column with the text; a.b is the field b of the object a.
        domain_from: Where a document's domain comes from: auto (meta.redpajama_set_name, else the file), file, or a
            column.
        token_dtype: Type of the ids in .bin files without a header.
        weights: Mixture weights as domain=number, `--weights github=0.3 wikipedia=0.7`, or the name of a preset
            (paper); the corpus's own, or by size, when not given.
        max_bytes: Bytes of text to take at most, over all inputs, each giving its beginning; everything when not given.
        workers: Threads that encode; one a core when not given.
        task: Do only the share i of n of the inputs, as i/n, on machines that see the same directory; when all are
            done, the command without it writes the corpus.
        overwrite: Replace a corpus that was prepared with other settings; never anything else.
    """
    from resformer.data import prepare

    prepare(
        list(input),
        out,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        tokenizer_bytes=tokenizer_bytes,
        validation_share=validation_share,
        split_seed=split_seed,
        on_bad_line=on_bad_line,
        text_column=text_column,
        domain_from=domain_from,
        token_dtype=token_dtype,
        weights=weights[0] if len(weights) == 1 and "=" not in weights[0] else lookup.weights(weights),
        max_bytes=max_bytes,
        workers=workers,
        task=task,
        overwrite=overwrite,
    )


def data_inspect(
    directory: str, /, *, verify: Literal["full", "sample", "none"] = "full", samples: int = 1, json: bool = False
) -> None:
    """Show what a prepared corpus holds, after checking its files against their checksums.

    Args:
        directory: A directory (or an address) that `resformer data prepare` wrote.
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
