"""Parameter groups for AdamW, by name: what decays, and what has a learning rate of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from ..core.policy import LAMBDA_NAMES
from ..errors import UserError, did_you_mean


def group_of(name: str, parameter: nn.Parameter) -> str:
    """ "lambdas" (anything below a policy, shared coefficients or depth averages), "matrices" (two or more dims) or
    "vectors" (norms, biases).
    """
    if set(LAMBDA_NAMES) & set(name.split(".")):
        return "lambdas"
    return "matrices" if parameter.dim() >= 2 else "vectors"


def optimizer_groups(
    model: nn.Module,
    *,
    lr: float = 6e-4,
    weight_decay: float = 0.1,
    lambda_lr_scale: float = 1.0,
    lr_scale: Mapping[str, float] | None = None,
) -> list[dict[str, Any]]:
    """Groups for `torch.optim.AdamW(optimizer_groups(model, lr=...))`.

    Matrices (embeddings and head among them, as in the paper's recipe) decay; norms, biases and lambdas do not. Lambdas
    are found by name, so that gates of two dimensions count as well, and their learning rate is `lr * lambda_lr_scale`.
    Hugging Face's Trainer would put lambdas among the decaying parameters: give it an optimizer built from these
    groups.

    `lr_scale` multiplies learning rates by parameter name: a pattern with `*` and `?`, or a whole name; where several
    fit, all of them count. The paper's boost of layer 1 is `{"model.layers.0.*": 2.0}`. A compiled or wrapped model's
    names are those of the bare one.

    Each group also carries "name" and "names" (of its parameters, in order). Empty groups are left out.

    Raises:
        UserError: for a pattern that fits no parameter.
    """
    groups: dict[tuple[str, float], dict[str, Any]] = {}
    decay = {"matrices": weight_decay, "vectors": 0.0, "lambdas": 0.0}
    named = [(name.replace("_orig_mod.", ""), parameter) for name, parameter in model.named_parameters()]
    _check_patterns(lr_scale or {}, [name for name, _ in named])
    for name, parameter in named:
        if not parameter.requires_grad:
            continue
        kind = group_of(name, parameter)
        scale = math.prod(factor for pattern, factor in (lr_scale or {}).items() if fnmatchcase(name, pattern))
        rate = lr * (lambda_lr_scale if kind == "lambdas" else 1.0) * scale
        label = kind if scale == 1 else f"{kind} x {scale:g}"
        group = groups.setdefault((kind, scale), {"name": label, "lr": rate, "weight_decay": decay[kind]})
        group.setdefault("params", []).append(parameter)
        group.setdefault("names", []).append(name)
    order = list(decay)
    return [groups[key] for key in sorted(groups, key=lambda key: (order.index(key[0]), key[1] != 1, key[1]))]


def _check_patterns(lr_scale: Mapping[str, float], names: Sequence[str]) -> None:
    for pattern in lr_scale:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UserError(
                f"lr_scale {pattern!r} fits no parameter{did_you_mean(pattern, names)} (names look like {names[0]!r}; "
                "* stands for anything)"
            )
