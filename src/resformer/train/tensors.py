"""The tensors of a checkpoint: PyTorch's distributed checkpointing (DCP) on its safetensors storage.

Every process writes its shards into a file of its own, and a file says where in the whole tensors its shards lie; so
any number of processes reads what any other number wrote. Names are `model.NAME` and `optimizer.KIND.NAME`, with the
parameter's canonical name. DCP's default storage has a pickle in it and is never used.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

from resformer.errors import UserError

MODEL, OPTIMIZER = "model", "optimizer"


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by canonical name, a shared one once."""
    parameters = dict(model.named_parameters())
    everything = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = {name: value for name, value in model.state_dict().items() if name not in everything}
    tensors = {name: value.detach() for name, value in (parameters | buffers).items()}
    assert not any(part in name for name in tensors for part in ("_orig_mod.", "module.")), "a wrapper's name was saved"
    return tensors


def everything(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """All that a checkpoint holds of model and optimizers."""
    tensors = {f"{MODEL}.{name}": tensor for name, tensor in model_tensors(model).items()}
    for name, parameter, optimizer in _parameters(optimizers):
        for kind, value in optimizer.state[parameter].items():
            tensors[f"{OPTIMIZER}.{kind}.{name}"] = value
    return tensors


def staged(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A copy on the CPU, which training does not change while it is written."""
    from torch.distributed.checkpoint.staging import BlockingAsyncStager

    return BlockingAsyncStager().stage(dict(tensors))


def write(directory: Path, tensors: Mapping[str, Tensor], group: Any) -> None:
    """Write this process's shards, synced; all processes of `group` (None = there is one) must come.

    Raises:
        OSError, SafetensorError, CheckpointException: it could not be done, here or in another process.
    """
    index = {name: 1 if name.startswith(f"{MODEL}.") else 2 for name in tensors}
    writer = HuggingFaceStorageWriter(str(directory), fqn_to_index_mapping=index, save_distributed=True)
    with quiet():
        dcp.save(dict(tensors), storage_writer=writer, process_group=group, no_dist=group is None)


def read_everything(
    directory: Path, model: nn.Module, optimizers: Sequence[Optimizer], found: Mapping[str, torch.Size], group: Any
) -> None:
    """Put the tensors of a checkpoint, which are `described(directory)`, into model and optimizers, to the bit,
    whatever number of processes wrote it.

    Raises:
        UserError: names or shapes differ from the model's.
    """
    kinds: dict[str, list[str]] = {}
    for key in found:
        if key.startswith(f"{OPTIMIZER}."):
            _, kind, name = key.split(".", 2)
            kinds.setdefault(name, []).append(kind)
    for name, parameter, optimizer in _parameters(optimizers):
        # Memory of its own: what a file maps may lie at another alignment, and vectorised arithmetic may then round
        # otherwise.
        optimizer.state[parameter] = {
            kind: torch.zeros((), dtype=torch.float32, device=parameter.device)
            if kind == "step"
            else torch.zeros_like(parameter, memory_format=torch.preserve_format).detach()
            for kind in sorted(kinds.get(name, []))
        }
    _read(directory, everything(model, optimizers), found, group)


def read_model(directory: Path, model: nn.Module) -> None:
    """Put the weights of a checkpoint into a model that is not sharded.

    Raises:
        UserError: names or shapes differ from the model's.
    """
    prefix = f"{MODEL}."
    found = {name: size for name, size in described(directory).items() if name.startswith(prefix)}
    _read(directory, {prefix + name: tensor for name, tensor in model_tensors(model).items()}, found, None)


def described(directory: Path) -> dict[str, torch.Size]:
    """Names and shapes of the tensors in a checkpoint."""
    with quiet():
        metadata = HuggingFaceStorageReader(str(directory)).read_metadata().state_dict_metadata
    return {name: entry.size for name, entry in metadata.items() if isinstance(entry, TensorStorageMetadata)}


def reason(error: BaseException) -> str:
    """What went wrong while tensors were written, in words."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (first, _) = next(iter(sorted(error.failures.items())))
        return f"{reason(first)} (process {rank})" if len(error.failures) > 1 or rank else reason(first)
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(str(text).split())


FAILURES = (OSError, SafetensorError, CheckpointException)
"""What `write` raises when it cannot write."""


def _read(directory: Path, tensors: dict[str, Tensor], found: Mapping[str, torch.Size], group: Any) -> None:
    require_same(directory, found, {name: tensor.shape for name, tensor in tensors.items()})
    read_some(directory, tensors, group)


def read_some(directory: Path, tensors: Mapping[str, Tensor], group: Any) -> None:
    """Fill these tensors from those of the same names, which must be there in the same shapes."""
    with quiet(), torch.no_grad():
        dcp.load(
            dict(tensors),
            storage_reader=HuggingFaceStorageReader(str(directory)),
            process_group=group,
            no_dist=group is None,
        )


def require_same(path: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise UserError unless names and shapes are the same."""
    differences = [
        *(f"{name} is missing" for name in wanted if name not in found),
        *(f"{name} is unexpected" for name in found if name not in wanted),
        *(
            f"{n} is {list(found[n])}, expected {list(wanted[n])}"
            for n in wanted
            if n in found and found[n] != wanted[n]
        ),
    ]
    if differences:
        more = f" and {len(differences) - 3} more" if len(differences) > 3 else ""
        raise UserError(f"{path} does not fit the model: {'; '.join(differences[:3])}{more}")


def _parameters(optimizers: Sequence[Optimizer]) -> Iterator[tuple[str, nn.Parameter, Optimizer]]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for name, parameter in zip(group["names"], group["params"], strict=True):
                yield name, parameter, optimizer


@contextmanager
def quiet() -> Iterator[None]:
    """Without DCP's remarks, for example that one process saves for itself, which is what we asked for."""
    loggers = [logging.getLogger(name) for name in ("torch.distributed.checkpoint", "torch.distributed")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch\.distributed.*")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
