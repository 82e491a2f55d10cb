"""Loss, and bits per byte, of a causal LM on the validation text, by domain.

Shapes: B windows, T tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from resformer.errors import UserError
from resformer.evaluate.windows import padded
from resformer.models import ResFormerModel
from resformer.parallel.ranks import Ranks


class Interrupted(Exception):  # noqa: N818  (no error: somebody wanted to stop)
    """`stop` said so between two batches; nothing was measured."""


def evaluate(
    model: Any,
    dataset: Any,
    *,
    sequence_length: int,
    batch_size: int,
    max_tokens: int | None = None,
    document_mask: bool = False,
    device: torch.device | str | None = None,
    stop: Callable[[], bool] = lambda: False,
    ranks: Ranks = Ranks(),  # noqa: B008  (frozen)
) -> dict[str, Any]:
    """Score the validation windows of every domain.

    Each window stands alone, a token is a target once. The sums run in float64 over per-token losses, so that the
    batch size changes nothing but the rounding inside the model. Dropout is off; the caller's autocast holds.

    Args:
        model: any causal LM of transformers, on its device.
        dataset: what `resformer.data.open_dataset` returns.
        sequence_length: tokens per window.
        batch_size: windows per forward pass.
        max_tokens: tokens to score per domain, of documents in the order of their hash; none = all.
        document_mask: keep documents apart, as training with `data.document_mask` does: positions restart in each, and
            its first token is not scored. Bits per byte then leave out that token's bytes where the vocabulary says
            how many they are (`Dataset.validation_bytes`).
        device: where the model is; none = ask it.
        stop: asked before each batch; must say the same in all processes.
        ranks: the processes that share the work, each with the same model; all of them get the result.

    Returns:
        `{"domains": {name: {"loss", "bits_per_byte", "tokens"}}, "loss", "bits_per_byte", "loss_token_weighted"}`:
        losses in nats per token; the overall loss and bits per byte are unweighted means over the domains, as in the
        paper's tables; `loss_token_weighted` is the mean over all scored tokens.

    Raises:
        UserError: vocabulary or positions of the model are smaller than the data's, a domain has no validation text, or
            a number is below 1.
        Interrupted: `stop()` was true.
    """
    check_numbers(sequence_length=sequence_length, batch_size=batch_size, max_tokens=max_tokens)
    check_fit(model, dataset, sequence_length)
    device = torch.device(device) if device is not None else next(model.parameters()).device
    domains: dict[str, dict[str, Any]] = {}
    total_nll, total_tokens = 0.0, 0
    how: dict[str, Any] = {"sequence_length": sequence_length, "max_tokens": max_tokens}
    if document_mask:
        how["document_mask"] = True
    with evaluating(model):
        for domain in dataset.domains:
            windows = dataset.validation(domain, **how)
            nll, tokens = _score(model, windows, batch_size, device, stop, ranks)
            if tokens == 0:
                raise UserError(
                    f"domain {domain!r} has no validation text; prepare the corpus with a larger --validation-share"
                )
            domains[domain] = {
                "loss": nll / tokens,
                "bits_per_byte": nll / math.log(2) / dataset.validation_bytes(domain, **how),
                "tokens": tokens,
            }
            total_nll, total_tokens = total_nll + nll, total_tokens + tokens
    return {
        "domains": domains,
        "loss": sum(d["loss"] for d in domains.values()) / len(domains),
        "bits_per_byte": sum(d["bits_per_byte"] for d in domains.values()) / len(domains),
        "loss_token_weighted": total_nll / total_tokens,
    }


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Put the model in evaluation mode for a while."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@torch.no_grad()
def token_nll(
    model: Any, tokens_BT1: Tensor, positions_BT: Tensor | None = None, *, attention_mask_BT: Tensor | None = None
) -> Tensor:
    """Negative log-likelihood `[B, T]` of tokens 1..T given those before, nats, fp32; of those in the same document,
    where positions `[B, T]` restart. `attention_mask_BT` is 0 where a row is only filled up.
    """
    given = kept_apart(model, positions_BT)
    if attention_mask_BT is not None and positions_BT is None:
        given["attention_mask"] = attention_mask_BT
    logits_BTV = model(input_ids=tokens_BT1[:, :-1], use_cache=False, **given).logits
    targets_BT = tokens_BT1[:, 1:]
    rows = [
        F.cross_entropy(row.float(), target, reduction="none")
        for row, target in zip(logits_BTV, targets_BT, strict=True)
    ]
    return torch.stack(rows)


def kept_apart(model: Any, positions_BT: Tensor | None) -> dict[str, Any]:
    """What to give a model's forward, so that it keeps the documents of a row apart; nothing where there are no
    positions.

    Positions that restart say it all, but a model that is left to find the documents has to wait for the device, and
    runs without a mask where it finds none, which a compiled block takes for another kind of call. So our own models
    get their masks ready-made: `[B, 1, T, T]`, True (eager: 0) where a query sees a key.
    """
    if positions_BT is None:
        return {}
    inner, config = model.base_model, model.config
    found: dict[str, Any] = {"position_ids": positions_BT}
    if not isinstance(inner, ResFormerModel) or config._attn_implementation not in ("sdpa", "eager"):
        return found
    place = torch.arange(positions_BT.shape[1], device=positions_BT.device)
    start_BT, distance_TT = place - positions_BT, place[:, None] - place
    seen = (start_BT[:, None, :, None] == start_BT[:, None, None, :]) & (distance_TT >= 0)
    masks = {"full_attention": seen}
    if config.sliding_window is not None:
        masks["sliding_attention"] = seen & (distance_TT < config.sliding_window)
    if config._attn_implementation == "eager":  # it adds the mask to its scores
        lowest = torch.finfo(torch.float32).min
        masks = {
            name: torch.zeros_like(mask, dtype=torch.float32).masked_fill_(~mask, lowest)
            for name, mask in masks.items()
        }
    return {**found, "attention_mask": masks}


def scored(
    model: Any,
    windows: Iterable[Any],
    *,
    batch_size: int,
    device: torch.device,
    stop: Callable[[], bool] = lambda: False,
    ranks: Ranks = Ranks(),  # noqa: B008  (frozen)
    done: Callable[[list[Any]], None] = lambda group: None,
) -> Iterator[tuple[list[Any], Tensor, Tensor]]:
    """Score windows (`windows.Window`, or what a dataset's `validation` yields), the model being in the mode it is to
    be scored in.

    A forward pass of a sharded model is an exchange between processes, so each runs as many: one that has no window
    left runs its first of the group again, and does not count it. Which windows make a batch does not depend on the
    number of processes.

    Args:
        model: any causal LM of transformers.
        windows: of any lengths; rows of a batch are filled up on the right, and attention does not see what is there.
        batch_size: windows per forward pass.
        device: where the model is.
        stop: asked before each batch; must say the same in all processes.
        ranks: the processes that share the windows.
        done: called with the windows that all processes have scored together.

    Yields:
        For each batch of this process: its windows, their losses `[B, T]` in nats, 0 where a target does not count
        (float64, but fp32 on MPS), and `[B, T]` bool, True where it counts.

    Raises:
        Interrupted: `stop()` was true.
    """
    for group in _batched(windows, batch_size * ranks.size):
        if stop():
            raise Interrupted
        own = group[ranks.rank * batch_size : (ranks.rank + 1) * batch_size]
        batch = own or group[:1]
        tokens_BT1 = torch.from_numpy(padded([window.tokens for window in batch], 0)).to(device)
        mask_BT = torch.from_numpy(padded([window.mask for window in batch], False)).to(device)
        lengths = [len(window.tokens) - 1 for window in batch]
        positions_BT = attention_mask_BT = None
        if getattr(batch[0], "positions", None) is not None:
            positions_BT = torch.from_numpy(np.stack([window.positions for window in batch])).to(device)
        elif min(lengths) < max(lengths):
            real = np.arange(max(lengths)) < np.array(lengths)[:, None]
            attention_mask_BT = torch.from_numpy(real.astype(np.int64)).to(device)
        losses_BT = token_nll(model, tokens_BT1, positions_BT, attention_mask_BT=attention_mask_BT)
        losses_BT = losses_BT.masked_fill(~mask_BT, 0.0)
        if own:
            # MPS has no float64: sum there in what it has.
            yield own, losses_BT if losses_BT.device.type == "mps" else losses_BT.double(), mask_BT
        done(group)


def _score(
    model: Any, windows: Iterable[Any], batch_size: int, device: torch.device, stop: Callable[[], bool], ranks: Ranks
) -> tuple[float, int]:
    """Summed loss and number of the tokens of all windows."""
    nll, count = 0.0, 0
    for _, losses_BT, mask_BT in scored(model, windows, batch_size=batch_size, device=device, stop=stop, ranks=ranks):
        nll += float(losses_BT.sum())
        count += int(mask_BT.sum())
    total_nll, total_count = ranks.sums(nll, count)
    return total_nll, round(total_count)


def _batched(windows: Iterable[Any], size: int) -> Iterator[list[Any]]:
    left = iter(windows)
    while batch := list(islice(left, size)):
        yield batch


def check_numbers(**numbers: int | None) -> None:
    """UserError that names every number below 1; None is "not given"."""
    wrong = {name: value for name, value in numbers.items() if value is not None and value < 1}
    problems = [f"{name} is {value}, expected 1 or more" for name, value in wrong.items()]
    if problems:
        raise UserError("; ".join(problems))


def check_fit(model: Any, dataset: Any, sequence_length: int) -> None:
    """UserError unless the model has the vocabulary of `dataset` and positions for the windows."""
    vocab_size = text_config(model).vocab_size
    if vocab_size < dataset.vocab_size:
        raise UserError(
            f"the model knows {vocab_size} tokens, the corpus has {dataset.vocab_size}: it was prepared with another "
            "tokenizer; prepare one with --tokenizer MODEL"
        )
    check_length(model, sequence_length)


def check_length(model: Any, sequence_length: int) -> None:
    """UserError unless the model has positions for windows of so many tokens."""
    positions = getattr(text_config(model), "max_position_embeddings", None)
    if positions is not None and sequence_length > positions:
        raise UserError(f"sequence length {sequence_length} is over the model's {positions} positions; shorten it")


def text_config(model: Any) -> Any:
    """The part of a model's config that is about text."""
    return model.config.get_text_config(decoder=True)


def default_length(model: Any) -> int:
    """Tokens per window where nobody says: the model's positions, at most 2,048."""
    return min(getattr(text_config(model), "max_position_embeddings", None) or 2048, 2048)
