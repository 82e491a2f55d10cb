"""`resformer eval` as a whole: what it writes, what it refuses, and that several processes give the same numbers."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import socket
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from evaluate_helpers import bos_tokenizer, llama, ours, plain_tokenizer, save

from resformer.cli import main
from resformer.data import prepare

NEEDS_LM_EVAL = pytest.mark.skipif(not find_spec("lm_eval"), reason="lm-eval is not installed")
TEXTS = {"rivers": "the river runs down to the sea", "stars": "a light — 日本 — is seen far above us\r\n"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Raw text, a model of ours and a Llama with a BOS; and a corpus of the tokenizer of ours."""
    place = tmp_path_factory.mktemp("command")
    (place / "texts").mkdir()
    for domain, text in TEXTS.items():
        rows = [json.dumps({"text": text * (1 + number % 7) + str(number)}) for number in range(23)]
        (place / "texts" / f"{domain}.jsonl").write_text("\n".join(rows) + "\n")
    save(ours(), plain_tokenizer(), place / "ours")
    save(llama(), bos_tokenizer(), place / "llama")
    prepare([place / "texts"], place / "data", tokenizer=place / "ours", validation_share=0.3, progress=False)
    (place / "tasks").mkdir()
    (place / "tasks" / "mine.jsonl").write_text(
        "".join(json.dumps({"query": "the", "choices": ["sea", f"light {n}"], "gold": n % 2}) + "\n" for n in range(5))
    )
    return place


@pytest.fixture(autouse=True)
def inside(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def result(file: Path | str) -> dict[str, Any]:
    return json.loads(Path(file).read_text())


def test_text_with_a_foreign_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "e.json"
    assert main(["eval", "llama", "--text", "texts", "--stride", "8", "--json", str(file), "--batch-size", "3"]) == 0
    said, found = capsys.readouterr(), result(file)
    assert said.err.startswith("scoring ") and "bytes" in said.err
    assert f"{found['loss']:.4f}" in said.out and "24 tokens, 8 apart" in said.out and "rivers" in said.out
    assert set(found["domains"]) == set(TEXTS)
    assert found["domains"]["stars"]["documents"] == 23
    size = sum(len((TEXTS["stars"] * (1 + n % 7) + str(n)).encode()) for n in range(23))
    assert found["domains"]["stars"]["bytes"] == size
    assert found["settings"]["stride"] == 8 and found["settings"]["sequence_length"] == 24
    assert found["settings"]["text"] == ["texts"] and found["settings"]["dtype"] == "fp32"
    assert {"torch", "transformers", "tokenizers", "resformer"} <= set(found["versions"])
    assert (
        found["bos"] == {"policy": "auto", "ids": [321], "why": "what the tokenizer puts there"} or found["bos"]["ids"]
    )
    assert len(found["tokenizer_fingerprint"]) == len(found["text_fingerprint"]) == 64
    assert found["text"]["documents_read"] == 46


def test_bos_and_dtype_change_what_they_should(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = {}
    for name, more in {"auto": [], "none": ["--bos", "none"], "bf16": ["--dtype", "bf16"]}.items():
        file = tmp_path / f"{name}.json"
        assert main(["eval", "ours", "--text", "texts", "--json", str(file), *more]) == 0
        found[name] = result(file)
    assert found["auto"]["overall"]["token_weighted"]["tokens_not_scored"] == 0
    assert found["none"]["overall"]["token_weighted"]["tokens_not_scored"] == 46
    assert "46 first tokens have no context and are not scored" in capsys.readouterr().out
    assert found["none"]["loss"] != found["auto"]["loss"]
    assert found["bf16"]["loss"] != found["auto"]["loss"]
    assert found["bf16"]["loss"] == pytest.approx(found["auto"]["loss"], rel=0.02)


def test_data_keeps_its_keys_and_gets_more(tmp_path: Path) -> None:
    file = tmp_path / "e.json"
    assert main(["eval", "ours", "--data", "data", "--json", str(file)]) == 0
    found = result(file)
    assert {"model", "data", "data_fingerprint", "domains", "loss", "bits_per_byte", "loss_token_weighted"} <= set(
        found
    )
    for row in found["domains"].values():
        assert {"loss", "bits_per_byte", "tokens", "perplexity", "word_perplexity", "words", "bytes"} <= set(row)
    assert main(["eval", "ours", "--data", "data", "--json", str(file)]) == 2
    assert main(["eval", "ours", "--data", "data", "--json", str(file), "--overwrite", "--stride", "3"]) == 0
    assert result(file)["loss"] != found["loss"]
    assert result(file)["domains"]["stars"]["tokens"] == found["domains"]["stars"]["tokens"]


def test_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"the sea\n")))
    assert main(["eval", "ours", "--text", "-", "--json", str(tmp_path / "e.json")]) == 0
    assert result(tmp_path / "e.json")["domains"]["stdin"]["bytes"] == 8


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("eval ours", "nothing to measure: pass --data DIR, --text INPUT... or --tasks NAMES"),
        ("eval ours --data data --text texts", "--data and --text exclude each other"),
        ("eval ours --text nowhere", "--text: no file or directory 'nowhere'"),
        ("eval ours --text texts --stride 0", "--stride is 0; expected 1 to"),
        ("eval ours --text texts --stride 25", "--stride is 25; expected 1 to the sequence length (24)"),
        ("eval ours --text texts --stride 9 --sequence-length 8", "--stride is 9, over --sequence-length 8"),
        ("eval ours --text texts --sequence-length 25", "over the model's 24 positions"),
        ("eval ours --text texts --bos model", "--bos model: neither the tokenizer nor the config"),
        ("eval ours --text texts --bos moddel", "moddel"),
        ("eval ours --text texts --dtype fp16", "fp16"),
        ("eval ours --text texts --text-column body", "expected a string in the field 'body'"),
        ("eval ours --text texts --task-files tasks", "--task-files says where data of tasks lie"),
        pytest.param(
            "eval ours --tasks mine --task-files nowhere", "--task-files nowhere is no directory", marks=NEEDS_LM_EVAL
        ),
        pytest.param("eval ours --tasks helaswag --task-files tasks", "did you mean 'hellaswag'?", marks=NEEDS_LM_EVAL),
        pytest.param("eval nothing --tasks mine --task-files tasks", "no model at nothing", marks=NEEDS_LM_EVAL),
        ("eval ours --text texts --limit 0", "--limit is 0"),
    ],
)
def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path, line: str, message: str) -> None:
    assert main([*line.split(), "--json", str(tmp_path / "e.json")]) == 2
    *_, last = capsys.readouterr().err.splitlines()
    assert message in last and not (tmp_path / "e.json").exists()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    """A forked process has none of its parent's threads, and would wait for them."""
    torch.set_num_threads(1)


def in_processes(count: int, place: Path, *arguments: str) -> list[tuple[int | None, str, str]]:
    """(exit code, standard output, standard error) of the command in each of several processes, started as torchrun
    does it, but without the imports.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def run(rank: int) -> None:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        with open(place / f"out{rank}", "w") as out, open(place / f"err{rank}", "w") as err:
            sys.stdout, sys.stderr = out, err
            try:
                code = main(list(arguments))
            except SystemExit as stop:
                code = int(stop.code or 0)
        os._exit(code)

    context = multiprocessing.get_context("fork")
    children = [context.Process(target=run, args=(rank,)) for rank in range(count)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
        child.kill()
    return [
        (child.exitcode, (place / f"out{rank}").read_text(), (place / f"err{rank}").read_text())
        for rank, child in enumerate(children)
    ]


def same(one: Any, other: Any) -> None:
    """Equal to 1e-6, apart from what says how many processes there were."""
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert set(one) == set(other)
        for key in one.keys() - {"processes", "json"}:
            same(one[key], other[key])
    elif isinstance(one, float):
        assert one == pytest.approx(other, rel=1e-6, abs=1e-6)
    else:
        assert one == other


@pytest.mark.parametrize("what", [["--text", "texts", "--stride", "7"], ["--data", "data"]])
def test_two_processes_give_the_numbers_of_one(tmp_path: Path, what: list[str]) -> None:
    line = ["eval", "ours", *what, "--batch-size", "3"]
    if "--text" in what and find_spec("lm_eval"):
        line += ["--tasks", "mine", "--task-files", "tasks"]
    assert main([*line, "--json", str(tmp_path / "one.json")]) == 0
    first, second = in_processes(2, tmp_path, *line, "--json", str(tmp_path / "two.json"))
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    assert "written" in first[1] and second[1:] == ("", "")
    two = result(tmp_path / "two.json")
    assert two["settings"]["processes"] == 2
    same(result(tmp_path / "one.json"), two)


def test_a_mistake_in_two_processes_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "the sea"}\n{\n')
    first, second = in_processes(
        2, tmp_path, "eval", "ours", "--text", str(tmp_path / "bad.jsonl"), "--json", str(tmp_path / "e.json")
    )
    assert (first[0], second[0]) == (2, 2)
    assert "bad.jsonl:2: not valid JSON" in first[2] and second[2] == ""
