"""The only file that knows which version of transformers is installed. Tried with 5.19 to 5.24."""

from __future__ import annotations

import inspect

from transformers import __version__ as transformers_version
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_utils import PreTrainedModel

# transformers 5.24 renamed the cache argument everywhere: forward(), generate(), masks and output classes.
CACHE = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"


def enable_checkpointing(model: PreTrainedModel, *, use_reentrant: bool = False) -> None:
    """Recompute each block's activations in the backward pass (transformers 5.23 renamed the method)."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": use_reentrant})


__all__ = [
    "CACHE",
    "create_causal_mask",
    "create_sliding_window_causal_mask",
    "enable_checkpointing",
    "transformers_version",
]
