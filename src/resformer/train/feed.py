"""Batches for the steps, read one step ahead by a thread."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from resformer.parallel import Ranks


@dataclass(frozen=True, kw_only=True)
class Rows:
    """One process's rows of a global batch; B is their number, T the sequence length.

    Attributes:
        tokens: ids `[B, T + 1]`.
        mask: `[B, T]`, False where the target does not count; None = all count.
        positions: `[B, T]`, restart where another document begins; None = one document a row.
        count: targets that count in the whole global batch; None where there is no mask.
    """

    tokens: Tensor
    mask: Tensor | None = None
    positions: Tensor | None = None
    count: int | None = None


class Feeder:
    """This process's rows of the global batches, on its device.

    The order of the data is a function of the global sample index alone, so there is nothing to save or restore here,
    and every process can count the targets of all: neither the device nor the other processes are asked.
    """

    def __init__(self, sampler: Any, ranks: Ranks, batch_size: int) -> None:
        self._sampler, self._ranks, self._batch_size = sampler, ranks, batch_size
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="data")
        self._ahead: tuple[int, Future[Rows]] | None = None

    def take(self, first: int, *, more: bool) -> Rows:
        """The rows of the batch whose first sample is `first`; `more` says that the batch after it will be asked for
        next.
        """
        ready, self._ahead = self._ahead, None
        rows = ready[1].result() if ready is not None and ready[0] == first else self._read(first)
        if more:
            following = first + self._batch_size
            self._ahead = following, self._thread.submit(self._read, following)

        def there(tensor: Tensor | None) -> Any:
            return None if tensor is None else tensor.to(self._ranks.device, non_blocking=True)

        return Rows(tokens=there(rows.tokens), mask=there(rows.mask), positions=there(rows.positions), count=rows.count)

    def _read(self, first: int) -> Rows:
        mine, everything = self._ranks.rows(self._batch_size), np.arange(first, first + self._batch_size)
        batch = self._sampler.samples(everything[mine])
        count = None
        if batch.mask is not None:
            others = np.delete(everything, mine)
            count = int(np.count_nonzero(batch.mask)) + (self._sampler.targets(others) if len(others) else 0)
        return Rows(
            tokens=self._tensor(batch.tokens),
            mask=None if batch.mask is None else self._tensor(batch.mask),
            positions=None if batch.positions is None else self._tensor(batch.positions),
            count=count,
        )

    def _tensor(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory() if self._ranks.device.type == "cuda" else tensor

    def __enter__(self) -> Feeder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
