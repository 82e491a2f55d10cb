"""The paper's recipes against METHOD's numbers."""

from __future__ import annotations

import pytest

from resformer.models.accounting import account
from resformer.recipes import names, recipe
from resformer.train.build import model_config

PARAMETERS = {"paper_82m": 81_901_056, "paper_180m": 179_874_048, "paper_468m": 467_921_920}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_of_the_paper(name: str) -> None:
    config = recipe(name)
    described = model_config(config, vocab_size=50_277)
    mixing = described.num_hidden_layers - 1
    assert account(described).parameters == PARAMETERS[name] + 2 * mixing  # two lambdas a layer


@pytest.mark.parametrize("name", [name for name in names() if name.startswith("paper")])
def test_every_batch_has_two_million_tokens(name: str) -> None:
    config = recipe(name)
    tokens = config.train.batch_size * config.data.sequence_length
    assert abs(tokens / 2**21 - 1) < 0.025  # 64 x 32,000 is 2.048M
    assert config.train.batch_size % config.micro_batch_size == 0
    assert config.max_position_embeddings == config.data.sequence_length
    assert (config.optim.lr, config.optim.warmup_steps, config.train.seed) == (6e-4, 120, 42)
    total = 200e9 if name == "paper_1b6" else 20.97e9
    assert config.train.steps * 2**21 == pytest.approx(total, rel=1e-3)
