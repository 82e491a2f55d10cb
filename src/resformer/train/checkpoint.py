"""Checkpoints in a run directory: which there are, whether they are whole, which are kept.

A checkpoint is a directory `checkpoints/step-00000100` with the files that each process wrote (`tensors.py`) and
`state.json`, which holds their checksums and its own. It is written under another name, synced and then renamed, so
that a directory of that name is whole; the text file `checkpoints/latest` names the last one. Nothing in it is ever
unpickled. How one is written is in `saver.py`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from resformer.errors import UserError
from resformer.train.files import OLD, put_back, sha256

FORMAT = 2
STATE, LATEST, TEMPORARY = "state.json", "latest", ".tmp-"
FILE = re.compile(r"shard-(\d{5})-model-\d{5}-of-\d{5}\.safetensors")
"""How the storage of tensors names its files; the first number counts the processes from 1."""
_NAME = re.compile(r"step-(\d{8,})")
_HASHING_THREADS = 4


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """Where a run stands, apart from its tensors.

    There is no random state in it: what a step draws (dropout of somebody's variant) comes from a seed that is a
    function of run seed, step and process.

    Attributes:
        step: optimizer steps done.
        tokens: training tokens seen.
        samples: sequences seen, which is the global index of the next one.
        pending_validation: the validation of `step` is due and was interrupted.
        metrics_bytes: size of metrics.jsonl when the checkpoint was written.
        norm_mean: running mean of the gradient's norm, against which spikes are told; 0 before the first step.
        skipped: steps that were left out.
        processes: how many wrote it.
        data_fingerprint: of the corpus.
        versions: of the packages that wrote it.
    """

    step: int = 0
    tokens: int = 0
    samples: int = 0
    pending_validation: bool = False
    metrics_bytes: int = 0
    norm_mean: float = 0.0
    skipped: int = 0
    processes: int = 1
    data_fingerprint: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)


class _BrokenError(Exception):
    """A checkpoint that cannot be used, and why."""


def find(
    checkpoints: Path, *, step: int | None = None, report: Callable[[str], None] = lambda _: None
) -> tuple[Path, TrainState]:
    """The newest checkpoint whose checksums hold (or the one of `step`) and its state.

    Newer ones that are damaged are passed over, each with a line to `report`.

    Raises:
        UserError: there is none.
    """
    names = [f"step-{step:08d}"] if step is not None else [f"step-{s:08d}" for s in reversed(steps(checkpoints))]
    reasons = [] if step is not None else _without_state(checkpoints)
    for name in names:
        try:
            state = _verified(checkpoints / name)
        except _BrokenError as broken:
            reasons.append(f"{name}: {broken}")
            continue
        for reason in reasons:
            if reason > name:  # an older one is of no interest
                report(f"damaged checkpoint passed over: {reason}; going on from {name}")
        return checkpoints / name, state
    have = ", ".join(str(s) for s in steps(checkpoints)) or "none"
    if step is not None and reasons and (checkpoints / names[0]).is_dir():
        raise UserError(f"checkpoint {checkpoints / names[0]} is damaged: {reasons[0]}; checkpoints there: {have}")
    if step is not None:
        raise UserError(f"no checkpoint of step {step} in {checkpoints}; checkpoints there: {have}")
    why = f" ({'; '.join(reasons)})" if reasons else ""
    raise UserError(f"no usable checkpoint in {checkpoints}{why}; start anew with --overwrite or in another directory")


def _without_state(checkpoints: Path) -> list[str]:
    """What is wrong with directories that look like checkpoints and are none, the newest first."""
    if not checkpoints.is_dir():
        return []
    odd = [p.name for p in checkpoints.iterdir() if _NAME.fullmatch(p.name) and not (p / STATE).is_file()]
    return [f"{name}: {STATE} is missing" for name in sorted(odd, reverse=True)]


def never_saved(checkpoints: Path) -> bool:
    """Whether no checkpoint was ever completed there, nor may one lie there damaged."""
    return not checkpoints.is_dir() or not any(
        _NAME.fullmatch(p.name) or p.name == LATEST or p.name.startswith(OLD) for p in checkpoints.iterdir()
    )


def steps(checkpoints: Path) -> list[int]:
    """Steps of the checkpoints there, ascending."""
    if not checkpoints.is_dir():
        return []
    found = (_NAME.fullmatch(path.name) for path in checkpoints.iterdir() if (path / STATE).is_file())
    return sorted(int(match[1]) for match in found if match)


def latest_step(checkpoints: Path) -> int | None:
    """Step of the newest checkpoint, without checking it; None if there is none."""
    return next(reversed(steps(checkpoints)), None)


def kept(checkpoints: Path) -> str:
    """What a run that breaks leaves, in words."""
    step = latest_step(checkpoints)
    return f"the checkpoint of step {step} is intact" if step is not None else "there is no checkpoint yet"


def clean(checkpoints: Path) -> None:
    """Remove what an interrupted save left behind, after what it displaced is back. Only for the process that holds the
    run.
    """
    put_back(checkpoints)
    for path in checkpoints.glob(f"{TEMPORARY}*"):
        if re.fullmatch(
            rf"{re.escape(TEMPORARY)}(old-)?[a-z0-9_]{{8}}", path.name
        ):  # as the tempfile module names them
            shutil.rmtree(path, ignore_errors=True)


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_state(directory: Path, state: TrainState, files: Mapping[str, str], groups: list[dict[str, Any]]) -> None:
    """Write `state.json` into a directory whose `files` have these checksums; `groups` is for readers."""
    content = {"format": FORMAT, **vars(state), "files": dict(sorted(files.items())), "parameter_groups": groups}
    (directory / STATE).write_text(json.dumps({**content, "sha256": _digest(content)}, indent=2) + "\n")


def _verified(directory: Path) -> TrainState:
    try:
        content = json.loads((directory / STATE).read_text(encoding="utf-8"))
    except OSError as error:
        raise _BrokenError(f"{STATE} cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise _BrokenError(f"{STATE} is no JSON") from None
    if not isinstance(content, dict) or content.pop("sha256", None) != _digest(content):
        raise _BrokenError(f"{STATE} does not fit its checksum")
    if content.get("format") != FORMAT:
        raise _BrokenError(f"{STATE} has format {content.get('format')}, this version reads {FORMAT}")
    files, state = _read_state(content, directory)
    # The storage reads every such file that it finds, whoever put it there.
    strange = sorted({path.name for path in directory.glob("*.safetensors")} - files.keys())
    strange += [name for name in files if not FILE.fullmatch(name)]
    if strange:
        raise _BrokenError(f"{strange[0]} is no file of this checkpoint")
    with ThreadPoolExecutor(_HASHING_THREADS) as threads:
        for problem in threads.map(lambda name: _damage(directory / name, files[name]), files):
            if problem:
                raise _BrokenError(problem)
    return state


def _read_state(content: Mapping[str, Any], directory: Path) -> tuple[dict[str, str], TrainState]:
    """Checksums by file, and the state; a value of another kind than it has is damage."""
    plain = TrainState()
    for name in TrainState.__dataclass_fields__:
        value, like = content.get(name), getattr(plain, name)
        fits = isinstance(value, int | float if isinstance(like, float) else type(like))
        if not fits or (isinstance(value, bool) and not isinstance(like, bool)):
            raise _BrokenError(f"{STATE}: {name} is {value!r}")
    files = content.get("files")
    if not isinstance(files, dict) or not files or not all(isinstance(digest, str) for digest in files.values()):
        raise _BrokenError(f"{STATE}: names no files")
    state = TrainState(**{name: content[name] for name in TrainState.__dataclass_fields__})
    if f"step-{state.step:08d}" != directory.name:
        raise _BrokenError(f"{STATE} is of step {state.step}")
    return files, state


def _damage(path: Path, expected: str) -> str:
    try:
        found = sha256(path)
    except OSError as error:
        return f"{path.name} cannot be read ({error.strerror})"
    return "" if found == expected else f"{path.name} does not fit its checksum"


def prune(checkpoints: Path, step: int, *, keep_last: int, keep_every: int | None) -> None:
    """Remove all but the last `keep_last`, of which there is at least one, and those that `keep_every` divides.

    Newer ones than `step` are not counted: they are damaged, or this run would not be here.
    """
    for old in [s for s in steps(checkpoints) if s <= step][:-keep_last]:
        if keep_every is not None and old % keep_every == 0:
            continue
        _remove(checkpoints / f"step-{old:08d}")


def _remove(directory: Path) -> None:
    """Remove a checkpoint's files; somebody else's in there stay. state.json goes last, so that one that is half
    removed is seen as damaged, and removed the next time.
    """
    for path in directory.iterdir():
        if FILE.fullmatch(path.name):
            path.unlink(missing_ok=True)
    (directory / STATE).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        directory.rmdir()
