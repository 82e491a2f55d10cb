"""Between `mini` and the paper: a tenth of its tokens, on one GPU."""

from __future__ import annotations

from resformer.recipes.paper import paper
from resformer.train.config import Config
from resformer.train.configure import edit


def small() -> Config:
    """The 82M model on 2.1 billion tokens: 4,000 steps of 256 x 2,048, two hours of an A100 at 40 % of its peak."""
    return edit(
        paper("82m"),
        {
            "train.steps": 4000,
            "train.batch_size": 256,
            "train.seed": 0,
            "train.validate_every": 200,
            "optim.warmup_steps": 200,
        },
    )
