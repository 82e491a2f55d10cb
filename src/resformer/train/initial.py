"""Weights to start from: those of another model with our names, whatever its variant."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from resformer.errors import UserError
from resformer.evaluate.loading import model_directory
from resformer.models.groups import group_of
from resformer.train.tensors import model_tensors

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def load_initial(model: nn.Module, source: str, *, report: Callable[[str], None]) -> None:
    """Copy the weights of `source` into a model that is neither sharded nor compiled.

    Args:
        model: ours; what the source lacks may only be the variant's own parameters, which keep their initial values.
        source: a run directory with its export, an exported directory, any Llama with these names, or a hub name.
            Safetensors only; nothing is unpickled and no code of the source runs.
        report: is told in a line what was taken, what kept its initial value and what was left out.

    Raises:
        UserError: no such model, weights that are missing or of another shape, or files that cannot be read.
    """
    directory = _local(source)
    files = _files(directory, source)
    wanted = model_tensors(model)
    if HEAD in wanted and HEAD not in files and EMBEDDING in files and _tied(directory):
        files[HEAD] = (files[EMBEDDING][0], EMBEDDING)
    missing = [name for name in wanted if name not in files]
    own = [name for name in missing if group_of(name, wanted[name]) == "lambdas"]  # type: ignore[arg-type]
    extra = [name for name in files if name not in wanted]
    problems = [f"{name} is missing" for name in missing if name not in own]
    problems += [
        f"{name} is {list(shape)}, expected {list(wanted[name].shape)}"
        for name, shape in _shapes(files).items()
        if name in wanted and shape != tuple(wanted[name].shape)
    ]
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise UserError(
            f"train.init_from {source} does not fit the model: {'; '.join(problems[:3])}{more}; give the model its "
            "sizes (--set model....) and the data its tokenizer, or start from another"
        )
    _copy(files, wanted, source)
    taken = f"starting from {source}: {len(wanted) - len(own)} tensors taken"
    report("; ".join([taken, *_said("initial values kept for", own), *_said("left out", extra)]))


def _said(words: str, names: Sequence[str]) -> list[str]:
    return [f"{words} {len(names)} (first: {names[0]})"] if names else []


def _local(source: str) -> Path:
    """The directory of the model; a hub name is fetched into the hub's cache."""
    directory = Path(model_directory(source))
    if directory.is_dir():
        return directory
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(source, allow_patterns=["*.safetensors", "*.safetensors.index.json", "config.json"])
        )
    except (OSError, HfHubHTTPError, LocalEntryNotFoundError, ValueError) as error:
        raise UserError(f"train.init_from {source} cannot be fetched: {' '.join(str(error).split())[:200]}") from None


def _files(directory: Path, source: str) -> dict[str, tuple[Path, str]]:
    """Where each tensor is: name -> (file, name in it)."""
    paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        raise UserError(
            f"train.init_from {source}: no .safetensors file in {directory}; other formats are not read, save the "
            "model anew with save_pretrained"
        )
    found: dict[str, tuple[Path, str]] = {}
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                found |= {name: (path, name) for name in file.keys()}  # noqa: SIM118  (no mapping)
        except (OSError, SafetensorError) as error:
            raise UserError(f"train.init_from {source}: {path} is damaged or cut short ({error})") from None
    return found


def _tied(directory: Path) -> bool:
    try:
        return bool(json.loads((directory / "config.json").read_text(encoding="utf-8")).get("tie_word_embeddings"))
    except (OSError, ValueError, AttributeError):
        return False


def _shapes(files: Mapping[str, tuple[Path, str]]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for path in {path for path, _ in files.values()}:
        with safe_open(path, framework="pt") as file:
            inside = [(name, key) for name, (where, key) in files.items() if where == path]
            shapes |= {name: tuple(file.get_slice(key).get_shape()) for name, key in inside}
    return shapes


def _copy(files: Mapping[str, tuple[Path, str]], wanted: Mapping[str, Tensor], source: str) -> None:
    for path in {path for path, _ in files.values()}:
        try:
            with safe_open(path, framework="pt") as file, torch.no_grad():
                for name, (where, key) in files.items():
                    if where == path and name in wanted:
                        target: Any = wanted[name]
                        target.copy_(file.get_tensor(key))
        except (OSError, SafetensorError) as error:
            raise UserError(f"train.init_from {source}: {path} cannot be read ({error})") from None
