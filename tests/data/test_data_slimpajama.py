"""Real rows in SlimPajama's shape, where a sample lies beside the checkout; skipped elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from resformer.data import open_dataset, prepare
from resformer.data.readers import Report, read

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


def test_all_seven_domains_are_read_with_their_names() -> None:
    pytest.importorskip("zstandard")
    report = Report()
    counts: dict[str, int] = {}
    for document in read(SAMPLE, report):
        counts[document.domain] = counts.get(document.domain, 0) + 1
    assert counts == COUNTS
    assert report.totals == {"files": 7}


def test_a_small_part_is_prepared_by_path_alone(tmp_path: Path) -> None:
    pytest.importorskip("zstandard")
    inputs = [SAMPLE / f"{name}.jsonl.zst" for name in ("c4", "commoncrawl", "wikipedia")]
    dataset = open_dataset(prepare(inputs, tmp_path / "out", vocab_size=600, max_bytes=1_500_000, progress=False))
    assert dataset.domains == ["c4", "commoncrawl", "wikipedia"]
    for domain in dataset.domains:
        entry = dataset.index["domains"][domain]
        assert entry["counts"]["documents_read"] == COUNTS[domain]
        assert entry["splits"]["validation"]["documents"] >= 1
        tokens, size = dataset.covered(domain, max_tokens=500)
        assert tokens == min(500, dataset.tokens("validation", domain))
        assert 1.0 < size / tokens < 8.0
    batch = dataset.sampler(sequence_length=64, batch_size=8, seed=0).batch(3)
    assert batch.tokens.max() < dataset.vocab_size
