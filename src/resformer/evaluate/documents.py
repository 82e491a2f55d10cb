"""Losses by document, for intervals over documents.

Shapes: B windows, T tokens, D documents.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from resformer.evaluate.loss import check_fit, check_numbers, evaluating, scored


def evaluate_documents(
    model: Any, dataset: Any, *, sequence_length: int, batch_size: int = 16, document_mask: bool = False
) -> tuple[dict[str, Any], dict[str, dict[str, list[Any]]]]:
    """Score the whole validation split as `loss.evaluate` does, and keep what each document has of it.

    Args:
        model: any causal LM of transformers, on its device.
        dataset: what `resformer.data.open_dataset` returns.
        sequence_length: tokens per window.
        batch_size: windows per forward pass.
        document_mask: keep documents apart, and do not score the first token of each.

    Returns:
        What `loss.evaluate` returns; and `{domain: {"nll": [D], "tokens": [D]}}`, summed losses in nats and scored
        tokens of each document, in the corpus's order. They add up to the domain's loss.

    Raises:
        UserError: vocabulary or positions of the model are smaller than the data's, or a domain has no validation text.
    """
    check_numbers(sequence_length=sequence_length, batch_size=batch_size)
    check_fit(model, dataset, sequence_length)
    device = next(model.parameters()).device
    apart = {"document_mask": True} if document_mask else {}
    domains: dict[str, dict[str, Any]] = {}
    documents: dict[str, dict[str, list[Any]]] = {}
    with evaluating(model):
        for domain in dataset.domains:
            ends_D = dataset.document_ends("validation", domain)
            nll_D, tokens_D = np.zeros(len(ends_D)), np.zeros(len(ends_D), dtype=np.int64)
            windows = dataset.validation(domain, sequence_length=sequence_length, **apart)
            first = 0  # of the batch's targets, in the stream
            for batch, losses_BT, mask_BT in scored(model, windows, batch_size=batch_size, device=device):
                kept = mask_BT.cpu().numpy().ravel()
                place = np.flatnonzero(kept)
                owner = np.searchsorted(ends_D, first + place, side="right")
                losses = losses_BT.to("cpu", torch.float64).numpy().ravel()[place]
                np.add.at(nll_D, owner, losses)
                np.add.at(tokens_D, owner, 1)
                first += len(batch) * sequence_length
            size = dataset.validation_bytes(domain, sequence_length=sequence_length, **apart)
            nll, tokens = float(nll_D.sum()), int(tokens_D.sum())
            domains[domain] = {
                "loss": nll / tokens,
                "bits_per_byte": nll / math.log(2) / size,
                "tokens": tokens,
            }
            documents[domain] = {"nll": [round(x, 4) for x in nll_D.tolist()], "tokens": tokens_D.tolist()}
    count = len(domains)
    total = sum(row["loss"] * row["tokens"] for row in domains.values())
    result = {
        "domains": domains,
        "loss": sum(row["loss"] for row in domains.values()) / count,
        "bits_per_byte": sum(row["bits_per_byte"] for row in domains.values()) / count,
        "loss_token_weighted": total / sum(row["tokens"] for row in domains.values()),
    }
    return result, documents
