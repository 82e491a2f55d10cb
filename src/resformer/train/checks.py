"""What must hold between configuration keys, one function per rule. Each names the keys that it reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from resformer.errors import UserError
from resformer.train.config import Config

Rule = Callable[[Config], str | None]
_RULES: list[tuple[tuple[str, ...], Rule]] = []


def _rule(*paths: str) -> Callable[[Rule], Rule]:
    def put(rule: Rule) -> Rule:
        _RULES.append((paths, rule))
        return rule

    return put


def cross_problems(config: Config, *, skip: frozenset[str] = frozenset()) -> Iterator[str]:
    """Yield a line for every rule that does not hold; rules that read a key in `skip` are left out.

    A rule is also left out when an earlier one found fault with a key that it reads: its verdict would mean nothing.
    """
    broken = set(skip)
    for paths, rule in _RULES:
        if broken.isdisjoint(paths):
            problem = rule(config)
            if problem:
                broken.update(paths)
                yield problem


def effective(config: Config) -> tuple[Config, list[str]]:
    """The configuration as it will be used, and notes on what was changed.

    Raises:
        UserError: a rule between keys does not hold; all that do not are listed.
    """
    problems = list(cross_problems(config))
    if problems:
        raise UserError("; ".join(problems))
    if config.optim.warmup_steps <= config.train.steps:
        return config, []
    shorter = max(1, config.train.steps // 10)
    note = (
        f"optim.warmup_steps {config.optim.warmup_steps} is longer than train.steps {config.train.steps}: "
        f"shortened to {shorter}"
    )
    optim = dataclasses.replace(config.optim, warmup_steps=shorter)
    return dataclasses.replace(config, optim=optim), [note]


@_rule("train.micro_batch_size", "train.batch_size")
def _micro_batch(config: Config) -> str | None:
    batch, micro = config.train.batch_size, config.micro_batch_size
    if batch % micro == 0:
        return None
    divisor = max(d for d in range(1, min(micro, batch) + 1) if batch % d == 0)
    return f"train.micro_batch_size {micro} does not divide train.batch_size {batch}; {divisor} would"


@_rule("model.hidden_size", "model.num_attention_heads", "model.head_dim")
def _heads(config: Config) -> str | None:
    m = config.model
    if m.head_dim is None and m.hidden_size % m.num_attention_heads:
        return (
            f"model.num_attention_heads {m.num_attention_heads} does not divide model.hidden_size {m.hidden_size}; "
            "change one, or set model.head_dim"
        )
    head_dim = m.head_dim or m.hidden_size // m.num_attention_heads
    if head_dim % 2 and m.position_embedding == "rope":
        return f"model.head_dim is {head_dim}; rotary positions need an even number"
    return None


@_rule("model.num_attention_heads", "model.num_key_value_heads")
def _kv_heads(config: Config) -> str | None:
    heads, kv_heads = config.model.num_attention_heads, config.model.num_key_value_heads
    if kv_heads is None or heads % kv_heads == 0:
        return None
    return f"model.num_key_value_heads {kv_heads} does not divide model.num_attention_heads {heads}; change one"


@_rule("data.sequence_length", "model.max_position_embeddings")
def _positions(config: Config) -> str | None:
    length, positions = config.data.sequence_length, config.max_position_embeddings
    if length <= positions:
        return None
    return (
        f"data.sequence_length {length} is over model.max_position_embeddings {positions}; "
        "shorten one or raise the other (none = equal)"
    )


@_rule("optim.start_lr", "optim.lr")
def _start_lr(config: Config) -> str | None:
    if config.optim.start_lr <= config.optim.lr:
        return None
    return f"optim.start_lr {config.optim.start_lr:g} is over optim.lr {config.optim.lr:g}; a warm-up rises"


@_rule("uptrain.kl", "uptrain.source")
def _distillation(config: Config) -> str | None:
    if config.uptrain.kl == 0 or config.uptrain.source is not None:
        return None
    return f"uptrain.kl is {config.uptrain.kl:g}, but there is no uptrain.source to distil from; name the model"


@_rule("uptrain.morph_steps", "optim.lambda_lr_scale")
def _morphing(config: Config) -> str | None:
    if config.uptrain.morph_steps == 0 or config.optim.lambda_lr_scale == 0:
        return None
    return (
        f"uptrain.morph_steps {config.uptrain.morph_steps} sets l1 and l2, which the optimizer would move as well; "
        "set optim.lambda_lr_scale=0"
    )


@_rule("train.keep_every", "train.checkpoint_every")
def _keep_every(config: Config) -> str | None:
    every, saved = config.train.keep_every, config.train.checkpoint_every
    if every is None or every % saved == 0:
        return None
    near = max(saved, round(every / saved) * saved)
    return f"train.keep_every {every} is no multiple of train.checkpoint_every {saved}, so it keeps nothing; {near} is"


@_rule(
    "model.num_hidden_layers",
    "model.sliding_window",
    "model.sliding_layers",
    "model.num_experts",
    "model.num_experts_per_tok",
    "model.mlp",
    "model.mlp_bias",
    "model.hidden_act",
)
def _form(config: Config) -> str | None:
    from resformer.models.forms import form_problems

    return "; ".join(f"model.{problem}" for problem in form_problems(config.model)) or None


@_rule("model.variant")
def _variant(config: Config) -> str | None:
    from resformer.core.registry import get

    return _complaint("model.variant", lambda: get(config.model.variant))


@_rule(
    "model.variant",
    "model.variant_options",
    "model.hidden_size",
    "model.num_attention_heads",
    "model.head_dim",
    "model.sliding_window",
    "model.sliding_layers",
)
def _variant_options(config: Config) -> str | None:
    from resformer.core.plan import Plan, with_windows
    from resformer.core.policy import Shape
    from resformer.core.registry import build
    from resformer.models.forms import windowed_layers

    m = config.model
    shape = Shape(
        layers=m.num_hidden_layers,
        hidden_size=m.hidden_size,
        heads=m.num_attention_heads,
        kv_heads=m.num_key_value_heads or m.num_attention_heads,
        head_dim=m.head_dim or m.hidden_size // m.num_attention_heads,
    )
    windowed = windowed_layers(m.sliding_window, m.sliding_layers, m.num_hidden_layers)

    def plan(options: Mapping[str, Any]) -> Plan:
        return build(m.variant, options, shape).plan(shape)

    def alone(option: str) -> str | None:
        return _complaint(f"model.variant_options.{option}", lambda: plan({option: m.variant_options[option]}))

    path = "model.variant_options" if m.variant_options else "model.variant"
    whole = _complaint(path, lambda: plan(m.variant_options))
    if whole:  # an option that is wrong by itself is named; others are wrong together
        return "; ".join(filter(None, map(alone, m.variant_options))) or whole
    return _complaint("model.variant", lambda: with_windows(plan(m.variant_options), m.sliding_window, windowed))


def _complaint(path: str, look: Callable[[], Any]) -> str | None:
    try:
        look()
    except ValueError as error:
        return f"{path}: {error}"
    return None
