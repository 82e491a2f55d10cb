"""Training a converted model on: `resformer convert` made it, and it has to come back to what it was made from."""

from __future__ import annotations

from resformer.train.config import Config, DataConfig, ModelConfig, OptimConfig, TrainConfig


def uptrain() -> Config:
    """1,000 steps of 8 x 512 tokens from `--init-from MODEL`, which says what the model is.

    Weights that are trained already want a learning rate well under that of pretraining; scalars and gates that start
    at zero would hardly leave it then, so theirs is ten times as high. The rate stays after a short warm-up and falls
    at the end (wsd), so that a run can be made longer. `uptrain.source=MODEL` names what the model was made from and
    has the run say how much of the loss came back; `uptrain.kl=0.5` distils from it.
    """
    return Config(
        model=ModelConfig(from_init=True),
        data=DataConfig(sequence_length=512),
        train=TrainConfig(
            steps=1000,
            batch_size=8,
            micro_batch_size=1,
            validate_every=100,
            validation_tokens=8192,
            checkpoint_every=100,
        ),
        optim=OptimConfig(
            lr=5e-5, warmup_steps=20, schedule="wsd", min_lr_ratio=0.1, weight_decay=0.01, lambda_lr_scale=10.0
        ),
    )
