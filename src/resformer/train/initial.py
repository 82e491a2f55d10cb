"""Weights to start from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def load_initial(model: Any, source: str, *, report: Callable[[str], None]) -> None:
    raise NotImplementedError
