"""What a converted model has won back of the loss that its conversion cost, and what it saves of the cache.

Read from what the run wrote: rows "source" and "validation" of metrics.jsonl, and environment.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resformer.errors import UserError
from resformer.train import rundir
from resformer.train.metrics import read_rows

NOTHING_LOST = 0.01
"""Nats per token: a start that is closer to the source than this has lost nothing that one could win back."""


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """Losses are means over the domains of the validation text, nats per token.

    Attributes:
        source: loss of the model that the run's was made from.
        points: (step, training tokens, loss) of every validation, the first of the model as it started.
        kv_bytes_per_token: of the trained model's cache in fp32.
        kv_ratio: of its cache to that of a model whose layers all store keys and values.
    """

    source: float
    points: Sequence[tuple[int, int, float]]
    kv_bytes_per_token: int
    kv_ratio: float

    def recovered(self, loss: float) -> float | None:
        """The share of what the conversion cost that is back at `loss`: 0 at the start, 1 where the source was, more
        below it; None where the conversion cost nothing.
        """
        lost = self.points[0][2] - self.source
        return (self.points[0][2] - loss) / lost if lost > NOTHING_LOST else None

    def line(self) -> str:
        """In a line, what became of it by the last validation."""
        _, tokens, loss = self.points[-1]
        share, start = self.recovered(loss), self.points[0][2]
        back = "" if share is None else f", {share:.1%} recovered"
        return (
            f"loss {start:.4f} -> {loss:.4f} in {tokens:,} tokens, of the source {self.source:.4f} "
            f"({loss - self.source:+.4f}{back}); KV cache {self.kv_bytes_per_token:,} bytes per token (fp32), "
            f"{1 - self.kv_ratio:.1%} saved"
        )

    def rows(self) -> list[dict[str, Any]]:
        """A row for every validation."""
        return [
            {
                "step": step,
                "tokens": tokens,
                "loss": loss,
                "above_source": loss - self.source,
                "recovered": self.recovered(loss),
            }
            for step, tokens, loss in self.points
        ]


def recovery(run: Path | str) -> Recovery:
    """Read it from a run that was trained with `uptrain.source`.

    Raises:
        UserError: no run, one without scores of its source, or files that cannot be used.
    """
    run = Path(run)
    if not (run / rundir.METRICS).is_file():
        raise UserError(f"no run in {run} ({rundir.METRICS} is missing); expected a directory of `resformer train`")
    path = run / rundir.ENVIRONMENT
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))["accounting"]
        found = recovery_of(read_rows(run / rundir.METRICS), facts)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{path} cannot be used ({error!r}); expected what the run wrote there") from None
    if found is None:
        raise UserError(
            f"{run} has no score of a source: train it with --set uptrain.source=MODEL, the model it was made from"
        )
    return found


def recovery_of(rows: Sequence[Mapping[str, Any]], accounting: Mapping[str, Any]) -> Recovery | None:
    """The same from rows of metrics.jsonl and environment.json's accounting; None where no source was scored."""
    means = [row for row in rows if row.get("domain") == "all"]
    source = [row["loss"] for row in means if row["split"] == "source"]
    points = {row["step"]: (row["train_tokens"], row["loss"]) for row in means if row["split"] == "validation"}
    if not source or 0 not in points:
        return None
    return Recovery(
        source=source[-1],
        points=[(step, *points[step]) for step in sorted(points)],
        kv_bytes_per_token=accounting["kv_bytes_per_token"],
        kv_ratio=accounting["kv_ratio"],
    )
