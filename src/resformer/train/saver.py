"""Writing checkpoints: by all processes together, at once or while training goes on."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from resformer.parallel import Elsewhere, Ranks
from resformer.train import checkpoint, tensors
from resformer.train.checkpoint import TrainState
from resformer.train.failure import RunFailure
from resformer.train.files import put_directory, sha256, write_atomic


class Saver:
    """Writes checkpoints of one run into `checkpoints`.

    An asynchronous save copies everything to CPU memory and is done by a thread, one save at a time. Its failure is
    noted in `failed` and raised by the next `save` or by `finish`.
    """

    def __init__(
        self,
        checkpoints: Path,
        ranks: Ranks,
        *,
        keep_last: int,
        keep_every: int | None = None,
        background: bool = False,
    ) -> None:
        self.checkpoints, self.ranks, self.background = checkpoints, ranks, background
        self.keep_last, self.keep_every = keep_last, keep_every
        self.saved: int | None = None
        """Step of the last save that was begun."""
        self._thread: threading.Thread | None = None
        self._problem: str | None = None

    @property
    def failed(self) -> bool:
        return self._problem is not None

    def save(self, state: TrainState, model: nn.Module, optimizers: Sequence[Optimizer], *, at_once: bool) -> None:
        """Write one checkpoint, point `latest` at it, then remove older ones. All processes must come.

        Args:
            state: where the run stands.
            model: sharded or not.
            optimizers: of the model.
            at_once: return when it is written, also if saves go on in the background.

        Raises:
            RunFailure: it, or the one before, could not be written; the checkpoints before are as they were.
        """
        self.finish()
        found, groups = tensors.everything(model, optimizers), _described(optimizers)
        self.saved = state.step
        if not self.background:
            self._write(state, found, groups)
        else:
            work = (state, tensors.staged(found), groups)
            self._thread = threading.Thread(target=self._write, args=work, daemon=True, name="checkpoint")
            self._thread.start()
        if at_once:
            self.finish()
        elif not self.background:
            self._raise()

    def finish(self) -> None:
        """Wait until the save that is under way is done.

        Raises:
            RunFailure: it could not be done. Only the first process says so, the others end with the same exit code.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._raise()

    def _raise(self) -> None:
        if self._problem is not None:
            problem, self._problem = self._problem, None
            raise RunFailure(problem) if self.ranks.first else Elsewhere(1)

    def _write(self, state: TrainState, found: dict[str, Tensor], groups: list[dict[str, Any]]) -> None:
        """Everything, the same in all processes; what goes wrong in one is known to all at the end."""
        target = self.checkpoints / f"step-{state.step:08d}"
        temporary, group = None, self.ranks.saving
        try:
            temporary, problem = self.ranks.gather(self._temporary() if self.ranks.first else (None, ""), group)[0]
            if temporary is not None:
                outcomes = self.ranks.gather(self._shards(temporary, found), group)
                problem = next((text for text, _ in outcomes if text), "")
            if not problem and temporary is not None:
                files = {name: digest for _, sums in outcomes for name, digest in sums.items()}
                sealed = self._seal(temporary, target, state, files, groups) if self.ranks.first else ""
                problem = self.ranks.gather(sealed, group)[0]
        except Exception as error:  # a thread must not die in silence
            problem = tensors.reason(error)
        if problem:
            if self.ranks.first and temporary is not None:
                shutil.rmtree(temporary, ignore_errors=True)
            self._problem = (
                f"step {state.step}: the checkpoint {target} could not be written: {problem}; "
                f"{checkpoint.kept(self.checkpoints)}"
            )

    def _temporary(self) -> tuple[Path | None, str]:
        try:
            self.checkpoints.mkdir(exist_ok=True)
            return Path(tempfile.mkdtemp(dir=self.checkpoints, prefix=checkpoint.TEMPORARY)), ""
        except OSError as error:
            return None, tensors.reason(error)

    def _shards(self, temporary: Path, found: dict[str, Tensor]) -> tuple[str, dict[str, str]]:
        """Write this process's tensors; return what went wrong, if anything, and the checksums of its files."""
        blind = [rank for rank, sees in enumerate(self.ranks.gather(temporary.is_dir(), self.ranks.saving)) if not sees]
        if blind:
            where = "every machine must have the run directory on one shared file system"
            return f"process {blind[0]} does not see {temporary}: {where}", {}
        try:
            tensors.write(temporary, found, self.ranks.saving)
            # The storage counts processes from 1.
            matches = ((path, checkpoint.FILE.fullmatch(path.name)) for path in sorted(temporary.iterdir()))
            own = [path for path, match in matches if match and int(match[1]) == self.ranks.rank + 1]
            return "", {path.name: sha256(path) for path in own}
        except tensors.FAILURES as error:
            return tensors.reason(error), {}

    def _seal(
        self, temporary: Path, target: Path, state: TrainState, files: dict[str, str], groups: list[dict[str, Any]]
    ) -> str:
        """Make a checkpoint of a directory with all its files in it."""
        try:
            checkpoint.write_state(temporary, state, files, groups)
            put_directory(temporary, target)
            write_atomic(self.checkpoints / checkpoint.LATEST, f"{target.name}\n")
            checkpoint.prune(self.checkpoints, state.step, keep_last=self.keep_last, keep_every=self.keep_every)
        except OSError as error:
            return tensors.reason(error)
        return ""


def _described(optimizers: Sequence[Optimizer]) -> list[dict[str, Any]]:
    """Parameter groups for readers: what is in them and their settings at this step."""
    plain = (int, float, str, bool, list, tuple)
    return [
        {k: v for k, v in group.items() if k != "params" and isinstance(v, plain)}
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]
