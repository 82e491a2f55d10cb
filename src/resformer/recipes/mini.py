"""The scale at which this project runs the paper's tables itself, on a CPU: one run is about four minutes of a core."""

from __future__ import annotations

from resformer.recipes.quick import quick
from resformer.train.config import Config
from resformer.train.configure import edit


def mini() -> Config:
    """The model of `quick` (8 layers x 128) on twice the tokens: 250 steps of 16 x 256, 1.02M tokens.

    The learning rate is the Transformer's best of 2e-3, 4e-3 and 8e-3 (docs/log.md), so that no variant wins because
    the baseline is badly tuned.
    """
    return edit(
        quick(),
        {
            "train.steps": 250,
            "train.batch_size": 16,
            "train.validate_every": 25,
            "train.checkpoint_every": 50,
            "optim.warmup_steps": 60,
            "optim.lr": 4e-3,
        },
    )
