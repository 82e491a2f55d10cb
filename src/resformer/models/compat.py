"""The only file that knows which version of transformers is installed. Tried with 5.19 to 5.24."""

from __future__ import annotations

import inspect

from transformers import __version__ as transformers_version
from transformers.masking_utils import create_causal_mask

# transformers 5.24 renamed the cache argument everywhere: forward(), generate(), masks and output classes.
CACHE = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"

__all__ = ["CACHE", "create_causal_mask", "transformers_version"]
