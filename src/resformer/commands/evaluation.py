"""What `resformer eval` does, step by step."""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resformer import lookup, tables
from resformer.commands.runs import said_once
from resformer.errors import UserError
from resformer.train.files import check_output, write_json

if TYPE_CHECKING:
    from resformer.evaluate.tasks import Tasks
    from resformer.evaluate.text_source import TextSource
    from resformer.parallel.ranks import Ranks

# A process may wait for others that read, load or count for long.
_TIMEOUT_SECONDS = 3600.0
_NOT_SETTINGS = ("model", "json", "overwrite", "imports")


@dataclass(frozen=True, kw_only=True)
class Request:
    """The arguments of the command, as `commands.models.evaluate` explains them."""

    model: str
    data: str | None
    text: tuple[str, ...]
    tasks: tuple[str, ...]
    task_files: Path | None
    limit: int | None
    num_fewshot: int | None
    sequence_length: int | None
    stride: int | None
    bos: str
    batch_size: int
    max_tokens: int | None
    dtype: str
    device: str
    text_column: str
    domain_from: str
    on_bad_line: str
    json: Path | None
    overwrite: bool
    imports: tuple[Path, ...]

    def check(self) -> Path | None:
        """Where the result goes. UserError for what makes no sense, before anything is imported or read."""
        for flag, value in (
            ("--sequence-length", self.sequence_length),
            ("--batch-size", self.batch_size),
            ("--limit", self.limit),
            ("--stride", self.stride),
        ):
            lookup.check_range(flag, value)
        lookup.check_range("--max-tokens", self.max_tokens, high=10**15)
        lookup.check_range("--num-fewshot", self.num_fewshot, low=0, high=1000)
        if not (self.data is not None or self.text or self.tasks):
            raise UserError("nothing to measure: pass --data DIR, --text INPUT... or --tasks NAMES")
        if self.data is not None and self.text:
            raise UserError("--data and --text exclude each other; measure them one after the other, each with --json")
        if self.task_files is not None and not self.tasks:
            raise UserError("--task-files says where data of tasks lie; name these with --tasks")
        if self.stride is not None and self.sequence_length is not None and self.stride > self.sequence_length:
            raise UserError(
                f"--stride is {self.stride}, over --sequence-length {self.sequence_length}; tokens would be left out"
            )
        inside = Path(self.model) / "eval.json" if Path(self.model).is_dir() else None
        target = self.json or inside
        if target is not None:
            check_output(target, overwrite=self.overwrite, flag="--json" if self.json else "the result")
        return target

    def settings(self) -> dict[str, Any]:
        """JSON-able, for eval.json."""
        found = {key: value for key, value in asdict(self).items() if key not in _NOT_SETTINGS}
        return {key: str(value) if isinstance(value, Path) else value for key, value in found.items()}


@dataclass(kw_only=True)
class _Opened:
    """What was asked for, opened; `ready` adds the model."""

    dataset: Any = None
    text: TextSource | None = None
    tasks: Tasks | None = None
    model: Any = None
    tokenizer: Any = None
    fingerprint: str = ""


def run(request: Request) -> None:
    """Measure, print and write."""
    with said_once():
        target = request.check()
        lookup.import_variants(request.imports, using=(request.model,))
        from resformer.evaluate.loading import resolve_device
        from resformer.parallel.ranks import processes

        device = resolve_device(request.device)
    lookup.quiet_libraries()
    with processes(device, timeout_seconds=_TIMEOUT_SECONDS) as ranks, contextlib.ExitStack() as stack:
        opened = ranks.together(lambda: _open(request, stack, ranks))
        result = ranks.together(lambda: _measure(request, opened, ranks))
        if not ranks.first:
            return
        _show(request, result)
        if target is not None:
            write_json(target, result)
            print(f"written: {target}")


def _open(request: Request, stack: contextlib.ExitStack, ranks: Ranks) -> _Opened:
    """Open text, tasks and model, in this order: a mistake in a name is said before anything large is loaded."""
    import torch

    from resformer.evaluate.encoding import fingerprint
    from resformer.evaluate.loading import load_model, model_directory

    opened = _Opened()
    if request.data is not None:
        from resformer.data import open_dataset

        opened.dataset = open_dataset(request.data, verify="sample")
    if request.text:
        from resformer.data.reading import Reading
        from resformer.evaluate.text_source import TextSource

        if "-" in request.text and ranks.size > 1:
            raise UserError("--text -: standard input cannot be shared among processes; write it to a file first")
        reading = Reading(
            on_bad_line=request.on_bad_line, text_column=request.text_column, domain_from=request.domain_from
        )
        opened.text = TextSource(request.text, reading)
    model_directory(request.model)
    if request.tasks:
        from resformer.evaluate.tasks import open_tasks, task_names

        opened.tasks = stack.enter_context(
            open_tasks(task_names(request.tasks), task_files=request.task_files, show=ranks.first)
        )
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[request.dtype]
    opened.model, opened.tokenizer = load_model(request.model, ranks.device, dtype=dtype)
    opened.fingerprint = fingerprint(opened.tokenizer)
    if opened.dataset is not None:
        lookup.check_tokenizer(request.model, opened.tokenizer, opened.dataset)
    return opened


def _measure(request: Request, opened: _Opened, ranks: Ranks) -> dict[str, Any]:
    from resformer.evaluate.loss import default_length

    length = request.sequence_length or default_length(opened.model)
    result: dict[str, Any] = {"model": request.model}
    apart = _apart(request.model)
    if opened.dataset is not None:
        result |= {"data": str(request.data), "data_fingerprint": opened.dataset.fingerprint}
        result |= _on_shards(request, opened, length, apart, ranks)
    if opened.text is not None:
        result |= _on_text(request, opened, length, apart, ranks)
    if opened.tasks is not None:
        from resformer.evaluate.tasks import mean_accuracy, run_tasks

        result["tasks"] = run_tasks(
            opened.model,
            opened.tokenizer,
            opened.tasks,
            batch_size=request.batch_size,
            limit=request.limit,
            num_fewshot=request.num_fewshot,
            max_length=request.sequence_length,
            ranks=ranks,
        )
        result["tasks_mean_acc"] = mean_accuracy(result["tasks"], opened.tasks.names)
    return result | _record(request, opened, length, apart, ranks)


def _on_shards(request: Request, opened: _Opened, length: int, apart: bool, ranks: Ranks) -> dict[str, Any]:
    from resformer.data.console import Progress
    from resformer.evaluate.shards import evaluate_shards

    dataset = opened.dataset
    total = sum(dataset.covered(domain, max_tokens=request.max_tokens)[0] for domain in dataset.domains)
    with Progress(f"scoring {total:,} tokens", total, ranks.first) as progress:
        return evaluate_shards(
            opened.model,
            dataset,
            sequence_length=length,
            stride=request.stride,
            batch_size=request.batch_size,
            max_tokens=request.max_tokens,
            document_mask=apart,
            device=ranks.device,
            ranks=ranks,
            advance=lambda tokens: progress.advance(tokens, tokens=tokens),
        )


def _on_text(request: Request, opened: _Opened, length: int, apart: bool, ranks: Ranks) -> dict[str, Any]:
    from resformer.data.console import Progress
    from resformer.evaluate.encoding import start_of_documents
    from resformer.evaluate.texts import evaluate_texts

    text = opened.text
    assert text is not None, "opened before"
    done = 0.0
    with Progress(f"scoring {text.size:,} bytes", text.size, ranks.first) as progress:

        def advance(work: float, tokens: int) -> None:
            nonlocal done
            done += work
            progress.advance(int(done) - progress.done, tokens=tokens)

        found = evaluate_texts(
            opened.model,
            opened.tokenizer,
            text.documents(),
            sequence_length=length,
            stride=request.stride,
            batch_size=request.batch_size,
            max_tokens=request.max_tokens,
            bos=start_of_documents(opened.model, opened.tokenizer, request.bos, document_mask=apart),
            device=ranks.device,
            ranks=ranks,
            advance=advance,
        )
    return {**found, "text": text.record()}


def _record(request: Request, opened: _Opened, length: int, apart: bool, ranks: Ranks) -> dict[str, Any]:
    """Under which conditions the numbers hold."""
    from importlib.metadata import version

    from resformer.train.environment import versions

    found = versions()
    if opened.tasks is not None:
        found |= {"lm_eval": version("lm_eval"), "datasets": version("datasets")}
    return {
        "settings": {
            **request.settings(),
            "sequence_length": length,
            "stride": request.stride or length,
            "document_mask": apart,
            "device": str(ranks.device),
            "processes": ranks.size,
            "imports": [str(path) for path in request.imports],
        },
        "tokenizer_fingerprint": opened.fingerprint,
        "versions": found,
    }


def _show(request: Request, result: dict[str, Any]) -> None:
    if "domains" in result:
        columns = ["domain", "tokens", "loss", "perplexity", "per word", "per byte", "bits/byte"]
        kinds = ("loss", "perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte")
        weighted, means = result["overall"]["token_weighted"], result["overall"]["mean_of_domains"]
        named = [*result["domains"].items(), ("all tokens", weighted)]
        rows = [(name, row["tokens"], *(row[kind] for kind in kinds)) for name, row in named]
        rows.append(("domain mean", weighted["tokens"], *(means[kind] for kind in kinds)))
        what = "validation" if request.data is not None else "text"
        tables.show(f"{request.model}: {what} (loss in nats per token)", columns, rows)
        words = "" if weighted["words"] is None else f"{weighted['words']:,} words, "
        print(f"{words}{weighted['bytes']:,} bytes of text; windows of {_windows(result['settings'])}")
        if weighted["tokens_not_scored"]:
            print(f"{weighted['tokens_not_scored']:,} first tokens have no context and are not scored")
        if result.get("domains_not_scored"):
            print(f"no token of these domains has context: {', '.join(result['domains_not_scored'])}")
    if "tasks" in result:
        rows = [
            (name, metric, one["value"], one["stderr"], "-" if row["documents"] is None else row["documents"])
            for name, row in result["tasks"].items()
            for metric, one in row["metrics"].items()
        ]
        tables.show(f"{request.model}: tasks", ["task", "metric", "value", "standard error", "documents"], rows)
        if result["tasks_mean_acc"] is not None and len(result["tasks"]) > 1:
            print(f"mean acc of the tasks: {result['tasks_mean_acc']:.4f}")


def _windows(settings: dict[str, Any]) -> str:
    length, stride = settings["sequence_length"], settings["stride"]
    return f"{length:,} tokens" if stride == length else f"{length:,} tokens, {stride:,} apart"


def _apart(model: str) -> bool:
    """Whether a model is a run that kept the documents of a sequence apart."""
    from resformer.train.configure import from_toml

    config = Path(model) / "config.toml"
    return config.is_file() and from_toml(config).data.document_mask
