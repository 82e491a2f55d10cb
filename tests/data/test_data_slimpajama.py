"""Real rows in SlimPajama's shape, where a sample lies beside the checkout; skipped elsewhere."""

from __future__ import annotations

import io
import json
from collections import Counter
from pathlib import Path

import pytest

from resformer.data import open_dataset, prepare, shards
from resformer.data.documents import clean

SAMPLE = Path(__file__).resolve().parents[3] / "shared" / "data" / "slimpajama_sample"
COUNTS = {
    "arxiv": 51,
    "book": 11,
    "c4": 2000,
    "commoncrawl": 40,
    "github": 533,
    "stackexchange": 2000,
    "wikipedia": 10_033,
}

pytestmark = pytest.mark.skipif(not SAMPLE.is_dir(), reason="no SlimPajama-shaped sample beside this checkout")


def source_texts(name: str) -> list[str]:
    """The texts of a file by a reader that has nothing of ours."""
    zstandard = pytest.importorskip("zstandard")
    with open(SAMPLE / f"{name}.jsonl.zst", "rb") as handle:
        lines = io.TextIOWrapper(
            zstandard.ZstdDecompressor().stream_reader(handle, read_across_frames=True), encoding="utf-8", newline="\n"
        )
        return [json.loads(line)["text"] for line in lines]


def test_every_document_comes_back_once_in_order_and_in_one_split(tmp_path: Path) -> None:
    pytest.importorskip("zstandard")
    dataset = open_dataset(prepare([SAMPLE], tmp_path / "out", vocab_size=2048, progress=False))
    assert dataset.domains == sorted(COUNTS)
    for name, count in COUNTS.items():
        rows = source_texts(name)
        assert len(rows) == count
        expected = list(dict.fromkeys(text for row in rows if (text := clean(row, Counter())).strip()))
        found: dict[str, list[str]] = {}
        for split in shards.SPLITS:
            ends = dataset.document_table(split, name)[:, 0].astype(int).tolist()
            ids = [dataset.stream(split, name)[a : b - 1] for a, b in zip([0, *ends], ends, strict=False)]
            found[split] = dataset.vocabulary.tokenizer.decode_batch([i.tolist() for i in ids])
            assert found[split] == [text for text in expected if text in set(found[split])]
        assert sorted(found["train"] + found["validation"]) == sorted(expected)


def test_a_small_part_is_prepared_by_path_alone(tmp_path: Path) -> None:
    pytest.importorskip("zstandard")
    inputs = [SAMPLE / f"{name}.jsonl.zst" for name in ("c4", "commoncrawl", "wikipedia")]
    dataset = open_dataset(prepare(inputs, tmp_path / "out", vocab_size=600, max_bytes=1_500_000, progress=False))
    assert dataset.domains == ["c4", "commoncrawl", "wikipedia"]
    for domain in dataset.domains:
        entry = dataset.index["domains"][domain]
        assert 2 <= entry["counts"]["documents_read"] <= COUNTS[domain]
        assert entry["splits"]["validation"]["documents"] >= 1
        tokens, size = dataset.covered(domain, max_tokens=500)
        assert tokens == min(500, dataset.tokens("validation", domain))
        assert 1.0 < size / tokens < 8.0
    batch = dataset.sampler(sequence_length=64, batch_size=8, seed=0).batch(3)
    assert batch.tokens.max() < dataset.vocab_size
