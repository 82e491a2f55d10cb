"""Load a patched model that `save_pretrained` has written."""

from __future__ import annotations

import os
from typing import Any

import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ..errors import UserError
from .patch import RECORD, VERSION, install

HUB = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token", "trust_remote_code")


def load_patched(
    directory: str | os.PathLike[str], *, model_class: type[PreTrainedModel] | None = None, **kwargs: Any
) -> Any:
    """A patched model as `model.save_pretrained(directory)` wrote it, patched again, in evaluation mode.

    Stock `from_pretrained` would drop the value residual with no more than a warning. Here every weight must be there,
    with the residual's parameters, and no other; only safetensors are read. Lambdas stay fp32 whatever `dtype` is.

    Args:
        directory: a directory, or a name on a hub.
        model_class: the model's class; the one that its config names, unless given.
        kwargs: for `from_pretrained`: `dtype`, `device_map`, `attn_implementation`, `revision` and so on.

    Raises:
        UserError: no patched model, one that a newer version wrote, or weights that do not fit to the last name.
    """
    try:
        config = AutoConfig.from_pretrained(directory, **{name: kwargs[name] for name in HUB if name in kwargs})
    except (OSError, ValueError) as error:
        raise UserError(f"{directory} has no config that can be read: {' '.join(str(error).split())[:300]}") from error
    check_records(config, directory)
    base = model_class or _class_of(config)

    def init(self: Any, config: PreTrainedConfig, *args: Any, **more: Any) -> None:
        base.__init__(self, config, *args, **more)
        _patch_again(self)

    # Patched inside its own __init__, so that from_pretrained knows the lambdas: it brings them where they belong, in
    # the dtype that they have there. The class has the stock one's name, by which transformers finds what it knows
    # about it, and is gone afterwards.
    body = {"__init__": init, "__module__": base.__module__, "__qualname__": base.__qualname__}
    loader: Any = type(base.__name__, (base,), body)
    ours = {"config": config, "use_safetensors": True, "output_loading_info": True, "ignore_mismatched_sizes": True}
    try:
        model, info = loader.from_pretrained(directory, **{**kwargs, **ours})
    except OSError as error:
        raise UserError(f"{directory} cannot be loaded: {' '.join(str(error).split())[:300]}") from error
    _check_weights(directory, info)
    model.__class__ = base
    return model


def _patch_again(model: PreTrainedModel) -> None:
    """Patch the model, or those parts of it whose configs say so."""
    done: set[int] = set()
    for module in list(model.modules()):
        config: Any = getattr(module, "config", None)
        record = getattr(config, RECORD, None)
        if record is not None and id(config) not in done:
            done.add(id(config))
            install(module, record["variant"], record["variant_options"])


def patched_parts(config: Any) -> list[Any]:
    """What a config says of patches, its own and those of its parts; nothing if the model is a stock one."""
    parts = [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))]
    return [getattr(part, RECORD) for part in parts if getattr(part, RECORD, None) is not None]


def check_records(config: Any, directory: Any) -> None:
    """See what the config says of patches.

    Raises:
        UserError: nothing, or nothing that we can read.
    """
    records = patched_parts(config)
    if not records:
        raise UserError(
            f"{directory} is no patched model (its config has no {RECORD!r}); load it with transformers and call "
            "resformer.patch"
        )
    for record in records:
        known = isinstance(record, dict) and {"variant", "variant_options", "version"} <= record.keys()
        if not known or not isinstance(record["version"], int):
            raise UserError(
                f"{directory}: {RECORD!r} in its config is {record!r}; expected variant, variant_options and version"
            )
        if record["version"] > VERSION:
            raise UserError(
                f"{directory} was patched by a newer resformer (record {record['version']}, this one reads up to "
                f"{VERSION}); install a newer one"
            )


def _class_of(config: Any) -> type[PreTrainedModel]:
    """The class that saved the model; the causal language model of its type if it does not say."""
    for name in config.architectures or ():
        found = getattr(transformers, name, None)
        if isinstance(found, type):
            return found
    mapping: Any = AutoModelForCausalLM._model_mapping
    if type(config) in mapping:
        return mapping[type(config)]
    raise UserError(f"transformers has no class {config.architectures}; name it: load_patched(..., model_class=...)")


def _check_weights(directory: Any, info: Any) -> None:
    """Raise UserError unless every weight was there, and no other, all of the right shape."""
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
        raise UserError(f"{directory} does not fit the patched model: {'; '.join(problems)}")
