"""The way back: one of our models, with a neutral variant, as a plain model of transformers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..models.configuration import ResFormerConfig
from . import check, families, weights
from .checkpoint import judge, save
from .place import check_target, new_directory
from .source import open_source
from .start import whole
from .talk import Say, note, quiet

# Fields of our config that a plain model need not share: they change nothing that it computes here.
_FREE = (
    *families.META,
    *("variant", "variant_options", "variant_formula", "converted_from", "use_cache", "initializer_range"),
    *("layer_norm_eps", "num_experts_per_tok", "router_aux_loss_coef"),
)


def convert_back(source: str, out: Path | str, *, overwrite: bool = False, say: Say = note) -> dict[int, float]:
    """Write one of our models as the class of transformers that it was converted from, or, if it was made here, as
    the first family that has its form. If anything fails, nothing is left at `out`.

    Returns:
        Position -> largest difference of a logit in fp32.

    Raises:
        UserError: no such model, a variant that is not neutral, a form that no family has, something at `out`.
        RunError: the new model does not load.
    """
    out = Path(out)
    check_target(out, overwrite=overwrite, source=source)
    opened = open_source(source)
    if not opened.ours:
        raise UserError(f"{source} is a {opened.config.model_type!r}; --to-hf takes models of this library")
    _check_owned(source, opened.config)
    config = plain_config(opened.config)
    tokenizer = opened.tokenizer()
    if tokenizer is None:
        say(f"{source} has no tokenizer; the new model gets none")
    ours = opened.model()
    probe = check.probe_for(opened.config)
    with quiet():
        model = to_plain(ours, config)
    with new_directory(out, overwrite=overwrite) as place:
        save(model, tokenizer, ours.generation_config, place)
        expected = check.logits(weights.full_precision(ours), probe.ids, probe.positions)
        _check_neutral(ours, check.logits(weights.full_precision(model), probe.ids, probe.positions), expected)
        del ours, model
        found = check.in_another_process(place, probe)
        judge(found, expected, probe, f"{source} and its conversion", own_fault=False)
    return dict(zip(probe.positions, check.difference(found, expected).tolist(), strict=True))


def to_plain(model: Any, config: Any | None = None) -> Any:
    """A model of transformers with the weights of one of ours; what its variant adds is left out.

    Args:
        model: ours.
        config: what `plain_config` returns, if it is at hand.
    """
    from transformers import AutoModelForCausalLM

    config = plain_config(model.config) if config is None else config
    family = families.find(config.model_type)
    state = weights.from_ours(model.state_dict(), family, model.config.shape().head_dim)
    return weights.load(AutoModelForCausalLM._model_mapping[type(config)], config, state)


def plain_config(ours: ResFormerConfig) -> Any:
    """The config of transformers that describes the same model without its variant.

    Raises:
        UserError: no family has this form; of a converted model, one that names what has changed since.
    """
    record = ours.converted_from
    if record is not None:
        found, differing = _as_family(ours, record["model_type"], record)
        if differing:
            raise UserError(
                f"the model was made of a {families.find(record['model_type']).title}, which has no such "
                f"{', '.join(differing)}"
            )
        return found
    nearest: list[str] | None = None
    for name in families.FAMILIES:
        found, differing = _as_family(ours, name, {})
        if not differing:
            return found
        nearest = differing if nearest is None or len(differing) < len(nearest) else nearest
    raise UserError(f"no family of transformers has this form (in the way: {', '.join(nearest or ())})")


def _as_family(ours: ResFormerConfig, name: str, record: dict[str, Any]) -> tuple[Any, list[str]]:
    """A config of that family for our model, and our fields that it would not give back."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING, AutoConfig

    family = families.find(name)
    try:
        given = {field: getattr(ours, field) for field in families.ALIKE}
        given |= {theirs: getattr(ours, field) for theirs, field in family.renamed.items()}
        given |= {
            "head_dim": ours.shape().head_dim,
            "rope_parameters": ours.rope(),
            "attention_dropout": ours.attention_dropout,
            **{field: allowed[0] for field, allowed in family.only.items() if field == "residual_dropout"},
            **family.undo(ours),
        }
        if "attention_out_bias" in given and given["attention_out_bias"] is None:
            given["attention_out_bias"] = ours.attention_bias
        declared = {item.name for item in dataclasses.fields(CONFIG_MAPPING[name])}
        if (
            "head_dim" not in {*declared, *record}
            and given["head_dim"] * given["num_attention_heads"] == ours.hidden_size
        ):
            del given["head_dim"]
        record = {key: value for key, value in record.items() if key != "model_type"}
        found = AutoConfig.for_model(name, **{**record, **given})
        again = ResFormerConfig(**families.our_fields(found), variant="transformer")
    except (ValueError, StrictDataclassError) as error:
        return None, [str(error)]
    return found, [field for field in _compared() if _plain(ours, field) != _plain(again, field)]


def _compared() -> list[str]:
    return [item.name for item in dataclasses.fields(ResFormerConfig) if item.name not in _FREE]


def _plain(config: ResFormerConfig, field: str) -> Any:
    """A field's meaning: several of them say nothing, or the same in other words, next to others."""
    if field == "attention_out_bias" and config.attention_out_bias is None:
        return config.attention_bias
    if field in ("sliding_window", "sliding_layers"):
        return bool(config.windowed_layers()) and (config.sliding_window, config.windowed_layers())
    if field == "nope_layers":
        return tuple(config.nope_layers or ())
    if field in ("qk_norm_over",) and not config.qk_norm:
        return None
    if field == "rope_parameters":
        return {key: value for key, value in config.rope().items() if value is not None}
    if field in ("head_dim", "num_key_value_heads"):
        shape = config.shape()
        return (shape.head_dim, shape.kv_heads)
    return getattr(config, field)


def _check_owned(source: str, config: ResFormerConfig) -> None:
    gone = [row.layer for row in config.plan() if not whole(row)]
    if gone:
        raise UserError(
            f"{source}: variant {config.variant!r} has no projections of their own in layers "
            f"{', '.join(map(str, gone))}, which a plain Transformer needs; there is no way back"
        )


def _check_neutral(model: Any, got: Any, expected: Any) -> None:
    """Refuse a variant that does something, and say where.

    Raises:
        UserError: logits differ without it.
    """
    gap, limit = float(check.difference(got, expected).max()), check.allowed(expected)
    if gap <= limit:
        return
    table, where = model.lambda_map(), ""
    off = [
        (layer, first, own)
        for layer, first, own in zip(*(table.get(key, ()) for key in ("layers", "first", "own")), strict=True)
        if (first, own) != (0.0, 1.0)
    ]
    if off:
        layer, first, own = max(off, key=lambda row: abs(row[1]) + abs(row[2] - 1))
        where = f"; furthest from it is layer {layer}: {first:.4g} V_1 + {own:.4g} V_{layer}"
    raise UserError(
        f"variant {model.config.variant!r} is not neutral: without it logits differ by {gap:.3g} (allowed: {limit:.3g})"
        f"{where}; a plain Transformer cannot compute this"
    )
