"""Loss, perplexity and bits per byte on raw text: each document alone, with the model's own tokenizer.

Bytes and words are those of the text itself, never of decoded tokens.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from resformer.data.documents import Document
from resformer.errors import UserError
from resformer.evaluate.encoding import Start, TextEncoder, start_of_documents
from resformer.evaluate.loss import check_length, check_numbers, default_length, evaluating, scored, text_config
from resformer.evaluate.summary import Tally, count_words, summarise
from resformer.evaluate.windows import Window, by_length, check_stride, slide
from resformer.parallel.ranks import Ranks

_READ_DOCUMENTS, _READ_CHARACTERS = 64, 1 << 17  # so much text is encoded at a time


@dataclass(frozen=True, kw_only=True)
class TextScore:
    """What a model says of one text.

    Attributes:
        token_ids: of the text, without what was put before it, int64 `[n]`.
        log_probabilities: of each token given those before it, nats, float64 `[n]`; NaN where it was not scored.
        words, bytes: of the text itself (`summary.count_words`; UTF-8).
    """

    token_ids: np.ndarray
    log_probabilities: np.ndarray
    words: int
    bytes: int

    @property
    def log_probability(self) -> float:
        """Of the scored tokens together, nats."""
        return float(np.nansum(self.log_probabilities))

    @property
    def tokens(self) -> int:
        """How many tokens were scored."""
        return int(np.isfinite(self.log_probabilities).sum())

    @property
    def perplexity(self) -> float:
        """Per scored token; NaN where there is none."""
        return math.exp(-self.log_probability / self.tokens) if self.tokens else math.nan


def score_texts(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    sequence_length: int | None = None,
    stride: int | None = None,
    batch_size: int = 8,
    bos: str = "auto",
    device: torch.device | str | None = None,
) -> list[TextScore]:
    """The log-probability of every token of every text; each text stands alone.

    The result does not depend on `batch_size`, up to the rounding inside the model (below 1e-4 a text in fp32).

    Args:
        model: any causal LM of transformers, on its device.
        tokenizer: the model's, of transformers.
        texts: any strings; one without tokens has no probabilities.
        sequence_length: tokens per window; none = the model's positions, at most 2,048.
        stride: tokens that a window adds to the one before, where a text is longer than one; none = `sequence_length`.
        batch_size: windows per forward pass.
        bos: what stands before a text: see `encoding.start_of_documents`.
        device: where the model is; none = ask it.

    Raises:
        UserError: a number out of range, a length over the model's positions, a token that the model does not know, or
            `bos="model"` where there is no such token.
    """
    length = default_length(model) if sequence_length is None else sequence_length
    start = start_of_documents(model, tokenizer, bos)
    _check(model, length, stride, batch_size, start)
    encoder = TextEncoder(tokenizer, vocab_size=text_config(model).vocab_size)
    ids = encoder.encode(texts)
    found = [np.full(len(one), np.nan) for one in ids]
    windows = by_length(
        (window for i, one in enumerate(ids) for window in _windows(one, start, length, stride, item=i)), batch_size
    )
    device = torch.device(device) if device is not None else next(model.parameters()).device
    with evaluating(model):
        for batch, losses_BT, mask_BT in scored(model, windows, batch_size=batch_size, device=device):
            losses, mask = losses_BT.cpu().numpy(), mask_BT.cpu().numpy()
            for row, window in enumerate(batch):
                targets = np.flatnonzero(mask[row])
                found[window.item][targets + window.start + 1 - len(start.ids)] = -losses[row, targets]
    return [
        TextScore(token_ids=one, log_probabilities=logs, words=count_words(text), bytes=len(text.encode()))
        for text, one, logs in zip(texts, ids, found, strict=True)
    ]


def evaluate_texts(
    model: Any,
    tokenizer: Any,
    documents: Iterable[tuple[Document, float]],
    *,
    sequence_length: int,
    stride: int | None = None,
    batch_size: int = 16,
    max_tokens: int | None = None,
    bos: str | Start = "auto",
    device: torch.device | str | None = None,
    ranks: Ranks = Ranks(),  # noqa: B008  (frozen)
    advance: Callable[[float, int], None] = lambda work, tokens: None,
) -> dict[str, Any]:
    """Score documents one by one, and sum up by domain.

    Args:
        model: any causal LM of transformers, on its device.
        tokenizer: the model's, of transformers.
        documents: with text, each with its share of the work for `advance` (`text_source.documents` gives both); the
            same ones in the same order in all processes.
        sequence_length: tokens per window.
        stride: as in `score_texts`.
        batch_size: windows per forward pass.
        max_tokens: a domain takes no more documents once it has so many tokens to score; none = all.
        bos: what stands before a document: see `encoding.start_of_documents`.
        device: where the model is; none = ask it.
        ranks: the processes that share the work, each with the same model; all of them get the result.
        advance: told of the work done and the tokens scored by all processes since the last call.

    Returns:
        What `summary.summarise` says, `"bos"` (`Start.record()`), `"domains_not_scored"` (domains without one token
        that has a context) and `"text_fingerprint"`: sha256 over the domains and texts in their order.

    Raises:
        UserError: as `score_texts`, or nothing was scored.
    """
    start = bos if isinstance(bos, Start) else start_of_documents(model, tokenizer, bos)
    _check(model, sequence_length, stride, batch_size, start, max_tokens=max_tokens)
    device = torch.device(device) if device is not None else next(model.parameters()).device
    reader = _Reader(
        encoder=TextEncoder(tokenizer, vocab_size=text_config(model).vocab_size),
        start=start,
        length=sequence_length,
        stride=stride,
        max_tokens=max_tokens,
    )
    sums: dict[str, float] = {}
    with evaluating(model):
        windows = by_length(reader.windows(documents), batch_size)
        for batch, losses_BT, _ in scored(
            model,
            windows,
            batch_size=batch_size,
            device=device,
            ranks=ranks,
            done=lambda group: advance(
                sum(window.work for window in group), sum(int(window.mask.sum()) for window in group)
            ),
        ):
            for window, nll in zip(batch, losses_BT.sum(dim=1).tolist(), strict=True):
                domain = reader.names[window.item]
                sums[domain] = sums.get(domain, 0.0) + nll
    # All processes have read all documents, so the counts are the same; the sums are of what each has scored.
    totals = ranks.sums(*(sums.get(domain, 0.0) for domain in reader.domains))
    for tally, nll in zip(reader.domains.values(), totals, strict=True):
        tally.nll = nll
    kept = {name: tally for name, tally in reader.domains.items() if tally.tokens}
    if not kept:
        raise UserError(
            "no token to score: the text is empty, or all its documents are of one token that has no context "
            f"(--bos {start.policy})"
        )
    return {
        **summarise(kept),
        "bos": start.record(),
        "domains_not_scored": [name for name in reader.domains if name not in kept],
        "text_fingerprint": reader.digest.hexdigest(),
    }


class _Reader:
    """Documents -> windows; counts what it reads."""

    def __init__(
        self, *, encoder: TextEncoder, start: Start, length: int, stride: int | None, max_tokens: int | None
    ) -> None:
        self.encoder, self.start, self.length, self.stride = encoder, start, length, stride
        self.max_tokens = max_tokens
        self.domains: dict[str, Tally] = {}
        self.names: list[str] = []  # of the domains, by number
        self.digest = hashlib.sha256()

    def windows(self, documents: Iterable[tuple[Document, float]]) -> Iterator[Window]:
        """The windows of all documents, `item` being the number of the domain."""
        waiting: list[tuple[Document, float]] = []
        size = 0
        for document, work in documents:
            if document.domain not in self.domains:
                self.domains[document.domain] = Tally()
                self.names.append(document.domain)
            waiting.append((document, work))
            size += len(document.text)
            if len(waiting) >= _READ_DOCUMENTS or size >= _READ_CHARACTERS:
                yield from self._encoded(waiting)
                waiting, size = [], 0
        yield from self._encoded(waiting)

    def _encoded(self, some: Sequence[tuple[Document, float]]) -> Iterator[Window]:
        open_ones = [pair for pair in some if not self._full(self.domains[pair[0].domain])]
        encoded = self.encoder.encode([document.text for document, _ in open_ones])
        for (document, work), ids in zip(open_ones, encoded, strict=True):
            tally = self.domains[document.domain]
            if self._full(tally):
                continue
            data = document.text.encode()
            self.digest.update(f"{document.domain} {len(data)}\n".encode() + data)
            count = max(0, len(ids) - (not self.start.ids))
            tally.add(
                Tally(
                    tokens=count,
                    tokens_not_scored=len(ids) - count,
                    words=count_words(document.text),
                    bytes=len(data),
                    documents=1,
                )
            )
            item = self.names.index(document.domain)
            beyond = len(self.start.ids) + len(ids) - 1 - self.length
            share = work / (1 + max(0, math.ceil(beyond / (self.stride or self.length))))
            for window in _windows(ids, self.start, self.length, self.stride):  # not a list: there may be many
                yield replace(window, item=item, work=share)

    def _full(self, tally: Tally) -> bool:
        return self.max_tokens is not None and tally.tokens >= self.max_tokens


def _windows(ids: np.ndarray, start: Start, length: int, stride: int | None, item: int = 0) -> Iterator[Window]:
    """Windows of one document."""
    sequence = np.concatenate([np.array(start.ids, dtype=np.int64), ids])
    return slide([sequence], first=max(1, len(start.ids)), length=length, stride=stride, item=item)


def _check(
    model: Any, length: int, stride: int | None, batch_size: int, start: Start, *, max_tokens: int | None = None
) -> None:
    check_numbers(sequence_length=length, batch_size=batch_size, max_tokens=max_tokens)
    check_length(model, length)
    check_stride(stride, length)
    if len(start.ids) > length:
        raise UserError(f"sequence length {length} has no room for the {len(start.ids)} tokens before a text")
    unknown = [one for one in start.ids if one >= text_config(model).vocab_size]
    if unknown:
        raise UserError(f"token {unknown[0]}, which stands before a text, is not among the model's; use --bos none")
