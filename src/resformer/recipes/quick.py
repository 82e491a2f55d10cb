"""Minutes on a laptop CPU: the smallest setting in which value residual shows on real text."""

from __future__ import annotations

from resformer.train.config import Config, DataConfig, ModelConfig, OptimConfig, TrainConfig


def quick() -> Config:
    """8 layers x 128, 2.7M parameters at a vocabulary of 4,096, 0.49M tokens in 240 steps: four minutes of a core.

    Four such runs, two at a time, with the installation, end within a quarter of an hour also where a core does
    40 GFLOP/s on these small matrices. The learning rate is high for the paper's sizes and right for this one.
    Validations are small and frequent, so that the crossing that "data saved" needs is found on a fine grid; the
    suite scores the whole validation split at the end.
    """
    return Config(
        model=ModelConfig(hidden_size=128, intermediate_size=352, num_hidden_layers=8, num_attention_heads=4),
        data=DataConfig(sequence_length=256),
        train=TrainConfig(
            steps=240, batch_size=8, validate_every=30, validation_tokens=2048, checkpoint_every=60, threads=1
        ),
        optim=OptimConfig(lr=2e-3, warmup_steps=80, weight_decay=0.1),
    )
