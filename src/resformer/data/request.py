"""What `prepare` is asked for, checked before anything is read or written. Messages name the flags of the command."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resformer.data import presets, sources, tokenizer
from resformer.data.console import say
from resformer.data.reading import Reading
from resformer.data.sampler import check_weights
from resformer.errors import UserError, did_you_mean

SEED_END = 2**63
TOKEN_DTYPES = ("uint16", "uint32")


@dataclass(frozen=True, kw_only=True)
class Request:
    """The arguments of `prepare`, checked.

    weights: a mixture, the name of a preset, or None. task: (i, n), i from 1.
    """

    inputs: tuple[str, ...]
    tokenizer: Path | None
    vocab_size: int
    tokenizer_bytes: int
    validation_share: float
    split_seed: int
    reading: Reading
    token_dtype: str | None
    weights: dict[str, float] | str | None
    max_bytes: int | None
    workers: int
    task: tuple[int, int] | None
    progress: bool

    def encoding_settings(self, stdin: Path | None) -> dict[str, Any]:
        """What decides the token ids of the documents."""
        return {
            "inputs": sources.inputs_digest(self.inputs, self.token_dtype, stdin),
            "tokenizer": None if self.tokenizer is None else tokenizer.identity(self.tokenizer),
            "vocab_size": self.vocab_size if self.tokenizer is None else None,
            "tokenizer_bytes": self.tokenizer_bytes if self.tokenizer is None else None,
            # A tokenizer that is trained does not see the documents that are held out.
            "validation_share": self.validation_share if self.tokenizer is None else None,
            "split_seed": self.split_seed,
            "on_bad_line": self.reading.on_bad_line,
            "text_column": self.reading.text_column,
            "domain_from": self.reading.domain_from,
            "token_dtype": self.token_dtype,
            "max_bytes": self.max_bytes,
        }

    def settings(self, stdin: Path | None) -> dict[str, Any]:
        """What decides the content of the result; equal settings mean "already prepared"."""
        more = {"validation_share": self.validation_share, "weights": self.weights}
        return self.encoding_settings(stdin) | more

    def check_tokenizer(self) -> None:
        """UserError when the given tokenizer cannot be used; said before the corpus is read, which may take hours."""
        if self.tokenizer is not None:
            tokenizer.read_existing(self.tokenizer)
            if lost := tokenizer.losses_of(self.tokenizer):
                say(f"note: --tokenizer {self.tokenizer} does not keep every text as it is: {lost}")


def check(
    *,
    inputs: str | Path | Sequence[str | Path],
    tokenizer_source: str | Path | None,
    vocab_size: int,
    tokenizer_bytes: int,
    validation_share: float,
    split_seed: int,
    reading: Reading,
    token_dtype: str | None,
    weights: dict[str, float] | str | None,
    max_bytes: int | None,
    workers: int | None,
    task: str | None,
    progress: bool,
) -> Request:
    """The arguments of `prepare` as a Request; UserError names the flag of the first one that makes no sense."""
    names = tuple(str(item) for item in ([inputs] if isinstance(inputs, str | Path) else inputs))
    sources.check_inputs(names)
    if tokenizer_source is None:
        tokenizer.check_vocab_size(vocab_size)
    elif not str(tokenizer_source):
        raise UserError("--tokenizer: got an empty path, expected a tokenizer.json, its directory or a hub name")
    if not 0 <= validation_share < 1:
        raise UserError(
            f"--validation-share: got {validation_share}, expected a share of at least 0 and below 1, such as 0.02 for "
            "2 %"
        )
    if not isinstance(split_seed, int) or not 0 <= split_seed < SEED_END:
        raise UserError(f"--split-seed: got {split_seed}, expected a whole number from 0 to {SEED_END - 1} (2**63 - 1)")
    _check_choice("--on-bad-line", reading.on_bad_line, ("error", "skip"))
    for flag, name in (("--text-column", reading.text_column), ("--domain-from", reading.domain_from)):
        if not name:
            raise UserError(f"{flag}: got an empty name, expected the name of a column")
    if token_dtype is not None:
        _check_choice("--token-dtype", token_dtype, TOKEN_DTYPES)
    for flag, value in (("--max-bytes", max_bytes), ("--workers", workers), ("--tokenizer-bytes", tokenizer_bytes)):
        if value is not None and value < 1:
            raise UserError(f"{flag}: got {value}, expected at least 1")
    if isinstance(weights, str):
        presets.check_name(weights)
    elif weights is not None:
        check_weights(weights, list(weights), name="--weights")
        weights = {name: float(value) for name, value in sorted(weights.items())}
    if tokenizer_source is None:
        _refuse_token_files(names, token_dtype)
    if task is not None and sources.STDIN in names:
        raise UserError("--task: standard input cannot be shared among tasks; write it to a file first")
    return Request(
        inputs=names,
        tokenizer=None if tokenizer_source is None else tokenizer.find(tokenizer_source),
        vocab_size=vocab_size,
        tokenizer_bytes=tokenizer_bytes,
        validation_share=float(validation_share),
        split_seed=int(split_seed),
        reading=reading,
        token_dtype=token_dtype,
        weights=weights,
        max_bytes=max_bytes,
        workers=workers
        or max(1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1),
        task=None if task is None else check_task(task),
        progress=progress,
    )


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_task(task: str) -> tuple[int, int]:
    """(i, n) of "i/n", i from 1."""
    found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", task.strip())
    number, of = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= number <= of:
        raise UserError(f"--task: got '{task}', expected i/n with i from 1 to n, such as 3/16")
    return number, of


def _check_choice(flag: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        listed = " or ".join(f"'{choice}'" for choice in choices)
        raise UserError(f"{flag}: got '{value}', expected {listed}{did_you_mean(str(value), list(choices))}")


def _refuse_token_files(names: Sequence[str], token_dtype: str | None) -> None:
    for name in names:
        if sources.is_path(name):
            for file, _ in sources.input_files(name, token_dtype):
                if sources.is_token_file(file):
                    raise UserError(f"{file}: holds token ids; say with --tokenizer which tokenizer they are of")
