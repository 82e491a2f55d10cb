"""Byte-level BPE: deterministic, exact, loadable by transformers, and deaf to special tokens in the text."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from data_helpers import write_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from resformer.data import open_dataset, tokenizer
from resformer.data.documents import draw, text_hash
from resformer.errors import UserError

TRAIN = """
from resformer.data import tokenizer
import hashlib
texts = ["def f(x): return x + %d\\n" % i for i in range(300)]
texts += ["the value residual of layer %d" % i for i in range(300)]
print(hashlib.sha256(tokenizer.train(texts, 400).encode()).hexdigest())
"""


def test_training_is_the_same_in_every_process_and_at_every_thread_count() -> None:
    digests = set()
    for threads in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", TRAIN],
            capture_output=True,
            text=True,
            check=True,
            env={"RAYON_NUM_THREADS": threads},
        )
        digests.add(done.stdout.strip())
    assert len(digests) == 1


@pytest.fixture(scope="module")
def vocabulary(prepared: Path) -> tokenizer.Vocabulary:
    return tokenizer.open_vocabulary(prepared)


@given(text=st.text(max_size=80))
@settings(max_examples=100, deadline=None)
def test_decoding_gives_the_text_back(vocabulary: tokenizer.Vocabulary, text: str) -> None:
    text = text.encode("utf-8", "replace").decode()
    (ids,) = vocabulary.encode([text])
    assert vocabulary.decode(ids) == text
    assert vocabulary.token_bytes()[ids].sum() == len(text.encode())


def test_vocabulary_comes_from_training_documents_alone(build: Callable[..., Path], tmp_path: Path) -> None:
    candidates = [f"number {i} " + "qzjqzj " * 40 for i in range(200)]
    held_out = [text for text in candidates if draw(text_hash(text.encode()), 0) < 0.3 * 2**64]
    assert len(held_out) > 20
    file = write_rows(tmp_path / "a.jsonl", [*held_out, *(f"plain text of document {i}" for i in range(100))])
    dataset = open_dataset(build([file], validation_share=0.3))
    assert dataset.index["domains"]["a"]["splits"]["validation"]["documents"] >= len(held_out)
    assert not any("qz" in token for token in dataset.vocabulary.tokenizer.get_vocab())


def test_end_of_text_written_in_a_document_stays_text(build: Callable[..., Path], tmp_path: Path) -> None:
    nasty = "before <|endoftext|> after<|endoftext|>"
    file = write_rows(tmp_path / "in.jsonl", [nasty] + [f"another document {i}" for i in range(20)])
    dataset = open_dataset(build([file]))
    documents = {}
    for split in ("train", "validation"):
        stream = dataset.stream(split, "in")
        ends = dataset.document_table(split, "in")[:, 0].astype(int).tolist()
        # The id stands exactly where documents end, nowhere else.
        assert np.flatnonzero(stream[:] == dataset.eos_token_id).tolist() == [end - 1 for end in ends]
        for start, end in zip([0, *ends], ends, strict=False):
            documents[dataset.vocabulary.decode(stream[start : end - 1])] = split
    assert nasty in documents
    assert len(documents) == 21


def test_end_of_text_that_is_not_marked_as_special_stays_text_too(prepared: Path, tmp_path: Path) -> None:
    value = json.loads((prepared / "tokenizer.json").read_text())
    assert value["added_tokens"][0]["content"] == "<|endoftext|>"
    value["added_tokens"][0]["special"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(value))
    vocabulary = tokenizer.open_vocabulary(tmp_path)
    assert vocabulary.tokenizer.encode("a<|endoftext|>").ids[-1] == 0  # the reason for the extra care
    for text in ("<|endoftext|>", "a<|endoftext|><|endoftext|>b", "<|endoftext|>x<|endoftext|>"):
        (ids,) = vocabulary.encode([text])
        assert 0 not in ids
        assert vocabulary.decode(ids) == text
        assert vocabulary.token_bytes()[ids].sum() == len(text)


def test_transformers_loads_it_and_agrees(prepared: Path, texts: dict[str, list[str]]) -> None:
    transformers = pytest.importorskip("transformers")
    loaded = transformers.AutoTokenizer.from_pretrained(prepared)
    vocabulary = tokenizer.open_vocabulary(prepared)
    assert loaded.eos_token_id == vocabulary.eos_token_id
    assert len(loaded) == vocabulary.vocab_size == 320
    for text in [*texts["github"][:5], "  spaces ,  and .\n\n\ttabs ' s \u00e4\U0001f600"]:
        ids = loaded(text)["input_ids"]
        assert ids == vocabulary.encode([text])[0].tolist()
        assert loaded.decode(ids) == text


def test_existing_tokenizer_by_file_or_directory(
    build: Callable[..., Path], source: Path, prepared: Path, tmp_path: Path
) -> None:
    alone = tmp_path / "alone" / "tokenizer.json"
    alone.parent.mkdir()
    alone.write_bytes((prepared / "tokenizer.json").read_bytes())
    datasets = [open_dataset(build([source], name, tokenizer=t)) for name, t in [("a", prepared), ("b", alone)]]
    assert [d.vocab_size for d in datasets] == [320, 320]
    assert datasets[0].fingerprint == datasets[1].fingerprint
    assert (datasets[1].tokenizer_dir / "tokenizer.json").read_bytes() == alone.read_bytes()
    assert json.loads((datasets[1].tokenizer_dir / "tokenizer_config.json").read_text())["eos_token"] == "<|endoftext|>"


def test_truncation_in_a_tokenizer_file_does_not_cut_documents(
    build: Callable[..., Path], source: Path, prepared: Path, tmp_path: Path
) -> None:
    value = json.loads((prepared / "tokenizer.json").read_text())
    value["truncation"] = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(value))
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": {"content": "<|endoftext|>"}}')
    cut = open_dataset(build([source], "cut", tokenizer=tmp_path))
    whole = open_dataset(build([source], "whole", tokenizer=prepared))
    assert cut.tokens("train", "book") == whole.tokens("train", "book")
    assert (cut.bos_token_id, whole.bos_token_id) == (0, None)


def broken_tokenizers() -> dict[str, tuple[dict[str, str], str]]:
    return {
        "missing": ({}, "expected the path of a tokenizer.json"),
        "not json": ({"tokenizer.json": "{"}, "not a tokenizer that"),
        "no end": ({"tokenizer.json": NO_END}, "no end-of-text token found"),
        "unknown end": (
            {"tokenizer.json": NO_END, "tokenizer_config.json": '{"eos_token": "<end>"}'},
            "eos_token is '<end>'",
        ),
        "bad config": ({"tokenizer.json": NO_END, "tokenizer_config.json": "[]"}, "expected a JSON object"),
    }


NO_END = json.dumps(
    {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []},
    }
)


@pytest.mark.parametrize("case", broken_tokenizers())
def test_broken_tokenizers_are_one_line(build: Callable[..., Path], source: Path, tmp_path: Path, case: str) -> None:
    files, message = broken_tokenizers()[case]
    home = tmp_path / "tokenizer"
    home.mkdir()
    for name, content in files.items():
        (home / name).write_text(content)
    with pytest.raises(UserError) as error:
        build([source], tokenizer=home)
    assert message in str(error.value)
    assert str(home) in str(error.value) and ".partial-" not in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_no_tokenizer_is_named_before_the_corpus_is_read(
    build: Callable[..., Path], source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("the corpus was read first")

    monkeypatch.setattr("resformer.data.build._sources", never)
    file = source / "book.jsonl"
    with pytest.raises(UserError, match=f"^--tokenizer {file}: not a tokenizer"):
        build([source], tokenizer=file)


def test_vocabulary_too_small_for_all_bytes(build: Callable[..., Path], source: Path) -> None:
    with pytest.raises(UserError, match="--vocab-size: got 100, expected 257"):
        build([source], vocab_size=100)


def test_vocabulary_larger_than_the_text_gives_is_said(
    build: Callable[..., Path], source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = open_dataset(build([source], vocab_size=50_000))
    assert dataset.vocab_size < 50_000
    assert f"a vocabulary of {dataset.vocab_size}, asked were 50000" in capsys.readouterr().err


def test_fingerprint_is_the_hash_of_the_file(prepared: Path) -> None:
    file = prepared / "tokenizer.json"
    assert tokenizer.fingerprint(file) == hashlib.sha256(file.read_bytes()).hexdigest()
