"""Read a suite's directory back: what each run did so far, whatever state it is in.

Nothing here fails on a run that is missing, half written or killed in the middle of a line: a report is most wanted
when something went wrong. Arrays are `[n]`, sorted by step; a step that was run again after a resume counts once, with
its last row.
"""

from __future__ import annotations

import json
import math
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from resformer.errors import UserError
from resformer.experiments.curves import Floats

SUITE_FILE, SAMPLES_FILE, EVAL_FILE = "suite.json", "samples.json", "eval.json"
DOCUMENTS_FILE, MEASURES_FILE, RECORD_FILE = "documents.json", "measures.jsonl", "record.json"
FAILED_FILE = "failed.json"
_SCORES = ("loss", "bits_per_byte")


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One kind of metrics row over time, a column a field; fields that a row lacks are NaN."""

    columns: dict[str, Floats] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Floats:
        return self.columns.get(name, np.full(len(self), np.nan))

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def last(self, name: str) -> float | None:
        values = self[name]
        return float(values[-1]) if len(values) and np.isfinite(values[-1]) else None


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything a report wants to know about one run. `steps` is what was asked for, `step` what is done.

    `documents` are the losses by validation document, `measures` the rows of an analysis. `recorded`: only the record
    of a finished run is there, without its model. `failure` is the last line of what a failed run said.
    """

    id: str
    name: str
    variant: str
    seed: int
    path: Path
    steps: int | None = None
    step: int = 0
    train: Curve = field(default_factory=Curve)
    validation: dict[str, Curve] = field(default_factory=dict)
    lambdas: dict[str, Any] = field(default_factory=dict)
    config: dict[str, dict[str, Any]] = field(default_factory=dict)
    config_text: str = ""
    environment: dict[str, Any] = field(default_factory=dict)
    evaluation: dict[str, Any] = field(default_factory=dict)
    sample: dict[str, Any] = field(default_factory=dict)
    documents: dict[str, Any] = field(default_factory=dict)
    measures: list[dict[str, Any]] = field(default_factory=list)
    recorded: bool = False
    failure: str = ""

    @property
    def trained(self) -> bool:
        """All steps are done, the last one is validated and the model is exported (or was, by the record)."""
        validated = self.validation.get("all", Curve()).last("step")
        exported = self.recorded or (self.path / "model").is_dir()
        return self.steps is not None and validated == self.steps and exported

    @property
    def scored(self) -> bool:
        """The final model was scored on the whole validation split: eval.json is whole, of the last step and of the
        corpus that the run was trained on.
        """
        found = self.evaluation
        domains = found.get("domains")
        if not isinstance(domains, dict) or not domains or found.get("step") != self.step:
            return False
        data = self.environment.get("data")
        prints = {found.get("data_fingerprint"), data.get("fingerprint") if isinstance(data, dict) else None} - {None}
        seen = {*self.validation} - {"all"}
        if len(prints) > 1 or (seen and {*domains} != seen):
            return False
        rows = [found, *domains.values()]
        return all(isinstance(row, dict) and all(_is_finite(row.get(key)) for key in _SCORES) for row in rows)

    @property
    def sampled(self) -> bool:
        """samples.json holds a text."""
        return isinstance(self.sample.get("text"), str)

    @property
    def measured(self) -> bool:
        """Losses by document and an analysis of the final model are there."""
        return self.documents.get("step") == self.step and bool(self.measures)

    @property
    def complete(self) -> bool:
        """Nothing is left to do."""
        return self.trained and self.scored and self.sampled and self.measured

    @property
    def state(self) -> str:
        """ "finished", "failed", "partial" or "missing"."""
        if self.trained:
            return "finished"
        if self.failure:
            return "failed"
        return "partial" if self.step else "missing"

    @property
    def accounting(self) -> dict[str, Any]:
        found = self.environment.get("accounting")
        return found if isinstance(found, dict) else {}


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file, or {} when there is none that can be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def read_suite(out: Path) -> dict[str, Any]:
    """The description that `run_suite` left in `out`; UserError when there is none, or a key is unusable."""
    suite = read_json(out / SUITE_FILE)
    if not isinstance(suite.get("runs"), list):
        raise UserError(
            f"no suite in {out}: expected a readable {SUITE_FILE}; start with `resformer suite run NAME --out {out}`"
        )
    _check_key(out, suite, "baseline", str, "")
    for key in ("pool", "records"):
        if suite.get(key) is not None:
            _check_key(out, suite, key, str, "")
    for i, run in enumerate(suite["runs"]):
        if not isinstance(run, dict):
            raise UserError(f"{out / SUITE_FILE}: runs[{i}] is {run!r}, expected an object; {_AGAIN}")
        _check_key(out, run, "id", str, f"runs[{i}].")
        if Path(run["id"]).name != run["id"]:
            raise UserError(f"{out / SUITE_FILE}: runs[{i}].id is {run['id']!r}, expected a plain name; {_AGAIN}")
        for key, kind in (("name", str), ("variant", str), ("seed", int), ("steps", int)):
            if run.get(key) is not None:
                _check_key(out, run, key, kind, f"runs[{i}].")
    return suite


def pool_of(out: Path, suite: dict[str, Any]) -> Path:
    """The directory that holds corpus and runs of the suite in `out`, which several suites may share."""
    return out / str(suite.get("pool") or ".")


_AGAIN = "write the file anew with `resformer suite run NAME`"


def _check_key(out: Path, found: dict[str, Any], key: str, kind: type, where: str) -> None:
    value = found.get(key)
    if not isinstance(value, kind) or value == "":
        got = "missing" if key not in found else f"{value!r}"
        expected = "a text" if kind is str else "a whole number"
        raise UserError(f"{out / SUITE_FILE}: {where}{key} is {got}, expected {expected}; {_AGAIN}")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines; a line torn by a kill is skipped."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    rows = []
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All whole rows of a metrics file."""
    return [row for row in read_lines(path) if isinstance(row.get("step"), int)]


def _curve(rows: list[dict[str, Any]]) -> Curve:
    by_step = {row["step"]: row for row in rows}
    ordered = [by_step[step] for step in sorted(by_step)]
    names = {key for row in ordered for key, value in row.items() if isinstance(value, (int, float))}
    return Curve(
        columns={n: np.array([_as_float(row.get(n)) for row in ordered], dtype=np.float64) for n in sorted(names)}
    )


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _as_float(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else float("nan")


def read_config(path: Path) -> tuple[dict[str, dict[str, Any]], str]:
    """A run's config.toml as section -> key -> value and as text; what is written "none" there is None. ({}, "") when
    it cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
        tree = tomllib.loads(text)
    except (OSError, ValueError):
        return {}, ""
    sections = {name: table for name, table in tree.items() if isinstance(table, dict)}
    return {name: {k: None if v == "none" else v for k, v in table.items()} for name, table in sections.items()}, text


def read_run(path: Path, spec: dict[str, Any], *, records: Path | None = None) -> Run:
    """One run in its directory, or, where it is not trained to its end there, its record if there is one.

    `spec` is what `suite.json` says of it.
    """
    found = _read(path, spec, recorded=False)
    if found.trained or records is None:
        return found
    record = read_record(records, path.name, spec)
    return record if record is not None and record.trained else found


def read_record(records: Path, run_id: str, spec: dict[str, Any]) -> Run | None:
    """The record of a run, whole or not; None where there is none."""
    path = records / "runs" / run_id
    return _read(path, spec, recorded=True) if (path / RECORD_FILE).is_file() else None


def _read(path: Path, spec: dict[str, Any], *, recorded: bool) -> Run:
    rows = read_rows(path / "metrics.jsonl")
    train = _curve([row for row in rows if row.get("split") == "train"])
    domains: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row.get("split") == "validation":
            domains.setdefault(str(row.get("domain")), []).append(row)
    lambdas = [row for row in rows if row.get("split") == "lambdas"]
    config, config_text = read_config(path / "config.toml")
    # What the suite asks for counts, not what a run's own files say.
    steps = spec.get("steps") or config.get("train", {}).get("steps")
    return Run(
        id=path.name,
        name=str(spec.get("name") or path.name),
        variant=str(spec.get("variant") or ""),
        seed=int(spec.get("seed") or 0),
        path=path,
        steps=steps if isinstance(steps, int) else None,
        step=int(train.last("step") or 0),
        train=train,
        validation={domain: _curve(found) for domain, found in domains.items()},
        lambdas=max(lambdas, key=lambda row: row["step"], default={}),
        config=config,
        config_text=config_text,
        environment=read_json(path / "environment.json"),
        evaluation=read_json(path / EVAL_FILE),
        sample=read_json(path / SAMPLES_FILE),
        documents=read_json(path / DOCUMENTS_FILE),
        measures=[row for row in read_lines(path / MEASURES_FILE) if isinstance(row.get("measure"), str)],
        recorded=recorded,
        failure=str(read_json(path / FAILED_FILE).get("message") or ""),
    )


def read_runs(out: Path) -> list[Run]:
    """All runs of the suite in `out`, in the suite's order: one for each name and seed."""
    suite = read_suite(out)
    records = out / suite["records"] if suite.get("records") else None
    pool = pool_of(out, suite)
    return [read_run(pool / "runs" / spec["id"], spec, records=records) for spec in suite["runs"]]
