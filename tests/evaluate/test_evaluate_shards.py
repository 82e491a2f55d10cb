"""Scores of prepared shards: the losses of training's validation, sliding windows, words and bytes of the raw text."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evaluate_helpers import llama, one_by_one, ours

from resformer.data import open_dataset, prepare
from resformer.data.dataset import Dataset
from resformer.errors import UserError
from resformer.evaluate import evaluate_shards
from resformer.evaluate.loss import evaluate
from resformer.evaluate.summary import count_words

DOCUMENTS = {
    "rivers": [
        f"the {name} — café — flows down\r\n to the sea" for name in ("Rhine", "Rhône", "Elbe", "Po", "Ob", "日本")
    ],
    "stars": [f" a light {n} is seen far above us " * n for n in range(1, 5)],
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    place = tmp_path_factory.mktemp("shards")
    for domain, texts in DOCUMENTS.items():
        (place / f"{domain}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    names = [str(place / f"{domain}.jsonl") for domain in DOCUMENTS]
    return open_dataset(prepare(names, place / "data", vocab_size=300, validation_share=0.5, progress=False))


def validation(corpus: Dataset, domain: str) -> list[list[int]]:
    """Token ids of the validation documents, each with its end."""
    ids = np.asarray(corpus.stream("validation", domain)[:], dtype=np.int64)
    return [part.tolist() for part in np.split(ids, corpus.document_ends("validation", domain)[:-1])]


@pytest.mark.parametrize("document_mask", [False, True])
@pytest.mark.parametrize("max_tokens", [None, 20])
def test_without_a_stride_it_is_the_validation_of_training(
    corpus: Dataset, document_mask: bool, max_tokens: int | None
) -> None:
    how: dict[str, Any] = {"sequence_length": 12, "max_tokens": max_tokens, "document_mask": document_mask}
    want = evaluate(ours(), corpus, batch_size=3, **how)
    found = evaluate_shards(ours(), corpus, batch_size=3, **how)
    for domain, row in want["domains"].items():
        assert {key: found["domains"][domain][key] for key in row} == row
    for key in ("loss", "bits_per_byte"):
        assert found[key] == pytest.approx(want[key], rel=1e-12)
    assert found["loss_token_weighted"] == pytest.approx(want["loss_token_weighted"], rel=1e-12)


@pytest.mark.parametrize("make", [ours, llama])
@pytest.mark.parametrize("stride", [1, 5, 12])
@pytest.mark.parametrize("batch_size", [1, 8])
def test_sliding_windows_over_the_stream(corpus: Dataset, make: Any, stride: int, batch_size: int) -> None:
    model = make()
    seen: list[int] = []
    found = evaluate_shards(
        model, corpus, sequence_length=12, stride=stride, batch_size=batch_size, advance=seen.append
    )
    for domain in corpus.domains:
        stream = [token for document in validation(corpus, domain) for token in document]
        logs = one_by_one(model, [corpus.eos_token_id], stream, length=12, stride=stride)
        row = found["domains"][domain]
        assert (row["tokens"], row["tokens_not_scored"]) == (len(stream), 0)
        assert row["loss"] == pytest.approx(-np.mean(logs), abs=1e-5)
    assert sum(seen) == found["overall"]["token_weighted"]["tokens"]


def test_sliding_windows_with_documents_apart(corpus: Dataset) -> None:
    model = ours()
    found = evaluate_shards(model, corpus, sequence_length=12, stride=4, batch_size=4, document_mask=True)
    for domain in corpus.domains:
        documents = validation(corpus, domain)
        logs = [one for ids in documents for one in one_by_one(model, [], ids, length=12, stride=4)]
        row = found["domains"][domain]
        assert row["loss"] == pytest.approx(-np.nanmean(logs), abs=1e-5)
        assert row["tokens_not_scored"] == row["documents"] == len(documents)


def test_words_and_bytes_are_of_the_raw_text(corpus: Dataset) -> None:
    found = evaluate_shards(ours(), corpus, sequence_length=12)
    for domain, texts in DOCUMENTS.items():
        held = [corpus.vocabulary.decode(ids[:-1]) for ids in validation(corpus, domain)]
        assert set(held) <= set(texts)
        row = found["domains"][domain]
        assert row["documents"] == len(held)
        assert row["bytes"] == sum(len(text.encode()) for text in held)
        assert row["words"] == sum(map(count_words, held))
        nll = row["loss"] * row["tokens"]
        assert row["word_perplexity"] == pytest.approx(math.exp(nll / row["words"]))
        assert row["byte_perplexity"] == pytest.approx(2 ** row["bits_per_byte"])


def test_words_are_unknown_where_decoding_does_not_give_the_text_back(
    corpus: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(corpus.vocabulary), "decode", lambda self, ids: "something shorter")
    found = evaluate_shards(ours(), corpus, sequence_length=12)
    assert found["domains"]["rivers"]["words"] is None and found["domains"]["rivers"]["word_perplexity"] is None
    assert found["overall"]["mean_of_domains"]["word_perplexity"] is None
    assert found["overall"]["token_weighted"]["words"] is None


def test_a_stride_over_the_window_is_refused(corpus: Dataset, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--stride is 13; expected 1 to the sequence length"):
        evaluate_shards(ours(), corpus, sequence_length=12, stride=13)
