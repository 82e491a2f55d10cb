"""Weights for layers that no longer have their own keys, values or queries: projections by least squares.

Shapes: B windows, T tokens, C hidden size, I = inputs of a projection: heads * head dim, or the intermediate size.

A layer n that shares gives X_n = A_n V_1 where the source gives U_n = A_n V_n. From calibration text we take, one layer
after the other, the output projection W_o of least |X_n W^T - Y_n|^2 over all tokens, and then the down projection of
the feed-forward half behind it in the same way, each with a ridge towards the source's weights that held-out text
chooses. Y_n is what the stream lacks: the source's stream after that half of the block, minus what goes into the half
in the new model; so each projection also mends what those before it left. Where norms stand behind the halves, so that
what a projection should give does not follow from the stream, Y_n is what the source's projection gives, and nothing
is mended.

What V_1 of a KV head has to become to stand for V_n is a linear map, and W_o takes it in. Fitting what attention adds,
and not V_n itself, weights tokens as attention does, lets every query head have a map of its own, and also answers for
shared keys and queries.

Both models run once, a block at a time for all windows; below the first layer that shares they are one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data.console import Progress
from ..errors import UserError
from ..models.configuration import ResFormerConfig
from ..models.mlp import MixtureOfExperts
from ..models.modeling import ResFormerForCausalLM
from .course import BATCH, Course, watched
from .start import whole
from .weights import is_ours_alone

TOKENS = 65536
"""Calibration tokens unless told otherwise."""
WINDOW = 512
RIDGES = (1.0, 0.3, 0.1, 0.03, 0.01, 0.003)
"""Of the mean square of the inputs; the one that fits held-out windows best is taken, for each projection."""
_FITTED_COST = 4  # a block that is fitted against one that is not, for the time that is left
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
    """Fit the output and down projections of the layers of `model` that share, in place.

    Args:
        source: the plain Transformer, in our host; its weights become fp32.
        model: with the source's weights as far as it has a place for them.
        ids: calibration windows `[B, T]`; one in eight is held out.
        say: is told how well it went, and when the fit is not taken because it does not help.

    Returns:
        Held-out loss in nats per token of the "source", of the "naive" and the "fitted" model.

    Raises:
        UserError: the model has token tables or averages over depth, which a fit block by block does not see.
    """
    layers = [row.layer - 1 for row in model.config.plan() if not whole(row)]
    held, used = ids[::_HELD_OUT], ids[torch.arange(len(ids)) % _HELD_OUT != 0]
    dtype = model.dtype
    _cast(source, torch.float32)
    _cast(model, torch.float32)
    before = {index: [projection.weight for projection in _projections(model, index)] for index in layers}
    target = "the source's does" if model.config.norm_placement == "post" else "the stream lacks"
    label = f"calibrating on {used.numel():,} tokens, {held.numel():,} held out"
    costs = [_FITTED_COST if index in layers else 1 for index in range(len(model.model.layers))]
    with Progress(label, sum(costs), True) as progress:
        losses = {"source": mean_loss(source, held), "naive": mean_loss(model, held)}
        texts = [_Text(model, source, part) for part in (used, held)]
        for index, cost in enumerate(costs):
            if index in layers:
                first, *second = (f"{share:.1%}" for share in _fit_block(model, index, *texts))
                behind = "".join(f", the feed-forward half {share}" for share in second)
                say(f"layer {index + 1}: attention gives {first} of what {target}{behind}")
            for text in texts:
                text.step(index, both=index not in layers)
            progress.advance(cost)
    losses["fitted"] = mean_loss(model, held)
    if not losses["fitted"] < losses["naive"]:
        say("the fit does not lower the held-out loss and is left out; give more or other --calibration text")
        for index, weights in before.items():
            for projection, weight in zip(_projections(model, index), weights, strict=True):
                projection.weight = weight
        losses["fitted"] = losses["naive"]
    _cast(model, dtype)
    return losses


def _cast(model: ResFormerForCausalLM, dtype: torch.dtype) -> None:
    """Change the weights' dtype, but for lambdas, which are fp32 always."""
    for name, parameter in model.named_parameters():
        if not is_ours_alone(name):
            parameter.data = parameter.data.to(dtype)


def _projections(model: ResFormerForCausalLM, index: int) -> list[nn.Linear]:
    """What is fitted in a block, in this order; a mixture of experts has no one down projection."""
    block = model.model.layers[index]
    plain = not isinstance(block.mlp, MixtureOfExperts)
    return [block.self_attn.o_proj, *([block.mlp.down_proj] if plain else [])]


@torch.no_grad()
def mean_loss(model: Any, ids: Tensor) -> float:
    """Nats per token of windows `[B, T]`, without what experts add to a training loss."""
    total = 0.0
    for part in ids.split(BATCH):
        logits = model(input_ids=part, use_cache=False).logits[:, :-1].float()
        total += float(F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum"))
    return total / ids[:, 1:].numel()


class _Text:
    """Windows on their way through both models.

    Attributes:
        course: the new model's.
        goal: the source's; None as long as it is the same one.
        wanted: for each projection of the block at hand and each batch of windows what decides about Y `[b * T, C]`:
            the source's stream after that half of the block, or, with norms behind it, what its projection gives.
    """

    def __init__(self, model: ResFormerForCausalLM, source: ResFormerForCausalLM, ids: Tensor) -> None:
        self.model, self.source = model, source
        self.course = Course.of(model, ids)
        self.goal: Course | None = None
        self.wanted: list[list[Tensor]] = []

    def aim(self, index: int) -> None:
        """The source goes through block `index`, and what it gives is what the new model's block should."""
        if self.goal is None:  # so far its blocks were the same ones, and a plain Transformer's send nothing
            self.goal = Course(self.source, list(self.course.streams))
        goal = self.goal
        block, projections = goal.inner.layers[index], _projections(self.source, index)
        self.wanted = [[] for _ in projections]
        for part in range(len(goal)):
            with ExitStack() as stack:
                seen = [stack.enter_context(watched(projection)) for projection in projections]
                before = goal.streams[part]
                goal.step(index, part)
            if block.norms_outputs:
                made = [look["made"] for look in seen]
            else:
                made = [before.flatten(0, 1) + seen[0]["made"], goal.streams[part].flatten(0, 1)]
            for wanted, tensor in zip(self.wanted, made[: len(projections)], strict=True):
                wanted.append(tensor)

    def sums(self, index: int, which: int) -> Sums:
        """Over all windows, for the projection `which` of block `index`."""
        block, projection = self.course.inner.layers[index], _projections(self.model, index)[which]
        total: Sums | None = None
        for part, wanted in enumerate(self.wanted[which]):
            with watched(projection) as seen:
                out = self.course.attend(index, part) if which == 0 else self.course.out(index, part)[0]
            x, y = seen["given"], wanted
            if not block.norms_outputs:
                y = y - (out.flatten(0, 1) - seen["made"])
            if projection.bias is not None:
                y = y - projection.bias
            new = ((x.T @ x).double(), (x.T @ y).double(), float(y.double().square().sum()))
            total = new if total is None else (total[0] + new[0], total[1] + new[1], total[2] + new[2])
        assert total is not None
        return total

    def step(self, index: int, *, both: bool) -> None:
        """The new model goes through block `index`, and so does the source, unless it is the same one so far."""
        for part in range(len(self.course)):
            self.course.step(index, part)
            if both and self.goal is not None:
                self.goal.step(index, part)
        self.wanted = []


@torch.no_grad()
def _fit_block(model: ResFormerForCausalLM, index: int, used: _Text, held: _Text) -> list[float]:
    """Fit the projections of block `index`; of what each of them should give, the part that it does, held out."""
    used.aim(index)
    held.aim(index)
    given = []
    for which, projection in enumerate(_projections(model, index)):
        W, left = _solve(used.sums(index, which), held.sums(index, which), projection.weight)
        projection.weight = nn.Parameter(W)  # a new one: the source may share the old one
        given.append(1 - left)
    return given


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
