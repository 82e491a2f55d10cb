"""Zero-shot and few-shot tasks, through lm-eval's own harness."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from resformer.errors import UserError, did_you_mean
from resformer.evaluate import stock_tasks
from resformer.evaluate.task_files import LOCAL, LocalTask, file_of, find_files, write_group, write_task
from resformer.parallel.ranks import Ranks

PRESETS = {"paper": ("hellaswag", "openbookqa", "winogrande", "arc_challenge", "arc_easy", "piqa")}
"""Names for several tasks; "paper" has the six of the paper's zero-shot table, in its order."""
BOOTSTRAP_DRAWS = 1000
"""For standard errors of what is no mean (perplexities); those of accuracies have a formula."""


@dataclass(frozen=True, kw_only=True)
class Tasks:
    """Tasks that are ready to run.

    Attributes:
        names: as they run, in the order in which they were asked for.
        local: those that read a local file, and the tasks of groups that do.
        objects: lm-eval's, one or more for each name.
        manager: lm-eval's index of the tasks.
    """

    names: tuple[str, ...]
    local: Mapping[str, LocalTask] = field(default_factory=dict)
    objects: tuple[Any, ...] = ()
    manager: Any = None


def task_names(texts: Sequence[str]) -> tuple[str, ...]:
    """The names in texts like "hellaswag,piqa" and "paper", each once.

    Raises:
        UserError: an empty name.
    """
    found: list[str] = []
    for text in texts:
        for name in text.split(","):
            if not name.strip():
                raise UserError(f"--tasks {text!r}: expected names separated by commas, such as hellaswag,piqa")
            found += PRESETS.get(name.strip(), (name.strip(),))
    return tuple(dict.fromkeys(found))


@contextmanager
def open_tasks(wanted: Sequence[str], *, task_files: str | Path | None = None, show: bool = False) -> Iterator[Tasks]:
    """Find tasks by name, write what local files need into a temporary directory, and load their data.

    Args:
        wanted: names of tasks, groups or tags of lm-eval, or of files in `task_files`.
        task_files: a directory with local files, by task name (docs/evaluation.md); a task without one is read from the
            hub, as lm-eval does.
        show: the progress of downloads, on standard error.

    Raises:
        UserError: lm-eval is missing, a name is unknown, a file does not fit its task, or data cannot be had.
    """
    stock_tasks.check_installed()
    directory = None if task_files is None else Path(task_files)
    files = {} if directory is None else find_files(directory)
    _check_names(wanted, files)
    with tempfile.TemporaryDirectory(prefix="resformer-tasks-") as temporary:
        out = Path(temporary)
        names, local = _write(wanted, files, directory, out)
        with quiet(show=show and any(name not in local for name in names)):
            manager = _manager(names, local, out)
            objects = _load(manager, names, local, directory)
        yield Tasks(names=names, local=local, objects=objects, manager=manager)


def run_tasks(
    model: Any,
    tokenizer: Any,
    tasks: Tasks,
    *,
    batch_size: int = 8,
    limit: int | None = None,
    num_fewshot: int | None = None,
    max_length: int | None = None,
    ranks: Ranks = Ranks(),  # noqa: B008  (frozen)
) -> dict[str, Any]:
    """Run tasks with lm-eval's `simple_evaluate` on a model that is loaded.

    Args:
        model: any causal LM of transformers, on its device, in evaluation mode.
        tokenizer: the model's, of transformers.
        tasks: what `open_tasks` gives, while it is open.
        batch_size: requests per forward pass.
        limit: documents per task, the first ones; none = all.
        num_fewshot: examples before each question; none = the task's own number, mostly 0.
        max_length: tokens that the model sees at most; none = what lm-eval takes from its config.
        ranks: the processes that share the documents, each with the same model; all of them get the result.

    Returns:
        `{name: {"metrics": {metric: {"value", "stderr"}}, "documents", "num_fewshot", "version"}}`, for a local task
        with what `LocalTask.record` says under "local". stderr is None where lm-eval has none.
    """
    from lm_eval import evaluator

    with quiet(show=ranks.first), _no_machine_search(evaluator):
        lm = _harness_model(model, tokenizer, batch_size=batch_size, max_length=max_length, ranks=ranks)
        result = evaluator.simple_evaluate(
            model=lm,
            tasks=list(tasks.objects),
            task_manager=tasks.manager,
            num_fewshot=num_fewshot,
            batch_size=batch_size,
            limit=limit,
            bootstrap_iters=BOOTSTRAP_DRAWS,
            log_samples=False,
        )
    found = ranks.gather(None if result is None else _tidy(result, tasks))
    assert found[0] is not None, "the first process has the result"
    return found[0]


def _check_names(wanted: Sequence[str], files: Mapping[str, Path]) -> None:
    for name in wanted:
        if name in stock_tasks.names() or file_of(name, files) is not None:
            continue
        known = [*PRESETS, *files, *stock_tasks.names()]
        raise UserError(
            f"--tasks: unknown task {name!r}{did_you_mean(name, known, likeness=0.6)} (`lm-eval ls tasks` lists what "
            "there is; a file of that name in --task-files DIR makes one)"
        )


def _write(
    wanted: Sequence[str], files: Mapping[str, Path], directory: Path | None, out: Path
) -> tuple[tuple[str, ...], dict[str, LocalTask]]:
    names: list[str] = []
    local: dict[str, LocalTask] = {}

    def write(name: str, file: Path) -> str:
        base = name.removesuffix(LOCAL)
        made = write_task(name, file, out, stock=stock_tasks.file_of(base), stock_of=_stock)
        local[made.name] = made
        return made.name

    for name in wanted:
        file = file_of(name, files)
        if file is not None:
            names.append(write(name, file))
            continue
        inner = _files_of_group(name, files, directory)
        if inner:
            write_group(name, [write(child, path) for child, path in inner.items()], stock_tasks.config(name), out)
        names.append(name)
    return tuple(dict.fromkeys(names)), local


def _stock(name: str) -> Path:
    file = stock_tasks.file_of(name)
    assert file is not None, f"lm-eval has {name}"
    return file


def _files_of_group(name: str, files: Mapping[str, Path], directory: Path | None) -> dict[str, Path]:
    """Local files of the tasks of a group, by task: `blimp_wh_island`, or `wh_island` in the directory `blimp`."""
    if directory is None or stock_tasks.names().get(name, ("", None))[0] != "group":
        return {}
    inside = find_files(directory / name) if (directory / name).is_dir() else {}
    found = {}
    for child in stock_tasks.children(name):
        short = child.removeprefix(f"{name}_")
        file = files.get(child) or inside.get(child) or inside.get(short)
        if file is not None:
            found[child] = file
    return found


def _manager(names: Sequence[str], local: Mapping[str, LocalTask], out: Path) -> Any:
    """lm-eval's index of these tasks, and of all others only where that is needed."""
    from lm_eval.tasks import TaskManager

    stock = [name for name in names if name not in local and not (out / f"{name}.yaml").is_file()]
    homes = stock_tasks.directories(stock)
    return TaskManager(include_path=[*(homes or []), out], include_defaults=homes is None)


def _load(
    manager: Any, names: Sequence[str], local: Mapping[str, LocalTask], task_files: Path | None
) -> tuple[Any, ...]:
    """lm-eval's task objects, with their data."""
    objects: list[Any] = []
    for name in names:
        try:
            loaded = manager.load([name])
        except Exception as error:  # of the hub, of the network, of datasets: each has its own
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            if name in local:
                raise UserError(f"{local[name].file} cannot be used for task {name} ({reason})") from error
            place = task_files or "DIR"
            raise UserError(
                f"--tasks {name}: its data cannot be had from the hub ({reason}); put {name}.jsonl into a directory "
                f"and pass --task-files {place}"
            ) from error
        group = loaded.get("groups", {}).get(name)
        objects += [group] if group is not None else loaded["tasks"].values()
    return tuple(objects)


def _harness_model(model: Any, tokenizer: Any, *, batch_size: int, max_length: int | None, ranks: Ranks) -> Any:
    """lm-eval's wrapper of the model, which shares documents among our processes."""
    import torch
    from lm_eval.models.huggingface import HFLM

    class Shared(HFLM):
        """lm-eval asks `accelerate` for this; here the processes are joined already."""

        rank = property(lambda self: ranks.rank)
        world_size = property(lambda self: ranks.size)

        def all_gather(self, tensor: Any) -> Any:
            return torch.stack([part.reshape(()) for part in ranks.gather(tensor.cpu())])

        def gather_object(self, obj: Any, dst: int = 0) -> Any:
            found = ranks.gather(obj)
            return found if ranks.rank == dst else None

        def barrier(self) -> None:
            ranks.gather(None)

    kind = HFLM if ranks.size == 1 else Shared
    return kind(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, max_length=max_length)


def _tidy(result: Mapping[str, Any], tasks: Tasks) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, row in {**result["results"], **result.get("groups", {})}.items():
        metrics: dict[str, dict[str, float | None]] = {}
        for key, value in row.items():
            metric, comma, filtered = key.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            stderr = row.get(f"{metric}_stderr,{filtered}")
            shown = metric if filtered == "none" else key
            metrics[shown] = {"value": _number(value), "stderr": _number(stderr)}
        samples = result.get("n-samples", {}).get(name, {})
        found[name] = {
            "metrics": metrics,
            "documents": samples.get("effective"),
            "num_fewshot": result.get("n-shot", {}).get(name),
            "version": _number(result.get("versions", {}).get(name)),
        }
        if name in tasks.local:
            found[name]["local"] = tasks.local[name].record()
    order = [*tasks.names, *(name for name in found if name not in tasks.names)]
    return {name: found[name] for name in order if name in found}


def mean_accuracy(found: Mapping[str, Any], names: Sequence[str]) -> float | None:
    """The unweighted mean of `acc`, as in the paper's table, over the tasks that have one; None where none has."""
    values = [found.get(name, {}).get("metrics", {}).get("acc", {}).get("value") for name in names]
    some = [value for value in values if value is not None]
    return sum(some) / len(some) if some else None


def _number(value: Any) -> float | None:
    """A float that JSON holds; None for "N/A" and NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


@contextmanager
def quiet(*, show: bool) -> Iterator[None]:
    """Keep standard output for results, and lm-eval's log to errors; `show` its progress bars on standard error."""
    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets")]
    levels = [logger.level for logger in loggers]
    with contextlib.ExitStack() as stack:
        if not show:
            stack.enter_context(contextlib.redirect_stderr(stack.enter_context(open(os.devnull, "w"))))
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


@contextmanager
def _no_machine_search(evaluator: Any) -> Iterator[None]:
    """lm-eval looks up a git commit in the current directory, which prints an error where there is none, and lists
    packages and hardware for seconds; our record has the versions.
    """
    with contextlib.ExitStack() as stack:
        # Standard errors are drawn here, not in copies of a process that holds a model.
        stack.enter_context(mock.patch.dict(os.environ, {"DISABLE_MULTIPROC": "1"}))
        for name in ("get_git_commit_hash", "add_env_info"):
            if hasattr(evaluator, name):
                stack.enter_context(mock.patch.object(evaluator, name, lambda *_, **__: None))
        yield
