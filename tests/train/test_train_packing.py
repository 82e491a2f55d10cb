"""Documents that share a sequence: each is computed as if it were alone, in every variant and form."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from test_train_processes import assert_close_runs, train_in
from torch import Tensor
from train_helpers import comparable, crash_after
from transformers import LlamaConfig, LlamaForCausalLM

from resformer import ResFormerConfig, ResFormerForCausalLM, cli
from resformer.core.registry import names
from resformer.data import open_dataset
from resformer.data.packing import documents_of
from resformer.errors import UserError
from resformer.evaluate.loading import load_model
from resformer.evaluate.loss import evaluate, token_nll
from resformer.models.compat import enable_checkpointing
from resformer.models.forms import GPT2_FORM
from resformer.parallel import Ranks
from resformer.parallel.wrap import compile_blocks
from resformer.train.config import Config
from resformer.train.configure import edit
from resformer.train.feed import Feeder
from resformer.train.loop import train
from resformer.train.loss import accumulate, summed_nll
from resformer.train.metrics import read_rows
from resformer.train.setup import check_epochs, open_data

EOS, T = 1, 30
ROWS = ((7, 1, 5, 11, 2, 4), (31,), (2, 17, 9))  # documents' tokens, end-of-text included; the third row has padding
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
FORMS: dict[str, dict[str, Any]] = {
    "no first residual": {"first_block_residual": False},
    "qk norm": {"qk_norm": True},
    "gpt2": GPT2_FORM,
    "sliding": {"sliding_window": 5},
    "sliding in part": {"sliding_window": 5, "sliding_layers": [1, 3]},
    "experts": {"num_experts": 4, "router_aux_loss_coef": 0.0},
    "eager": {"attn_implementation": "eager"},
    "all at once": {
        "first_block_residual": False,
        "qk_norm": True,
        "position_embedding": "learned",
        "norm": "layernorm",
        "sliding_window": 6,
        "num_experts": 3,
        "num_experts_per_tok": 1,
        "router_aux_loss_coef": 0.0,
    },
}
CASES = [(name, "llama") for name in names()]
CASES += [(name, form) for form in FORMS for name in ("learnable", "svformer", "denseformer")]
CASES += [("attention_residual", "gpt2"), ("cross_attention", "sliding"), ("cross_attention", "gpt2")]
CASES += [("cla", "sliding in part"), ("skipv1", "sliding in part"), ("neutreno", "all at once")]


def make(variant: str, form: str = "llama") -> ResFormerForCausalLM:
    """A tiny model in training mode whose lambdas are off their initial values."""
    torch.manual_seed(0)
    changes = dict(FORMS.get(form, {}))
    implementation = changes.pop("attn_implementation", None)
    described = ResFormerConfig(variant=variant, **{**SIZES, **changes})  # type: ignore[arg-type]
    if implementation:
        described._attn_implementation = implementation
    model = ResFormerForCausalLM(described).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "value_" in name or "depth_average" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif parameter.dim() > 1:
                parameter.mul_(4.0)
    return model


def packed() -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Rows `[B, T + 1]`, positions and mask `[B, T]`, and the documents, `[1, n]` each."""
    draw = torch.Generator().manual_seed(3)
    rows = torch.full((len(ROWS), T + 1), EOS)
    documents = []
    for row, lengths in zip(rows, ROWS, strict=True):
        place = 0
        for length in lengths:
            document = torch.randint(2, 61, (length,), generator=draw)
            if place + length <= T + 1:
                document[-1] = EOS
            row[place : place + length] = document
            documents.append(document[None])
            place += length
    positions, same = documents_of(rows[:, :-1].numpy(), EOS)
    used = torch.arange(T) < torch.tensor([sum(lengths) - 1 for lengths in ROWS])[:, None]
    return rows, torch.from_numpy(positions), torch.from_numpy(same) & used, documents


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    scale = max(gradient.abs().max() for gradient in expected.values())
    for name, gradient in found.items():
        assert (gradient - expected[name]).abs().max() <= 1e-5 * scale, name


@pytest.mark.parametrize(("variant", "form"), CASES)
def test_a_document_is_computed_as_if_it_were_alone(variant: str, form: str) -> None:
    model = make(variant, form)
    rows, positions, mask, documents = packed()
    alone = torch.cat([token_nll(model, document)[0] for document in documents if document.shape[1] > 1])
    together = token_nll(model, rows, positions)[mask]
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=2e-6)
    assert (token_nll(model, rows)[mask] - alone).abs().max() > 1e-3, "without positions they are not alone"

    count = int(mask.sum())
    expected_loss = sum(summed_nll(model, d) / count for d in documents if d.shape[1] > 1)
    expected_loss.backward()  # type: ignore[union-attr]
    expected = gradients(model)
    for micro_batch_size, checkpointing in ((3, False), (1, False), (3, True)):
        if checkpointing:
            enable_checkpointing(model)
        loss = accumulate(
            model, rows, micro_batch_size=micro_batch_size, mask_BT=mask, positions_BT=positions, count=count
        )
        assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-5)  # type: ignore[union-attr]
        assert_close(gradients(model), expected)


@pytest.fixture
def dynamo() -> None:
    """torch.compile as in a new process."""
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 8


class Counting:
    """A backend of torch.compile that runs graphs as they are and counts them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        self.graphs += 1
        return graph.forward


@pytest.mark.usefixtures("dynamo")
def test_compiled_blocks_keep_documents_apart() -> None:
    model = make("learnable_plus")
    rows, positions, mask, _ = packed()
    how: dict[str, Any] = {"mask_BT": mask, "positions_BT": positions, "count": int(mask.sum())}
    expected_loss = accumulate(model, rows, micro_batch_size=3, **how)
    expected = gradients(model)
    compile_blocks(model, backend="aot_eager")
    loss = accumulate(model, rows, micro_batch_size=3, **how)
    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-5)
    assert_close(gradients(model), expected)


@pytest.mark.usefixtures("dynamo")
def test_batches_with_and_without_boundaries_share_their_graphs() -> None:
    """The second row is one document. Past its limit of graphs Dynamo runs a block eagerly without a word."""
    graphs = []
    for documents in (False, True):
        torch._dynamo.reset()
        model = make("dense")
        rows, positions, _, _ = packed()
        compile_blocks(model, backend=(backend := Counting()))
        for _ in range(2):
            accumulate(model, rows, micro_batch_size=1, positions_BT=positions if documents else None)
        graphs.append(backend.graphs)
    assert graphs[0] == graphs[1]


def test_nobody_waits_for_the_device_to_find_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import masking_utils

    calls = []
    real = masking_utils.find_packed_sequence_indices
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda p: (calls.append(1), real(p))[1])
    rows, positions, mask, _ = packed()
    for form in ("llama", "sliding in part", "eager"):
        accumulate(make("learnable", form), rows, micro_batch_size=3, mask_BT=mask, positions_BT=positions, count=9)
    assert not calls
    llama = LlamaForCausalLM(LlamaConfig(**SIZES))  # type: ignore[arg-type]
    alone = torch.cat([token_nll(llama, rows[:1, :7]), token_nll(llama, rows[:1, 8:13])], dim=1)
    apart = token_nll(llama, rows, positions)[0]
    assert calls
    torch.testing.assert_close(torch.cat([apart[:6], apart[8:12]])[None], alone, rtol=1e-5, atol=2e-6)


def test_without_documents_no_positions_are_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("learnable")
    rows, positions, mask, _ = packed()
    seen: list[set[str]] = []
    real = model.model.forward
    monkeypatch.setattr(model.model, "forward", lambda **how: (seen.append(set(how)), real(**how))[1])
    accumulate(model, rows, micro_batch_size=3)
    accumulate(model, rows, micro_batch_size=3, mask_BT=mask, positions_BT=positions)
    assert seen == [{"input_ids", "use_cache"}, {"input_ids", "use_cache", "position_ids", "attention_mask"}]


def test_a_batch_in_which_nothing_counts_is_no_mistake() -> None:
    model = make("learnable")
    rows = torch.full((2, 5), EOS)
    loss = accumulate(model, rows, micro_batch_size=2, mask_BT=torch.zeros(2, 4, dtype=torch.bool), count=0)
    assert loss.item() == 0.0
    assert all(not gradient.any() for gradient in gradients(model).values())


@pytest.mark.parametrize("changes", [{}, {"data.document_mask": True}, {"data.packing": "best_fit"}])
def test_each_process_counts_the_targets_of_all(config: Config, changes: dict[str, Any]) -> None:
    _, sampler = open_data(edit(config, changes))
    taken = []
    for rank in range(4):
        with Feeder(sampler, Ranks(rank=rank, size=4), 8) as feeder:
            taken.append(feeder.take(16, more=False))
    whole = sampler.samples(np.arange(16, 24))
    np.testing.assert_array_equal(torch.cat([rows.tokens for rows in taken]).numpy(), whole.tokens)
    if not changes:
        assert {(rows.mask, rows.positions, rows.count) for rows in taken} == {(None, None, None)}
        return
    np.testing.assert_array_equal(torch.cat([rows.mask for rows in taken]).numpy(), whole.mask)
    assert {rows.count for rows in taken} == {int(whole.mask.sum())}
    if "data.document_mask" in changes:
        np.testing.assert_array_equal(torch.cat([rows.positions for rows in taken]).numpy(), whole.positions)


APART = {"data.document_mask": True, "data.packing": "best_fit", "train.steps": 6, "train.validate_every": 3}
APART |= {"train.checkpoint_every": 3}


def test_a_run_with_documents_apart(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says how many targets counted, resumes to the bit, and evaluating its model gives its last validation."""
    apart = edit(config, APART)
    result = train(apart, tmp_path / "run")
    _, sampler = open_data(apart)
    rows = [row for row in read_rows(tmp_path / "run" / "metrics.jsonl") if row["split"] == "train"]
    assert [row["loss_tokens"] for row in rows] == [int(sampler.batch(step).mask.sum()) for step in range(1, 7)]
    assert rows[-1]["tokens"] == 6 * 8 * 32
    model, _ = load_model(tmp_path / "run")
    how: dict[str, Any] = {"sequence_length": 32, "batch_size": 4, "max_tokens": apart.train.validation_tokens}
    again = evaluate(model, open_dataset(str(apart.data.dir)), **how, document_mask=True)
    for name, scores in again["domains"].items():
        assert result.final_validation[name].items() <= scores.items()
    assert evaluate(model, open_dataset(str(apart.data.dir)), **how)["loss"] != again["loss"]
    words = ["--data", str(apart.data.dir), "--device", "cpu", "--max-tokens", str(apart.train.validation_tokens)]
    assert cli.main(["eval", str(tmp_path / "run"), *words, "--batch-size", "4"]) == 0
    written = json.loads((tmp_path / "run" / "eval.json").read_text())["domains"]
    assert all(scores.items() <= written[name].items() for name, scores in again["domains"].items())
    crash_after(apart, tmp_path / "other", 5, monkeypatch)
    train(apart, tmp_path / "other", resume=True)
    assert comparable(tmp_path / "other") == comparable(tmp_path / "run")


def test_plain_rows_say_nothing_of_targets(whole_run: Path) -> None:
    assert not any("loss_tokens" in row for row in read_rows(whole_run / "metrics.jsonl"))


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch was built without gloo")
@pytest.mark.parametrize("variant", ["learnable_plus", "cross_attention"])
def test_two_processes_are_one(config: Config, tmp_path: Path, variant: str) -> None:
    apart = edit(config, {**APART, "model.variant": variant, "train.micro_batch_size": 2})
    train(apart, tmp_path / "one")
    train_in(2, apart, tmp_path / "two")
    assert_close_runs(tmp_path / "one", tmp_path / "two")
    counted = [[row.get("loss_tokens") for row in comparable(tmp_path / name)] for name in ("one", "two")]
    assert counted[0] == counted[1]


def test_a_run_that_repeats_a_domain_too_often_is_refused(config: Config, tmp_path: Path) -> None:
    _, sampler = open_data(config)
    most = max(sampler.epochs(20).values())
    domain = max(sampler.epochs(20), key=lambda name: sampler.epochs(20)[name])
    check_epochs(edit(config, {"data.max_epochs": most}), sampler)
    fitting = max(step for step in range(1, 20) if max(sampler.epochs(step).values()) <= most / 2)
    for how in ({}, {"dry_run": True}):
        with pytest.raises(UserError) as caught:
            train(edit(config, {"data.max_epochs": most / 2}), tmp_path / "run", **how)
        said = str(caught.value)
        assert said.startswith(f"the run would go {most:.4g} times through domain '{domain}', data.max_epochs is ")
        assert f"; set train.steps to {fitting} or fewer, give the domain a lower weight (data.weights), " in said
        assert "\n" not in said and not (tmp_path / "run").exists()
    check_epochs(edit(config, {"data.max_epochs": most / 2, "train.steps": fitting}), sampler)
    with pytest.raises(UserError, match=r"data.max_epochs is 1e-06; give the domain a lower weight"):
        check_epochs(edit(config, {"data.max_epochs": 1e-6}), sampler)


def test_a_run_that_goes_on_with_another_batch_keeps_to_the_limit(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What counts are the samples that were seen and those to come, whatever the batch was before."""
    _, sampler = open_data(config)
    most = max(sampler.epochs(20).values())
    limited = edit(config, {"data.max_epochs": most, "train.batch_size": 16, "train.steps": 10})
    crash_after(limited, tmp_path / "run", 6, monkeypatch)
    small = edit(limited, {"train.batch_size": 8, "train.steps": 20})  # 5 steps of 16 are done
    with pytest.raises(UserError, match=r"set train.steps to 15 or fewer"):
        train(small, tmp_path / "run", resume=True, on_change="continue")
    train(edit(small, {"train.steps": 15}), tmp_path / "run", resume=True, on_change="continue")


def test_the_start_names_domains_that_are_repeated(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the start of the rest of a run; not the end of one."""
    from resformer.data.sampler import Sampler

    short = edit(config, {"train.steps": 2, "train.checkpoint_every": 1})
    crash_after(short, tmp_path / "run", 2, monkeypatch)
    assert "repeated" not in "".join(capsys.readouterr())
    monkeypatch.setattr(Sampler, "epochs", lambda self, step, samples=0: {"one": 0.5, "two": 2.5})
    for expected in (1, 0):
        train(short, tmp_path / "run", resume=True)
        said = "".join(capsys.readouterr())
        assert said.count("note: domains that are repeated, in epochs of the whole run: two 2.50 (data.max") == expected


@pytest.mark.parametrize(
    ("changes", "padded"), [({}, None), ({"data.document_mask": True}, False), ({"data.packing": "best_fit"}, True)]
)
def test_a_dry_run_says_what_counts(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], padded: bool | None
) -> None:
    train(edit(config, changes), tmp_path / "run", dry_run=True)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("# training tokens")]
    if padded is None:
        assert "padding" not in line and "count" not in line
    else:
        assert ("padding 0.00%" in line) != padded
        assert "targets that count about " in line


def test_keys_survive_a_file(config: Config, tmp_path: Path) -> None:
    from resformer.train.configure import from_toml, to_toml

    changed = edit(config, {"data.max_epochs": 1.5, "data.packing": "best_fit", "data.document_mask": True})
    (tmp_path / "c.toml").write_text(to_toml(changed))
    assert from_toml(tmp_path / "c.toml") == changed
    assert replace(changed.data, max_epochs=None).max_epochs is None
    refused: Callable[[], Any] = lambda: edit(config, {"data.max_epochs": 0.0})  # noqa: E731
    with pytest.raises(UserError, match=r"data\.max_epochs"):
        refused()
