"""A run whose model is that of a checkpoint, whole (`model.from_init`): what `resformer convert` wrote, trained on.

The configuration is filled in from the checkpoint's config.json before anything else looks at it, so that config.toml
says everything and the checkpoint is needed once.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from resformer.errors import UserError
from resformer.models import ResFormerConfig
from resformer.train import rundir
from resformer.train.config import Config, ModelConfig
from resformer.train.configure import from_toml
from resformer.train.initial import local

_MODEL_TYPE = "resformer"
TOKENIZER = "tokenizer.json"
# Not of the checkpoint's description: how attention is computed, and the description itself.
_OURS = ("attention", "from_init", "config_json")


def adopted(config: Config, run: Path | None = None) -> Config:
    """`config` with the model section that `model.from_init` asks for; as it is where it asks for none or has it.

    Args:
        config: of a recipe or `configure`.
        run: a run that is resumed: the model section is the one it started with.

    Raises:
        UserError: there is no model of ours at train.init_from, or other model keys are set as well.
    """
    model, source = config.model, config.train.init_from
    if not model.from_init or model.config_json is not None:
        return config
    different = [
        field.name
        for field in dataclasses.fields(model)
        if field.name not in _OURS and getattr(model, field.name) != getattr(ModelConfig(), field.name)
    ]
    if different:
        raise UserError(
            f"model.{different[0]} is set, but the model is taken whole from train.init_from (model.from_init); leave "
            "it away, make another model with `resformer convert`, or set model.from_init=false and all sizes"
        )
    if run is not None and (run / rundir.CONFIG).is_file():
        before = from_toml(run / rundir.CONFIG).model
        if before.from_init:
            kept = dataclasses.replace(before, attention=model.attention)
            return dataclasses.replace(config, model=kept)
    if source is None:
        raise UserError(
            "train.init_from is not set, from which the model is taken (model.from_init); pass --init-from MODEL (to "
            "`plan`: --set train.init_from=MODEL), a directory that `resformer convert` or `resformer export` wrote"
        )
    return dataclasses.replace(config, model=_described(_config_of(source), model.attention))


def check_tokenizer(config: Config, dataset: Any) -> list[str]:
    """See that the corpus was encoded with the tokenizer of the model that the run starts with; notes where that has
    none.

    Raises:
        UserError: an id means another token.
    """
    if not config.model.from_init or config.train.init_from is None:
        return []
    own = local(config.train.init_from) / TOKENIZER
    other = Path(dataset.tokenizer_dir) / TOKENIZER
    if not own.is_file() or not other.is_file():
        where = own if not own.is_file() else other
        return [f"{where} is missing: whether the corpus has the model's tokenizer cannot be seen"]
    ours, theirs = (Tokenizer.from_file(str(path)).get_vocab() for path in (own, other))
    if ours == theirs:
        return []
    token = min(ours.keys() ^ theirs.keys() or {t for t in ours if ours[t] != theirs[t]})
    raise UserError(
        f"the corpus {config.data.dir} was encoded with another tokenizer than that of train.init_from "
        f"{config.train.init_from} (first difference: the token {token!r}, {ours.get(token, 'none')} there and "
        f"{theirs.get(token, 'none')} in the corpus); prepare it with --tokenizer {own.parent}"
    )


def _config_of(source: str) -> ResFormerConfig:
    """The config of a model of ours; a run that is not exported yet has none.

    Raises:
        UserError: no such model, or one of another type.
    """
    directory = local(source)
    path = directory / "config.json"
    try:
        about: Any = json.loads(path.read_text(encoding="utf-8"))
        kind = about["model_type"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"train.init_from {source}: {path} cannot be read ({error!r})") from None
    if kind != _MODEL_TYPE:
        raise UserError(
            f"train.init_from {source} is a {kind}, and model.from_init takes models of ours; convert it first: "
            f"`resformer convert {source} --variant V --out DIR`"
        )
    try:
        found: Any = ResFormerConfig.from_pretrained(directory)
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"train.init_from {source}: {' '.join(str(error).split())[:300]}") from None
    return found


def _described(found: ResFormerConfig, attention: Any) -> ModelConfig:
    """The model section of a run with this model."""
    named = {
        field.name: getattr(found, field.name)
        for field in dataclasses.fields(ModelConfig)
        if field.name not in (*_OURS, "rope_theta")
    }
    named["rope_theta"] = float(found.rope().get("rope_theta", ModelConfig().rope_theta))
    whole = found.to_diff_dict()
    for name in ("architectures", "auto_map", "dtype", "model_type", "transformers_version", "variant_formula"):
        whole.pop(name, None)
    return ModelConfig(
        **named, attention=attention, from_init=True, config_json=json.dumps(whole, sort_keys=True, allow_nan=False)
    )
