"""Made-up text for the tests of `resformer.data`."""

from __future__ import annotations

import json
import random
from pathlib import Path

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


def write_rows(file: Path, texts: list[str], **more: object) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps({"text": text, **more}) + "\n" for text in texts), encoding="utf-8")
    return file
