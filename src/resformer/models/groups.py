"""Parameter groups for AdamW, by name: what decays, and what has a learning rate of its own."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..core.policy import LAMBDA_NAMES


def group_of(name: str, parameter: nn.Parameter) -> str:
    """ "lambdas" (anything below a policy, shared coefficients or depth averages), "matrices" (two or more dims) or
    "vectors" (norms, biases).
    """
    if set(LAMBDA_NAMES) & set(name.split(".")):
        return "lambdas"
    return "matrices" if parameter.dim() >= 2 else "vectors"


def optimizer_groups(
    model: nn.Module, *, lr: float = 6e-4, weight_decay: float = 0.1, lambda_lr_scale: float = 1.0
) -> list[dict[str, Any]]:
    """Groups for `torch.optim.AdamW(optimizer_groups(model, lr=...))`.

    Matrices (embeddings and head among them, as in the paper's recipe) decay; norms, biases and lambdas do not. Lambdas
    are found by name, so that gates of two dimensions count as well, and their learning rate is `lr * lambda_lr_scale`.
    Hugging Face's Trainer would put
    lambdas among the decaying parameters: give it an optimizer built from these groups.

    Each group also carries "name" and "names" (of its parameters, in order). Empty groups are left out.
    """
    groups: dict[str, dict[str, Any]] = {
        "matrices": {"lr": lr, "weight_decay": weight_decay},
        "vectors": {"lr": lr, "weight_decay": 0.0},
        "lambdas": {"lr": lr * lambda_lr_scale, "weight_decay": 0.0},
    }
    for group in groups.values():
        group.update(params=[], names=[])
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            group = groups[group_of(name, parameter)]
            group["params"].append(parameter)
            group["names"].append(name)
    return [{"name": name, **group} for name, group in groups.items() if group["params"]]
