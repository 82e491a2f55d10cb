"""Tasks through lm-eval with local files: names, formats, prompts, and numbers that can be recomputed."""

from __future__ import annotations

import bz2
import json
import math
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evaluate_helpers import llama, ours, plain_tokenizer

from resformer.cli import main
from resformer.data import prepare
from resformer.errors import UserError
from resformer.evaluate import evaluate_texts, open_tasks, run_tasks, score_texts, stock_tasks, task_names
from resformer.evaluate.tasks import PRESETS, mean_accuracy
from resformer.evaluate.text_source import TextSource

pytest.importorskip("lm_eval")

ACTIVITY = "Roof removal: A man sits. A dog (in the NYC) barks. he then"
HELLASWAG = ["falls.", "runs off.", "  sings [title] aloud.", "sleeps."]
QUESTION = {"query": "Question: Which is wet?", "choices": ["a stone", "the sea", "a light"], "gold": 1}
ROWS: dict[str, list[Mapping[str, Any]]] = {
    "arc_easy": [QUESTION, {"query": "Question: Far?", "choices": ["us", "above", "a", "b"], "gold": 0}],
    "arc_challenge": [{"question": "Wet?", "choices": {"text": ["sea", "sun"], "label": ["1", "2"]}, "answerKey": "2"}],
    "openbook_qa": [{"query": "Predators eat", "choices": ["lions", "sea", "grass", "us"], "gold": 1}],
    "piqa": [{"query": "Question: How to swim?\n", "choices": ["in the sea", "above"], "gold": 0}],
    "winogrande": [
        {"context_options": ["Al saw Bo so Al", "Al saw Bo so Bo"], "continuation": "ran far.", "gold": 1},
        {"context_options": ["the_sea is a", "the_sea is the"], "continuation": "light", "gold": 0},
    ],
    "lambada": [{"context": "down to the", "continuation": "sea"}, {"context": "far above", "continuation": "us"}],
    "wikitext": [{"page": "the sea takes it , again"}, {"text": "x"}][:1],
    "mine": [QUESTION],
    "schema": [{"context_options": ["a b", "a c"], "continuation": "d", "gold": 0}],
    "blimp_wh_island": [{"sentence_good": "the sea is seen", "sentence_bad": "sea the is seen"}],
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("tasks")
    for name, rows in ROWS.items():
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = "\n".join([ACTIVITY, "1", *HELLASWAG]) + "\n"
    (place / "hellaswag_val_full.txt.bz2").write_bytes(bz2.compress(text.encode()))
    (place / "blimp").mkdir()
    (place / "blimp" / "causative.jsonl").write_text(
        json.dumps({"sentence_good": "he runs", "sentence_bad": "runs he"}) + "\n"
    )
    (place / "readme.md").write_text("not a task")
    return place


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def big(make: Any) -> Any:
    """With room for the prompts."""
    if make is ours:
        return ours(max_position_embeddings=256)
    model = llama()
    model.config.max_position_embeddings = 256
    return model


def run(wanted: str, files: Path, model: Any, tokenizer: Any, **how: Any) -> dict[str, Any]:
    with open_tasks(task_names([wanted]), task_files=files) as tasks:
        return run_tasks(model, tokenizer, tasks, **how)


def test_names() -> None:
    assert task_names(["piqa,wikitext", "paper", "piqa"])[:3] == ("piqa", "wikitext", "hellaswag")
    assert len(task_names(["piqa,wikitext", "paper", "piqa"])) == 7
    assert task_names(["piqa, hellaswag", "wikitext"]) == ("piqa", "hellaswag", "wikitext")
    assert set(task_names(["paper"])) == {
        "hellaswag", "openbookqa", "winogrande", "arc_challenge", "arc_easy", "piqa"
    }  # fmt: skip
    with pytest.raises(UserError, match="expected names separated by commas"):
        task_names(["piqa,,x"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("helaswag", "unknown task 'helaswag'; did you mean 'hellaswag'"),
        ("arc_eazy", "did you mean 'arc_easy'"),
        ("papr", "did you mean 'paper'"),
        ("xyzzyxyzzy", "unknown task 'xyzzyxyzzy' \\(`lm-eval ls tasks`"),
    ],
)
def test_a_wrong_name_is_said_before_anything_is_loaded(files: Path, name: str, message: str) -> None:
    with pytest.raises(UserError, match=message), open_tasks(["piqa", name], task_files=files):
        pass


def test_what_lm_eval_has_is_known_without_its_index() -> None:
    names = stock_tasks.names()
    assert all(names[name][0] == "task" for name in (*PRESETS["paper"], "wikitext", "lambada_openai"))
    assert names["blimp"][0] == "group" and names["ai2_arc"][0] == "tag"
    assert len(stock_tasks.children("blimp")) == 67
    assert stock_tasks.directories(["blimp", "piqa"]) is not None
    assert stock_tasks.directories(["ai2_arc"]) is None  # a tag: only the whole index knows


def test_without_lm_eval_it_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stock_tasks, "version", lambda package: "0.4.11")
    with pytest.raises(UserError, match=r"lm-eval 0.4.11 is too old; type: pip install 'lm-eval>=0.4.12'"):
        stock_tasks.check_installed()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with (
        pytest.raises(UserError, match=r"--tasks needs lm_eval; type: pip install 'resformer\[eval\]'"),
        open_tasks(["piqa"]),
    ):
        pass


def prompts(files: Path, name: str) -> list[list[tuple[str, str]]]:
    """(context, continuation) of each choice of each row, as lm-eval asks the model."""
    with open_tasks([name], task_files=files) as tasks:
        (task,) = tasks.objects
        task.build_all_requests(limit=None, rank=0, world_size=1)
        rows: dict[int, list[tuple[str, str]]] = {}
        for instance in task.instances:
            rows.setdefault(instance.doc_id, []).append(instance.args)
        assert task.config.task == tasks.names[0]
        return list(rows.values())


@pytest.mark.usefixtures("no_network")
def test_stock_prompts_are_in_force(files: Path) -> None:
    said = "Roof removal: A man sits. A dog (in the NYC) barks. He then"
    assert prompts(files, "hellaswag") == [
        [(said, f" {end}") for end in ("falls.", "runs off.", "sings. aloud.", "sleeps.")]
    ]
    assert prompts(files, "arc_easy")[0] == [
        ("Question: Which is wet?\nAnswer:", f" {choice}") for choice in QUESTION["choices"]
    ]
    assert prompts(files, "arc_challenge") == [
        [("Question: Wet?\nAnswer:", " sea"), ("Question: Wet?\nAnswer:", " sun")]
    ]
    assert prompts(files, "openbookqa")[0][1] == ("Predators eat", " sea")
    assert prompts(files, "piqa") == [
        [("Question: How to swim?\nAnswer:", " in the sea"), ("Question: How to swim?\nAnswer:", " above")]
    ]
    assert prompts(files, "winogrande") == [
        [("Al saw Bo so Al", " ran far."), ("Al saw Bo so Bo", " ran far.")],
        [("the_sea is a", " light"), ("the_sea is the", " light")],
    ]
    assert prompts(files, "lambada_openai") == [[("down to the", " sea")], [("far above", " us")]]
    assert prompts(files, "wikitext") == [[("the sea takes it, again",)]]
    assert prompts(files, "mine") == [[("Question: Which is wet?", f" {choice}") for choice in QUESTION["choices"]]]
    assert prompts(files, "schema_local") == [[("a b", " d"), ("a c", " d")]]


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("make", [ours, llama])
def test_numbers_at_batch_sizes_1_3_and_8_against_our_own(files: Path, make: Any) -> None:
    model, tokenizer = big(make), plain_tokenizer()
    some = [
        run("arc_easy,hellaswag,lambada_openai,winogrande,mine,wikitext", files, model, tokenizer, batch_size=size)
        for size in (1, 3, 8)
    ]
    for found in some:
        assert list(found) == ["arc_easy", "hellaswag", "lambada_openai", "winogrande", "mine_local", "wikitext"]
        for name, row in found.items():
            for metric, one in row["metrics"].items():
                assert one["value"] == pytest.approx(some[0][name]["metrics"][metric]["value"], abs=1e-4, rel=1e-4)
    found = some[0]
    assert found["arc_easy"]["documents"] == 2 and found["arc_easy"]["num_fewshot"] == 0
    assert found["mine_local"]["local"]["note"].startswith("the query as it stands")
    assert found["arc_easy"]["metrics"]["acc"]["stderr"] is not None
    # The same by hand: the choice whose tokens are likeliest after the prompt.
    right, logs = 0, []
    for row in ROWS["arc_easy"]:
        prompt = f"{row['query']}\nAnswer:"
        scores = [tail(model, tokenizer, prompt, f" {choice}") for choice in row["choices"]]
        right += int(np.argmax(scores)) == row["gold"]
    assert found["arc_easy"]["metrics"]["acc"]["value"] == right / 2
    for row in ROWS["lambada"]:
        logs.append(tail(model, tokenizer, row["context"], f" {row['continuation']}"))
    assert found["lambada_openai"]["metrics"]["perplexity"]["value"] == pytest.approx(
        math.exp(-np.mean(logs)), rel=1e-3
    )
    assert mean_accuracy(found, ["arc_easy", "winogrande"]) is not None
    assert mean_accuracy(found, ["arc_easy", "wikitext"]) == found["arc_easy"]["metrics"]["acc"]["value"]
    assert mean_accuracy(found, ["wikitext"]) is None


def tail(model: Any, tokenizer: Any, prompt: str, rest: str) -> float:
    """Log-probability of `rest` after `prompt`, the prompt's own tokens being those of the whole."""
    count = len(tokenizer(prompt).input_ids)
    return float(score_texts(model, tokenizer, [prompt + rest], bos="none")[0].log_probabilities[count:].sum())


@pytest.mark.usefixtures("no_network")
def test_word_and_byte_perplexity_are_those_of_lm_evals_wikitext(files: Path, tmp_path: Path) -> None:
    pages = [" the sea takes it, and \n a light is seen \n", "x far above us"]
    (tmp_path / "wikitext.jsonl").write_text("".join(json.dumps({"text": page}) + "\n" for page in pages))
    model, tokenizer = big(llama), plain_tokenizer()
    tokenizer.bos_token = tokenizer.eos_token  # as GPT-2 has it: lm-eval puts it before a text
    theirs = run("wikitext", tmp_path, model, tokenizer)["wikitext"]["metrics"]
    # Its detokenizer moves white space, but words and bytes are counted before that: so do the same to the text.
    moved = [page.replace(" \n", "\n").replace("\n ", "\n") for page in pages]
    scores = score_texts(model, tokenizer, moved, bos="model")
    nll = -sum(score.log_probability for score in scores)
    from resformer.evaluate.summary import count_words

    assert theirs["word_perplexity"]["value"] == pytest.approx(math.exp(nll / sum(map(count_words, pages))), rel=1e-4)
    assert theirs["byte_perplexity"]["value"] == pytest.approx(
        math.exp(nll / sum(len(page.encode()) for page in pages)), rel=1e-4
    )
    (tmp_path / "same.jsonl").write_text(json.dumps({"text": "the sea takes it"}) + "\n")
    (tmp_path / "wikitext.jsonl").write_text(json.dumps({"page": "the sea takes it"}) + "\n")
    theirs = run("wikitext", tmp_path, model, tokenizer)["wikitext"]["metrics"]
    text = TextSource([tmp_path / "same.jsonl"]).documents()
    found = evaluate_texts(model, tokenizer, text, sequence_length=24, bos="model")["domains"]["same"]
    for metric in ("word_perplexity", "byte_perplexity", "bits_per_byte"):
        assert theirs[metric]["value"] == pytest.approx(found[metric], rel=1e-5)


@pytest.mark.usefixtures("no_network")
def test_limit_shots_and_a_group_of_local_files(files: Path) -> None:
    model, tokenizer = big(ours), plain_tokenizer()
    found = run("arc_easy,blimp", files, model, tokenizer, limit=1, num_fewshot=1)
    assert found["arc_easy"]["documents"] == 1 and found["arc_easy"]["num_fewshot"] == 1
    assert set(found) == {"arc_easy", "blimp", "blimp_wh_island", "blimp_causative"}
    inner = [found[name]["metrics"]["acc"]["value"] for name in ("blimp_wh_island", "blimp_causative")]
    assert found["blimp"]["metrics"]["acc"]["value"] == sum(inner) / 2
    assert found["blimp_causative"]["local"]["file"].endswith("causative.jsonl")


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        ("piqa", [{"goal": "x"}], r"piqa.jsonl: the first row has the fields \['goal'\]; task piqa expects .*'sol1'"),
        ("piqa", [], "piqa.jsonl holds no rows"),
        ("mystery", [{"a": 1}], "task mystery expects .*'query'"),
        ("mystery", "[1]\n", "mystery.jsonl:1: expected a JSON object"),
        ("mystery", "{\n", "mystery.jsonl:1: not valid JSON"),
    ],
)
def test_a_file_that_does_not_fit(tmp_path: Path, name: str, rows: Any, message: str) -> None:
    text = rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / f"{name}.jsonl").write_text(text)
    with pytest.raises(UserError, match=message), open_tasks([name], task_files=tmp_path):
        pass


def test_places_that_do_not_fit(tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match=r"is no directory; expected one with files like hellaswag\.jsonl"),
        open_tasks(["piqa"], task_files=tmp_path / "none"),
    ):
        pass
    for suffix in (".jsonl", ".parquet"):
        (tmp_path / f"piqa{suffix}").write_text("")
    with (
        pytest.raises(UserError, match=r"holds piqa.jsonl and piqa.parquet; leave one"),
        open_tasks(["piqa"], task_files=tmp_path),
    ):
        pass


def test_rows_of_a_parquet_file(tmp_path: Path) -> None:
    table = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    rows = [{"goal": "swim", "sol1": "in the sea", "sol2": "above", "label": 0}]
    pyarrow.parquet.write_table(table.Table.from_pylist(rows), tmp_path / "piqa.parquet")
    assert prompts(tmp_path, "piqa")[0][0] == ("Question: swim\nAnswer:", " in the sea")


def test_data_that_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr("datasets.load_dataset", refuse)
    with (
        pytest.raises(
            UserError, match=r"--tasks piqa: its data cannot be had from the hub .*put piqa.jsonl into"
        ) as caught,
        open_tasks(["piqa"]),
    ):
        pass
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_lm_evals_own_command_line_takes_our_export_and_says_the_same(files: Path, tmp_path: Path) -> None:
    """A run's export, loaded by lm-eval alone, on tasks put in place by the same YAMLs."""
    rows = [json.dumps({"text": f"the water flows down to the sea and {n} lights are seen. " * 9}) for n in range(20)]
    (tmp_path / "text.jsonl").write_text("\n".join(rows))
    data = prepare(tmp_path / "text.jsonl", tmp_path / "data", vocab_size=300, validation_share=0.2, progress=False)
    run_dir = tmp_path / "run"
    train = f"train tiny --data {data} --out {run_dir} --variant svformer --steps 3"
    assert main([*train.split(), "--set", "model.max_position_embeddings=256"]) == 0
    wanted = "arc_easy,hellaswag,winogrande,lambada_openai,wikitext"
    with open_tasks(task_names([wanted]), task_files=files) as tasks:
        yamls = tasks.manager.include_path[-1]
        arguments = f"pretrained={run_dir / 'model'},trust_remote_code=True"
        done = subprocess.run(
            [
                *(Path(sys.executable).with_name("lm_eval"), "run", "--model", "hf", "--model_args", arguments),
                *("--device", "cpu", "--tasks", wanted, "--include_path", yamls, "--output_path", tmp_path / "theirs"),
            ],
            capture_output=True,
            text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")},
        )
        assert done.returncode == 0, done.stderr[-3000:]
    assert main(["eval", str(run_dir), "--tasks", wanted, "--task-files", str(files)]) == 0
    (file,) = (tmp_path / "theirs").rglob("results_*.json")
    theirs = json.loads(file.read_text())["results"]
    found = json.loads((run_dir / "eval.json").read_text())["tasks"]
    assert list(found) == wanted.split(",")
    for name, row in found.items():
        for metric, one in row["metrics"].items():
            assert theirs[name][f"{metric},none"] == pytest.approx(one["value"], rel=1e-5), (name, metric)
