"""Evaluation of any causal LM of transformers: loss by domain, perplexity of text, tasks of lm-eval, generation.

Names load what they need when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    "evaluate_shards": "shards",
    "evaluate_texts": "texts",
    "score_texts": "texts",
    "TextScore": "texts",
    "TextSource": "text_source",
    "start_of_documents": "encoding",
    "load_model": "loading",
    "open_tasks": "tasks",
    "run_tasks": "tasks",
    "task_names": "tasks",
}
__all__ = [*_HOMES]

if TYPE_CHECKING:
    from .encoding import start_of_documents as start_of_documents
    from .loading import load_model as load_model
    from .shards import evaluate_shards as evaluate_shards
    from .tasks import open_tasks as open_tasks
    from .tasks import run_tasks as run_tasks
    from .tasks import task_names as task_names
    from .text_source import TextSource as TextSource
    from .texts import TextScore as TextScore
    from .texts import evaluate_texts as evaluate_texts
    from .texts import score_texts as score_texts


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'resformer.evaluate' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
