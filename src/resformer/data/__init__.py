"""Text -> documents -> tokens -> shards -> batch(step). Knows nothing of models and never imports torch.

prepare(["embedded"], "runs/data", vocab_size=4096)
dataset = open_dataset("runs/data")
batch = dataset.sampler(sequence_length=256, batch_size=16, seed=0).batch(step=1)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from resformer.data.build import prepare
    from resformer.data.dataset import Dataset, ValidationWindow, open_dataset
    from resformer.data.inspection import inspect
    from resformer.data.sampler import Batch, Sampler

__all__ = ["Batch", "Dataset", "Sampler", "ValidationWindow", "inspect", "open_dataset", "prepare"]

# Lazy, so that `resformer --help` pays for neither numpy nor tokenizers.
_HOME = {
    "Batch": "sampler",
    "Dataset": "dataset",
    "Sampler": "sampler",
    "ValidationWindow": "dataset",
    "inspect": "inspection",
    "open_dataset": "dataset",
    "prepare": "build",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
