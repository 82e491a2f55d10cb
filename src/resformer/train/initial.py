"""Weights to start from: those of another model with our names, whatever its variant."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from resformer.errors import UserError
from resformer.evaluate.loading import model_directory
from resformer.models.groups import group_of
from resformer.train import checkpoint, rundir
from resformer.train.configure import from_toml
from resformer.train.tensors import MODEL, described, model_tensors, read_some

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_FLOATING = ("F64", "F32", "F16", "BF16")
# What the same weights compute with. Another number of heads cuts the same matrices elsewhere, so that they mean
# nothing; the rest one may want to change.
_CUTS = ("num_attention_heads", "num_key_value_heads", "head_dim")
_SETTINGS = ("rope_theta", "rms_norm_eps", "hidden_act", "position_embedding", "norm", "tie_word_embeddings")


@dataclass(frozen=True, kw_only=True)
class _Source:
    """Weights that are read when it is known which.

    Attributes:
        settings: what is known of its configuration, under the names of Llama's.
        shapes: of its tensors, by name.
        strange: names of tensors that are no floating-point numbers, and what they are.
        read: copies tensors of these names into the given ones.
    """

    label: str
    settings: Mapping[str, Any]
    shapes: dict[str, tuple[int, ...]]
    strange: Mapping[str, str]
    read: Callable[[Mapping[str, Tensor]], None]


def load_initial(model: nn.Module, source: str, *, report: Callable[[str], None]) -> None:
    """Copy the weights of `source` into a model that is neither sharded nor compiled.

    Args:
        model: ours; what the source lacks may only be the variant's own parameters, which keep their initial values.
        source: a run directory (its last whole checkpoint, or its export if it has none), an exported directory, any
            Llama with these names, or a hub name. Safetensors only; nothing is unpickled and no code of the source
            runs.
        report: is told in a line what was taken, what kept its initial value, what was left out and which settings
            differ.

    Raises:
        UserError: no such model, weights that are missing, of another shape, cut into other heads or quantised, or
            files that cannot be read.
    """
    found = _open(source, report)
    wanted, settings = model_tensors(model), _settings(model.config.to_dict())  # type: ignore[operator, union-attr]
    head = {}
    if HEAD in wanted and HEAD not in found.shapes and found.settings.get("tie_word_embeddings"):
        head = {HEAD: wanted.pop(HEAD)}
    missing = [name for name in wanted if name not in found.shapes]
    own = [name for name in missing if group_of(name, wanted[name]) == "lambdas"]  # type: ignore[arg-type]
    extra = [name for name in found.shapes if name not in wanted]
    _check(source, found, wanted, settings, [name for name in missing if name not in own])
    found.read({name: tensor for name, tensor in wanted.items() if name in found.shapes})
    if head:
        with torch.no_grad():
            head[HEAD].copy_(wanted[EMBEDDING])
    taken = f"starting from {found.label}: {len(wanted) + len(head) - len(own)} tensors taken"
    other = _differences(_SETTINGS, settings, found.settings)
    report("; ".join([taken, *_said("initial values kept for", own), *_said("left out", extra), *other]))


def _check(
    source: str,
    found: _Source,
    wanted: Mapping[str, Tensor],
    settings: Mapping[str, Any],
    missing: Sequence[str],
) -> None:
    rows = found.shapes.get(EMBEDDING, (0,))[0]
    if EMBEDDING in wanted and rows and rows != len(wanted[EMBEDDING]):
        raise UserError(
            f"train.init_from {source} has a vocabulary of {rows} entries, the model one of {len(wanted[EMBEDDING])}; "
            "prepare the data with its tokenizer (`resformer data prepare --tokenizer DIR`), or start from another"
        )
    problems = _differences(_CUTS, settings, found.settings)
    problems += [f"{name} is missing" for name in missing]
    for name in (name for name in wanted if name in found.shapes):
        if found.shapes[name] != tuple(wanted[name].shape):
            problems.append(f"{name} is {list(found.shapes[name])}, expected {list(wanted[name].shape)}")
        elif name in found.strange:
            problems.append(f"{name} holds {found.strange[name]} numbers, expected floating point, not quantised")
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise UserError(
            f"train.init_from {source} does not fit the model: {'; '.join(problems[:3])}{more}; give the model its "
            "sizes (--set model....), or start from another"
        )


def _differences(names: Sequence[str], ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    return [
        f"model.{name} is {ours[name]}, there {theirs[name]}"
        for name in names
        if name in ours and theirs.get(name) is not None and ours[name] != theirs[name]
    ]


def _said(words: str, names: Sequence[str]) -> list[str]:
    return [f"{words} {len(names)} (first: {names[0]})"] if names else []


def _settings(about: Any) -> dict[str, Any]:
    """The keys that `_CUTS` and `_SETTINGS` name, as far as a configuration has them, with those that follow."""
    if not isinstance(about, dict):
        return {}
    rope = about.get("rope_parameters")
    known = {"rope_theta": rope.get("rope_theta")} if isinstance(rope, dict) else {}
    known |= {name: about[name] for name in (*_CUTS, *_SETTINGS) if about.get(name) is not None}
    heads, width = known.get("num_attention_heads"), about.get("hidden_size")
    if isinstance(heads, int) and heads > 0 and isinstance(width, int):
        known.setdefault("head_dim", width // heads)
        known.setdefault("num_key_value_heads", heads)
    return known


def _open(source: str, report: Callable[[str], None]) -> _Source:
    run = Path(source)
    if not (run / "config.json").is_file() and (run / rundir.CONFIG).is_file():
        checkpoints = run / rundir.CHECKPOINTS
        if checkpoint.steps(checkpoints):
            return _of_checkpoint(run, *checkpoint.find(checkpoints, report=report))
    return _of_export(source, local(source))


def _of_checkpoint(run: Path, directory: Path, state: checkpoint.TrainState) -> _Source:
    prefix = f"{MODEL}."
    sizes = {name.removeprefix(prefix): size for name, size in described(directory).items() if name.startswith(prefix)}

    def read(targets: Mapping[str, Tensor]) -> None:
        read_some(directory, {prefix + name: tensor for name, tensor in targets.items()}, None)

    return _Source(
        label=f"{run} (step {state.step})",
        settings=_settings(dataclasses.asdict(from_toml(run / rundir.CONFIG).model)),
        shapes={name: tuple(size) for name, size in sizes.items()},
        strange={},
        read=read,
    )


def _of_export(source: str, directory: Path) -> _Source:
    shapes: dict[str, tuple[int, ...]] = {}
    strange, places = {}, {}
    for path in _files(source, directory):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  (no mapping)
                    part = file.get_slice(name)
                    shapes[name], places[name] = tuple(part.get_shape()), path
                    if part.get_dtype() not in _FLOATING:
                        strange[name] = part.get_dtype()
        except (OSError, SafetensorError) as error:
            raise UserError(f"train.init_from {source}: {path} is damaged or cut short ({error})") from None

    def read(targets: Mapping[str, Tensor]) -> None:
        for path in dict.fromkeys(places.values()):
            with safe_open(path, framework="pt") as file, torch.no_grad():
                for name in (name for name in targets if places[name] == path):
                    targets[name].copy_(file.get_tensor(name))

    try:
        about = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"train.init_from {source}: {directory / 'config.json'} cannot be read ({error})") from None
    return _Source(label=source, settings=_settings(about), shapes=shapes, strange=strange, read=read)


def local(source: str) -> Path:
    """The directory of an exported model; a hub name is fetched into the hub's cache."""
    directory = Path(model_directory(source))
    if directory.is_dir():
        return directory
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(snapshot_download(source, allow_patterns=["model*.safetensors", INDEX, "*.json", "*.jinja"]))
    except (OSError, HfHubHTTPError, ValueError) as error:
        raise UserError(f"train.init_from {source} cannot be fetched: {' '.join(str(error).split())[:200]}") from None


def _files(source: str, directory: Path) -> list[Path]:
    """The files of the model alone: adapters and other copies may lie next to them."""
    index = directory / INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            if not all(Path(name).name == name and name.endswith(".safetensors") for name in names):
                raise ValueError("a file outside the directory")
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            raise UserError(f"train.init_from {source}: {index} is no index of safetensors files") from None
        for name in names:
            if not (directory / name).is_file():
                raise UserError(f"train.init_from {source}: {directory / name} is missing, which {INDEX} names")
        return [directory / name for name in names]
    if (directory / WEIGHTS).is_file():
        return [directory / WEIGHTS]
    raise UserError(
        f"train.init_from {source}: no {WEIGHTS} in {directory}; other formats are not read, save the model anew with "
        "save_pretrained"
    )
