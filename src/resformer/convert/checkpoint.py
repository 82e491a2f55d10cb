"""A model of transformers becomes one of ours, as a directory: checked from a new process before it takes its name."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import RunError, UserError
from ..models.configuration import ResFormerConfig
from ..models.modeling import ResFormerForCausalLM
from . import check, families, fits, weights
from .card import card
from .patch import RECORD
from .patch_flow import is_attached
from .place import check_target, new_directory
from .source import Source, open_source
from .start import Start, choose
from .talk import Say, note, quiet

# Fields of our config that say what variant it is and where it came from, not what its plain part computes.
_NOT_CARRIED = ("variant", "variant_options", "variant_formula", "converted_from", *families.META)


@dataclass(frozen=True, kw_only=True)
class Converted:
    """What came out.

    Attributes:
        config: of the new model.
        exact: it computes what its source does.
        differences: position (from 0) -> largest difference of a logit from the source's, in fp32.
        losses: nats per token on held-out windows of the calibration text: of the source, of the model with the
            source's weights as they are ("naive"), and with fitted ones ("fitted"); empty without calibration.
        unseen: what the sequence of the check is too short to show.
    """

    config: ResFormerConfig
    exact: bool
    differences: dict[int, float]
    losses: dict[str, float] = field(default_factory=dict)
    unseen: tuple[str, ...] = ()


def convert_checkpoint(
    source: str,
    out: Path | str,
    *,
    variant: str,
    options: Mapping[str, Any] | None = None,
    inexact: bool = False,
    calibration: Iterable[str] | None = None,
    calibration_tokens: int = fits.TOKENS,
    ignored_fields: Collection[str] = (),
    overwrite: bool = False,
    prelude: Sequence[str] = (),
    say: Say = note,
) -> Converted:
    """Convert a model and write it to `out`; if anything fails, nothing is left there.

    Args:
        source: a directory that `from_pretrained` takes, a hub name or a GGUF file, of one of `families.FAMILIES` or of
            this library.
        out: the directory to write.
        variant: of the new model.
        options: its options; those that are missing are chosen so that the model starts as its source, see `start`.
        inexact: convert also where the variant has no such start.
        calibration: texts on which weights of layers that share values are fitted.
        calibration_tokens: how many tokens of them are read.
        ignored_fields: fields of the source's config that have nothing to do with what it computes.
        overwrite: replace a model that is there.
        prelude: lines of Python for the process that checks, such as imports that register variants.
        say: gets what the user should know, a line at a time.

    Raises:
        UserError: no such model, a field that cannot be carried over, no exact start, something at `out`.
        RunError: the new model does not compute what it should, or does not load.
    """
    out = Path(out)
    check_target(out, overwrite=overwrite, source=source)
    opened = open_source(source)
    plain, config, start = _configs(opened, variant, options or {}, ignored_fields)
    if not (start.exact or start.shares or inexact):
        raise UserError(f"no exact start: {start.why}; pass --inexact to convert nevertheless, with a changed model")
    _check_calibration(opened, start, calibration is not None)

    tokenizer = opened.tokenizer()
    if tokenizer is None:
        say(f"{source} has no tokenizer; the new model gets none")
    ids = None
    if calibration is not None:
        ids = fits.windows(calibration, tokenizer, tokens=calibration_tokens, limit=config)
    elif start.shares and not _mixes(opened):
        say(f"{start.why}; without --calibration the weights stay as they are")
    theirs = opened.model()
    model, losses = _built(opened, theirs, plain, config, ids, say)
    with new_directory(out, overwrite=overwrite) as place:
        save(model, tokenizer, theirs.generation_config, place)
        result = _checked(opened, theirs, model, place, start, losses, prelude)
        text = card(
            config, opened.label, exact=result.exact, why=start.why, differences=result.differences, losses=losses
        )
        (place / "README.md").write_text(text, encoding="utf-8")
    return result


def _described(source: Source, ignored: Collection[str]) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Fields of ours without variant, and the record for the way back."""
    config = source.config
    if source.ours:
        names = [item.name for item in dataclasses.fields(config) if item.name not in _NOT_CARRIED]
        return {name: getattr(config, name) for name in names}, config.converted_from
    fields = families.our_fields(config, ignored=(*ignored, RECORD))
    gone = ("quantization_config", RECORD)
    kept = {k: v for k, v in config.to_diff_dict().items() if not k.startswith("_") and k not in gone}
    return fields, json.loads(json.dumps(kept, default=str))


def _configs(
    source: Source, variant: str, options: Mapping[str, Any], ignored: Collection[str]
) -> tuple[ResFormerConfig, ResFormerConfig, Start]:
    """Configs of the plain Transformer and of the new model, and where that starts."""
    fields, record = _described(source, ignored)
    plain = ResFormerConfig(**fields, variant="transformer", converted_from=record)
    if source.patch is None:
        start = choose(variant, options, plain.shape(), trained=not _mixes(source))
    else:
        start = _as_patched(source, variant, options)
    config = ResFormerConfig(**fields, variant=variant, variant_options=start.options, converted_from=record)
    if source.ours:
        _check_projections(source, config)
    return plain, config, start


def _check_projections(source: Source, config: ResFormerConfig) -> None:
    """See that one of ours has the projections that its conversion is to have.

    Raises:
        UserError: naming the layers that lack them.
    """
    missing = [
        str(new.layer)
        for old, new in zip(source.config.plan(), config.plan(), strict=True)
        if any(
            getattr(new, name) > getattr(old, name) for name in ("owns_value", "owns_key", "owns_query", "value_share")
        )
    ]
    if missing:
        raise UserError(
            f"{source.name}: variant {source.config.variant!r} has no projections of their own in layers "
            f"{', '.join(missing)}, which {config.variant!r} needs; convert the model that it was made from"
        )


def _mixes(source: Source) -> bool:
    """It is one of ours that uses values of other layers already, perhaps a morphed one that shares them."""
    return source.ours and source.config.variant != "transformer"


def _as_patched(source: Source, variant: str, options: Mapping[str, Any]) -> Start:
    """A patched model computes what ours of the same variant does, with the weights that it has learned.

    Raises:
        UserError: another variant, or other options.
    """
    assert source.patch is not None, "the caller looks"
    theirs = source.patch["variant_options"]
    other = [
        f"{key}={value!r} (there: {theirs.get(key)!r})" for key, value in options.items() if value != theirs.get(key)
    ]
    if variant != source.patch["variant"] or other:
        asked = f"asked for: {', '.join(other)}" if variant == source.patch["variant"] else f"not {variant!r}"
        raise UserError(
            f"{source.name} is patched with {source.patch['variant']!r}, {asked}; convert it as it is (--variant "
            f"{source.patch['variant']} without --set), or take the patch out first (resformer.unpatch)"
        )
    return Start(options=dict(theirs), exact=True)


def _check_calibration(source: Source, start: Start, given: bool) -> None:
    if given and not start.shares:
        raise UserError("--calibration fits weights of layers that share projections, and this variant shares none")
    if given and source.ours and source.config.variant != "transformer":
        raise UserError(
            f"--calibration fits to a plain Transformer's values, but {source.name} is a {source.config.variant!r}; "
            "leave it out"
        )


def _built(
    source: Source, theirs: Any, plain: ResFormerConfig, config: ResFormerConfig, ids: Tensor | None, say: Say
) -> tuple[ResFormerForCausalLM, dict[str, float]]:
    """The new model, and the losses of a fit on calibration windows `ids`, if there are any."""
    state = our_state(theirs, source)
    with quiet():
        model = weights.build(config, state)
        return model, {} if ids is None else fits.fit(weights.build(plain, state), model, ids, say=say)


def _checked(
    source: Source,
    theirs: Any,
    model: ResFormerForCausalLM,
    place: Path,
    start: Start,
    losses: dict[str, float],
    prelude: Sequence[str],
) -> Converted:
    """Compare what a new process makes of `place` with the source, or where the start is not exact with the model."""
    probe = check.probe_for(model.config)
    wanted = check.logits(weights.full_precision(theirs), probe.ids, probe.positions)
    expected = wanted if start.exact else check.logits(weights.full_precision(model), probe.ids, probe.positions)
    found = check.in_another_process(place, probe, prelude)
    judge(found, expected, probe, f"{source.name} and its conversion", own_fault=start.exact and source.ours)
    gaps = check.difference(found, wanted)
    return Converted(
        config=model.config,
        # A model that has learned to share already is the same without the weights that it no longer uses.
        exact=start.exact or bool((gaps <= check.allowed(wanted)).all()),
        differences=dict(zip(probe.positions, gaps.tolist(), strict=True)),
        losses=losses,
        unseen=probe.unseen,
    )


def our_state(model: Any, source: Source) -> dict[str, Tensor]:
    """A source's weights under our conventions, without those of value residual."""
    state = model.state_dict()
    if source.ours:
        return {name: x for name, x in state.items() if not weights.is_ours_alone(name)}
    config = source.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return weights.to_ours(state, families.find(config.model_type), head_dim)


def save(model: Any, tokenizer: Any | None, generation: Any, place: Path) -> None:
    """Weights, config, generation config and tokenizer."""
    with quiet():
        model.save_pretrained(place)
    # As the source has it: transformers refuses to write some of what it reads.
    (place / "generation_config.json").write_text(generation.to_json_string(), encoding="utf-8")
    if tokenizer is not None:
        tokenizer.save_pretrained(place)


def judge(found: Tensor, expected: Tensor, probe: check.Probe, pair: str, *, own_fault: bool) -> None:
    """See that logits agree.

    Raises:
        UserError, RunError: they do not; the first where the choice of the source may be the reason.
    """
    gaps, limit = check.difference(found, expected), check.allowed(expected)
    if bool((gaps <= limit).all()):
        return
    at = int(gaps.argmax())
    text = (
        f"{pair} do not compute the same: logits at position {probe.positions[at]} differ by {float(gaps[at]):.3g} "
        f"(allowed: {limit:.3g}); nothing was written"
    )
    raise UserError(f"{text}; its variant is not neutral") if own_fault else RunError(text)


def in_memory(model: Any, *, variant: str, options: Mapping[str, Any] | None = None) -> ResFormerForCausalLM:
    """Our model with the exact start made of a model of transformers in memory, for those who want no files.

    Weights are shared with the given model where they need no reordering.

    Raises:
        UserError: as `convert_checkpoint`.
    """
    source = Source(name=type(model).__name__, place="", file=None, config=model.config)
    if source.patch is not None and not is_attached(model):
        raise UserError(f"{source.name} was saved patched, but loaded without; load it with resformer.load_patched")
    _, config, start = _configs(source, variant, options or {}, ())
    if not start.exact:
        raise UserError(f"no exact start: {start.why}")
    with torch.no_grad(), quiet():
        return weights.build(config, our_state(model, source))
