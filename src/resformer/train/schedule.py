"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math


def lr_at(
    step: int, *, steps: int, lr: float, start_lr: float = 0.0, warmup_steps: int = 0, min_lr_ratio: float = 0.1
) -> float:
    """Learning rate of optimizer step `step`, counted from 1: linear warm-up, then a cosine to `min_lr_ratio * lr`.

    The warm-up goes from `start_lr` at step 0 to `lr` at step `warmup_steps`; the cosine ends at step `steps`.
    Source: the training code of arXiv 2410.17897, whose steps count from 0; ours of step n is theirs of t = n.
    """
    if step <= warmup_steps:
        return start_lr + (lr - start_lr) * step / warmup_steps
    lowest = min_lr_ratio * lr
    done = min(1.0, (step - warmup_steps) / (steps - warmup_steps))
    return lowest + (lr - lowest) * 0.5 * (1.0 + math.cos(math.pi * done))
