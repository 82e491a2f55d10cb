"""Proposals of a Sparse model: what the rule gives where the answer is known, how sure it is, and the command."""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from resformer import ResFormerConfig, ResFormerForCausalLM
from resformer.analyze.proposals import as_option, choose, propose, strengths
from resformer.commands.lambdas import analyze_lambdas
from resformer.core.plan import select_layers
from resformer.core.variants.sparse import Sparse
from resformer.errors import UserError


def history(strength: Any, *, rows: int = 12, drift: float = 0.0, noise: float = 0.0) -> list[dict[str, Any]]:
    """Lambda rows of layers 2.. whose strength is as given, growing by `drift` from the first to the last row."""
    generator = np.random.default_rng(0)
    found = []
    for i in range(rows):
        now = np.asarray(strength) * (1 + drift * i / rows) + 1e-9 * i
        now = now + noise * generator.standard_normal(len(now))
        layers = list(range(2, len(now) + 2))
        found.append({"step": 10 * i, "layers": layers, "first": (now / 2).tolist(), "own": [0.5] * len(now)})
    return found


@pytest.mark.parametrize("depth", [6, 8, 12, 16, 24, 32])
def test_strengths_that_rise_evenly_give_the_last_third(depth: int) -> None:
    found = propose(history(np.arange(depth - 1) + 1.0), depth=depth)
    assert found.layers == select_layers("last_third", depth)
    assert found.variant_options["layers"] == f"last:{len(found.layers)}"
    assert found.confidence == "stable" and found.agreement == 1.0 and found.rank_correlation == pytest.approx(1.0)


def test_the_budget_moves_to_the_layers_chosen() -> None:
    found = propose(history(np.linspace(0.4, 1.0, 7)), depth=8)
    assert found.layers == (6, 7, 8)
    assert found.first == round(4.9 / 3, 1) and found.first_learned == pytest.approx(0.9)
    most = propose(history(np.linspace(1, 31, 31)), depth=32)
    assert most.first == 5.0 and any("asks for first = 45" in note for note in most.notes)


def test_concentrated_strength_gives_fewer_layers_and_scattered_gives_a_list() -> None:
    plus = 16 * np.exp(np.arange(2.0, 9.0)) / np.exp(np.arange(2.0, 9.0)).sum()  # Learnable-Plus as it starts
    assert propose(history(plus), depth=8).layers == (8,)
    found = propose(history([0.1, 3.0, 0.1, 0.1, 0.1, 3.0, 0.1]), depth=8)
    assert found.layers == (3, 7) and found.variant_options["layers"] == [3, 7]
    assert as_option([3, 4], 8) == [3, 4] and as_option([7, 8], 8) == "last:2"


def test_of_equal_layers_the_last_third_is_taken_and_called_unclear() -> None:
    found = propose(history([0.5] * 7), depth=8)
    assert found.layers == (6, 7, 8) and found.confidence == "unclear"
    assert choose([2, 3, 4], np.array([1.0, 2.0, 2.0])) == (3, 4)
    assert choose([2, 3, 4, 5], np.array([0.0, 1.0, 0.0, 1.0])) == (3, 5)
    assert choose([2], np.array([0.3])) == (2,)


def test_confidence_says_what_the_rows_say() -> None:
    rising = np.arange(1.0, 8.0)
    assert propose(history(rising, drift=4.0), depth=8).confidence == "moving"
    assert propose(history(rising / 50 + 1, noise=0.3), depth=8).confidence == "unclear"
    few = propose(history(rising, rows=2), depth=8)
    assert few.confidence == "unknown" and few.agreement is None and "only 2 row" in " ".join(few.notes)
    single = propose(history(rising, rows=1), depth=8)
    assert single.table[0].spread is single.table[0].trend is single.table[0].chosen is None
    assert single.layers == (6, 7, 8)


def test_only_the_last_quarter_counts() -> None:
    rows = history(np.arange(7.0)[::-1] + 1, rows=12)[:8] + history(np.arange(7.0) + 1, rows=12)[8:]
    found = propose(rows, depth=8)
    assert found.layers == (6, 7, 8) and found.steps == (90, 110) and found.rows == 3


def test_weights_below_zero_and_own_weights_near_zero_are_told() -> None:
    assert strengths([1.0, -1.0, 1.0], [0.5, 0.5, -2.0]).tolist() == [2.0, 0.0, 10.0]
    rows = [
        {"step": i, "layers": [2, 3, 4], "first": [-0.2, 0.5, 1.0], "own": [1.0, 0.01 + i / 1e6, 1.0]} for i in range(4)
    ]
    notes = " ".join(propose(rows).notes)
    assert "subtracted in layer(s) 2" in notes and "own weight below 0.1 in layer(s) 3" in notes


def test_the_proposal_is_a_sparse_model_that_can_be_built() -> None:
    found = propose(history(np.arange(7.0) + 1, drift=0.1), depth=8, source=2)
    options = json.loads(json.dumps(found.asdict()))["variant_options"]
    assert options["source"] == 2
    model = ResFormerForCausalLM(config("sparse", {**options, "source": 1}))
    assert model.lambda_map()["layers"] == list(found.layers) and model.lambda_map()["first"] == [found.first] * 3
    assert {*options} <= {*Sparse.options()}


def config(variant: str, options: dict[str, Any], layers: int = 8) -> ResFormerConfig:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    return ResFormerConfig(
        vocab_size=32,
        num_hidden_layers=layers,
        variant=variant,
        variant_options=options,
        **sizes,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "holds no lambdas"),
        (history([1.0], rows=3), "1 layer mixes"),
        (
            [{**row, "first": [0.5] * 3, "own": [0.5] * 3} for row in history([1.0] * 3, rows=3)],
            "the same at all steps",
        ),
        ([*history([1.0, 2.0], rows=2), {"step": 5, "layers": [2], "first": [1.0], "own": [1.0]}], "not alike"),
        ([{"step": 1, "layers": [2, 3], "first": [1.0, math.nan], "own": [1.0, 1.0]}], "not alike"),
        ([{"step": 1, "layers": [2, 3], "first": [1.0, 2.0]}], "not alike"),
    ],
)
def test_runs_without_usable_lambdas_are_user_errors(rows: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        propose(rows, name="runs/x")
    assert str(caught.value).startswith("runs/x: ") and "\n" not in str(caught.value)


def run(place: Path, rows: list[dict[str, Any]], *, lambdas: int = 14) -> Path:
    place.mkdir(parents=True)
    lines = [json.dumps({"split": "lambdas", **row}) for row in rows]
    (place / "metrics.jsonl").write_text("".join(line + "\n" for line in lines) + '{"split": "tra')
    (place / "config.toml").write_text(
        '[model]\nvariant = "learnable"\nnum_hidden_layers = 8\n[model.variant_options]\n'
    )
    about = {"command": ["resformer", "train", "quick"], "accounting": {"parameters_by_group": {"lambdas": lambdas}}}
    (place / "environment.json").write_text(json.dumps(about))
    return place


def test_the_command_prints_a_table_and_a_line_that_trains_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = run(tmp_path / "my runs" / "a", history(np.linspace(0.4, 1.0, 7)))
    analyze_lambdas(place)
    said = capsys.readouterr().out
    assert 'variant sparse, variant_options {"layers": "last:3", "first": 1.6}' in said and "confidence stable" in said
    assert sum(line.rstrip().endswith("yes") for line in said.splitlines()) == 3
    line = next(line for line in said.splitlines() if line.startswith("train it: "))
    words = shlex.split(line.removeprefix("train it: "))
    assert words[:5] == ["resformer", "train", "quick", "--config", str(place / "config.toml")]
    options = ["model.variant_options.layers=last:3", "model.variant_options.first=1.6"]
    assert words[5:10] == ["--variant", "sparse", "--set", *options] and words[10:] == ["--out", f"{place}-sparse"]


def test_the_line_that_trains_it_is_taken_by_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from resformer import lookup

    place = run(tmp_path / "a", history([0.1, 3.0, 0.1, 0.1, 0.1, 3.0, 0.1]))
    analyze_lambdas(place, json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["layers"] == [3, 7] and found["confidence"] == "stable" and len(found["table"]) == 7
    words = shlex.split(found["command"])
    overrides = tuple(words[words.index("--set") + 1 : words.index("--out")])
    flags = {"model.variant": "sparse"}
    chosen = lookup.run_config("quick", file=place / "config.toml", overrides=overrides, flags=flags)
    assert dict(chosen.model.variant_options) == {"layers": [3, 7], "first": found["first"]}


def test_an_exported_model_gives_its_weights_as_one_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ResFormerForCausalLM(config("learnable", {}))
    for layer, block in enumerate(model.model.layers[1:], start=1):
        block.self_attn.value_residual.first.data.fill_(0.1 * layer)
    model.save_pretrained(tmp_path / "model")
    monkeypatch.setattr("resformer.evaluate.loading.load_model", lambda *_: (model, None))  # it has no tokenizer
    analyze_lambdas(tmp_path / "model", json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["layers"] == [6, 7, 8] and found["confidence"] == "unknown" and found["rows"] == 1
    for variant, words in (("sparse", "fixed weights"), ("transformer", "no lambdas")):
        plain = ResFormerForCausalLM(config(variant, {}))
        monkeypatch.setattr("resformer.evaluate.loading.load_model", lambda *_, plain=plain: (plain, None))
        with pytest.raises(UserError, match=words):
            analyze_lambdas(tmp_path / "model")


def test_places_without_lambdas_are_user_errors(tmp_path: Path) -> None:
    empty = run(tmp_path / "empty", [])
    fixed = run(tmp_path / "fixed", history([5.0, 5.0], rows=1), lambdas=0)
    for place, words in ((empty, "no lambdas"), (fixed, "fixed weights"), (tmp_path / "none", "is no run")):
        with pytest.raises(UserError, match=words) as caught:
            analyze_lambdas(place)
        assert "\n" not in str(caught.value)
