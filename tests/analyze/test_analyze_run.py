"""`resformer analyze`: the same numbers however it is cut and interrupted, and what it refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from resformer import ResFormerConfig, ResFormerForCausalLM, cli
from resformer.analyze import run as run_module
from resformer.analyze.probe import DEFAULT_GROUPS, Probe
from resformer.analyze.record import Means
from resformer.analyze.run import MEASURES, Settings, analyze, labels_of
from resformer.analyze.texts import read_texts, windows
from resformer.errors import UserError
from resformer.evaluate.encoding import TextEncoder, start_of_documents


def make_model(path: Path, variant: str, seed: int = 0) -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = ResFormerConfig(variant=variant, vocab_size=len(words), max_position_embeddings=64, **sizes)
    ResFormerForCausalLM(config).save_pretrained(path)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("analyze")
    for variant in ("transformer", "learnable"):
        make_model(place / variant, variant)
    (place / "text").mkdir()
    for i in range(9):
        (place / "text" / f"{i}.txt").write_text(f"Text number {i}. " * (2 + i))
    return place


def settings(place: Path, **changes: object) -> Settings:
    return Settings(**{"inputs": (str(place / "text"),), "length": 32, "texts": 6, **changes})  # type: ignore[arg-type]


def made(model: Any, tokenizer: Any, texts: list[str], *, bos: str = "auto", **how: Any) -> torch.Tensor:
    encoder, start = TextEncoder(tokenizer, vocab_size=257), start_of_documents(model, tokenizer, bos)
    return windows(encoder, start, tokenizer.eos_token_id, texts, **how)


def numbers(rows: list[dict]) -> dict[tuple, float | list[float]]:
    return {(r["model"], r["measure"], r["layer"]): r.get("value", r.get("values")) for r in rows}


def test_rows_are_the_means_of_the_probe_over_the_texts(place: Path, tmp_path: Path) -> None:
    models = [str(place / "transformer"), str(place / "learnable")]
    rows = analyze(models, tmp_path / "out", settings(place), progress=False)
    assert [json.loads(line) for line in (tmp_path / "out" / MEASURES).read_text().splitlines()] == rows
    assert {row["model"] for row in rows} == {"transformer", "learnable"}
    from resformer.evaluate.loading import load_model

    model, tokenizer = load_model(models[1])
    texts = [(place / "text" / f"{i}.txt").read_text() for i in range(9)]
    tokens = made(model, tokenizer, texts, length=32, count=6, source="documents")
    assert tokenizer.decode(tokens[0]) == "<end>" + texts[1][:31]
    found = numbers(rows)
    each = [Probe(model)(tokens[i : i + 1]) for i in range(6)]
    for (measure, layer), value in each[0].items():
        expected = torch.cat([one[measure, layer] for one in each]).double()
        got = torch.tensor(found["learnable", measure, layer], dtype=torch.float64)
        assert torch.allclose(got, expected.mean(0), rtol=1e-6, atol=1e-9), (measure, layer)
        if value.dim() == 1:
            row = next(r for r in rows if (r["model"], r["measure"], r["layer"]) == ("learnable", measure, layer))
            assert row["standard_error"] == pytest.approx(float(expected.std()) / math.sqrt(6), rel=1e-5, abs=1e-9)
            assert row["texts"] == 6
    assert ("learnable", "read_value_share", 2) in found and ("transformer", "read_value_share", 2) not in found
    assert ("learnable", "loss_without_mlp", 3) in found


def test_batches_change_nothing(place: Path, tmp_path: Path) -> None:
    models = [str(place / "learnable")]
    one, three = (numbers(analyze(models, tmp_path / f"{b}", settings(place, batch=b), progress=False)) for b in (1, 4))
    assert one.keys() == three.keys()
    for key, value in one.items():
        assert torch.allclose(torch.tensor(value), torch.tensor(three[key]), rtol=1e-4, atol=1e-6), key


def test_it_goes_on_where_it_was_stopped(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = [str(place / "learnable")]
    expected = analyze(models, tmp_path / "whole", settings(place), progress=False)
    monkeypatch.setattr(run_module, "_SAVE_SECONDS", 0.0)
    calls: list[int] = []
    stopping = [True]
    whole = Probe.__call__

    def stop_at_four(self: Probe, *a: torch.Tensor) -> object:
        calls.append(1)
        if stopping and len(calls) == 4:
            raise KeyboardInterrupt
        return whole(self, *a)

    monkeypatch.setattr(Probe, "__call__", stop_at_four)
    with pytest.raises(KeyboardInterrupt):
        analyze(models, tmp_path / "out", settings(place), progress=False)
    stopping.clear()
    assert not (tmp_path / "out" / MEASURES).exists()
    again = analyze(models, tmp_path / "out", settings(place), progress=False)
    assert len(calls) == 4 + 3 and again == expected
    # Another model beside it: no window of the first is measured again, and its rows stay.
    calls.clear()
    both = analyze([str(place / "transformer")], tmp_path / "out", settings(place), progress=False)
    assert len(calls) == 6 and [row for row in both if row["model"] == "learnable"] == expected
    assert {row["model"] for row in both} == {"learnable", "transformer"}
    # Other settings begin anew, when that is said.
    calls.clear()
    with pytest.raises(UserError, match=r"was measured with other settings \(sequence_length\)"):
        analyze(models, tmp_path / "out", settings(place, length=16))
    rows = analyze(models, tmp_path / "out", settings(place, length=16), overwrite=True)
    assert len(calls) == 6 and {row["model"] for row in rows} == {"learnable"}


def test_a_model_that_fails_does_not_take_the_others_with_it(place: Path, tmp_path: Path) -> None:
    models = [str(place / "nowhere"), str(place / "transformer")]
    with pytest.raises(UserError, match="no model at"):
        analyze(models, tmp_path / "out", settings(place), progress=False)
    assert '"model": "transformer"' in (tmp_path / "out" / MEASURES).read_text()
    with pytest.raises(UserError, match="no model at"):
        analyze(models[:1], tmp_path / "other", settings(place), progress=False)
    assert not (tmp_path / "other").exists()


def test_each_group_alone(place: Path, tmp_path: Path) -> None:
    whole = numbers(analyze([str(place / "learnable")], tmp_path / "all", settings(place), progress=False))
    seen: set[tuple] = set()
    for group in DEFAULT_GROUPS:
        rows = analyze([str(place / "learnable")], tmp_path / group, settings(place, groups=(group,)), progress=False)
        found = numbers(rows)
        assert found and found.items() <= whole.items()
        seen |= found.keys()
    assert seen == whole.keys()
    assert ("learnable", "lambda_first", 2) in seen and ("learnable", "value_spectrum", 1) in seen


def test_joined_windows_and_too_little_text(place: Path, tmp_path: Path) -> None:
    from resformer.evaluate.loading import load_model

    model, tokenizer = load_model(place / "learnable")
    texts = ["abc", "defgh", "i"]
    joined = made(model, tokenizer, texts, bos="none", length=4, count=9, source="joined")
    assert [tokenizer.decode(row) for row in joined] == ["abc<end>", "defg", "h<end>i<end>"]
    assert made(model, tokenizer, texts, bos="none", length=4, count=1, source="auto").tolist() == [
        tokenizer("defg")["input_ids"]
    ]
    assert len(made(model, tokenizer, texts, bos="none", length=4, count=2, source="auto")) == 2
    started = made(model, tokenizer, texts, length=4, count=9, source="joined")
    assert [tokenizer.decode(row) for row in started] == ["<end>abc", "<end><end>de", "<end>fgh", "<end><end>i<end>"]
    literal = made(model, tokenizer, ["a<end>b, c"], length=8, count=1, source="documents")
    assert literal[0].tolist().count(tokenizer.eos_token_id) == 1
    with pytest.raises(UserError, match="--text: gives not one window of 40 tokens"):
        made(model, tokenizer, texts, length=40, count=1, source="auto")


def test_texts_come_from_all_sources_in_turns(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"text": "{name}{i}"}}\n' for i in range(9)))
    names = [str(tmp_path / f"{name}.jsonl") for name in "ab"]
    assert read_texts(names, enough=8)[:4] == ["a0", "b0", "a1", "b1"]
    assert len(read_texts(names, enough=8)) == 4


def test_a_measure_without_a_value_counts_for_nothing() -> None:
    means = Means()
    means.add({("a", 1): torch.tensor([1.0, float("nan"), 3.0])}, 3)
    assert list(means.rows()) == [{"measure": "a", "layer": 1, "texts": 2, "value": 2.0, "standard_error": 1.0}]
    means = Means()
    means.add({("a", 1): torch.tensor([float("nan")])}, 1)
    assert next(means.rows())["value"] is None


def test_labels_are_short_and_different() -> None:
    assert labels_of(["runs/a/model", "runs/b/model"]) == ["a/model", "b/model"]
    assert labels_of(["x", "org/y"]) == ["x", "y"]
    assert labels_of(["a/b", "/a/b"]) == ["1:a/b", "2:a/b"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("analyze transformer --text text --out out --sequence-length 1", "--sequence-length: got 1"),
        ("analyze transformer --text text --out out --sequence-length 65", "transformer has 64 positions"),
        ("analyze transformer --text text --out out --texts 0", "--texts: got 0"),
        (
            "analyze transformer --text text --out out --measures valuse",
            "--measures: got 'valuse'; did you mean 'values'",
        ),
        ("analyze transformer --text nowhere --out out", "--text: no file or directory 'nowhere'"),
        ("analyze transformer --text text --out text", "holds files that no analysis wrote"),
        ("analyze --text text --out out", "MODEL: got none"),
        ("analyze transformer --text text --out out --bos end", "--bos: got 'end'"),
        ("analyze nowhere --text text --out out --sequence-length 8", "no model at nowhere"),
        ("analyze transformer transformer --text text --out out", "named twice"),
    ],
)
def test_mistakes_are_one_line(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, line: str, message: str
) -> None:
    monkeypatch.chdir(place)
    assert cli.main(line.split()) == 2
    said = capsys.readouterr().err.splitlines()
    assert message in said[-1]
