"""Models that `resformer.patch` has changed, opened by name: with their value residual, by every command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import evaluate_helpers as helpers
import pytest
import torch
from transformers import LlamaModel

import resformer
from resformer import cli
from resformer.errors import UserError
from resformer.evaluate.loading import load_model
from resformer.evaluate.texts import score_texts

TEXT = "The river runs down to the sea, and the sea takes it. A light is seen far above us.\n" * 6
RECORD = "resformer_patch"
# With parameters, which stock transformers reports, and without, which it loads in silence.
PATCHES: list[tuple[str, dict[str, Any]]] = [("learnable", {"init_first": 0.7}), ("constant", {"first": 3.0})]


@pytest.fixture(params=PATCHES, ids=lambda patch: patch[0])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Path]:
    """A patched model in memory, and the directory that it and a tokenizer were saved to."""
    variant, options = request.param
    model = resformer.patch(helpers.llama(), variant=variant, variant_options=options)
    return model, helpers.save(model, helpers.plain_tokenizer(), tmp_path / "patched")


def ids() -> torch.Tensor:
    return torch.randint(3, helpers.VOCAB, (2, 12), generator=torch.Generator().manual_seed(2))


@torch.no_grad()
def test_it_comes_back_patched(saved: tuple[Any, Path]) -> None:
    model, place = saved
    loaded, _ = load_model(place)
    assert type(loaded) is type(model) and not loaded.training
    assert torch.equal(loaded(ids()).logits, model(ids()).logits)
    assert not torch.equal(loaded(ids()).logits, helpers.llama()(ids()).logits)
    low, _ = load_model(place, dtype=torch.bfloat16)
    assert low.dtype == torch.bfloat16
    assert all(x.dtype == torch.float32 for name, x in low.named_parameters() if "value_residual" in name)


def test_eval_gives_the_loss_of_the_model_in_memory(saved: tuple[Any, Path], tmp_path: Path) -> None:
    model, place = saved
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    arguments = ["--text", str(text), "--json", str(tmp_path / "found.json"), "--device", "cpu"]
    assert cli.main(["eval", str(place), *arguments]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    patched, stock = (score_texts(one, helpers.plain_tokenizer(), [TEXT])[0] for one in (model, helpers.llama()))
    assert found["loss"] == pytest.approx(-patched.log_probability / patched.tokens, abs=1e-6)
    assert abs(patched.log_probability - stock.log_probability) / patched.tokens > 1e-3


def test_generate_gives_the_tokens_of_the_model_in_memory(saved: tuple[Any, Path], tmp_path: Path) -> None:
    model, place = saved
    arguments = ["--prompt", "The river", "--max-new-tokens", "8", "--temperature", "0", "--device", "cpu"]
    assert cli.main(["generate", str(place), *arguments, "--check-cache", "--json", str(tmp_path / "g.json")]) == 0
    tokenizer = helpers.plain_tokenizer()
    prompt = torch.tensor([tokenizer("The river").input_ids])
    made = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False)
    found = json.loads((tmp_path / "g.json").read_text())
    assert made[0, prompt.shape[1] :].tolist() == found["results"][0]["tokens"]


def test_what_is_no_language_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = resformer.patch(LlamaModel(helpers.llama().config), variant="constant")
    place = helpers.save(model, helpers.plain_tokenizer(), tmp_path / "stack")
    with pytest.raises(UserError, match="is a LlamaModel; expected a causal language model"):
        load_model(place)


def test_a_record_that_does_not_fit_is_one_line(saved: tuple[Any, Path], capsys: pytest.CaptureFixture[str]) -> None:
    _, place = saved
    file = place / "config.json"
    about = json.loads(file.read_text())
    for record, message in (
        ({**about[RECORD], "version": 99}, "newer resformer"),
        ({**about[RECORD], "variant": "mine"}, "unknown variant 'mine'"),
        ("yes", "expected variant, variant_options and version"),
    ):
        file.write_text(json.dumps({**about, RECORD: record}))
        assert cli.main(["generate", str(place), "--prompt", "x", "--device", "cpu"]) == 2
        error = capsys.readouterr().err.strip().splitlines()
        assert len(error) == 1 and message in error[0], error


def test_a_directory_without_a_tokenizer_names_the_way_out(saved: tuple[Any, Path]) -> None:
    _, place = saved
    (place / "tokenizer.json").unlink()
    with pytest.raises(
        UserError, match=r"tokenizer\.json is missing; write it again with save_pretrained of the model"
    ):
        load_model(place)


def test_the_lambdas_of_a_patched_model_are_refused_in_one_line(
    saved: tuple[Any, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    _, place = saved
    assert cli.main(["analyze-lambdas", str(place)]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1 and "lambdas" in error[0]
