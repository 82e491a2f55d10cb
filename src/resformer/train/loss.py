"""The training loss: summed over the global batch, divided by its tokens, never as logits of a whole batch.

Shapes: B sequences, T tokens, C hidden size, V vocabulary, N = B * T rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from resformer.evaluate.loss import kept_apart
from resformer.parallel import Ranks
from resformer.parallel.wrap import synchronise
from resformer.train.distill import IGNORED, Teacher, distilled_losses
from resformer.train.reduced_loss import reduced_nll

# Rows of logits at a time on the CPU: 512 x 4,096 fp32 (8 MB) stay in the cache. Head and loss of 4,096 tokens, forward
# and backward, take 0.25 s of one core so, against 0.42 s with whole logits (C = 128).
CPU_CHUNK_ROWS = 512


def summed_nll(
    model: Any, tokens_BT1: Tensor, mask_BT: Tensor | None = None, positions_BT: Tensor | None = None
) -> Tensor:
    """Sum of the negative log-likelihoods of tokens 1..T given those before, nats, fp32 scalar.

    Args:
        model: a causal LM of transformers.
        tokens_BT1: ids `[B, T + 1]`.
        mask_BT: False where the target does not count; none = all count.
        positions_BT: positions of the inputs, which restart where another document begins; none = one document.
    """
    return batch_losses(model, tokens_BT1, mask_BT, positions_BT)[0]


def batch_losses(
    model: Any, tokens_BT1: Tensor, mask_BT: Tensor | None = None, positions_BT: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The summed negative log-likelihood, and the weighted load-balancing loss of a model with experts.

    A sharded model has this as a method (`parallelize(..., methods=(batch_losses,))`), before which the weights of the
    head, that are used here outside of any forward, are gathered.
    """
    inputs_BT, targets_BT = tokens_BT1[:, :-1], tokens_BT1[:, 1:]
    if mask_BT is not None:
        targets_BT = targets_BT.masked_fill(~mask_BT, IGNORED)
    # A cache in a training step would switch off the detection of packed documents and cost memory for nothing.
    output = model.base_model(input_ids=inputs_BT, use_cache=False, **kept_apart(model, positions_BT))
    head: Any = model.get_output_embeddings()
    nll = _linear_nll(output.last_hidden_state.flatten(0, 1), head, targets_BT.flatten())
    aux_loss = getattr(output, "aux_loss", None)
    return nll, None if aux_loss is None else model.config.router_aux_loss_coef * aux_loss


def accumulate(
    model: Any,
    tokens_BT1: Tensor,
    *,
    micro_batch_size: int,
    mask_BT: Tensor | None = None,
    positions_BT: Tensor | None = None,
    count: int | None = None,
    ranks: Ranks = Ranks(),  # noqa: B008  (frozen)
    teacher: Teacher | None = None,
) -> Tensor:
    """Add the gradients of the mean loss over all counted tokens of the global batch; return that loss (nats a token).

    The sum over micro-batches and processes is divided by the tokens of the whole batch, so that gradients do not
    depend on how the batch is cut, also when sequences have unequal numbers of counted tokens. Processes exchange
    gradients after the last micro-batch only.

    Experts add the gradient of their load-balancing loss, the mean over micro-batches (which are balanced each by
    itself); the loss that is returned stays the tokens' alone.

    Args:
        model: the model, sharded or not.
        tokens_BT1: this process's rows of the batch, as many as in every other process.
        micro_batch_size: rows of a forward pass.
        mask_BT: False where the target does not count; none = all count.
        positions_BT: positions of the inputs, which restart where another document begins; none = one document a row.
        count: how many targets count in the global batch; none = ask device and processes.
        ranks: the processes.
        teacher: whom to distil from as well. Then `[2]` is returned: the cross-entropy, and t^2 KL, per token.
    """
    if count is not None:
        count = max(1, count)  # where nothing counts the sum is 0
    elif mask_BT is None:
        count = ranks.size * tokens_BT1[:, 1:].numel()
    else:
        count = int(ranks.sums(float(mask_BT.sum()))[0])
    total = torch.zeros(() if teacher is None else (2,), device=tokens_BT1.device)
    losses = _losses(model, teacher)
    for start in range(0, len(tokens_BT1), micro_batch_size):
        rows = slice(start, start + micro_batch_size)
        if ranks.size > 1:
            synchronise(model, start + micro_batch_size >= len(tokens_BT1))
        objective, balance, *sums = losses(
            tokens_BT1[rows],
            mask_BT[rows] if mask_BT is not None else None,
            positions_BT[rows] if positions_BT is not None else None,
        )
        part = objective / count
        share = len(tokens_BT1[rows]) / len(tokens_BT1) / ranks.size
        (part if balance is None else part + balance * share).backward()
        total += sums[0] / count if sums else part.detach()
    return ranks.total(total)


def _losses(model: Any, teacher: Teacher | None) -> Callable[..., tuple[Any, ...]]:
    """`batch_losses` or `distilled_losses` of the model, as its method where it has one."""
    function = batch_losses if teacher is None else functools.partial(distilled_losses, teacher=teacher)
    name = batch_losses.__name__ if teacher is None else distilled_losses.__name__
    method = getattr(model, name, None)
    if method is None:
        return functools.partial(function, model)
    return method if teacher is None else functools.partial(method, teacher=teacher)


def _linear_nll(hidden_NC: Tensor, head: nn.Linear, targets_N: Tensor) -> Tensor:
    weight_VC: Tensor = head.weight
    bias_V: Tensor | None = head.bias
    kind = hidden_NC.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        return reduced_nll(hidden_NC, weight_VC, bias_V, targets_N, dtype=dtype, ignored=IGNORED)
    if not hasattr(nn, "LinearCrossEntropyOptions"):  # torch < 2.13
        chunks = zip(hidden_NC.split(CPU_CHUNK_ROWS), targets_N.split(CPU_CHUNK_ROWS), strict=True)
        return sum(  # type: ignore[return-value]
            F.cross_entropy(F.linear(part, weight_VC, bias_V).float(), targets, reduction="sum", ignore_index=IGNORED)
            for part, targets in chunks
        )
    if kind == "cpu":
        options = nn.LinearCrossEntropyOptions(
            batch_chunk_size=CPU_CHUNK_ROWS, chunking_method=None, acc_policy="accurate"
        )
    else:
        options = nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(
        hidden_NC, weight_VC, targets_N, linear_bias=bias_V, reduction="sum", ignore_index=IGNORED, options=options
    ).float()
