"""Means over texts of what a probe finds, kept on the disk as they grow."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from resformer.analyze.probe import Found


class Means:
    """Running mean and standard error over texts of every (measure, layer).

    A NaN (a measure that a text has no value of) counts for nothing. Vectors keep the mean of each entry.
    """

    def __init__(self) -> None:
        self.count: dict[tuple[str, int], Tensor] = {}
        self.total: dict[tuple[str, int], Tensor] = {}
        self.squares: dict[tuple[str, int], Tensor] = {}
        self.texts = 0

    def add(self, found: Found, texts: int) -> None:
        """Take in what a probe found of so many texts."""
        assert {len(values) for values in found.values()} <= {texts}, "one row a text"
        self.texts += texts
        for key, values in found.items():
            rows = values.double()
            there = ~rows.isnan()
            rows = rows.nan_to_num(0.0)
            for store, amount in (
                (self.count, there.sum(dim=0).double()),
                (self.total, rows.sum(dim=0)),
                (self.squares, rows.square().sum(dim=0)),
            ):
                store[key] = store[key] + amount if key in store else amount

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row for each (measure, layer): `value` and its standard error over the texts, or `values` of a vector."""
        for measure, layer in sorted(self.total):
            key = (measure, layer)
            count, mean = self.count[key], self.total[key] / self.count[key]
            row: dict[str, Any] = {"measure": measure, "layer": layer, "texts": int(count.max())}
            if mean.dim():
                yield {**row, "values": [_number(x) for x in mean.tolist()]}
                continue
            spread = (self.squares[key] - self.total[key] ** 2 / count).clamp_min(0.0) / (count - 1)
            yield {**row, "value": _number(float(mean)), "standard_error": _number(float((spread / count).sqrt()))}

    def save(self, file: Path, settings: dict[str, Any]) -> None:
        """Write all of it, as a whole or not at all."""
        state = {
            "settings": settings,
            "texts": self.texts,
            "sums": [
                [
                    m,
                    layer,
                    self.count[m, layer].tolist(),
                    self.total[m, layer].tolist(),
                    self.squares[m, layer].tolist(),
                ]
                for m, layer in sorted(self.total)
            ],
        }
        file.parent.mkdir(parents=True, exist_ok=True)
        waiting = file.with_name(f".{file.name}.{os.getpid()}")
        waiting.write_text(json.dumps(state), encoding="utf-8")
        os.replace(waiting, file)

    @classmethod
    def load(cls, file: Path, settings: dict[str, Any]) -> Means | None:
        """What `save` wrote with the same settings; None where there is no such."""
        try:
            state = json.loads(file.read_text(encoding="utf-8"))
            if state["settings"] != settings:
                return None
            means = cls()
            means.texts = int(state["texts"])
            for measure, layer, *sums in state["sums"]:
                key = (str(measure), int(layer))
                means.count[key], means.total[key], means.squares[key] = (
                    torch.tensor(x, dtype=torch.float64) for x in sums
                )
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return means


def _number(x: float) -> float | None:
    return x if math.isfinite(x) else None
