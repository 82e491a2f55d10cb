"""Local files for lm-eval's tasks: rows as the stock task wants them, and a YAML that puts them in place of its data.

The stock prompt, choices and metrics stay in force. Where the fields of the original rows cannot be had back from a
file, the task is one of our own, named `X_local`.
"""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from resformer.data.archives import BROKEN, chunks, suffixes
from resformer.errors import UserError

Row = dict[str, Any]
LOCAL = "_local"
JSON_LINES = (".jsonl", ".ndjson")
OTHER_NAMES = {
    "hellaswag": ("hellaswag_val_full", "hellaswag_val"),
    "lambada_openai": ("lambada",),
    "openbookqa": ("openbook_qa",),
    "winogrande": ("winogrande_xl",),
}
"""What the file of a task may be called besides the task's name."""
FIELDS: dict[str, tuple[str, ...]] = {
    "hellaswag": ("activity_label", "ctx_a", "ctx_b", "endings", "label"),
    "piqa": ("goal", "sol1", "sol2", "label"),
    "arc_easy": ("question", "choices", "answerKey"),
    "arc_challenge": ("question", "choices", "answerKey"),
    "openbookqa": ("question_stem", "choices", "answerKey"),
    "winogrande": ("sentence", "option1", "option2", "answer"),
    "lambada_openai": ("text",),
    "wikitext": ("page",),
}
"""Fields that the stock tasks read."""
QUERY, SCHEMA, CONTEXT = ("query", "choices", "gold"), ("context_options", "continuation", "gold"), ("context",)
_SENTENCE_ENDS = ('."', '!"', '?"', ".", "!", "?")


@dataclass(frozen=True, kw_only=True)
class LocalTask:
    """One task that reads a local file.

    Attributes:
        name: as it runs: the stock one, or with `_local`.
        file: what it reads.
        rows: how many.
        note: how the rows became those of the task.
    """

    name: str
    file: Path
    rows: int
    note: str

    def record(self) -> dict[str, Any]:
        """For eval.json."""
        return {"file": str(self.file), "rows": self.rows, "note": self.note}


def find_files(directory: Path) -> dict[str, Path]:
    """Files of `directory` that may hold a task, by name without suffixes.

    Raises:
        UserError: no such directory, or two files of one name.
    """
    if not directory.is_dir():
        raise UserError(f"--task-files {directory} is no directory; expected one with files like hellaswag.jsonl")
    found: dict[str, Path] = {}
    for file in sorted(path for path in directory.iterdir() if path.is_file()):
        form, _ = suffixes(file)
        if form not in (*JSON_LINES, ".parquet", ".txt"):
            continue
        stem = file.name[: file.name.lower().index(form)]
        if stem in found:
            raise UserError(f"--task-files {directory} holds {found[stem].name} and {file.name}; leave one of them")
        found[stem] = file
    return found


def file_of(name: str, files: Mapping[str, Path]) -> Path | None:
    """The file of a task, by its name or another one that is usual."""
    base = name.removesuffix(LOCAL)
    return next((files[stem] for stem in (name, base, *OTHER_NAMES.get(base, ())) if stem in files), None)


def write_task(name: str, file: Path, out: Path, *, stock: Path | None, stock_of: Callable[[str], Path]) -> LocalTask:
    """Write the rows and the YAML of a task into `out`.

    Args:
        name: of the task, as it was asked for.
        file: with its rows.
        out: an empty directory, or one with other tasks.
        stock: the YAML of lm-eval's task of that name; None where there is none.
        stock_of: gives that of another task.

    Raises:
        UserError: rows that the task cannot use, with what they have and what is expected.
    """
    base = name.removesuffix(LOCAL)
    rows = list(_rows(base, file))
    if not rows:
        raise UserError(f"{file} holds no rows")
    first, called, note = rows[0], base, _note(base, file)
    config: dict[str, Any] = {}
    include = stock
    if base in FIELDS and all(field in first for field in FIELDS[base]):
        pass
    elif base in FIELDS and (convert := _converter(base, first)) is not None:
        rows, note = [convert(row) for row in rows], "rows put back into the fields of the stock task"
    elif all(field in first for field in SCHEMA):
        rows, called, note = (
            [_winogrande(row) for row in rows],
            base + LOCAL,
            "one continuation, scored after each context",
        )
        include = stock_of("winogrande")
    elif all(field in first for field in QUERY):
        called, note, include = base + LOCAL, "the query as it stands, a space, and each choice", None
        config = _own_choices()
    elif base in FIELDS or stock is None:
        expected = " or ".join(str(list(some)) for some in (FIELDS.get(base), QUERY, SCHEMA) if some)
        raise UserError(f"{file}: the first row has the fields {sorted(first)[:8]}; task {name} expects {expected}")
    data = out / f"{called}.rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    whole: dict[str, Any] = {
        **({} if include is None else {"include": str(include)}),
        **config,
        "task": called,
        "tag": None,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(out / "cache")},
        "training_split": None,
        "validation_split": None,
        "test_split": "test",
        "fewshot_split": "test",
    }
    # JSON is YAML.
    (out / f"{called}.yaml").write_text(json.dumps(whole, indent=1), encoding="utf-8")
    return LocalTask(name=called, file=file, rows=len(rows), note=note)


def write_group(name: str, children: Sequence[str], stock: Mapping[str, Any], out: Path) -> None:
    """Write the YAML of a group of tasks that have local files."""
    kept = {key: stock[key] for key in ("aggregate_metric_list", "metadata") if key in stock}
    (out / f"{name}.yaml").write_text(json.dumps({"group": name, "task": list(children), **kept}), encoding="utf-8")


def _own_choices() -> dict[str, Any]:
    metrics = [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")]
    return {
        "output_type": "multiple_choice",
        "doc_to_text": "{{query}}",
        "doc_to_target": "{{gold}}",
        "doc_to_choice": "{{choices}}",
        "metric_list": metrics,
        "metadata": {"version": 1.0},
    }


def _rows(name: str, file: Path) -> Iterator[Row]:
    form, _ = suffixes(file)
    try:
        if form == ".parquet":
            yield from _table(file)
        elif form == ".txt" and name == "hellaswag":
            yield from _hellaswag_text(file)
        elif form == ".txt":
            raise UserError(f"{file}: task {name} has no format of plain text; expected .jsonl or .parquet")
        else:
            yield from _json_lines(file)
    except BROKEN as error:
        raise UserError(f"{file} cannot be read to its end ({error})") from error


def _table(file: Path) -> list[Row]:
    try:
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"{file}: reading .parquet needs pyarrow; pip install 'resformer[data]'") from None
    return pyarrow.parquet.read_table(file).to_pylist()


def _json_lines(file: Path) -> Iterator[Row]:
    for number, line in enumerate(b"".join(chunks(file)).split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8-sig"))
        except ValueError as error:
            raise UserError(f"{file}:{number}: not valid JSON ({error})") from None
        if not isinstance(row, dict):
            raise UserError(f"{file}:{number}: expected a JSON object, got {type(row).__name__}")
        yield row


def _hellaswag_text(file: Path) -> Iterator[Row]:
    """Six lines a task: "activity: context", the label, four endings.

    The stock task writes the unfinished sentence at the end (`ctx_b`) with a capital letter, so it is taken apart here.
    """
    lines = b"".join(chunks(file)).decode("utf-8-sig").split("\n")
    lines = lines[:-1] if lines[-1] == "" else lines
    for start in range(0, len(lines), 6):
        some = [line.rstrip("\r") for line in lines[start : start + 6]]
        activity, colon, context = some[0].partition(": ")
        if len(some) < 6 or not colon or some[1].strip() not in ("0", "1", "2", "3"):
            raise UserError(
                f"{file}:{start + 1}: expected six lines a task: 'activity: context', a label from 0 to 3, four endings"
            )
        begun, unfinished = _unfinished(context)
        yield {
            "activity_label": activity,
            "ctx_a": begun,
            "ctx_b": unfinished,
            "endings": some[2:],
            "label": some[1].strip(),
        }


def _unfinished(context: str) -> tuple[str, str]:
    """The whole sentences of a context, and the one that the endings finish ("" where there is none)."""
    text = context.rstrip()
    if text.endswith(_SENTENCE_ENDS):
        return context, ""
    cuts = [text.rfind(f"{end} ") + len(end) for end in _SENTENCE_ENDS if f"{end} " in text]
    return (text[: max(cuts)], text[max(cuts) :].strip()) if cuts else (context, "")


def _converter(task: str, first: Row) -> Callable[[Row], Row] | None:
    """How rows in another known form become those of a stock task."""
    if task in ("arc_easy", "arc_challenge", "openbookqa") and all(field in first for field in QUERY):
        return _openbookqa if task == "openbookqa" else _arc
    if task == "piqa" and all(field in first for field in QUERY):
        return _piqa
    if task == "winogrande" and all(field in first for field in SCHEMA):
        return _winogrande
    if task == "lambada_openai" and all(field in first for field in (*CONTEXT, "continuation")):
        return lambda row: {"text": f"{row['context'].rstrip()} {row['continuation'].strip()}"}
    if task == "wikitext" and "text" in first:
        return lambda row: {"page": row["text"]}
    return None


def _note(task: str, file: Path) -> str:
    if task == "hellaswag" and suffixes(file)[0] == ".txt":
        return "the unfinished sentence at the end of a context is taken for ctx_b"
    return "rows as the stock task's"


def _question(row: Row) -> str:
    return str(row["query"]).removeprefix("Question: ").strip()


def _lettered(row: Row) -> Row:
    letters = string.ascii_uppercase[: len(row["choices"])]
    return {"choices": {"text": list(row["choices"]), "label": list(letters)}, "answerKey": letters[int(row["gold"])]}


def _arc(row: Row) -> Row:
    return {"question": _question(row), **_lettered(row)}


def _openbookqa(row: Row) -> Row:
    return {"question_stem": str(row["query"]), **_lettered(row)}


def _piqa(row: Row) -> Row:
    first, second = row["choices"]
    return {"goal": _question(row), "sol1": first, "sol2": second, "label": int(row["gold"])}


def _winogrande(row: Row) -> Row:
    """The sentence with a gap; where the words before the gap cannot be told from the options, all is in the options,
    which gives the same requests.
    """
    first, second = row["context_options"]
    pairs = zip(first.split(" "), second.split(" "), strict=False)
    words = (word for word, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    shared = "".join(f"{word} " for word in words)
    shared = "" if "_" in shared or not (first.startswith(shared) and second.startswith(shared)) else shared
    return {
        "sentence": f"{shared}_ {row['continuation'].strip()}",
        "option1": first[len(shared) :],
        "option2": second[len(shared) :],
        "answer": str(int(row["gold"]) + 1),
    }
