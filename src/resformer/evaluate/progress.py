"""Rows of a batch while they are made: their text as it comes, when they end and why, and when each token came."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from transformers import StoppingCriteria

Finish = Literal["stop", "end", "length"]
"""Why a text ended: a stop text came, the end-of-text token came, or there was no room for more tokens."""

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
CONTEXT_TOKENS = 4


class Sink(Protocol):
    """Where text goes while it is made: `sys.stdout`, an open file, `io.StringIO`."""

    def write(self, text: str, /) -> Any: ...

    def flush(self) -> Any: ...


class Row:
    """One continuation.

    Text grows by what a token adds to the text of the few tokens before it (the prompt's last ones at first), since a
    token alone may be half a character, or lose the space it begins with. Special tokens are no text.

    Attributes:
        tokens: new ids, the end-of-text id included.
        text: what they say so far, without a stop text and without what follows it.
        finish: why the row ended, None while it goes on.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt_ids: Sequence[int],
        *,
        end_ids: frozenset[int],
        stop: Sequence[str],
        max_new_tokens: int,
        sink: Sink | None = None,
    ) -> None:
        self.tokenizer, self.end_ids, self.stop, self.sink = tokenizer, end_ids, tuple(stop), sink
        self.max_new_tokens = max_new_tokens
        self.tokens: list[int] = []
        self.text = ""
        self.finish: Finish | None = None
        self._ids = list(prompt_ids[-CONTEXT_TOKENS:])
        self._start, self._read, self._end = 0, len(self._ids), len(self._ids)
        self._known = self._decode()
        self._printed = 0

    def add(self, token: int) -> bool:
        """Take the row's next token and say whether the row is at its end; a row that is takes nothing more."""
        if self.finish is not None:
            return True
        self.tokens.append(token)
        if token in self.end_ids:
            self.finish = "end"
        else:
            self._ids.append(token)
            if self.stop or self.sink is not None:
                self._read_text(len(self._ids))
        if self.finish is None and len(self.tokens) >= self.max_new_tokens:
            self.finish = "length"
        self._print(final=False)
        return self.finish is not None

    def close(self) -> None:
        """Bring the text up to the last token and print what was held back."""
        for end in range(self._end + 1, len(self._ids) + 1):  # as it would have been read while it came
            self._read_text(end)
        if self._read < self._end and self.finish != "stop":
            self._read_text(self._end, final=True)
        self._print(final=True)

    def _decode(self) -> str:
        window = self._ids[self._start : self._end]
        return self.tokenizer.decode(window, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _read_text(self, end: int, *, final: bool = False) -> None:
        """Add what the tokens up to `end` say that are not read yet, unless they end inside a character."""
        self._end = end
        now = self._decode()
        if now.endswith(INCOMPLETE) and not final:
            return
        before = len(self.text)
        self.text += now[len(self._known) :]
        self._start, self._read = self._read, end
        self._known = self._decode()
        # A stop text may have begun in what was there.
        found = [self.text.find(stop, max(0, before - len(stop) + 1)) for stop in self.stop]
        ends = [position for position in found if position >= 0]
        if ends:
            self.text, self.finish = self.text[: min(ends)], "stop"

    def _print(self, *, final: bool) -> None:
        if self.sink is None:
            return
        held = 0 if final or self.finish == "stop" else held_back(self.text, self.stop)
        text = self.text[self._printed : len(self.text) - held]
        if text:
            self.sink.write(text)
            self.sink.flush()
            self._printed += len(text)


def held_back(text: str, stop: Sequence[str]) -> int:
    """How many of the last characters of `text` may be the beginning of a stop text."""
    lengths = (n for one in stop for n in range(min(len(one) - 1, len(text)), 0, -1) if text.endswith(one[:n]))
    return max(lengths, default=0)


class Progress(StoppingCriteria):
    """Shows every new token to its row, notes the time, and stops the rows that are at their end."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = list(rows)
        self.times_seconds: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        tokens = input_ids[:, -1].tolist()  # waits for the device, so the clock is right there too
        self.times_seconds.append(time.perf_counter())
        ended = [row.add(token) for row, token in zip(self.rows, tokens, strict=True)]
        return torch.tensor(ended, device=input_ids.device)

    def close(self) -> None:
        """Finish all rows' texts."""
        for row in self.rows:
            row.close()
