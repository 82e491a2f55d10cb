"""Scores of raw text: equal to a loop over single tokens, whatever the batch size, windows and tokenizer."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from evaluate_helpers import POSITIONS, bos_tokenizer, gpt2, llama, one_by_one, ours, plain_tokenizer
from transformers import ByT5Tokenizer

from resformer.data.documents import Document
from resformer.data.reading import Reading
from resformer.errors import UserError
from resformer.evaluate import evaluate_texts, score_texts
from resformer.evaluate.encoding import TextEncoder, fingerprint, start_of_documents
from resformer.evaluate.summary import Tally, count_words, summarise

LONG = "The river runs down to the sea, and a naïve 日本語 reader — far above us — sees it. " * 3
TEXTS = ["", "a", "to the sea", "日本", "🜚🌊x", "line\r\nline", LONG, "the sea\n", " two  spaces ", LONG[:40]]
KINDS: list[tuple[Callable[[], Any], Callable[[], Any]]] = [
    (llama, plain_tokenizer),
    (llama, bos_tokenizer),
    (gpt2, plain_tokenizer),
    (ours, plain_tokenizer),
]


@pytest.mark.parametrize(("make", "tokenizer"), KINDS)
@pytest.mark.parametrize(("length", "stride"), [(POSITIONS, None), (POSITIONS, 5), (7, 7), (7, 1)])
def test_a_text_is_the_product_of_its_tokens(make: Any, tokenizer: Any, length: int, stride: int | None) -> None:
    model, tokens = make(), tokenizer()
    start = start_of_documents(model, tokens)
    found = score_texts(model, tokens, TEXTS, sequence_length=length, stride=stride, batch_size=3)
    for text, score in zip(TEXTS, found, strict=True):
        ids = tokens(text, add_special_tokens=False).input_ids
        want = one_by_one(model, start.ids, ids, length=length, stride=stride or length)
        assert score.token_ids.tolist() == ids
        np.testing.assert_allclose(score.log_probabilities, want, atol=1e-4)
        assert score.log_probability == pytest.approx(np.nansum(want), abs=1e-4)
        if score.tokens:
            assert score.perplexity == pytest.approx(math.exp(-np.nanmean(want)), rel=1e-4)
        assert score.bytes == len(text.encode())


@pytest.mark.parametrize("make", [llama, gpt2, ours])
@pytest.mark.parametrize("stride", [None, 5])
def test_forty_texts_at_batch_sizes_1_3_and_8(make: Any, stride: int | None) -> None:
    draw = np.random.default_rng(0)
    texts = [LONG[: int(draw.integers(0, len(LONG)))] for _ in range(40)]
    model, tokens = make(), plain_tokenizer()
    found = [score_texts(model, tokens, texts, stride=stride, batch_size=size) for size in (1, 3, 8)]
    for some in zip(*found, strict=True):
        totals = [score.log_probability for score in some]
        assert max(totals) - min(totals) < 1e-4
    assert len({score.tokens for score in found[0]}) > 10


def test_what_is_padded_in_bf16_stays_close() -> None:
    model, tokens = ours().to(torch.bfloat16), plain_tokenizer()
    alone, together = (score_texts(model, tokens, TEXTS, batch_size=size) for size in (1, 8))
    for a, b in zip(alone, together, strict=True):
        assert a.log_probability == pytest.approx(b.log_probability, rel=3e-3, abs=0.1)


def test_what_stands_before_a_document() -> None:
    plain, with_bos = plain_tokenizer(), bos_tokenizer()
    end, begin = plain.eos_token_id, with_bos.bos_token_id
    assert start_of_documents(ours(), plain).ids == (end,)
    assert start_of_documents(ours(), with_bos).ids == (end,)  # as in training, whatever the tokenizer would do
    assert start_of_documents(ours(), plain, document_mask=True).ids == ()
    assert start_of_documents(llama(), plain).ids == ()
    assert start_of_documents(llama(), with_bos).ids == (begin,)
    assert start_of_documents(llama(), with_bos, "none").ids == ()
    assert start_of_documents(ours(), with_bos, "model").ids == (begin,)
    assert start_of_documents(llama(), plain, "model").ids == (1,)  # of its config
    with pytest.raises(UserError, match="--bos model: neither the tokenizer nor the config names"):
        start_of_documents(gpt2(), plain, "model")
    with pytest.raises(UserError, match=r"--bos is 'moddel'.*did you mean 'model'"):
        start_of_documents(gpt2(), plain, "moddel")


def test_the_end_of_text_spelt_out_is_text() -> None:
    tokens = plain_tokenizer()
    (ids,) = TextEncoder(tokens, vocab_size=999).encode(["a <|endoftext|> b"])
    assert tokens.eos_token_id not in ids and tokens.decode(ids) == "a <|endoftext|> b"
    assert TextEncoder(tokens, vocab_size=999).encode([""])[0].tolist() == []


def test_a_tokenizer_in_python_alone() -> None:
    tokens = ByT5Tokenizer(extra_ids=0)
    (ids,) = TextEncoder(tokens, vocab_size=999).encode(["né</s>"])
    assert ids.tolist() == [byte + 3 for byte in "né</s>".encode()]
    assert start_of_documents(llama(), tokens).ids == ()  # it puts something behind a text only
    assert fingerprint(tokens) == fingerprint(ByT5Tokenizer(extra_ids=0)) != fingerprint(plain_tokenizer())


def test_a_fingerprint_is_of_the_tokenizer_not_of_its_last_call() -> None:
    tokens = plain_tokenizer()
    before = fingerprint(tokens)
    tokens.pad_token = "<|endoftext|>"
    tokens(["a", "b c d"], padding=True, truncation=True, max_length=3)
    assert fingerprint(tokens) == before


def documents(*pairs: tuple[str, str]) -> list[tuple[Document, float]]:
    return [(Document(text=text, domain=domain, name="here"), 1.0) for domain, text in pairs]


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_sums_by_domain_and_overall(batch_size: int) -> None:
    model, tokens = llama(), bos_tokenizer()
    some = documents(("a", LONG), ("b", "to the sea"), ("a", "日本\r\n"), ("b", "x"))
    work: list[float] = []
    found = evaluate_texts(
        model, tokens, some, sequence_length=9, batch_size=batch_size, advance=lambda done, _: work.append(done)
    )
    assert sum(work) == pytest.approx(4.0)
    sums: dict[str, list[float]] = {"a": [], "b": []}
    for document, _ in some:
        ids = tokens(document.text, add_special_tokens=False).input_ids
        sums[document.domain] += one_by_one(model, [tokens.bos_token_id], ids, length=9, stride=9)
    sizes = {name: sum(len(d.text.encode()) for d, _ in some if d.domain == name) for name in sums}
    words = {name: sum(count_words(d.text) for d, _ in some if d.domain == name) for name in sums}
    for name, logs in sums.items():
        row, nll = found["domains"][name], -sum(logs)
        assert (row["tokens"], row["bytes"], row["words"]) == (len(logs), sizes[name], words[name])
        assert (row["documents"], row["tokens_not_scored"]) == (2, 0)
        assert row["loss"] == pytest.approx(nll / len(logs), abs=1e-5)
        assert row["perplexity"] == pytest.approx(math.exp(nll / len(logs)), rel=1e-4)
        assert row["bits_per_byte"] == pytest.approx(nll / math.log(2) / sizes[name], abs=1e-5)
        assert row["byte_perplexity"] == pytest.approx(math.exp(nll / sizes[name]), rel=1e-4)
        assert row["word_perplexity"] == pytest.approx(math.exp(nll / words[name]), rel=1e-3)
    overall = found["overall"]
    assert found["loss"] == overall["mean_of_domains"]["loss"]
    assert found["loss"] == pytest.approx(sum(row["loss"] for row in found["domains"].values()) / 2)
    nll, count = -sum(map(sum, sums.values())), sum(map(len, sums.values()))
    assert overall["token_weighted"]["loss"] == found["loss_token_weighted"] == pytest.approx(nll / count, abs=1e-5)
    assert overall["token_weighted"]["bytes"] == sum(sizes.values())


def test_first_tokens_that_have_no_context_are_counted() -> None:
    model, tokens = llama(), plain_tokenizer()
    found = evaluate_texts(model, tokens, documents(("a", "to the sea"), ("a", "x"), ("b", "y")), sequence_length=9)
    assert found["domains_not_scored"] == ["b"] and list(found["domains"]) == ["a"]
    assert found["domains"]["a"]["tokens_not_scored"] == 2
    assert found["domains"]["a"]["bytes"] == len("to the seax")  # of the raw text, all of it
    assert found["bos"]["ids"] == [] and found["bos"]["policy"] == "auto"
    with pytest.raises(UserError, match=r"no token to score.*--bos auto"):
        evaluate_texts(model, tokens, documents(("b", "y")), sequence_length=9)
    with pytest.raises(UserError, match="no token to score"):
        evaluate_texts(model, tokens, [], sequence_length=9)


def test_max_tokens_takes_whole_documents() -> None:
    model, tokens = ours(), plain_tokenizer()
    some = documents(("a", LONG), ("a", "never reached"), ("b", "x"), ("b", "y"))
    found = evaluate_texts(model, tokens, some, sequence_length=9, max_tokens=2)
    assert [row["documents"] for row in found["domains"].values()] == [1, 2]
    whole = evaluate_texts(model, tokens, [some[0], *some[2:]], sequence_length=9)
    assert whole["domains"] == found["domains"] and whole["text_fingerprint"] == found["text_fingerprint"]


def test_what_does_not_fit_is_refused() -> None:
    model, tokens = llama(), plain_tokenizer()
    with pytest.raises(UserError, match=f"sequence length 99 is over the model's {POSITIONS} positions"):
        score_texts(model, tokens, ["a"], sequence_length=99)
    with pytest.raises(UserError, match="--stride is 10; expected 1 to the sequence length"):
        score_texts(model, tokens, ["a"], sequence_length=9, stride=10)
    with pytest.raises(UserError, match="batch_size is 0"):
        score_texts(model, tokens, ["a"], batch_size=0)
    with pytest.raises(UserError, match=r"the tokenizer gives token \d+, but the model knows 60"):
        score_texts(ours(vocab_size=60), tokens, ["日本"])


def test_words_as_lm_eval_counts_them() -> None:
    assert [count_words(text) for text in ("a b", " a\n b ", "", "日本 x")] == [2, 4, 1, 2]


def test_a_perplexity_that_no_float_holds_is_none() -> None:
    found = summarise({"a": Tally(nll=1e4, tokens=10, words=1, bytes=5, documents=1)})
    assert found["domains"]["a"]["word_perplexity"] is None and found["domains"]["a"]["perplexity"] is None
    assert found["domains"]["a"]["loss"] == 1000


def test_text_from_files(tmp_path: Path) -> None:
    from resformer.evaluate import TextSource

    (tmp_path / "wiki.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "one\\r\\n"}\n{"text": "  "}\n{"text": "two"}\n')
    (tmp_path / "book.txt").write_bytes(b"\xef\xbb\xbfcaf\xc3\xa9\r\n")
    source = TextSource([tmp_path / "wiki.jsonl", tmp_path / "book.txt"])
    found = [(document.domain, document.text) for document, _ in source.documents()]
    assert found == [("wiki", "one\r\n"), ("wiki", "two"), ("book", "café\r\n")]
    assert source.record()["empty"] == 1 and source.record()["byte_order_mark"] == 2
    works = [work for _, work in TextSource([tmp_path / "book.txt"]).documents()]
    assert sum(works) == (tmp_path / "book.txt").stat().st_size
    with pytest.raises(UserError, match=r"--text: no file or directory '.*none'"):
        TextSource([tmp_path / "none"])
    (tmp_path / "bad.jsonl").write_text("{\n")
    with pytest.raises(UserError, match=r"bad.jsonl:1: not valid JSON.*; mend the file, or leave it out$"):
        list(TextSource([tmp_path / "bad.jsonl"]).documents())  # where the user has no flag for it
    with pytest.raises(UserError, match=r"; mend the file or pass --on-bad-line skip$"):
        list(TextSource([tmp_path / "bad.jsonl"], Reading()).documents())
    np.array([1, 2], dtype=np.uint16).tofile(tmp_path / "ids.bin")
    with pytest.raises(UserError, match=r"ids.bin holds token ids, no text"):
        TextSource([tmp_path / "ids.bin"])


@pytest.mark.parametrize("stride", [None, 1, 5])
@pytest.mark.parametrize("bos", ["none", "auto"])
def test_the_counts_are_those_of_the_windows(stride: int | None, bos: str) -> None:
    """They are known before the windows are made; the work adds up to that of the documents."""
    seen: list[tuple[float, int]] = []
    found = evaluate_texts(
        ours(),
        plain_tokenizer(),
        documents(*((f"d{len(text)}", text) for text in TEXTS)),
        sequence_length=7,
        stride=stride,
        bos=bos,
        advance=lambda work, tokens: seen.append((work, tokens)),
    )
    assert sum(tokens for _, tokens in seen) == found["overall"]["token_weighted"]["tokens"]
    scored = sum(row["documents"] for row in found["domains"].values())
    assert sum(work for work, _ in seen) == pytest.approx(scored)
