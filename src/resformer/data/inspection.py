"""inspect(): what is in a prepared corpus, for `resformer data inspect`."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from resformer.data.dataset import Dataset, open_dataset
from resformer.data.losses import losses

_SAMPLE_TOKENS = 60


def inspect(directory: str | Path, verify: str = "full", *, samples: int = 1, seed: int = 0) -> dict[str, Any]:
    """JSON-able statistics of a prepared corpus, after checking it (`open_dataset` says what `verify` means and what
    raises UserError).

    "losses" says in lines what the build left out. Per domain: weight, documents, tokens, bytes and bytes per token,
    in all and by split, the readers' counts, `samples` decoded beginnings of training documents, chosen by `seed`, and
    the lengths of the documents in tokens (`_lengths`).
    """
    dataset = open_dataset(directory, verify=verify)
    domains: dict[str, Any] = {}
    for name in dataset.domains:
        entry = dataset.index["domains"][name]
        splits = {
            split: {**{key: part[key] for key in ("documents", "tokens", "bytes")}, "bytes_per_token": _ratio(part)}
            for split, part in entry["splits"].items()
        }
        total: dict[str, Any] = {
            key: sum(part[key] for part in splits.values()) for key in ("documents", "tokens", "bytes")
        }
        domains[name] = {
            "weight": dataset.weights[name],
            **total,
            "bytes_per_token": _ratio(total),
            "lengths": _lengths(entry["splits"]),
            "splits": splits,
            "counts": entry["counts"],
            "samples": _samples(dataset, name, samples, seed),
        }
    everything = {key: sum(d[key] for d in domains.values()) for key in ("documents", "tokens", "bytes")}
    return {
        "directory": str(directory),
        "verify": verify,
        "fingerprint": dataset.fingerprint,
        "vocab_size": dataset.vocab_size,
        "dtype": dataset.index["dtype"],
        "special_tokens": dataset.index["special_tokens"],
        "tokenizer": dataset.index["tokenizer"],
        "readers": dataset.index["readers"],
        "losses": losses(dataset.index),
        **everything,
        "bytes_per_token": _ratio(everything),
        "domains": domains,
    }


def _ratio(part: dict[str, Any]) -> float | None:
    return part["bytes"] / part["tokens"] if part["tokens"] else None


def _lengths(splits: dict[str, Any]) -> dict[str, Any]:
    """Tokens of the documents, end-of-text included: how many have 2^i to 2^(i+1) - 1, and the i of the median."""
    histograms = [part["length_histogram"] for part in splits.values()]
    counts = [sum(h[i] for h in histograms if i < len(h)) for i in range(max(map(len, histograms)))]
    half, seen, median = sum(counts) / 2, 0, 0
    for i, count in enumerate(counts):
        seen += count
        if seen >= half:
            median = i
            break
    return {"histogram": counts, "median_power": median}


def _samples(dataset: Dataset, domain: str, count: int, seed: int) -> list[dict[str, Any]]:
    ends = dataset.document_table("train", domain)[:, 0].astype(np.int64)
    stream = dataset.stream("train", domain)
    out = []
    for i in range(min(count, len(ends))):
        digest = hashlib.sha256(f"sample {seed} {domain} {i}".encode()).digest()
        document = int.from_bytes(digest[:8], "big") % len(ends)
        start = int(ends[document - 1]) if document else 0
        ids = stream[start : min(int(ends[document]), start + _SAMPLE_TOKENS)]
        out.append(
            {"document": document, "tokens": int(ends[document]) - start, "text": dataset.vocabulary.decode(ids)}
        )
    return out
