"""Batches for the steps, read one step ahead by a thread."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from resformer.parallel import Ranks


class Feeder:
    """This process's rows of the global batches, on its device.

    The order of the data is a function of the global sample index alone, so there is nothing to save or restore here.
    """

    def __init__(self, sampler: Any, ranks: Ranks, batch_size: int) -> None:
        self._sampler, self._ranks, self._batch_size = sampler, ranks, batch_size
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="data")
        self._ahead: tuple[int, Future[Tensor]] | None = None

    def take(self, first: int, *, more: bool) -> Tensor:
        """Tokens `[B / processes, T + 1]` of the batch whose first sample is `first`; `more` says that the batch after
        it will be asked for next.
        """
        ready, self._ahead = self._ahead, None
        rows = ready[1].result() if ready is not None and ready[0] == first else self._read(first)
        if more:
            following = first + self._batch_size
            self._ahead = following, self._thread.submit(self._read, following)
        return rows.to(self._ranks.device, non_blocking=True)

    def _read(self, first: int) -> Tensor:
        mine = self._ranks.rows(self._batch_size)
        tokens = torch.from_numpy(self._sampler.samples(np.arange(first + mine.start, first + mine.stop)).tokens)
        return tokens.pin_memory() if self._ranks.device.type == "cuda" else tokens

    def __enter__(self) -> Feeder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
