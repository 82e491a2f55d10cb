"""Losses by document: they add up to the domain's, and each token is its own document's."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from evaluate_helpers import VOCAB, ours

from resformer.data import open_dataset, prepare
from resformer.evaluate.documents import evaluate_documents
from resformer.evaluate.loss import evaluate

LENGTH = 24


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("documents")
    generator = np.random.default_rng(0)
    words = ["river", "sea", "light", "far", "naïve", "日本", "the", "is"]
    rows = [" ".join(generator.choice(words, size=int(generator.integers(1, 60)))) + f" {i}." for i in range(120)]
    for name, part in (("a", rows[:80]), ("b", rows[80:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
    inputs = [str(folder / "a.jsonl"), str(folder / "b.jsonl")]
    prepare(inputs, folder / "data", vocab_size=VOCAB, validation_share=0.3)
    return open_dataset(folder / "data")


def model():
    return ours(variant="learnable").double()


@pytest.mark.parametrize("document_mask", [False, True])
def test_the_totals_are_those_of_evaluate(corpus, document_mask: bool) -> None:
    whole = evaluate(model(), corpus, sequence_length=LENGTH, batch_size=5, document_mask=document_mask)
    found, documents = evaluate_documents(
        model(), corpus, sequence_length=LENGTH, batch_size=3, document_mask=document_mask
    )
    for domain in corpus.domains:
        assert found["domains"][domain] == pytest.approx(whole["domains"][domain], rel=1e-9)
        rows = documents[domain]
        assert len(rows["nll"]) == len(rows["tokens"]) == corpus.documents("validation", domain) > 5
        assert sum(rows["tokens"]) == found["domains"][domain]["tokens"]
        assert sum(rows["nll"]) / sum(rows["tokens"]) == pytest.approx(found["domains"][domain]["loss"], abs=1e-4)
    for key in ("loss", "bits_per_byte", "loss_token_weighted"):
        assert found[key] == pytest.approx(whole[key], rel=1e-9)


def test_each_token_is_its_documents(corpus) -> None:
    """Token by token: the stream cut at the ends of documents, in windows that know nothing of them."""
    _, documents = evaluate_documents(model(), corpus, sequence_length=LENGTH)
    judge = model()
    for domain in corpus.domains:
        stream = np.asarray(corpus.stream("validation", domain)[:], dtype=np.int64)
        losses = np.zeros(len(stream))
        for start in range(0, len(stream), LENGTH):
            before = stream[start - 1] if start else corpus.eos_token_id
            ids = torch.from_numpy(np.concatenate([[before], stream[start : start + LENGTH]]))[None]
            with torch.no_grad():
                logp = judge(input_ids=ids[:, :-1], use_cache=False).logits[0].log_softmax(-1)
            for t in range(ids.shape[1] - 1):
                losses[start + t] = -logp[t, ids[0, t + 1]].item()
        start = 0
        for k, end in enumerate(corpus.document_ends("validation", domain).tolist()):
            assert documents[domain]["tokens"][k] == end - start
            assert documents[domain]["nll"][k] == pytest.approx(losses[start:end].sum(), abs=1e-3)
            start = end


def test_windows_of_an_analysis_begin_documents_and_come_from_all_domains(corpus, tmp_path: Path) -> None:
    from resformer.experiments.finish import measured_windows

    rows = measured_windows(corpus, 12, 6)
    assert rows.shape == (6, 12) and (rows[:, 0] == corpus.eos_token_id).all()
    starts = {
        domain: [
            np.asarray(corpus.stream("validation", domain)[end : end + 11]).tolist()
            for end in [0, *corpus.document_ends("validation", domain)[:-1].tolist()]
        ]
        for domain in corpus.domains
    }
    for i, row in enumerate(rows):
        assert row[1:].tolist() in starts[corpus.domains[i % 2]]
    # Where no document is long enough, running text does.
    assert measured_windows(corpus, 400, 4).shape[1] == 400
