"""The run directory: when a run may start in it, and which files in it are a run's."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from resformer.errors import UserError
from resformer.train import checkpoint, incident
from resformer.train.config import Config
from resformer.train.configure import from_toml, to_tree
from resformer.train.metrics import MetricsLog

CONFIG, ENVIRONMENT, METRICS = "config.toml", "environment.json", "metrics.jsonl"
CHECKPOINTS, TOKENIZER, MODEL, TENSORBOARD = "checkpoints", "tokenizer", "model", "tensorboard"

_RANDOM = "[a-z0-9_]{8}"  # what the tempfile module puts after a prefix


def _temporary(name: str) -> str:
    """What `files.write_atomic` writes before it renames."""
    return rf"\.{re.escape(name)}\.{_RANDOM}"


# Everything that a run, or a command that works on a run, writes into its directory: regular expressions, each for one
# whole name.
TOKENIZER_FILES = (
    *(r"tokenizer\.json", r"tokenizer_config\.json"),
    *(r"special_tokens_map\.json", r"added_tokens\.json", r"chat_template\.jinja"),
)
KEPT_FILES = (*TOKENIZER_FILES, r"generation_config\.json")
"""What an export takes over as it is, from the run's directory of the tokenizer."""
MODEL_FILES = (
    *(r"config\.json", r"generation_config\.json"),
    *(r"model\.safetensors", r"model-\d{5}-of-\d{5}\.safetensors", r"model\.safetensors\.index\.json"),
    r"modeling_resformer\.py",
    *TOKENIZER_FILES,
    *(r"README\.md", r"eval\.json", _temporary("eval.json")),
)
_CHECKPOINT_FILES = (re.escape(checkpoint.STATE), checkpoint.FILE.pattern)
_STEP = r"step-\d{8,}"
_UNFINISHED = re.escape(checkpoint.TEMPORARY) + _RANDOM
_REPLACED = rf"\.tmp-old-{_RANDOM}"  # of `files.put_directory`
_OWN = (
    *((re.escape(name),) for name in (CONFIG, ENVIRONMENT, METRICS)),
    *((_temporary(name),) for name in (CONFIG, ENVIRONMENT, "eval.json", "measures.jsonl", "samples.json")),
    *((name,) for name in (r"eval\.json", r"measures\.jsonl", r"samples\.json")),
    *((CHECKPOINTS, name) for name in (checkpoint.LATEST, _temporary(checkpoint.LATEST))),
    *((CHECKPOINTS, place, name) for place in (_STEP, _UNFINISHED) for name in _CHECKPOINT_FILES),
    *((CHECKPOINTS, _REPLACED, _STEP, name) for name in _CHECKPOINT_FILES),
    *((place, name) for place in (MODEL, rf"\.{MODEL}-{_RANDOM}") for name in MODEL_FILES),
    *((_REPLACED, MODEL, name) for name in MODEL_FILES),
    *((TOKENIZER, name) for name in KEPT_FILES),
    *((incident.DIRECTORY, name) for name in (r"step-\d{8,}\.json", r"\.step-\d{8,}\.json\." + _RANDOM)),
    (TENSORBOARD, r"events\.out\.tfevents\..+"),
)
# Logs that a shell, a launcher or a batch system puts there: they neither stop a run nor are removed.
_TOLERATED = (".log", ".out", ".err")

# Keys that may change on resume: they change no number that the run computes.
_FREE = (
    *("data.dir", "data.verify", "data.max_epochs", "train.checkpoint_every", "train.keep_last", "train.keep_every"),
    *("train.async_save", "train.init_from", "train.skip_limit", "train.spike_factor", "parallel.timeout_seconds"),
    *("track.log_every_seconds", "track.tensorboard", "track.wandb", "track.trackio", "track.peak_flops"),
    "track.gradient_norms",
)
# These may change as well, at the price of the last bits.
_FREE_WITH_NOTE = (
    *("train.device", "train.threads", "train.compile", "train.checkpointing", "train.micro_batch_size"),
    *("parallel.shard", "parallel.replicate"),
)
# These change what the rest of the run is, and are taken over when the user says so.
_ON_DEMAND = (
    *("train.steps", "train.batch_size", "train.validate_every", "train.validation_tokens"),
    *("optim.lr", "optim.start_lr", "optim.warmup_steps", "optim.min_lr_ratio", "optim.schedule", "optim.decay_share"),
    *("optim.weight_decay", "optim.beta1", "optim.beta2", "optim.eps", "optim.grad_clip"),
    *("optim.lambda_lr_scale", "optim.lr_scale", "optim.muon_lr_scale", "optim.muon_momentum"),
)


def check_start(out: Path, *, resume: bool, overwrite: bool, held: bool = False) -> None:
    """Raise UserError unless a run may start (or has started) in `out`. Changes nothing.

    An empty metrics.jsonl alone is no run: it is what a start leaves that went no further than its lock. `held` says
    that the caller has that lock; otherwise a run that is being written is named as such.
    """
    if resume and overwrite:
        raise UserError("--resume and --overwrite exclude each other; give one of them")
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file; expected a directory")
    if out.is_symlink() and not out.exists():
        raise UserError(f"--out {out} is a link to {os.readlink(out)}, which is not there; make it, or choose another")
    if not held and (out / METRICS).is_file():
        MetricsLog(out / METRICS).close()
    if resume:
        if not (out / CONFIG).is_file():
            raise UserError(f"--resume: no run in {out} ({CONFIG} is missing); leave --resume out to start one")
        if not (out / METRICS).is_file():
            raise UserError(
                f"--resume: {out / METRICS} is missing, the losses of the run in {out}; put it back, or start anew "
                "with --overwrite"
            )
        return
    foreign = list(islice((path for path, own in _files(out) if not own), 4))
    if foreign:
        some = ", ".join(str(path.relative_to(out)) for path in foreign[:3]) + (", ..." if len(foreign) > 3 else "")
        raise UserError(f"--out {out} holds files that are no run's ({some}); choose another directory")
    lock_only = out / METRICS if out.is_dir() and not _size(out / METRICS) else None
    if not overwrite and any(path != lock_only for path, _ in _files(out)):
        done = checkpoint.latest_step(out / CHECKPOINTS)
        at = f" (last checkpoint: step {done})" if done is not None else ""
        raise UserError(f"--out {out} holds a run already{at}; pass --resume, --overwrite or another --out")


def clear(out: Path) -> None:
    """Remove every file that a run wrote, and the directories that are empty then; nothing else.

    metrics.jsonl is emptied and stays: it is the lock of whoever clears.
    """
    for path, own in list(_files(out)):
        if own and path == out / METRICS:
            os.truncate(path, 0)
        elif own:
            path.unlink()
    for directory, _, _ in os.walk(out, topdown=False):
        relative = Path(directory).relative_to(out)
        if relative.parts and _own(relative, directory=True) and not os.listdir(directory):
            os.rmdir(directory)


def nothing_saved(out: Path, config: Config) -> bool:
    """Whether the run in `out`, which has the configuration `config`, never came to its first checkpoint.

    Raises:
        UserError: it has another configuration.
    """
    if not checkpoint.never_saved(out / CHECKPOINTS):
        return False
    check_same(out, config)
    return True


def check_same(out: Path, config: Config, *, change: bool = False) -> tuple[list[str], dict[str, tuple[Any, Any]]]:
    """Compare with the configuration that the run in `out` has; return notes on harmless differences, and the others,
    which the rest of the run is to have: path -> (before, now).

    Raises:
        UserError: a key differs that changes what the run computes, and `change` does not allow it or could not make
            sense of it; the message names both values of each.
    """
    before, now = to_tree(from_toml(out / CONFIG)), to_tree(config)
    wrong, notes, changed = [], [], {}
    # What a run wins back is told from losses on the text on which its source was scored at the start.
    fixed = ("train.validation_tokens",) if config.uptrain.source is not None else ()
    demanded = [path for path in _ON_DEMAND if path not in fixed]
    for section, table in now.items():
        for name, value in table.items():
            path, old = f"{section}.{name}", before[section][name]
            if old == value or path in _FREE:
                continue
            text = f"{path} is {_shown(old)} in the run and {_shown(value)} now"
            if path in _FREE_WITH_NOTE and not (path == "train.micro_batch_size" and config.model.num_experts):
                notes.append(f"{text}: the numbers may differ from an uninterrupted run in their last bits")
            elif change and path in demanded:
                notes.append(f"{text}, from here on")
                changed[path] = (old, value)
            else:
                wrong.append((path, text))
    if wrong:
        keep = f"keep the run's values (--config {out / CONFIG})"
        demand = "let the new values hold from here on (--on-change continue), "
        way = f"{keep}, {demand if all(path in demanded for path, _ in wrong) else ''}or start another run"
        raise UserError(f"--resume {out}: {'; '.join(text for _, text in wrong)}; {way}")
    return notes, changed


def _shown(value: object) -> str:
    return "none" if value is None else repr(value) if isinstance(value, str) else str(value)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _files(out: Path) -> Iterator[tuple[Path, bool]]:
    """Every file below `out`, with whether a run wrote it, and every empty directory that no run made; tolerated logs
    are left out.
    """
    for directory, directories, names in os.walk(out):
        here = Path(directory)
        links = [name for name in directories if (here / name).is_symlink()]
        for name in sorted([*names, *links]):
            relative = (here / name).relative_to(out)
            if not (here == out and relative.suffix in _TOLERATED):
                yield here / name, _own(relative)
        if here != out and not directories and not names and not _own(here.relative_to(out), directory=True):
            yield here, False


def _own(relative: Path, *, directory: bool = False) -> bool:
    """Whether a run writes a file of that name or, with `directory`, a directory with such files in it."""
    parts = relative.parts
    return any(
        all(re.fullmatch(one, part) for one, part in zip(pattern, parts, strict=False))
        for pattern in _OWN
        if (len(pattern) > len(parts) if directory else len(pattern) == len(parts))
    )
