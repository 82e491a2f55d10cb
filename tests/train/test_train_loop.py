"""One whole run, and the ways in which it must not end well."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from train_helpers import comparable, saved_weights

from resformer.data import open_dataset
from resformer.errors import UserError
from resformer.evaluate.loading import load_model
from resformer.evaluate.loss import evaluate
from resformer.models import ResFormerForCausalLM
from resformer.models.accounting import account
from resformer.models.attention import Attention
from resformer.train import build, checkpoint
from resformer.train.config import Config
from resformer.train.configure import configure, edit, from_toml
from resformer.train.failure import RunFailure
from resformer.train.loop import train
from resformer.train.metrics import read_rows
from resformer.train.schedule import lr_at


def test_what_a_run_leaves(whole_run: Path, config: Config) -> None:
    assert from_toml(whole_run / "config.toml") == config
    assert sorted(path.name for path in whole_run.iterdir()) == [
        "checkpoints",
        "config.toml",
        "environment.json",
        "metrics.jsonl",
        "model",
        "tokenizer",
    ]
    assert (whole_run / "checkpoints" / "latest").read_text() == "step-00000020\n"
    assert checkpoint.steps(whole_run / "checkpoints") == [15, 20]
    files = {path.suffix for path in whole_run.rglob("*") if path.is_file()}
    assert files == {".toml", ".json", ".jsonl", ".safetensors", ".md", ".py", ""}


def test_environment(whole_run: Path, config: Config) -> None:
    facts = json.loads((whole_run / "environment.json").read_text())
    dataset = open_dataset(str(config.data.dir))
    described = build.model_config(config, vocab_size=dataset.vocab_size)
    assert facts["accounting"] == account(described).asdict()
    assert facts["data"]["fingerprint"] == dataset.fingerprint
    assert facts["command"] == ["test"]
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["threads"] == 1


def test_rows_of_training(whole_run: Path, config: Config) -> None:
    rows = [row for row in read_rows(whole_run / "metrics.jsonl") if row["split"] == "train"]
    assert [row["step"] for row in rows] == list(range(1, 21))
    assert [row["tokens"] for row in rows] == [8 * 32 * step for step in range(1, 21)]
    keys = {"split", "step", "tokens", "loss", "lr", "grad_norm", "tokens_per_second", "seconds", "memory_bytes"}
    assert all(set(row) == keys for row in rows)
    assert [row["lr"] for row in rows] == [lr_at(s, steps=20, lr=2e-3, warmup_steps=5) for s in range(1, 21)]
    assert rows[0]["loss"] == pytest.approx(math.log(300), abs=0.1)
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.5
    assert all(row["tokens_per_second"] == pytest.approx(256 / row["seconds"]) for row in rows)


def test_rows_of_validation_are_what_evaluate_says(whole_run: Path, config: Config) -> None:
    rows = [row for row in read_rows(whole_run / "metrics.jsonl") if row["split"] == "validation"]
    assert [(row["step"], row["domain"]) for row in rows] == [
        (step, domain) for step in (10, 20) for domain in ("one", "two", "all")
    ]
    assert {row["train_tokens"] for row in rows if row["step"] == 10} == {2560}
    model, _ = load_model(whole_run)
    scores = evaluate(
        model, open_dataset(str(config.data.dir)), sequence_length=32, batch_size=4, max_tokens=512, device="cpu"
    )
    for row in rows[3:5]:
        found = scores["domains"][row["domain"]]
        assert row["tokens"] == found["tokens"] == 512
        assert row["loss"] == pytest.approx(found["loss"], rel=1e-6)
        assert row["bits_per_byte"] == pytest.approx(found["bits_per_byte"], rel=1e-6)
    assert rows[5]["loss"] == pytest.approx((rows[3]["loss"] + rows[4]["loss"]) / 2)


def test_rows_of_lambdas(whole_run: Path) -> None:
    rows = [row for row in read_rows(whole_run / "metrics.jsonl") if row["split"] == "lambdas"]
    model, _ = load_model(whole_run)
    assert [row["step"] for row in rows] == [10, 20]
    assert {key: rows[-1][key] for key in ("layers", "first", "own")} == model.lambda_map()
    assert rows[-1]["first"] != [0.5]


def test_the_result_is_the_last_validation(config: Config, tmp_path: Path) -> None:
    short = edit(config, {"train.steps": 3, "train.validate_every": 2, "model.variant": "transformer"})
    result = train(short, tmp_path / "run")
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows if row["split"] == "validation"] == [2] * 3 + [3] * 3
    assert not any(row["split"] == "lambdas" for row in rows)
    assert result.out == tmp_path / "run"
    assert result.final_validation["all"]["loss"] == rows[-1]["loss"]
    assert result.final_validation.keys() == {"one", "two", "all"}


def test_config_toml_makes_the_same_run_again(whole_run: Path, config: Config, tmp_path: Path) -> None:
    again = configure(Config(), file=whole_run / "config.toml")
    torch.manual_seed(1234)  # what happened before must not matter
    train(again, tmp_path / "run")
    assert comparable(tmp_path / "run") == comparable(whole_run)


def test_micro_batches_change_rounding_only(whole_run: Path, config: Config, tmp_path: Path) -> None:
    train(edit(config, {"train.micro_batch_size": 8}), tmp_path / "run")
    for one, other in zip(comparable(whole_run), comparable(tmp_path / "run"), strict=True):
        if one["split"] == "train":
            assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
            assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)


def test_the_run_is_what_a_plain_loop_gives(whole_run: Path, config: Config) -> None:
    """The same 20 steps written out: whole logits, one batch, AdamW of two groups, the schedule as a formula."""
    dataset = open_dataset(str(config.data.dir))
    sampler = dataset.sampler(sequence_length=32, batch_size=8, seed=0)
    torch.manual_seed(0)
    model = ResFormerForCausalLM(build.model_config(config, vocab_size=300)).train()
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    rows = [row for row in read_rows(whole_run / "metrics.jsonl") if row["split"] == "train"]
    for step, row in enumerate(rows, start=1):
        tokens = torch.from_numpy(sampler.batch(step).tokens)
        logits = model(input_ids=tokens[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        cosine = 0.1 + 0.9 * (1 + math.cos(math.pi * (step - 5) / 15)) / 2
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * (step / 5 if step <= 5 else cosine)
        optimizer.step()
        optimizer.zero_grad()
        assert row["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert row["grad_norm"] == pytest.approx(norm.item(), rel=1e-3)


def test_checkpointing_recomputes_and_changes_nothing(
    whole_run: Path, config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = Attention.forward, []

    def counted(self: Attention, *args: Any, **how: Any) -> Any:
        calls.append(torch.is_grad_enabled())
        return real(self, *args, **how)

    monkeypatch.setattr(Attention, "forward", counted)
    train(edit(config, {"train.checkpointing": True}), tmp_path / "run")
    assert sum(calls) == 20 * 2 * 2 * 2, "steps x micro-batches x layers, each once more in the backward pass"
    assert comparable(tmp_path / "run") == comparable(whole_run)


def test_bf16_trains_over_fp32_weights(whole_run: Path, config: Config, tmp_path: Path) -> None:
    train(edit(config, {"train.dtype": "bf16"}), tmp_path / "run")
    rough, exact = comparable(tmp_path / "run"), comparable(whole_run)
    assert rough[19]["loss"] != exact[19]["loss"]
    assert rough[19]["loss"] == pytest.approx(exact[19]["loss"], abs=0.02)
    model, _ = load_model(tmp_path / "run")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_padded_vocabulary_is_opt_in(config: Config, tmp_path: Path) -> None:
    short = edit(config, {"train.steps": 2, "model.vocab_size": 320})
    train(short, tmp_path / "run")
    model, _ = load_model(tmp_path / "run")
    assert model.config.vocab_size == 320
    with pytest.raises(UserError, match=r"model.vocab_size 200 is smaller than the data's vocabulary 300"):
        train(edit(config, {"model.vocab_size": 200}), tmp_path / "small")


def test_a_loss_that_is_no_number_stops_with_the_step(config: Config, tmp_path: Path) -> None:
    wild = edit(config, {"optim.lr": 1e30, "optim.warmup_steps": 0, "train.checkpoint_every": 1})
    with pytest.raises(RunFailure, match=r"^step \d+: loss is .*(nan|inf)") as caught:
        train(wild, tmp_path / "run")
    step = int(str(caught.value).split()[1].rstrip(":"))
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows if row["split"] == "train"] == list(range(1, step))
    assert checkpoint.latest_step(tmp_path / "run" / "checkpoints") == step - 1
    assert not (tmp_path / "run" / "model").exists()


def test_a_note_says_that_the_warmup_was_shortened(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(edit(config, {"train.steps": 3}), tmp_path / "run")
    assert "optim.warmup_steps 5 is longer than train.steps 3: shortened to 1" in capsys.readouterr().err
    assert from_toml(tmp_path / "run" / "config.toml").optim.warmup_steps == 1


def test_plain_progress_lines(config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(edit(config, {"track.log_every_seconds": 1e-6}), tmp_path / "run")
    lines = capsys.readouterr().err.splitlines()
    assert sum(line.startswith("step ") and "tokens/s  ETA 0:0" in line for line in lines) == 20
    assert lines[-1].startswith("done: 20 steps, validation loss ")


def test_dry_run_prints_a_config_and_writes_nothing(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(config, tmp_path / "run", dry_run=True)
    printed = capsys.readouterr().out
    (tmp_path / "c.toml").write_text(printed)
    assert from_toml(tmp_path / "c.toml") == config
    assert "# parameters: 39,842" in printed
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.dir": None}, "data.dir is not set; pass --data DIR"),
        ({"data.dir": "nowhere"}, "nowhere"),
        ({"train.batch_size": 100_000}, "fewer than one batch"),
        ({"data.weights": {"tree": 1.0}}, "unknown domain 'tree'"),
        ({"train.device": "cuda:7"}, "device 'cuda:7' is not available on this machine"),
    ],
)
def test_a_mistake_leaves_no_directory(
    config: Config, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    section, name = next(iter(changes)).split(".")
    part = replace(getattr(config, section), **{name: next(iter(changes.values()))})
    if section == "train" and name == "batch_size":
        part = replace(part, micro_batch_size=None)
    with pytest.raises(UserError) as caught:
        train(replace(config, **{section: part}), tmp_path / "run")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_compiled_blocks_keep_their_names(config: Config, tmp_path: Path) -> None:
    short = edit(config, {"train.steps": 2, "optim.warmup_steps": 1})
    train(short, tmp_path / "eager")
    train(edit(short, {"train.compile": True}), tmp_path / "compiled")
    for one, other in zip(comparable(tmp_path / "eager"), comparable(tmp_path / "compiled"), strict=True):
        assert one["step"] == other["step"]
        assert one.get("loss", 0.0) == pytest.approx(other.get("loss", 0.0), rel=1e-4)
    model, _ = load_model(tmp_path / "compiled")
    tensors = saved_weights(tmp_path / "compiled", 2)
    assert tensors.keys() == {name for name, _ in model.named_parameters()}


def test_norms_of_chosen_gradients_are_in_the_rows(config: Config, whole_run: Path, tmp_path: Path) -> None:
    """Layer 1's values and output are what the paper watches."""
    names = ("model.layers.0.self_attn.v_proj.weight", "model.layers.0.self_attn.o_proj.weight")
    few = edit(config, {"track.gradient_norms": ["model.layers.0.self_attn.[vo]_proj.weight"], "train.steps": 2})
    train(few, tmp_path / "run")
    rows = [row for row in read_rows(tmp_path / "run" / "metrics.jsonl") if row["split"] == "train"]
    assert [sorted(row["gradient_norms"]) for row in rows] == [sorted(names)] * 2
    assert all(0 < value < row["grad_norm"] for row in rows for value in row["gradient_norms"].values())
    assert from_toml(tmp_path / "run" / "config.toml").track.gradient_norms == few.track.gradient_norms
    plain = [row for row in read_rows(whole_run / "metrics.jsonl") if row["split"] == "train"]
    assert "gradient_norms" not in plain[0] and plain[0]["loss"] == rows[0]["loss"]
    wrong = edit(config, {"track.gradient_norms": ["model.layers.0.self_attn.v_porj.weight"]})
    with pytest.raises(UserError, match=r"track\.gradient_norms: no trained parameter .*did you mean"):
        train(wrong, tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()
