"""The paper's runs (arXiv 2410.17897v2, table 4 and the released scripts): Llama blocks in Pythia's shapes, 20 billion
tokens of SlimPajama.

What the sources leave open: the running text says 1,200 steps of warm-up, table 4 and every script say 120, which is
what stands here (`--set optim.warmup_steps=1200` is the text's value). The text says fp16, the scripts bf16. Of the
1.6B model only the size and its 200 billion tokens are known to us; the shape is our choice, that of Pythia-1.4B.
"""

from __future__ import annotations

from functools import partial

from resformer.models.sizes import SIZES
from resformer.train.config import Config, DataConfig, ModelConfig, OptimConfig, TrainConfig

BATCH_TOKENS = 2**21
# Sequence length -> (sequences in a batch of about 2.1M tokens, in one forward pass of the 82M model on 80 GB).
# Larger models: fewer sequences in a forward pass, by what `--dry-run` estimates.
FEWER = {"468m": 2, "1b6": 4}
LENGTHS = {512: (4096, 128), 2048: (1024, 32), 8192: (256, 8), 32_000: (64, 2), 64_000: (32, 1)}


def paper(size: str, *, length: int = 2048, tokens: float = 10_000 * BATCH_TOKENS) -> Config:
    """A model of `sizes.SIZES` trained on `tokens` tokens in sequences of `length`; the vocabulary is the data's."""
    shape = {
        name: value
        for name, value in SIZES[size].items()
        if name not in ("vocab_size", "max_position_embeddings", "num_key_value_heads")
    }
    batch, micro = LENGTHS[length]
    return Config(
        model=ModelConfig(**shape),
        data=DataConfig(sequence_length=length),
        train=TrainConfig(
            steps=round(tokens / BATCH_TOKENS),
            batch_size=batch,
            micro_batch_size=max(1, micro // FEWER.get(size, 1)),
            seed=42,
            dtype="bf16",
            compile=True,
            validate_every=500,
            validation_tokens=2**20,
            checkpoint_every=500,
        ),
        optim=OptimConfig(lr=6e-4, start_lr=1e-7, warmup_steps=120, min_lr_ratio=0.1, weight_decay=0.1, grad_clip=1.0),
    )


paper_2m, paper_82m, paper_180m, paper_468m = (partial(paper, size) for size in ("2m", "82m", "180m", "468m"))
paper_1b6 = partial(paper, "1b6", tokens=200e9)
paper_82m_512, paper_82m_8192, paper_82m_32000, paper_82m_64000 = (
    partial(paper, "82m", length=length) for length in (512, 8192, 32_000, 64_000)
)
