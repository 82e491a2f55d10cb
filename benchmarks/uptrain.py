"""Losses of converted and uptrained models by document, against the model that they were made from.

    python benchmarks/uptrain.py source=models/source shared=runs/shared --data data/mine --json-file uptrain.json

Each validation document is scored alone, its first tokens at most, by every model; the first model named is what the
others are compared with. The interval is over documents: what another draw of text would change, not another seed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import turns
import tyro

DRAWS = 10_000


def score(model: Any, dataset: Any, most: int) -> tuple[list[str], list[float], list[int]]:
    """Domain, summed loss (nats) and scored tokens of every validation document of at least three tokens."""
    import torch

    from resformer.evaluate.loss import evaluating, token_nll

    domains, losses, tokens = [], [], []
    with evaluating(model):
        for domain in dataset.domains:
            stream, start = dataset.stream("validation", domain), 0
            for end in dataset.document_ends("validation", domain):
                ids = torch.tensor(stream[start : min(int(end), start + most + 1)].astype("int64"))[None]
                start = int(end)
                if ids.shape[1] > 2:
                    nll = token_nll(model, ids).double()
                    domains.append(domain)
                    losses.append(float(nll.sum()))
                    tokens.append(nll.numel())
    return domains, losses, tokens


def difference(left: list[float], right: list[float], tokens: list[int], seed: int = 0) -> tuple[float, float, float]:
    """Loss per token of left minus right, and its 95 % bootstrap interval over documents, the same ones for both."""
    import numpy as np

    gap, size = np.subtract(left, right), np.asarray(tokens)
    picked = np.random.default_rng(seed).integers(len(size), size=(DRAWS, len(size)))
    low, high = np.quantile(gap[picked].sum(axis=1) / size[picked].sum(axis=1), (0.025, 0.975))
    return float(gap.sum() / size.sum()), float(low), float(high)


def main(
    models: tyro.conf.Positional[tuple[str, ...]],
    /,
    *,
    data: Path,
    tokens: int = 512,
    threads: int = 1,
    json_file: Path | None = None,
) -> int:
    """Score models by document.

    Args:
        models: NAME=MODEL, a run, an exported directory or a hub name; the first is compared with.
        data: A corpus of `resformer data prepare`, encoded with their tokenizer.
        tokens: Scored tokens of a document at most.
        threads: CPU threads.
        json_file: Where to write all numbers.
    """
    import torch

    from resformer.data import open_dataset
    from resformer.evaluate.loading import load_model

    torch.set_num_threads(threads)
    dataset, found = open_dataset(data), dict[str, Any]()
    first: tuple[str, list[float]] | None = None
    for entry in models:
        name, equals, place = entry.partition("=")
        if not equals:
            print(f"{entry}: expected NAME=MODEL", file=sys.stderr)
            return 2
        domains, losses, counts = score(load_model(place)[0].float(), dataset, tokens)
        first = first or (name, losses)
        gap, low, high = difference(losses, first[1], counts)
        found[name] = {
            "loss": sum(losses) / sum(counts),
            "documents": len(counts),
            "tokens": sum(counts),
            "by_domain": {
                d: sum(x for x, e in zip(losses, domains, strict=True) if e == d)
                / sum(n for n, e in zip(counts, domains, strict=True) if e == d)
                for d in dict.fromkeys(domains)
            },
            "against": {"model": first[0], "difference": gap, "low": low, "high": high},
        }
        print(
            f"{name:20} {found[name]['loss']:.4f} nats per token, {len(counts)} documents; "
            f"against {first[0]} {gap:+.4f} ({low:+.4f} to {high:+.4f})",
            flush=True,
        )
    if json_file is not None:
        settings = {"corpus": dataset.fingerprint, "tokens_per_document": tokens}
        turns.write(json_file, {"about": turns.about(), "settings": settings, "models": found})
    return 0


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
