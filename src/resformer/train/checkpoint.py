"""Checkpoints: weights and optimizer as safetensors, the rest as JSON; nothing is ever unpickled.

A checkpoint is a directory `checkpoints/step-00000100` with three files. It is written under another name, synced and
then renamed, so that a directory of that name is whole; the text file `checkpoints/latest` names the last one.
`state.json` holds the checksums of the other two and of itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from resformer.errors import UserError
from resformer.train.failure import RunFailure
from resformer.train.files import put_directory, sha256, write_atomic

FORMAT = 1
MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"
FILES = (MODEL, OPTIMIZER, STATE)
LATEST = "latest"
TEMPORARY = ".tmp-"
_NAME = re.compile(r"step-(\d{8,})")
_RNG = "rng.cpu"


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """Where a run stands, apart from its tensors.

    Attributes:
        step: optimizer steps done.
        tokens: training tokens seen.
        pending_validation: the validation of `step` is due and was interrupted.
        metrics_bytes: size of metrics.jsonl when the checkpoint was written.
        data_fingerprint: of the corpus.
        versions: of the packages that wrote it.
    """

    step: int = 0
    tokens: int = 0
    pending_validation: bool = False
    metrics_bytes: int = 0
    data_fingerprint: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)


class _BrokenError(Exception):
    """A checkpoint that cannot be used, and why."""


def save(
    checkpoints: Path, state: TrainState, model: nn.Module, optimizer: torch.optim.Optimizer, *, keep_last: int
) -> Path:
    """Write one checkpoint, point `latest` at it, then remove all but the last `keep_last`; return its directory.

    Raises:
        RunFailure: it could not be written; the checkpoints before it are as they were.
    """
    target = checkpoints / f"step-{state.step:08d}"
    temporary: Path | None = None
    try:
        checkpoints.mkdir(exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=checkpoints, prefix=TEMPORARY))
        save_file(model_tensors(model), temporary / MODEL)
        save_file(_optimizer_tensors(optimizer) | {_RNG: torch.get_rng_state()}, temporary / OPTIMIZER)
        content = {
            "format": FORMAT,
            **vars(state),
            "files": {name: sha256(temporary / name) for name in (MODEL, OPTIMIZER)},
            "parameter_groups": _described(optimizer),
        }
        (temporary / STATE).write_text(json.dumps({**content, "sha256": _digest(content)}, indent=2) + "\n")
        put_directory(temporary, target)
        write_atomic(checkpoints / LATEST, f"{target.name}\n")
        _prune(checkpoints, state.step, keep_last)
    except (OSError, SafetensorError) as error:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        reason = getattr(error, "strerror", None) or error
        raise RunFailure(
            f"step {state.step}: the checkpoint {target} could not be written: {reason}; {kept(checkpoints)}"
        ) from error
    return target


def restore(directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put the tensors of a checkpoint that `find` returned into model, optimizer and random state, to the bit.

    Raises:
        UserError: names or shapes differ from the model's.
    """
    load_model_tensors(model, directory / MODEL)
    tensors = load_file(directory / OPTIMIZER)
    torch.set_rng_state(tensors.pop(_RNG))
    _load_optimizer(optimizer, tensors, directory / OPTIMIZER)


def find(
    checkpoints: Path, *, step: int | None = None, report: Callable[[str], None] = lambda _: None
) -> tuple[Path, TrainState]:
    """The newest checkpoint whose checksums hold (or the one of `step`) and its state.

    Newer ones that are damaged are passed over, each with a line to `report`.

    Raises:
        UserError: there is none.
    """
    names = [f"step-{step:08d}"] if step is not None else [f"step-{s:08d}" for s in reversed(steps(checkpoints))]
    reasons = []
    for name in names:
        try:
            state = _verified(checkpoints / name)
        except _BrokenError as broken:
            reasons.append(f"{name}: {broken}")
            continue
        for reason in reasons:
            report(f"damaged checkpoint passed over: {reason}; going on from {name}")
        return checkpoints / name, state
    have = ", ".join(str(s) for s in steps(checkpoints)) or "none"
    if step is not None and reasons and (checkpoints / names[0]).is_dir():
        raise UserError(f"checkpoint {checkpoints / names[0]} is damaged: {reasons[0]}; checkpoints there: {have}")
    if step is not None:
        raise UserError(f"no checkpoint of step {step} in {checkpoints}; checkpoints there: {have}")
    why = f" ({'; '.join(reasons)})" if reasons else ""
    raise UserError(f"no usable checkpoint in {checkpoints}{why}; start anew with --overwrite or in another directory")


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
    """Remove what an interrupted save left behind. Only for the process that holds the run."""
    for path in checkpoints.glob(f"{TEMPORARY}*"):
        if re.fullmatch(
            rf"{re.escape(TEMPORARY)}(old-)?[a-z0-9_]{{8}}", path.name
        ):  # as the tempfile module names them
            shutil.rmtree(path, ignore_errors=True)


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by canonical name, a shared one once."""
    parameters = dict(model.named_parameters())
    everything = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = {name: value for name, value in model.state_dict().items() if name not in everything}
    tensors = {name: value.detach().contiguous() for name, value in (parameters | buffers).items()}
    assert not any(part in name for name in tensors for part in ("_orig_mod.", "module.")), "a wrapper's name was saved"
    return tensors


def load_model_tensors(model: nn.Module, path: Path) -> None:
    """Copy the tensors of a file into the model.

    Raises:
        UserError: the names or shapes are not exactly the model's.
    """
    found, wanted = load_file(path), model_tensors(model)
    _require_same(path, {k: v.shape for k, v in found.items()}, {k: v.shape for k, v in wanted.items()})
    with torch.no_grad():
        for name, tensor in wanted.items():
            tensor.copy_(found[name])


def _require_same(path: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    differences = [
        *(f"{name} is missing" for name in wanted if name not in found),
        *(f"{name} is unexpected" for name in found if name not in wanted),
        *(f"{n} is {found[n]}, expected {wanted[n]}" for n in wanted if n in found and found[n] != wanted[n]),
    ]
    if differences:
        more = f" and {len(differences) - 3} more" if len(differences) > 3 else ""
        raise UserError(f"{path} does not fit the model: {'; '.join(differences[:3])}{more}")


def _optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{key}.{name}": value.contiguous()
        for group in optimizer.param_groups
        for name, parameter in zip(group["names"], group["params"], strict=True)
        for key, value in optimizer.state[parameter].items()
    }


def _load_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor], path: Path) -> None:
    """Every parameter gets its state, in memory of its own: what a file maps may lie at another alignment, and
    vectorised arithmetic may then round otherwise."""
    kinds = sorted({name.split(".", 1)[0] for name in tensors})
    shapes: dict[str, Any] = {}
    for group in optimizer.param_groups:
        for name, parameter in zip(group["names"], group["params"], strict=True):
            shapes |= {f"{kind}.{name}": torch.Size() if kind == "step" else parameter.shape for kind in kinds}
    _require_same(path, {name: tensor.shape for name, tensor in tensors.items()}, shapes)
    for group in optimizer.param_groups:
        for name, parameter in zip(group["names"], group["params"], strict=True):
            optimizer.state[parameter] = {
                kind: torch.empty_like(tensors[f"{kind}.{name}"], device=parameter.device).copy_(
                    tensors[f"{kind}.{name}"]
                )
                for kind in kinds
            }


def _described(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Parameter groups for readers: what is in them and their settings at this step."""
    plain = (int, float, str, bool, list, tuple)
    return [
        {k: v for k, v in group.items() if k != "params" and isinstance(v, plain)} for group in optimizer.param_groups
    ]


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _verified(directory: Path) -> TrainState:
    try:
        content = json.loads((directory / STATE).read_text(encoding="utf-8"))
    except OSError as error:
        raise _BrokenError(f"{STATE} cannot be read ({error.strerror})") from None
    except ValueError:
        raise _BrokenError(f"{STATE} is no JSON") from None
    if not isinstance(content, dict) or content.pop("sha256", None) != _digest(content):
        raise _BrokenError(f"{STATE} does not fit its checksum")
    if content["format"] != FORMAT:
        raise _BrokenError(f"{STATE} has format {content['format']}, this version reads {FORMAT}")
    for name, expected in content["files"].items():
        try:
            found = sha256(directory / name)
        except OSError as error:
            raise _BrokenError(f"{name} cannot be read ({error.strerror})") from None
        if found != expected:
            raise _BrokenError(f"{name} does not fit its checksum")
    return TrainState(**{name: content[name] for name in TrainState.__dataclass_fields__})


def _prune(checkpoints: Path, step: int, keep_last: int) -> None:
    """Remove the oldest. Newer ones than `step` are not counted: they are damaged, or this run would not be here."""
    for old in [s for s in steps(checkpoints) if s <= step][:-keep_last]:
        directory = checkpoints / f"step-{old:08d}"
        for name in reversed(FILES):  # without its state.json it is no checkpoint any more
            (directory / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # somebody else's files in there stay
            directory.rmdir()
