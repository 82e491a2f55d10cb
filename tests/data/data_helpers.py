"""Made-up text for the tests of `resformer.data`."""

from __future__ import annotations

import json
import random
from pathlib import Path

from resformer.data import shards
from resformer.data.dataset import Dataset

WORDS = (
    "value",
    "residual",
    "layer",
    "attention",
    "token",
    "shard",
    "stream",
    "window",
    "epoch",
    "batch",
    "hash",
    "seed",
)
DOMAINS = {"wikipedia": 60, "github": 40, "book": 12}


def sentences(generator: random.Random, count: int) -> str:
    return " ".join(generator.choice(WORDS) + generator.choice(["", "s", ",", ".", "\n"]) for _ in range(count))


def stored(dataset: Dataset, split: str, domain: str) -> list[str]:
    """The texts of a split of a domain, from its shards; each ends with the end-of-text id, which is nowhere else."""
    ends = dataset.document_table(split, domain)[:, 0].astype(int).tolist()
    stream, found = dataset.stream(split, domain), []
    for a, b in zip([0, *ends], ends, strict=False):
        ids = stream[a:b]
        assert ids[-1] == dataset.eos_token_id and not dataset.vocabulary.control[ids[:-1]].any()
        found.append(dataset.vocabulary.decode(ids[:-1]))
    return found


def all_stored(dataset: Dataset) -> list[str]:
    """The texts of all domains and splits."""
    return [text for domain in dataset.domains for split in shards.SPLITS for text in stored(dataset, split, domain)]


def tree(directory: Path) -> dict[str, bytes]:
    """Every file below a directory."""
    return {p.relative_to(directory).as_posix(): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def write_rows(file: Path, texts: list[str], **more: object) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps({"text": text, **more}) + "\n" for text in texts), encoding="utf-8")
    return file
