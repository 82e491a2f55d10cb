"""Hugging Face's Trainer on our models: with our parameter groups and our order of the data it is our loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, SequentialSampler

from resformer import optimizer_groups
from resformer.data import open_dataset
from resformer.train import build
from resformer.train.config import Config
from resformer.train.configure import edit
from resformer.train.loop import train
from resformer.train.metrics import read_rows
from resformer.train.schedule import lr_at

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="Hugging Face's Trainer needs accelerate")

VARIANTS = ("learnable_plus", "svformer", "denseformer")


class Ordered(Dataset):
    """The samples of a run in the run's own order, as Trainer wants them."""

    def __init__(self, config: Config) -> None:
        dataset = open_dataset(str(config.data.dir), verify="none")
        self.sampler = dataset.sampler(
            sequence_length=config.data.sequence_length, batch_size=config.train.batch_size, seed=config.train.seed
        )
        self.count = config.train.steps * config.train.batch_size

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.from_numpy(self.sampler.samples(np.array([index])).tokens[0])
        return {"input_ids": tokens[:-1], "labels": tokens[:-1], "shift_labels": tokens[1:]}


class InOrder(transformers.Trainer):
    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


@pytest.mark.parametrize("variant", VARIANTS)
def test_trainer_is_our_loop_for_twenty_steps(config: Config, tmp_path: Path, variant: str) -> None:
    config = edit(config, {"model.variant": variant, "model.num_hidden_layers": 3, "train.micro_batch_size": None})
    train(config, tmp_path / "ours", command=["test"])
    rows = [row for row in read_rows(tmp_path / "ours" / "metrics.jsonl") if row["split"] == "train"]

    dataset = open_dataset(str(config.data.dir), verify="none")
    described = build.model_config(config, vocab_size=dataset.vocab_size)
    model = build.build_model(config, described, torch.device("cpu"))
    o = config.optim
    groups = optimizer_groups(model, lr=o.lr, weight_decay=o.weight_decay)
    optimizer = torch.optim.AdamW(groups, betas=(o.beta1, o.beta2), eps=o.eps)

    def rate(steps_done: int) -> float:
        return (
            lr_at(steps_done + 1, steps=config.train.steps, lr=o.lr, start_lr=o.start_lr,
                  warmup_steps=o.warmup_steps, min_lr_ratio=o.min_lr_ratio) / o.lr
        )  # fmt: skip

    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "theirs"),
        max_steps=config.train.steps,
        per_device_train_batch_size=config.train.batch_size,
        max_grad_norm=o.grad_clip,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        remove_unused_columns=False,
        use_cpu=True,
        disable_tqdm=True,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    trainer = InOrder(model=model, args=arguments, train_dataset=Ordered(config), optimizers=(optimizer, schedule))
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert len(losses) == len(rows) == 20
    assert losses == pytest.approx([row["loss"] for row in rows], abs=1e-5)
    assert losses[-1] < losses[0] - 0.05  # and something was learned


def test_trainers_own_groups_would_decay_lambdas(config: Config, tmp_path: Path) -> None:
    """Why the documentation says to bring one's own optimizer."""
    described = build.model_config(edit(config, {"model.variant": "learnable"}), vocab_size=300)
    model = build.build_model(config, described, torch.device("cpu"))
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), weight_decay=0.1, report_to=[], use_cpu=True, disable_tqdm=True
    )
    own = transformers.Trainer(model=model, args=arguments).create_optimizer()
    lambdas = [p for name, p in model.named_parameters() if "value_residual" in name]
    decayed = {id(p) for group in own.param_groups if group["weight_decay"] > 0 for p in group["params"]}
    assert lambdas and {id(p) for p in lambdas} <= decayed
    ours = {id(p): g["weight_decay"] for g in optimizer_groups(model, weight_decay=0.1) for p in g["params"]}
    assert {ours[id(p)] for p in lambdas} == {0.0}
