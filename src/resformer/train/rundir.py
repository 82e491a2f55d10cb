"""The run directory: when a run may start in it, and which files in it are a run's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path

from resformer.errors import UserError
from resformer.train import checkpoint
from resformer.train.config import Config
from resformer.train.configure import from_toml, to_tree

CONFIG, ENVIRONMENT, METRICS = "config.toml", "environment.json", "metrics.jsonl"
CHECKPOINTS, TOKENIZER, MODEL = "checkpoints", "tokenizer", "model"

TOKENIZER_FILES = ("tokenizer*.json", "special_tokens_map.json", "added_tokens.json")
# Everything that a run, or a command that works on a run, writes into its directory.
MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "model.safetensors.index.json",
    "modeling_resformer.py",
    *TOKENIZER_FILES,
    "README.md",
    "eval.json",
)
_OWN = (
    *(name for plain in (CONFIG, ENVIRONMENT, METRICS) for name in (plain, f".{plain}.*")),
    *("eval.json", "measures.jsonl", "samples.json"),
    *(f"{CHECKPOINTS}/{name}" for name in (checkpoint.LATEST, f".{checkpoint.LATEST}.*")),
    *(f"{CHECKPOINTS}/step-*/{name}" for name in checkpoint.FILES),
    f"{CHECKPOINTS}/{checkpoint.TEMPORARY}*",
    *(f"{MODEL}/{name}" for name in MODEL_FILES),
    f".{MODEL}-*",
    *(f"{TOKENIZER}/{name}" for name in TOKENIZER_FILES),
)
# Logs that a shell, a launcher or a batch system puts there: they neither stop a run nor are removed.
_TOLERATED = ("*.log", "*.out", "*.err")

# Keys that may change on resume: they change no number that the run computes.
_FREE = ("data.dir", "data.verify", "train.checkpoint_every", "train.keep_last", "track.log_every_seconds")
# These may change as well, at the price of the last bits.
_FREE_WITH_NOTE = ("train.device", "train.threads", "train.compile", "train.checkpointing")


def check_start(out: Path, *, resume: bool, overwrite: bool) -> None:
    """Raise UserError unless a run may start (or has started) in `out`. Changes nothing."""
    if resume and overwrite:
        raise UserError("--resume and --overwrite exclude each other; give one of them")
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file; expected a directory")
    if resume:
        if not (out / CONFIG).is_file():
            raise UserError(f"--resume: no run in {out} ({CONFIG} is missing); leave --resume out to start one")
        return
    foreign = list(islice((path for path, own in _files(out) if not own), 4))
    if foreign:
        some = ", ".join(str(path.relative_to(out)) for path in foreign[:3]) + (", ..." if len(foreign) > 3 else "")
        raise UserError(f"--out {out} holds files that are no run's ({some}); choose another directory")
    if not overwrite and any(True for _ in _files(out)):
        done = checkpoint.latest_step(out / CHECKPOINTS)
        at = f" (last checkpoint: step {done})" if done is not None else ""
        raise UserError(f"--out {out} holds a run already{at}; pass --resume, --overwrite or another --out")


def clear(out: Path) -> None:
    """Remove every file that a run wrote, and directories that are empty then."""
    for path, own in list(_files(out)):
        if own:
            path.unlink()
    for directory, _, _ in os.walk(out, topdown=False):
        if Path(directory) != out and not os.listdir(directory):
            os.rmdir(directory)


def check_same(out: Path, config: Config) -> list[str]:
    """Compare with the configuration that the run in `out` was started with; return notes on harmless differences.

    Raises:
        UserError: a key differs that changes what the run computes; the message names both values of each.
    """
    before, now = to_tree(from_toml(out / CONFIG)), to_tree(config)
    wrong, notes = [], []
    for section, table in now.items():
        for name, value in table.items():
            path, old = f"{section}.{name}", before[section][name]
            if old == value or path in _FREE:
                continue
            text = f"{path} is {_shown(old)} in the run and {_shown(value)} now"
            if path in _FREE_WITH_NOTE:
                notes.append(f"{text}: the numbers may differ from an uninterrupted run in their last bits")
            else:
                wrong.append(text)
    if wrong:
        raise UserError(
            f"--resume {out}: {'; '.join(wrong)}; keep the run's values (--config {out / CONFIG}) or start another run"
        )
    return notes


def _shown(value: object) -> str:
    return "none" if value is None else repr(value) if isinstance(value, str) else str(value)


def _files(out: Path) -> Iterator[tuple[Path, bool]]:
    """Every file below `out`, with whether a run wrote it; tolerated logs are left out."""
    for directory, directories, names in os.walk(out):
        links = [name for name in directories if (Path(directory) / name).is_symlink()]
        for name in sorted([*names, *links]):
            path = Path(directory) / name
            relative = path.relative_to(out).as_posix()
            if not any(fnmatch(relative, pattern) and "/" not in relative for pattern in _TOLERATED):
                yield path, any(fnmatch(relative, pattern) for pattern in _OWN)
