"""The command that says what converted models have won back."""

from __future__ import annotations

import json as json_module
from pathlib import Path

from resformer import tables
from resformer.errors import UserError


def recovery(runs: tuple[Path, ...], /, *, json: bool = False) -> None:
    """Loss recovered against training tokens, and cache saved, of runs that trained a converted model on.

    They were trained with `--set uptrain.source=MODEL`, the model that theirs was made from; it and the model as it
    started were scored on the same text before the first step. `resformer analyze RUN... --out DIR` draws the curves.

    Example: `resformer recovery runs/shared`

    Args:
        runs: Run directories.
        json: Print one JSON object instead of tables.
    """
    from resformer.train.recovery import recovery as read

    if not runs:
        raise UserError("no run is given; name the directories of runs that were trained with uptrain.source")

    found = {str(run): read(run) for run in runs}
    if json:
        print(
            json_module.dumps(
                {
                    run: {
                        "source": one.source,
                        "kv_bytes_per_token": one.kv_bytes_per_token,
                        "kv_ratio": one.kv_ratio,
                        "points": one.rows(),
                    }
                    for run, one in found.items()
                }
            )
        )
        return
    for run, one in found.items():
        print(f"{run}: {one.line()}")
        tables.show_rows("", one.rows())
