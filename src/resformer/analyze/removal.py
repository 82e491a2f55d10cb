"""How much worse a model gets when one attention or one feed-forward layer adds nothing to the residual stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from resformer.analyze.capture import blocks_of
from resformer.errors import UserError

_ATTENTION = ("self_attn", "attn", "attention", "self_attention")
_MLP = ("mlp", "feed_forward", "ffn", "block_sparse_moe")


def part_of(block: nn.Module, names: tuple[str, ...]) -> nn.Module:
    """The attention or the feed-forward part of a layer, by its usual names; UserError where there is none."""
    for name in names:
        found = getattr(block, name, None)
        if isinstance(found, nn.Module):
            return found
    raise UserError(f"{type(block).__name__}: has none of {', '.join(names)}, so that it cannot be removed")


def check_parts(model: Any) -> None:
    """UserError where a layer has parts that cannot be removed."""
    for block in blocks_of(model):
        for names in (_ATTENTION, _MLP):
            part_of(block, names)


@contextmanager
def removed(part: nn.Module) -> Iterator[None]:
    """Let a part of a layer give zeros. What a layer sends to later ones beside its output stays."""

    def silence(module: nn.Module, inputs: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            return torch.zeros_like(output)
        return (torch.zeros_like(output[0]), *output[1:])

    handle = part.register_forward_hook(silence)
    try:
        yield
    finally:
        handle.remove()


@torch.no_grad()
def losses(model: Any, tokens_BT: Tensor) -> Tensor:
    """Mean negative log-likelihood of the tokens 2..T of each text `[B]`, nats, float64."""
    logits = model(input_ids=tokens_BT, use_cache=False).logits[:, :-1]
    nll = [
        nn.functional.cross_entropy(row.float(), target, reduction="none")
        for row, target in zip(logits, tokens_BT[:, 1:], strict=True)
    ]
    return torch.stack(nll).double().mean(dim=1)


def removal(model: Any, tokens_BT: Tensor) -> dict[tuple[str, int], Tensor]:
    """Loss of each text as it is ("loss", layer 0), and how much it rises without one part of one layer
    ("loss_without_attention" and "loss_without_mlp", layers from 1), nats `[B]`.
    """
    whole = losses(model, tokens_BT)
    found = {("loss", 0): whole}
    for layer, block in enumerate(blocks_of(model), start=1):
        for name, names in (("attention", _ATTENTION), ("mlp", _MLP)):
            with removed(part_of(block, names)):
                found[f"loss_without_{name}", layer] = losses(model, tokens_BT) - whole
    return {key: value.cpu() for key, value in found.items()}
