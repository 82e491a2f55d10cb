"""Minutes on a laptop CPU: the smallest setting in which value residual shows on real text."""

from __future__ import annotations

from resformer.train.config import Config, DataConfig, ModelConfig, OptimConfig, TrainConfig


def quick() -> Config:
    """8 layers x 128, 2.7M parameters at a vocabulary of 4,096, 1.0M tokens in 250 steps: about four minutes of a core.

    The learning rate is the trial's of METHOD section 12: high for the paper's sizes, right for this one.
    """
    return Config(
        model=ModelConfig(hidden_size=128, intermediate_size=352, num_hidden_layers=8, num_attention_heads=4),
        data=DataConfig(sequence_length=256),
        train=TrainConfig(
            steps=250, batch_size=16, validate_every=50, validation_tokens=6144, checkpoint_every=50, threads=1
        ),
        optim=OptimConfig(lr=2e-3, warmup_steps=100, weight_decay=0.1),
    )
