"""Converted models that are trained on: the recipe `uptrain`, distillation, morphing, and what came back."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from train_helpers import assert_same_run, comparable, crash_after, write_text
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from resformer import ResFormerConfig, ResFormerForCausalLM, cli
from resformer.convert.checkpoint import convert_checkpoint
from resformer.data import open_dataset, prepare
from resformer.errors import UserError
from resformer.evaluate.loading import load_model
from resformer.evaluate.loss import evaluate
from resformer.models.compat import enable_checkpointing
from resformer.recipes import recipe
from resformer.train.config import Config
from resformer.train.configure import edit, from_toml, to_toml
from resformer.train.distill import Teacher
from resformer.train.loop import train
from resformer.train.loss import accumulate
from resformer.train.metrics import read_rows
from resformer.train.recovery import Recovery, recovery

VOCAB = 60
FORM: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}


def new_model(seed: int, **changes: Any) -> ResFormerForCausalLM:
    torch.manual_seed(seed)
    return ResFormerForCausalLM(ResFormerConfig(**{**FORM, **changes}))


def naive(
    student: Any, teacher: Any, tokens: Tensor, mask: Tensor, share: float, t: float, **how: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Objective, cross-entropy and t^2 KL per counted token, from whole logits in float64."""
    own = student(input_ids=tokens[:, :-1], use_cache=False, **how).logits.double()
    with torch.no_grad():
        wanted = teacher(input_ids=tokens[:, :-1], use_cache=False, **how).logits.double()
    ce = F.cross_entropy(own.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    p, log_q = (wanted / t).softmax(-1), (own / t).log_softmax(-1)
    kl = t * t * (p * (p.log() - log_q)).sum(-1).flatten()
    ce, kl = ((part * mask.flatten()).sum() / mask.sum() for part in (ce, kl))
    return (1 - share) * ce + share * kl, ce, kl


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("share", "t", "micro"), [(0.5, 1.0, 2), (1.0, 3.0, 4), (0.2, 0.7, 1)])
def test_distillation_is_the_formula(
    monkeypatch: pytest.MonkeyPatch, share: float, t: float, micro: int, checkpointing: bool
) -> None:
    monkeypatch.setattr("resformer.train.distill.LOGITS", VOCAB * 7)
    student, teacher = new_model(0, variant="svformer"), new_model(1, variant="transformer").eval()
    student.train()
    if checkpointing:
        enable_checkpointing(student)
    tokens = torch.randint(VOCAB, (4, 21))
    mask = torch.rand(4, 20) < 0.7
    mask[1] = False
    expected, ce, kl = naive(student, teacher, tokens, mask, share, t)
    expected.backward()
    wanted = {name: p.grad.clone() for name, p in student.named_parameters() if p.grad is not None}
    student.zero_grad()
    found = accumulate(
        student,
        tokens,
        micro_batch_size=micro,
        mask_BT=mask,
        teacher=Teacher(model=teacher, share=share, temperature=t),
    )
    assert found.tolist() == pytest.approx([ce.item(), kl.item()], abs=2e-6)
    scale = max(gradient.abs().max() for gradient in wanted.values())
    for name, parameter in student.named_parameters():
        assert parameter.grad is not None and (parameter.grad - wanted[name]).abs().max() <= 2e-6 * scale, name
    assert all(p.grad is None for p in teacher.parameters())


@pytest.mark.parametrize("kind", ["ours", "llama"])
def test_documents_are_apart_for_the_teacher_too(kind: str) -> None:
    student = new_model(0).train()
    teacher: Any = new_model(1) if kind == "ours" else LlamaForCausalLM(LlamaConfig(**FORM))
    tokens = torch.randint(VOCAB, (2, 13))
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6], [0, 1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9]])
    mask = torch.ones(2, 12, dtype=torch.bool)
    how = {"position_ids": positions}
    _, ce, kl = naive(student.eval(), teacher.eval(), tokens, mask, 0.5, 1.0, **how)
    found = accumulate(
        student.train(),
        tokens,
        micro_batch_size=1,
        mask_BT=mask,
        positions_BT=positions,
        teacher=Teacher(model=teacher, share=0.5),
    )
    assert found.tolist() == pytest.approx([ce.item(), kl.item()], abs=2e-6)
    together = naive(student, teacher, tokens, mask, 0.5, 1.0)[2]
    assert abs(together.item() - kl.item()) > 1e-3  # or the test above says nothing


def test_a_teacher_that_is_the_student_teaches_nothing_new() -> None:
    student = new_model(0).train()
    tokens = torch.randint(VOCAB, (2, 9))
    found = accumulate(
        student, tokens, micro_batch_size=2, teacher=Teacher(model=new_model(0).eval(), share=1.0, temperature=2.0)
    )
    assert found[1].item() == pytest.approx(0.0, abs=1e-6)
    assert max(p.grad.abs().max() for p in student.parameters() if p.grad is not None) < 1e-6


# --- runs ---


@pytest.fixture(scope="module")
def source(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with forms that no key of a run has, and the corpus's tokenizer."""
    out = tmp_path_factory.mktemp("source") / "llama"
    torch.manual_seed(3)
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e5}
    dataset = open_dataset(corpus)
    form = FORM | {"vocab_size": 300, "num_hidden_layers": 6, "rope_parameters": rope, "initializer_range": 0.15}
    ends = [dataset.eos_token_id, 299]
    model = LlamaForCausalLM(LlamaConfig(**form, eos_token_id=ends, bos_token_id=None))
    model.generation_config.update(do_sample=True, temperature=0.6, top_p=0.9)
    model.save_pretrained(out)
    (out / "chat_template.jinja").write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    for path in Path(dataset.tokenizer_dir).glob("tokenizer*.json"):
        shutil.copy(path, out / path.name)
    return out


@pytest.fixture(scope="module")
def shared(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source as an SVFormer on the last third of its layers."""
    out = tmp_path_factory.mktemp("shared") / "model"
    convert_checkpoint(str(source), out, variant="svformer", say=lambda _: None)
    return out


@pytest.fixture
def uptrain(corpus: Path) -> Config:
    return edit(
        recipe("uptrain"),
        {
            "data.dir": str(corpus),
            "data.sequence_length": 32,
            "train.steps": 20,
            "train.batch_size": 4,
            "train.micro_batch_size": 2,
            "train.validate_every": 10,
            "train.checkpoint_every": 5,
            "train.validation_tokens": 320,
            "train.device": "cpu",
            "optim.lr": 2e-3,
            "optim.warmup_steps": 2,
        },
    )


def test_the_model_is_the_one_of_the_checkpoint(uptrain: Config, source: Path, shared: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(edit(uptrain, {"train.init_from": str(shared), "uptrain.source": str(source)}), out)
    before, after = (json.loads((place / "config.json").read_text()) for place in (shared, out / "model"))
    assert {k: v for k, v in after.items() if before.get(k) != v} == {}
    for name in ("generation_config.json", "chat_template.jinja", "tokenizer.json", "tokenizer_config.json"):
        assert (out / "model" / name).read_bytes() == (shared / name).read_bytes(), name
    assert GenerationConfig.from_pretrained(out / "model").temperature == 0.6
    kept = from_toml(out / "config.toml")
    assert kept.model.variant == "svformer" and kept.model.num_hidden_layers == 6 and kept.model.rope_theta == 1e5
    assert edit(Config(), {}) != kept and from_toml_text(to_toml(kept), tmp_path) == kept
    # The first scores are those of the two models as they were.
    dataset = open_dataset(uptrain.data.dir or "")
    rows = comparable(out)
    for split, place in (("source", source), ("validation", shared)):
        scores = evaluate(load_model(place)[0], dataset, sequence_length=32, batch_size=2, max_tokens=320)
        found = {row["domain"]: row["loss"] for row in rows if row["split"] == split and row["step"] == 0}
        assert found == {name: one["loss"] for name, one in scores["domains"].items()} | {"all": scores["loss"]}
    assert [row["step"] for row in rows if row["split"] == "validation" and row["domain"] == "all"] == [0, 10, 20]
    trained: Any = AutoModelForCausalLM.from_pretrained(out / "model")
    weights = load_file(shared / "model.safetensors")
    moved = [name for name, p in trained.named_parameters() if name in weights and not torch.equal(p, weights[name])]
    assert len(moved) == len(list(trained.parameters()))


def from_toml_text(text: str, place: Path) -> Config:
    (place / "again.toml").write_text(text)
    return from_toml(place / "again.toml")


def test_what_came_back(
    uptrain: Config, source: Path, shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    train(edit(uptrain, {"train.init_from": str(shared), "uptrain.source": str(source)}), out)
    said = capsys.readouterr().err
    found = recovery(out)
    rows = [row for row in comparable(out) if row.get("domain") == "all"]
    losses = {(row["split"], row["step"]): row["loss"] for row in rows}
    assert found.source == losses["source", 0]
    assert found.points == [(s, s * 4 * 32, losses["validation", s]) for s in (0, 10, 20)]
    assert found.kv_ratio == pytest.approx(10 / 12) and found.kv_bytes_per_token == 10 * 2 * 4 * 4
    assert found.line() in said and found.line() in (out / "model" / "README.md").read_text().replace("\n", " ")
    assert cli.main(["recovery", str(out), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)[str(out)]
    assert printed["source"] == found.source and printed["points"] == found.rows()
    assert cli.main(["recovery", str(out)]) == 0 and "16.7% saved" in capsys.readouterr().out


def test_shares_of_what_was_lost() -> None:
    one = Recovery(
        source=3.0, points=[(0, 0, 5.0), (10, 100, 4.0), (20, 200, 2.9)], kv_bytes_per_token=8, kv_ratio=0.75
    )
    assert [row["recovered"] for row in one.rows()] == pytest.approx([0.0, 0.5, 1.05])
    assert [row["above_source"] for row in one.rows()] == pytest.approx([2.0, 1.0, -0.1])
    assert one.line() == (
        "loss 5.0000 -> 2.9000 in 200 tokens, of the source 3.0000 (-0.1000, 105.0% recovered); KV cache 8 bytes per "
        "token (fp32), 25.0% saved"
    )
    nothing_lost = dataclasses.replace(one, points=[(0, 0, 3.001), (10, 100, 2.9)])
    assert [row["recovered"] for row in nothing_lost.rows()] == [None, None] and "recovered" not in nothing_lost.line()


@pytest.mark.parametrize("share", [0.0, 0.7])
@pytest.mark.parametrize("step", [3, 12])
def test_an_interrupted_run_ends_as_the_uninterrupted_one(
    uptrain: Config,
    source: Path,
    shared: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    share: float,
    step: int,
) -> None:
    start, theirs = tmp_path / "start", tmp_path / "source"
    shutil.copytree(shared, start)
    shutil.copytree(source, theirs)
    config = edit(uptrain, {"train.init_from": str(start), "uptrain.source": str(theirs), "uptrain.kl": share})
    train(config, tmp_path / "whole")
    crash_after(config, tmp_path / "cut", step, monkeypatch)
    if step == 12:
        shutil.rmtree(start)  # config.toml and the checkpoint say all
        if not share:
            shutil.rmtree(theirs)  # it was scored, and teaches nothing
    train(config, tmp_path / "cut", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "cut")
    kl = [row["kl"] for row in read_rows(tmp_path / "cut" / "metrics.jsonl") if "kl" in row]
    assert len(kl) == (20 if share else 0)


def test_a_stop_during_the_first_scores(
    uptrain: Config, source: Path, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from resformer.evaluate.loss import Interrupted
    from resformer.train import fit
    from resformer.train.failure import Stopped

    config = edit(uptrain, {"train.init_from": str(shared), "uptrain.source": str(source)})
    train(config, tmp_path / "whole")
    real = fit.Fit.scores

    def stopped(self: Any, model: Any) -> dict[str, Any]:
        if model is self.parts.model:
            self.stop.number = 15
            raise Interrupted
        return real(self, model)

    with monkeypatch.context() as patch:
        patch.setattr(fit.Fit, "scores", stopped)
        with pytest.raises(Stopped):
            train(config, tmp_path / "cut")
    assert not [row for row in read_rows(tmp_path / "cut" / "metrics.jsonl") if row["split"] != "train"]
    train(config, tmp_path / "cut", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.parametrize(
    ("learnable", "svformer"), [({}, {}), ({"layers": [5, 6], "source": 4}, {"layers": [5, 6], "anchors": [1, 4]})]
)
def test_morphing_ends_in_an_svformer_that_computes_the_same(
    uptrain: Config,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    learnable: dict[str, Any],
    svformer: dict[str, Any],
) -> None:
    start, third = tmp_path / "learnable", {"layers": "last_third"}
    convert_checkpoint(str(source), start, variant="learnable", options=third | learnable, say=lambda _: None)
    config = edit(uptrain, {"train.init_from": str(start), "uptrain.morph_steps": 15, "optim.lambda_lr_scale": 0.0})
    train(config, tmp_path / "whole")
    rows = [row for row in comparable(tmp_path / "whole") if row["split"] == "lambdas"]
    assert [(row["first"], row["own"]) for row in rows] == [
        ([pytest.approx(2 / 3)] * 2, [pytest.approx(1 / 3)] * 2),
        ([1.0] * 2, [0.0] * 2),
    ]
    crash_after(config, tmp_path / "cut", 7, monkeypatch)
    train(config, tmp_path / "cut", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "cut")
    found = convert_checkpoint(
        str(tmp_path / "whole" / "model"),
        tmp_path / "svformer",
        variant="svformer",
        options=svformer,
        say=lambda _: None,
    )
    assert found.exact and max(found.differences.values()) == 0
    one, other = (load_model(place)[0] for place in (tmp_path / "whole", tmp_path / "svformer"))
    ids = torch.randint(300, (2, 30))
    assert other.config.variant == "svformer" and not any("layers.5.self_attn.v_proj" in n for n in other.state_dict())
    torch.testing.assert_close(one(ids).logits, other(ids).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train.init_from": "none"}, r"train\.init_from is not set, .*pass --init-from MODEL"),
        ({"model.hidden_size": 64}, r"model\.hidden_size is set, but the model is taken whole from train\.init_from"),
        ({"model.variant": "svformer"}, r"model\.variant is set, .* make another model with `resformer convert`"),
        ({"train.init_from": "SOURCE"}, r"is a llama, .* convert it first: `resformer convert"),
        ({"train.init_from": "/no/such"}, r"no model at /no/such"),
        ({"uptrain.source": "/no/such"}, r"no model at /no/such"),
        ({"data.sequence_length": 128}, r"data\.sequence_length 128 is over model\.max_position_embeddings 64"),
        ({"uptrain.source": "OTHER"}, r"uptrain\.source .* has a vocabulary of 60 entries, the model one of 300"),
        ({"data.dir": "CORPUS"}, r"encoded with another tokenizer .*first difference: the token .*--tokenizer"),
        ({"uptrain.morph_steps": 5, "optim.lambda_lr_scale": 0.0}, r"the model has no layer with learned weights"),
    ],
)
def test_mistakes_are_named_before_anything_is_written(
    uptrain: Config, source: Path, shared: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    if "OTHER" in changes.values():
        new_model(0, eos_token_id=0).save_pretrained(tmp_path / "other")
        PreTrainedTokenizerFast.from_pretrained(source).save_pretrained(tmp_path / "other")
    if "CORPUS" in changes.values():
        (tmp_path / "text").mkdir()
        text = write_text(tmp_path / "text", seed=7)
        prepare(text, tmp_path / "corpus", vocab_size=300, validation_share=0.1, progress=False)
    places = {"SOURCE": str(source), "OTHER": str(tmp_path / "other"), "CORPUS": str(tmp_path / "corpus")}
    changed = {path: places.get(value, value) if isinstance(value, str) else value for path, value in changes.items()}
    with pytest.raises(UserError, match=message):
        train(edit(edit(uptrain, {"train.init_from": str(shared)}), changed), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"uptrain.kl": 0.5}, r"uptrain\.kl is 0\.5, but there is no uptrain\.source"),
        ({"uptrain.morph_steps": 5}, r"set optim\.lambda_lr_scale=0"),
        ({"uptrain.kl": 1.5}, r"uptrain\.kl"),
        ({"uptrain.temperature": 0.0}, r"uptrain\.temperature"),
    ],
)
def test_keys_that_do_not_go_together(uptrain: Config, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        edit(uptrain, changes)


def test_runs_without_a_source_have_none(whole_run: Path) -> None:
    with pytest.raises(UserError, match=r"has no score of a source: train it with --set uptrain\.source=MODEL"):
        recovery(whole_run)
    with pytest.raises(UserError, match=r"no run in"):
        recovery(whole_run / "nothing")
    assert cli.main(["recovery"]) == 2


def test_a_resumed_run_is_told_on_the_text_of_its_source(
    uptrain: Config, source: Path, shared: Path, tmp_path: Path
) -> None:
    config = edit(uptrain, {"train.init_from": str(shared), "uptrain.source": str(source), "train.steps": 5})
    train(config, tmp_path / "run")
    longer = edit(config, {"train.steps": 6, "train.validation_tokens": 64})
    with pytest.raises(UserError, match=r"train\.validation_tokens is 320 in the run and 64 now"):
        train(longer, tmp_path / "run", resume=True, on_change="continue")
    train(edit(config, {"train.steps": 6}), tmp_path / "run", resume=True, on_change="continue")
    assert recovery(tmp_path / "run").points[-1][0] == 6


def test_a_source_in_16_bits_is_scored_and_teaches_in_those_of_the_run(
    uptrain: Config, source: Path, tmp_path: Path
) -> None:
    place, start = tmp_path / "bf16", tmp_path / "learnable"
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    model.save_pretrained(place)
    for path in (*source.glob("tokenizer*.json"), source / "chat_template.jinja"):
        shutil.copy(path, place / path.name)
    convert_checkpoint(str(place), start, variant="learnable", say=lambda _: None)
    how = {"train.init_from": str(start), "uptrain.source": str(place), "uptrain.kl": 0.5, "train.steps": 1}
    train(edit(uptrain, how), tmp_path / "run")
    rows = comparable(tmp_path / "run")
    first = {row["split"]: row["loss"] for row in rows if row["step"] == 0 and row.get("domain") == "all"}
    assert first["source"] == pytest.approx(first["validation"], abs=1e-6)
    assert next(row["kl"] for row in rows if row["split"] == "train") == pytest.approx(0.0, abs=1e-6)


def test_a_dry_run_sees_the_same_mistakes(
    uptrain: Config, source: Path, shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = edit(uptrain, {"train.init_from": str(shared), "uptrain.source": str(source)})
    train(config, tmp_path / "run", dry_run=True)
    assert 'variant = "svformer"' in capsys.readouterr().out
    with pytest.raises(UserError, match="no model at /no/such"):
        train(edit(config, {"uptrain.source": "/no/such"}), tmp_path / "run", dry_run=True)
    (tmp_path / "text").mkdir()
    other = prepare(
        write_text(tmp_path / "text", seed=7), tmp_path / "data", vocab_size=300, validation_share=0.1, progress=False
    )
    with pytest.raises(UserError, match="encoded with another tokenizer"):
        train(edit(config, {"data.dir": str(other)}), tmp_path / "run", dry_run=True)
