"""A trained model by what a user calls it: a run directory, an exported directory, a name on a hub."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from resformer.errors import UserError

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "merges.txt")
"""Files of which a model's directory has one at least; ours have the first."""


def resolve_device(name: str) -> torch.device:
    """The device of `name`; "auto" is cuda, else mps, else cpu.

    Raises:
        UserError: this machine has no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"device {name!r} is unknown; expected auto, cpu, cuda, cuda:N or mps") from None
    usable = {
        "cpu": True,
        "mps": torch.backends.mps.is_available(),
        "cuda": torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count(),
    }
    if not usable.get(device.type, False):
        raise UserError(f"device {name!r} is not available on this machine; use auto or cpu")
    return device


def model_directory(model: str | Path) -> str:
    """What `from_pretrained` takes: the export inside a run directory, a directory as it is, or a hub name.

    Raises:
        UserError: no such directory, or a run that has no export yet.
    """
    if not str(model):
        raise UserError("the model's name is empty; expected a run directory, an exported directory or a hub name")
    path = Path(model)
    if (path / "config.json").is_file():
        return str(path)
    if (path / "config.toml").is_file():
        if not (path / "model" / "config.json").is_file():
            raise UserError(f"run {path} has no exported model yet; write one with `resformer export {path}`")
        return str(path / "model")
    if path.exists():
        raise UserError(f"{path} holds no model: expected a run directory (config.toml) or an export (config.json)")
    # A name in a directory that is there is no hub name, which would be looked up there for half a minute.
    if path.is_absolute() or str(model).startswith((".", "~")) or str(model).count("/") != 1 or path.parent.is_dir():
        raise UserError(f"no model at {path}: expected a run directory, an exported directory or a hub name ORG/NAME")
    return str(model)


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """transformers shows a bar for every file that it reads or writes, which lands in the middle of a log."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _check_files(directory: Path) -> None:
    """Name the file of an export that is missing or damaged, before transformers says it in many words.

    Raises:
        UserError: no weights, no tokenizer, weights or config.json that cannot be read; a hub name is left alone.
    """
    if not directory.is_dir():
        return
    run = directory.parent if (directory.parent / "config.toml").is_file() else None
    again = (
        f"`resformer export {run} --overwrite`" if run else "`resformer export RUN --out DIR` of the run it came from"
    )
    try:
        about = json.loads((directory / "config.json").read_bytes())
    except ValueError as error:
        raise UserError(f"{directory / 'config.json'} is no JSON ({error}); write it again with {again}") from None
    if isinstance(about, dict) and about.get("model_type") != "resformer":
        again = "save_pretrained of the model and of its tokenizer"
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise UserError(f"{directory} holds no weights (model.safetensors is missing); write them again with {again}")
    for file in files:
        try:
            with safe_open(file, framework="pt"):
                pass
        except (OSError, SafetensorError) as error:
            raise UserError(f"{file} is damaged or cut short ({error}); write it again with {again}") from None
    if not any((directory / name).is_file() for name in TOKENIZERS):
        raise UserError(f"{directory / 'tokenizer.json'} is missing; write it again with {again}")


def load_model(
    model: str | Path, device: str | torch.device = "cpu", *, dtype: torch.dtype | None = None
) -> tuple[Any, Any]:
    """Return (model, tokenizer), the model in evaluation mode on `device`. Reads safetensors only, never a pickle.

    A model that `resformer.patch` has changed comes back patched.

    `dtype` of the weights: none = as they are stored; what a model keeps in fp32 stays so.

    Raises:
        UserError: nothing there, no such device, or weights that do not fit the model to the last name.
    """
    # The Auto classes know our models as soon as anything of this package is imported.
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from resformer.convert.patch_load import load_patched, patched_parts

    where = resolve_device(device) if isinstance(device, str) else device
    directory = model_directory(model)
    _check_files(Path(directory))
    chosen: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
    try:
        with no_progress_bars():
            if patched_parts(AutoConfig.from_pretrained(directory)):
                loaded, info = load_patched(directory, **chosen), {}  # which looks at the weights' names itself
            else:
                with_info: Any = AutoModelForCausalLM.from_pretrained(
                    directory, use_safetensors=True, output_loading_info=True, **chosen
                )
                loaded, info = with_info
        tokenizer = AutoTokenizer.from_pretrained(directory)
    except (OSError, ValueError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"model {model} cannot be loaded: {reason[:300]}") from error
    problems = [
        f"{len(info[kind])} weights {words} (first: {sorted(map(str, info[kind]))[0]})"
        for kind, words in (
            ("missing_keys", "missing"),
            ("unexpected_keys", "unexpected"),
            ("mismatched_keys", "of another shape"),
        )
        if info.get(kind)
    ]
    if problems:
        raise UserError(f"model {model} does not fit its weights: {'; '.join(problems)}")
    if not loaded.can_generate():  # a patched model has the class that saved it
        raise UserError(f"model {model} is a {type(loaded).__name__}; expected a causal language model")
    broken = next((name for name, weight in loaded.named_parameters() if not bool(weight.isfinite().all())), None)
    if broken is not None:
        raise UserError(f"model {model}: its weight {broken} is not finite, so that no number of it means anything")
    loaded.eval()
    return loaded.to(where), tokenizer
