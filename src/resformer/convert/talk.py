"""What a conversion says, and what transformers need not say meanwhile."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Say = Callable[[str], None]


def note(text: str) -> None:
    """A line to standard error."""
    print(f"note: {text}", file=sys.stderr)


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' bar for every file and its report on missing weights, which are looked at here."""
    from transformers.utils import logging

    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()
