"""The processes of one run, as `torchrun` (or any launcher that sets the same variables) starts them.

One process is the case of one rank: every method works there, and torch.distributed is never touched.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from resformer.errors import RunError, UserError

T = TypeVar("T")
CPU = torch.device("cpu")
GRACE_SECONDS = 1.0

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What a launcher says in the environment."""


class Elsewhere(SystemExit):
    """Another process has failed and says why; this one ends with the same exit code and in silence.

    It takes a moment for that: a launcher ends all processes when the first one is gone, also the one that speaks.
    """

    def __init__(self, code: int) -> None:
        super().__init__(code)
        time.sleep(GRACE_SECONDS)


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among all.

    Attributes:
        rank: number of this process, from 0.
        size: processes in all.
        local_rank: number of this process on its machine, from 0.
        device: what it computes on.
        control: group (gloo) for small things between steps; None with one process.
        saving: group (gloo) that only the writer of checkpoints uses: its collectives run on a thread of their own, and
            two threads on one group would meet each other's messages.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    device: torch.device = CPU
    control: Any = None
    saving: Any = None

    @property
    def first(self) -> bool:
        """Whether this is the process that reports and writes what is written once."""
        return self.rank == 0

    def rows(self, count: int) -> slice:
        """This process's rows of a global batch of `count` sequences, which `size` divides."""
        share = count // self.size
        return slice(self.rank * share, (self.rank + 1) * share)

    def agree(self, *numbers: int) -> list[int]:
        """The largest of each number over all processes. Waits for the processes, for no device."""
        if self.size == 1:
            return list(numbers)
        largest = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(largest, dist.ReduceOp.MAX, self.control)
        return largest.tolist()

    def fail(self, error: Exception) -> NoReturn:
        """End all processes for a reason that all know: the first raises `error`, the others end in silence."""
        raise error if self.first else Elsewhere(2 if isinstance(error, UserError) else 1)

    def total(self, value: Tensor) -> Tensor:
        """The sum of `value` over all processes, on its device."""
        if self.size == 1:
            return value
        value = value.clone()
        dist.all_reduce(value)
        return value

    def sums(self, *values: float) -> list[float]:
        """The sum of each number over all processes, in float64."""
        if self.size == 1:
            return list(values)
        numbers = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(numbers, group=self.control)
        return numbers.tolist()

    def gather(self, value: T, group: Any = None) -> list[T]:
        """The value of every process, by rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=group or self.control)
        return values

    def on_first(self, work: Callable[[], T]) -> T:
        """Let the first process do `work`; all get what it returned, or end when it failed."""
        result = self.together(lambda: work() if self.first else None)
        return self.gather(result)[0]  # type: ignore[return-value]

    def together(self, work: Callable[[], T]) -> T:
        """Do `work` in all processes, and fail in all when it fails in one.

        Raises:
            UserError, RunError, OSError: of `work`, in the first process where it failed.
            Elsewhere: in all others.
        """
        if self.size == 1:
            return work()
        problem: Exception | None = None
        result: Any = None
        try:
            result = work()
        except Exception as error:
            problem = error
        codes = self.gather(None if problem is None else 2 if isinstance(problem, UserError) else 1)
        failed = [rank for rank, code in enumerate(codes) if code is not None]
        if not failed:
            return result
        if problem is None or failed[0] != self.rank:
            raise Elsewhere(codes[failed[0]] or 1)
        if len(failed) < self.size and isinstance(problem, UserError | RunError):
            raise type(problem)(f"process {self.rank} of {self.size}: {problem}") from problem
        raise problem


def lost_contact(error: BaseException) -> str:
    """What a failed exchange between processes says, in one line; "" if `error` is something else."""
    text = " ".join(str(error).split())
    known = isinstance(error, dist.DistBackendError | dist.DistNetworkError | dist.DistStoreError)
    if known or (
        isinstance(error, RuntimeError) and re.search(r"gloo/|\bgloo\b|Gloo|NCCL|Connection (closed|reset)", text)
    ):
        return re.sub(r"^\[[^\]]*\]\s*", "", text)[:160]
    return ""


def launched() -> tuple[int, int, int]:
    """Rank, size and local rank as a launcher has set them; 0, 1, 0 without one.

    Raises:
        UserError: some of the variables are missing or no numbers.
    """
    if int(_number("WORLD_SIZE", "1")) == 1:
        return 0, 1, 0
    missing = [name for name in LAUNCHER if name not in os.environ]
    if missing:
        raise UserError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but {', '.join(missing)} is not set; start processes with "
            "torchrun, or unset WORLD_SIZE to train in one"
        )
    rank, size, local_rank = _number("RANK"), _number("WORLD_SIZE"), _number("LOCAL_RANK")
    if not 0 <= rank < size or not 0 <= local_rank < size or not 0 < _number("MASTER_PORT") < 65_536:
        raise UserError(
            f"the environment says RANK={rank}, LOCAL_RANK={local_rank}, WORLD_SIZE={size}, "
            f"MASTER_PORT={os.environ['MASTER_PORT']}: ranks count from 0 to {size - 1}, ports to 65535; start "
            "processes with torchrun"
        )
    return rank, size, local_rank


def _number(name: str, default: str = "") -> int:
    text = os.environ.get(name, default)
    try:
        return int(text)
    except ValueError:
        raise UserError(f"the environment variable {name} is {text!r}, expected a whole number") from None


@contextmanager
def processes(device: torch.device, *, timeout_seconds: float = 600.0) -> Iterator[Ranks]:
    """Join the processes that the launcher started, and leave them at the end.

    Args:
        device: what to compute on; "cuda" becomes the GPU of this process's number on its machine.
        timeout_seconds: how long a process waits for the others before it gives up.

    Raises:
        UserError: the environment says half of what is needed, or the device cannot be shared.
    """
    rank, size, local_rank = launched()
    if size == 1:
        yield Ranks(device=device)
        return
    if not dist.is_available():
        raise UserError(f"{size} processes, but this build of torch has no torch.distributed; train in one")
    if device.type == "mps":
        raise UserError(f"{size} processes on mps: one process is all it can; set train.device=cpu, or start one")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if local_rank >= count:
            raise UserError(f"process {local_rank} of this machine has no GPU: there are {count}; start as many")
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    ours, timeout = not dist.is_initialized(), timedelta(seconds=timeout_seconds)
    if ours:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        try:
            dist.init_process_group(backend, timeout=timeout)
        except RuntimeError as error:
            if not (said := lost_contact(error)):
                raise
            where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            raise RunError(f"process {rank} of {size} found no others at {where} ({said}); start all again") from error
    try:
        joined = Ranks(rank=rank, size=size, local_rank=local_rank, device=device)
        groups = [dist.new_group(backend="gloo", timeout=timeout) for _ in range(2)]
        yield replace(joined, control=groups[0], saving=groups[1])
    except BaseException:
        # Others may wait for us in a collective, or be gone: leaving in good order could wait for them for ever.
        ours = False
        raise
    finally:
        if ours:
            dist.destroy_process_group()
