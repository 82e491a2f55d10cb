"""Seconds: for tests and for trying the commands out. It learns next to nothing."""

from __future__ import annotations

from resformer.recipes.quick import quick
from resformer.train.config import Config
from resformer.train.configure import edit


def tiny() -> Config:
    """2 layers x 32, 20 steps of 8 x 32 tokens."""
    return edit(
        quick(),
        {
            "model.hidden_size": 32,
            "model.intermediate_size": 64,
            "model.num_hidden_layers": 2,
            "model.num_attention_heads": 2,
            "data.sequence_length": 32,
            "train.steps": 20,
            "train.batch_size": 8,
            "train.validate_every": 10,
            "train.validation_tokens": 512,
            "train.checkpoint_every": 5,
            "optim.warmup_steps": 5,
        },
    )
