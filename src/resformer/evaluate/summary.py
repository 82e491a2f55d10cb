"""From summed losses to the numbers that are reported: loss, perplexities, bits per byte, by domain and overall."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_SPACE = re.compile(r"\s+")
KINDS = ("loss", "perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte")


@dataclass(kw_only=True)
class Tally:
    """What was summed up over some text.

    Attributes:
        nll: negative log-likelihood of the scored tokens, nats.
        tokens: scored tokens.
        tokens_not_scored: tokens that had no context.
        words: see `count_words`; None where they are not known.
        bytes: UTF-8 bytes of the text itself.
        documents: how many the text is; None where that is not known.
    """

    nll: float = 0.0
    tokens: int = 0
    tokens_not_scored: int = 0
    words: int | None = 0
    bytes: int = 0
    documents: int | None = 0

    def add(self, other: Tally) -> None:
        """Take in what was summed up over other text."""
        self.nll += other.nll
        self.tokens += other.tokens
        self.tokens_not_scored += other.tokens_not_scored
        self.bytes += other.bytes
        self.words = None if self.words is None or other.words is None else self.words + other.words
        known = self.documents is not None and other.documents is not None
        self.documents = self.documents + other.documents if known else None  # type: ignore[operator]

    def row(self) -> dict[str, Any]:
        """JSON-able: the loss in nats per token, perplexity per token, word and byte, bits per byte, and the counts."""
        loss = self.nll / self.tokens
        nats_per_byte = self.nll / self.bytes
        return {
            "loss": loss,
            "bits_per_byte": self.nll / math.log(2) / self.bytes,
            "tokens": self.tokens,
            "perplexity": exponential(loss),
            "word_perplexity": exponential(self.nll / self.words) if self.words else None,
            "byte_perplexity": exponential(nats_per_byte),
            "words": self.words,
            "bytes": self.bytes,
            "documents": self.documents,
            "tokens_not_scored": self.tokens_not_scored,
        }


def summarise(domains: Mapping[str, Tally]) -> dict[str, Any]:
    """The result of a measurement.

    Returns:
        `{"domains": {name: Tally.row()}, "loss", "bits_per_byte", "loss_token_weighted", "overall"}`. `loss` and
        `bits_per_byte` are unweighted means over the domains, as in the paper's tables. `overall` holds
        `mean_of_domains` (the same means, and the perplexities that belong to the mean losses per token, word and
        byte) and `token_weighted` (all text as one).
    """
    rows = {name: tally.row() for name, tally in domains.items()}
    whole = Tally()
    for tally in domains.values():
        whole.add(tally)
    weighted = whole.row()
    loss = sum(row["loss"] for row in rows.values()) / len(rows)
    bits = sum(row["bits_per_byte"] for row in rows.values()) / len(rows)
    words = [tally.nll / tally.words if tally.words else None for tally in domains.values()]
    per_word = None if None in words else sum(w for w in words if w is not None) / len(words)
    means = {
        "loss": loss,
        "perplexity": exponential(loss),
        "word_perplexity": None if per_word is None else exponential(per_word),
        "byte_perplexity": exponential(bits * math.log(2)),
        "bits_per_byte": bits,
    }
    return {
        "domains": rows,
        "loss": loss,
        "bits_per_byte": bits,
        "loss_token_weighted": weighted["loss"],
        "overall": {"mean_of_domains": means, "token_weighted": weighted},
    }


def count_words(text: str) -> int:
    """Parts between white space, as lm-eval's wikitext task counts them: white space at an end of the text makes one
    more, which is empty.
    """
    return len(_SPACE.split(text))


def exponential(value: float) -> float | None:
    """e to the power of `value`; None where no float holds it (an untrained model on text without spaces)."""
    try:
        return math.exp(value)
    except OverflowError:
        return None
