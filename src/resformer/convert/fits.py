"""Weights for layers that no longer have their own keys, values or queries: output projections by least squares.

Shapes: B windows, T tokens, C hidden size, I = heads * head dim.

A layer n that shares gives X_n = A_n V_1 where the source gives U_n = A_n V_n and adds Y_n = U_n W_o^T to its stream.
From calibration text we take the W of least |X_n W^T - Y_n|^2 over all tokens, with a ridge towards the source's W_o
that held-out text chooses. What V_1 of a KV head has to become to stand for V_n is a linear map, and W_o takes it in.
Fitting what attention adds, and not V_n itself, weights tokens as attention does, lets every query head have a map of
its own, and also answers for shared keys and queries.

Both models run once. Every block of the new one is given the source's stream, so that all layers are fitted at the
same time, and to inputs that they would see if the layers before them were perfect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..data.console import Progress
from ..errors import UserError
from ..models.configuration import ResFormerConfig
from ..models.modeling import ResFormerForCausalLM
from .start import whole
from .weights import is_ours_alone

TOKENS = 65536
"""Calibration tokens unless told otherwise."""
WINDOW = 512
BATCH = 4
RIDGES = (0.3, 0.1, 0.03, 0.01, 0.003)
"""Of the mean square of the inputs; the one that fits held-out windows best is taken, for each layer."""
_HELD_OUT = 8  # one window of so many is kept to measure on
Sums = tuple[Tensor, Tensor, float]
"""X^T X `[I, I]`, X^T Y `[I, C]` and |Y|^2, in fp64."""


def windows(texts: Iterable[str], tokenizer: Any | None, *, tokens: int, limit: ResFormerConfig) -> Tensor:
    """Token ids `[B, T]` of the beginning of the texts, joined as the tokenizer encodes each of them.

    Raises:
        UserError: no tokenizer, too little text, ids that the model does not know.
    """
    if tokenizer is None:
        raise UserError("--calibration needs the tokenizer of the source, which has none")
    length = min(WINDOW, limit.max_position_embeddings)
    ids: list[int] = []
    for text in texts:
        ids += tokenizer(text, verbose=False).input_ids
        if len(ids) >= tokens:
            break
    count = min(len(ids), tokens) // length
    least = 2 * _HELD_OUT * length
    if tokens < least:
        raise UserError(f"--calibration-tokens is {tokens:,}; expected at least {least:,}, {2 * _HELD_OUT} windows")
    if count < 2 * _HELD_OUT:
        raise UserError(f"--calibration has {len(ids):,} tokens; expected at least {least:,}: give more text")
    found = torch.tensor(ids[: count * length]).view(count, length)
    if int(found.max()) >= limit.vocab_size:
        raise UserError(f"the tokenizer has an id {int(found.max())}, but the model {limit.vocab_size} of them")
    return found


def fit(
    source: ResFormerForCausalLM, model: ResFormerForCausalLM, ids: Tensor, *, say: Callable[[str], None]
) -> dict[str, float]:
    """Fit the output projections of the layers of `model` that share, in place.

    Args:
        source: the plain Transformer, in our host.
        model: with the source's weights as far as it has a place for them.
        ids: calibration windows `[B, T]`; one in eight is held out.
        say: is told how well it went, and when the fit is not taken because it does not help.

    Returns:
        Held-out loss in nats per token of the "source", of the "naive" and the "fitted" model.
    """
    layers = [row.layer - 1 for row in model.config.plan() if not whole(row)]
    held, used = ids[::_HELD_OUT], ids[torch.arange(len(ids)) % _HELD_OUT != 0]
    dtype = model.dtype
    _cast(source, torch.float32)
    _cast(model, torch.float32)
    losses = {"source": mean_loss(source, held), "naive": mean_loss(model, held)}
    before = {index: _projection(model, index).weight for index in layers}
    label = f"calibrating on {used.numel():,} tokens, {held.numel():,} held out"
    sums, checks = _sums(source, model, used, layers, label=label), _sums(source, model, held, layers)
    for index in layers:
        projection = _projection(model, index)
        W, unexplained = _solve(sums[index], checks[index], projection.weight)
        projection.weight = nn.Parameter(W)  # a new one: the source may share the old one
        say(f"layer {index + 1}: {1 - unexplained:.1%} of what attention adds follows from what it now attends to")
    losses["fitted"] = mean_loss(model, held)
    if not losses["fitted"] < losses["naive"]:
        say("the fit does not lower the held-out loss and is left out; give more or other --calibration text")
        for index, weight in before.items():
            _projection(model, index).weight = weight
        losses["fitted"] = losses["naive"]
    _cast(model, dtype)
    return losses


def _cast(model: ResFormerForCausalLM, dtype: torch.dtype) -> None:
    """Change the weights' dtype, but for lambdas, which are fp32 always."""
    for name, parameter in model.named_parameters():
        if not is_ours_alone(name):
            parameter.data = parameter.data.to(dtype)


def _projection(model: ResFormerForCausalLM, index: int) -> nn.Linear:
    return model.model.layers[index].self_attn.o_proj


@torch.no_grad()
def mean_loss(model: Any, ids: Tensor) -> float:
    """Nats per token of windows `[B, T]`."""
    total = sum(
        float(model(input_ids=part, labels=part, use_cache=False).loss) * len(part) for part in ids.split(BATCH)
    )
    return total / len(ids)


@torch.no_grad()
def _sums(
    source: ResFormerForCausalLM, model: ResFormerForCausalLM, ids: Tensor, layers: Sequence[int], *, label: str = ""
) -> dict[int, Sums]:
    """Per layer the sums over all tokens; with a label progress is shown."""
    sums: dict[int, Sums] = {}
    with Progress(label, ids.numel(), bool(label)) as progress:
        for part in ids.split(BATCH):
            with _captured(source, model, layers) as (wanted, given):
                source.model(input_ids=part, use_cache=False)
                model.model(input_ids=part, use_cache=False)
                for index in layers:
                    x, y = given[index].flatten(0, 1).double(), wanted[index].flatten(0, 1).double()
                    bias = _projection(model, index).bias
                    y = y if bias is None else y - bias.double()
                    new = (x.T @ x, x.T @ y, float(y.square().sum()))
                    old = sums.get(index)
                    sums[index] = new if old is None else (old[0] + new[0], old[1] + new[1], old[2] + new[2])
            progress.advance(part.numel(), tokens=part.numel())
    return sums


@contextmanager
def _captured(
    source: ResFormerForCausalLM, model: ResFormerForCausalLM, layers: Sequence[int]
) -> Iterator[tuple[dict[int, Tensor], dict[int, Tensor]]]:
    """Within: run the source, then the model, whose blocks get the source's stream. Gives what the source's attention
    adds `[B, T, C]` and what the model's output projections get `[B, T, I]`, by layer from 0.
    """
    stream: dict[int, Tensor] = {}
    wanted: dict[int, Tensor] = {}
    given: dict[int, Tensor] = {}
    with ExitStack() as stack:

        def hook(handle: Any) -> None:
            stack.callback(handle.remove)

        for index, block in enumerate(source.model.layers):
            hook(block.register_forward_pre_hook(lambda _, args, at=index: stream.__setitem__(at, args[0])))
        for index, block in enumerate(model.model.layers):
            hook(block.register_forward_pre_hook(lambda _, args, at=index: (stream.pop(at), *args[1:])))
        for index in layers:
            out = _projection(source, index)
            hook(out.register_forward_hook(lambda _m, _a, output, at=index: wanted.__setitem__(at, output)))
            out = _projection(model, index)
            hook(out.register_forward_pre_hook(lambda _m, args, at=index: given.__setitem__(at, args[0])))
        yield wanted, given


@torch.no_grad()
def _solve(sums: Sums, check: Sums, start: Tensor) -> tuple[Tensor, float]:
    """W `[C, I]` of least |X W^T - Y|^2 + ridge |W - start|^2, and which part of |Y|^2 it leaves on `check`."""
    xx, xy, _ = sums
    scale, eye = xx.diagonal().mean() + torch.finfo(torch.float64).tiny, torch.eye(len(xx), dtype=xx.dtype)
    solved = [torch.linalg.solve(xx + r * scale * eye, xy + r * scale * start.double().T) for r in RIDGES]
    best = min(solved, key=lambda W_IC: _left(W_IC, check))
    return best.T.to(start.dtype).contiguous(), _left(best, check)


def _left(W_IC: Tensor, sums: Sums) -> float:
    """|X W - Y|^2 / |Y|^2."""
    xx, xy, yy = sums
    left = yy - 2 * float((W_IC * xy).sum()) + float((W_IC * (xx @ W_IC)).sum())
    return max(0.0, left) / max(yy, 1e-300)
