"""What `prepare` is asked for, checked before anything is read or written. Messages name the flags of the command."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resformer.data import embedded, tokenizer
from resformer.data.readers import list_files
from resformer.data.sampler import check_weights
from resformer.errors import UserError, did_you_mean

SEED_END = 2**63


@dataclass(frozen=True, kw_only=True)
class Request:
    """The arguments of `prepare`, checked."""

    inputs: tuple[str, ...]
    tokenizer: Path | None
    vocab_size: int
    validation_share: float
    split_seed: int
    on_bad_line: str
    weights: dict[str, float] | None
    max_bytes: int | None
    progress: bool

    def settings(self) -> dict[str, Any]:
        """What decides the content of the result; equal settings mean "already prepared"."""
        return {
            "inputs": _inputs_digest(self.inputs),
            "tokenizer": None if self.tokenizer is None else tokenizer.fingerprint(tokenizer.locate(self.tokenizer)),
            "vocab_size": self.vocab_size if self.tokenizer is None else None,
            "validation_share": self.validation_share,
            "split_seed": self.split_seed,
            "on_bad_line": self.on_bad_line,
            "weights": self.weights,
            "max_bytes": self.max_bytes,
        }

    def check_tokenizer(self) -> None:
        """UserError when the given tokenizer cannot be used; said before the corpus is read, which may take hours."""
        if self.tokenizer is not None:
            tokenizer.read_existing(self.tokenizer)


def check(
    inputs: Any,
    source: Any,
    vocab_size: Any,
    share: Any,
    seed: Any,
    on_bad_line: Any,
    weights: Any,
    max_bytes: Any,
    progress: bool,
) -> Request:
    """The arguments of `prepare` as a Request; UserError names the flag of the first one that makes no sense."""
    names = tuple(str(item) for item in ([inputs] if isinstance(inputs, str | Path) else inputs))
    _check_inputs(names)
    if source is None:
        tokenizer.check_vocab_size(vocab_size)
    else:
        if not str(source):
            raise UserError("--tokenizer: got an empty path, expected a tokenizer.json or its directory")
        source = Path(source)
        tokenizer.locate(source)
    if not 0 <= share < 1:
        raise UserError(
            f"--validation-share: got {share}, expected a share of at least 0 and below 1, such as 0.02 for 2 %"
        )
    if not isinstance(seed, int) or not 0 <= seed < SEED_END:
        raise UserError(f"--split-seed: got {seed}, expected a whole number from 0 to {SEED_END - 1} (2**63 - 1)")
    if on_bad_line not in ("error", "skip"):
        raise UserError(
            f"--on-bad-line: got '{on_bad_line}', expected 'error' or "
            f"'skip'{did_you_mean(str(on_bad_line), ['error', 'skip'])}"
        )
    if max_bytes is not None and max_bytes < 1:
        raise UserError(f"--max-bytes: got {max_bytes}, expected at least 1")
    if weights is not None:
        check_weights(weights, list(weights), name="--weights")
    return Request(
        inputs=names,
        tokenizer=source,
        vocab_size=vocab_size,
        validation_share=float(share),
        split_seed=int(seed),
        on_bad_line=on_bad_line,
        weights=None if weights is None else {name: float(value) for name, value in sorted(weights.items())},
        max_bytes=max_bytes,
        progress=progress,
    )


def _check_inputs(names: tuple[str, ...]) -> None:
    if not names:
        raise UserError("--input: got none, expected 'embedded' or the paths of files or directories")
    for name in names:
        if not name.strip():  # Path("") is the current directory, with everything in it
            raise UserError("--input: got an empty path, expected 'embedded' or a file or directory ('.' for this one)")
        if name != embedded.NAME and not Path(name).exists():
            raise UserError(
                f"--input: no file or directory '{name}'{did_you_mean(name, [embedded.NAME])}; expected a path or "
                "'embedded'"
            )
    if len(set(names)) < len(names):
        twice = ", ".join(sorted({name for name in names if names.count(name) > 1}))
        raise UserError(f"--input: named twice: {twice}; name each once")


def _inputs_digest(inputs: Sequence[str]) -> str:
    """Identity of the inputs by names, sizes and times of their files; reading terabytes would not be "at once"."""
    digest = hashlib.sha256()
    for name in inputs:
        if name == embedded.NAME:
            digest.update(f"{embedded.NAME} {embedded.REVISION}\n".encode())
            continue
        top = Path(name)
        for file in list_files(top):
            stat = file.stat()
            relative = file.relative_to(top).as_posix() if file != top else file.name
            digest.update(json.dumps([relative, stat.st_size, stat.st_mtime_ns]).encode())
    return digest.hexdigest()
