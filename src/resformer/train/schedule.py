"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["cosine", "linear", "wsd"]


def lr_at(
    step: int,
    *,
    steps: int,
    lr: float,
    start_lr: float = 0.0,
    warmup_steps: int = 0,
    min_lr_ratio: float = 0.1,
    schedule: Schedule = "cosine",
    decay_share: float = 0.2,
) -> float:
    """Learning rate of optimizer step `step`, counted from 1: linear warm-up, then down to `min_lr_ratio * lr`.

    The warm-up goes from `start_lr` at step 0 to `lr` at step `warmup_steps`; the schedule ends at step `steps`.

    | schedule | after the warm-up | source |
    |---|---|---|
    | cosine | half a cosine | the training code of arXiv 2410.17897; its steps count from 0, ours of n is its t = n |
    | linear | a straight line | |
    | wsd | `lr`, and a straight line in the last `decay_share` of all steps | warmup-stable-decay, arXiv 2404.06395 |
    """
    if step <= warmup_steps:
        return start_lr + (lr - start_lr) * step / warmup_steps
    first = warmup_steps if schedule != "wsd" else max(warmup_steps, steps - round(decay_share * steps))
    if step <= first:
        return lr
    lowest, done = min_lr_ratio * lr, min(1.0, (step - first) / (steps - first))
    left = 0.5 * (1.0 + math.cos(math.pi * done)) if schedule == "cosine" else 1.0 - done
    return lowest + (lr - lowest) * left
