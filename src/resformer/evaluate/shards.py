"""Loss, perplexity and bits per byte on the validation text of a prepared corpus."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from resformer.errors import UserError
from resformer.evaluate.loss import check_fit, check_numbers, evaluating, scored
from resformer.evaluate.summary import Tally, count_words, summarise
from resformer.evaluate.windows import Window, by_length, check_stride, slide
from resformer.parallel.ranks import Ranks

_CUT_CHARACTER = 3  # bytes by which a text that is cut in a character may differ


def evaluate_shards(
    model: Any,
    dataset: Any,
    *,
    sequence_length: int,
    batch_size: int = 16,
    stride: int | None = None,
    max_tokens: int | None = None,
    document_mask: bool = False,
    device: torch.device | str | None = None,
    ranks: Ranks = Ranks(),  # noqa: B008  (frozen)
    advance: Callable[[int], None] = lambda tokens: None,
) -> dict[str, Any]:
    """Score the validation split of every domain; without `stride` the losses are those of `loss.evaluate`.

    Args:
        model: any causal LM of transformers, on its device.
        dataset: what `resformer.data.open_dataset` returns.
        sequence_length: tokens per window.
        batch_size: windows per forward pass; changes nothing but the rounding inside the model.
        stride: tokens that a window adds to the one before, each scored with at least `sequence_length - stride`
            tokens of context; none = windows that do not overlap.
        max_tokens: tokens to score per domain, of documents in the order of their hash; none = all.
        document_mask: keep documents apart: the first token of each has no context and is not scored. With a `stride`
            each document has windows of its own.
        device: where the model is; none = ask it.
        ranks: the processes that share the work, each with the same model; all of them get the result.
        advance: told how many tokens all processes have scored since the last call.

    Returns:
        What `summary.summarise` says. Bytes are those of the raw text, as the corpus recorded them. Words are counted
        in the decoded documents of domains where these have exactly the raw bytes, and are None elsewhere.

    Raises:
        UserError: vocabulary or positions of the model are smaller than the data's, a domain has no validation text, or
            a number is out of range.
    """
    check_numbers(sequence_length=sequence_length, batch_size=batch_size, max_tokens=max_tokens)
    check_stride(stride, sequence_length)
    check_fit(model, dataset, sequence_length)
    device = torch.device(device) if device is not None else next(model.parameters()).device
    domains: dict[str, Tally] = {}
    with evaluating(model):
        for domain in dataset.domains:
            windows = _windows(dataset, domain, sequence_length, stride, max_tokens, document_mask, batch_size)
            tally = Tally()
            for _, losses_BT, mask_BT in scored(
                model,
                windows,
                batch_size=batch_size,
                device=device,
                ranks=ranks,
                done=lambda group: advance(sum(int(window.mask.sum()) for window in group)),
            ):
                tally.nll += float(losses_BT.sum())
                tally.tokens += int(mask_BT.sum())
            nll, tokens = ranks.sums(tally.nll, tally.tokens)
            tally.nll, tally.tokens = nll, round(tokens)
            if tally.tokens == 0:
                raise UserError(
                    f"domain {domain!r} has no validation text; prepare the corpus with a larger --validation-share"
                )
            how = {"sequence_length": sequence_length, "max_tokens": max_tokens}
            tally.bytes = dataset.validation_bytes(domain, **how, **({"document_mask": True} if document_mask else {}))
            covered, raw = dataset.covered(domain, max_tokens=max_tokens)
            tally.tokens_not_scored = covered - tally.tokens
            count = partial(_documents_and_words, dataset, domain, sequence_length, max_tokens, raw)
            tally.documents, tally.words = ranks.on_first(count)
            domains[domain] = tally
    return summarise(domains)


def _windows(
    dataset: Any,
    domain: str,
    length: int,
    stride: int | None,
    max_tokens: int | None,
    document_mask: bool,
    batch_size: int,
) -> Iterator[Any]:
    if stride is None:
        apart = {"document_mask": True} if document_mask else {}
        return dataset.validation(domain, sequence_length=length, max_tokens=max_tokens, **apart)
    if document_mask:
        return by_length(_windows_of_documents(dataset, domain, length, stride, max_tokens), batch_size)
    # The end-of-text id before the very first token is its context, as it is for every later document.
    end = np.array([dataset.eos_token_id], dtype=np.int64)
    pieces = (piece for pieces in ([end], _targets(dataset, domain, length, max_tokens)) for piece in pieces)
    return slide(pieces, first=1, length=length, stride=stride)


def _windows_of_documents(
    dataset: Any, domain: str, length: int, stride: int, max_tokens: int | None
) -> Iterator[Window]:
    for number, ids in enumerate(_documents(dataset, domain, length, max_tokens)):
        yield from slide([ids], first=1, length=length, stride=stride, item=number)


def _targets(dataset: Any, domain: str, length: int, max_tokens: int | None) -> Iterator[np.ndarray]:
    """The covered tokens of a domain in order, in pieces."""
    for window in dataset.validation(domain, sequence_length=length, max_tokens=max_tokens):
        yield window.tokens[1:][window.mask]


def _documents(dataset: Any, domain: str, length: int, max_tokens: int | None) -> Iterator[np.ndarray]:
    """The covered documents, each with its end-of-text id (the last one lacks it if it is cut)."""
    parts: list[np.ndarray] = []
    for piece in _targets(dataset, domain, length, max_tokens):
        start = 0
        for end in (np.flatnonzero(piece == dataset.eos_token_id) + 1).tolist():
            yield np.concatenate([*parts, piece[start:end]])
            parts, start = [], end
        parts.append(piece[start:])
    if sum(map(len, parts)):
        yield np.concatenate(parts)


def _documents_and_words(
    dataset: Any, domain: str, length: int, max_tokens: int | None, raw_bytes: int
) -> tuple[int, int | None]:
    documents = words = size = 0
    cut = False
    for ids in _documents(dataset, domain, length, max_tokens):
        cut = ids[-1] != dataset.eos_token_id
        text = dataset.vocabulary.decode(ids if cut else ids[:-1])
        documents += 1
        words += count_words(text)
        size += len(text.encode())
    exact = abs(size - raw_bytes) <= (_CUT_CHARACTER if cut else 0)
    return documents, words if exact else None
