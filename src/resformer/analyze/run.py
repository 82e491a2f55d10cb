"""`resformer analyze`: measure models on the same texts, keep the numbers, draw the figures."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from resformer.analyze.probe import DEFAULT_GROUPS, GROUPS, Probe
from resformer.analyze.record import Means
from resformer.analyze.removal import check_parts
from resformer.analyze.texts import read_texts, windows
from resformer.data.console import say
from resformer.errors import UserError, did_you_mean
from resformer.evaluate.encoding import POLICIES

MEASURES, ANALYSIS, _STATE = "measures.jsonl", "analysis.json", ".state"
_SAVE_SECONDS = 20.0
# Characters to look for windows in: many documents are too short.
_LEAST_TEXT, _TEXT_PER_TOKEN = 16_000_000, 256
_SOURCES = ("auto", "documents", "joined")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured and on what. length: tokens of a window; texts: number of windows; batch: windows at a time."""

    inputs: tuple[str, ...]
    length: int = 2048
    texts: int = 16
    batch: int = 1
    groups: tuple[str, ...] = DEFAULT_GROUPS
    source: str = "auto"
    bos: str = "auto"
    device: str = "auto"

    def __post_init__(self) -> None:
        for flag, value in (("--sequence-length", self.length), ("--texts", self.texts), ("--batch-size", self.batch)):
            if value < (2 if flag == "--sequence-length" else 1):
                raise UserError(f"{flag}: got {value}, expected at least {2 if flag == '--sequence-length' else 1}")
        for group in self.groups:
            if group not in GROUPS:
                expected = f"expected some of {', '.join(GROUPS)}"
                raise UserError(f"--measures: got '{group}'{did_you_mean(group, GROUPS)}; {expected}")
        if self.source not in _SOURCES:
            raise UserError(f"--window: got '{self.source}', expected one of {', '.join(_SOURCES)}")
        if self.bos not in POLICIES:
            raise UserError(f"--bos: got '{self.bos}', expected one of {', '.join(POLICIES)}")

    def record(self) -> dict[str, Any]:
        """JSON-able: what decides the numbers."""
        return {
            "text": list(self.inputs),
            "sequence_length": self.length,
            "texts": self.texts,
            "measures": sorted(self.groups),
            "window": self.source,
            "bos": self.bos,
        }


def labels_of(models: Sequence[str]) -> list[str]:
    """A short, different name for each model: the last parts of its path that tell it from the others."""
    paths = [[part for part in model.replace(os.sep, "/").split("/") if part] or [model] for model in models]
    for depth in range(1, max(map(len, paths)) + 1):
        short = ["/".join(path[-depth:]) for path in paths]
        if len(set(short)) == len(short):
            return short
    return [f"{i + 1}:{'/'.join(path)}" for i, path in enumerate(paths)]


def analyze(
    models: Sequence[str], out: Path, settings: Settings, *, overwrite: bool = False, progress: bool = True
) -> list[dict[str, Any]]:
    """Measure each of `models` (run directories, exported directories, hub names) on the same texts.

    Writes `measures.jsonl` into `out` and returns its rows: `{"model", "measure", "layer", "texts", "value",
    "standard_error"}`, or `"values"` for what is by position or by eigenvalue; and `analysis.json` with the settings.
    What was measured is kept as it grows, in `out/.state`: the same call goes on after a stop. Models that an earlier
    call with the same settings has measured there stay in the results.

    Raises:
        UserError: a model that cannot be loaded or seen (after the others are measured), texts that are too short, or
            an `out` that holds something else or other settings.
    """
    if not models:
        raise UserError("MODEL: got none; name a run directory, an exported directory or a hub name")
    if len(set(models)) < len(models):
        raise UserError("MODEL: the same model is named twice; name each once")
    record = {"settings": settings.record(), "versions": versions()}
    before = check_place(out, record, overwrite=overwrite)
    texts = read_texts(settings.inputs, enough=max(_LEAST_TEXT, _TEXT_PER_TOKEN * settings.length * settings.texts))
    rows: list[dict[str, Any]] = []
    problems: list[UserError] = []
    labels = labels_of(models)
    for label, model in zip(labels, models, strict=True):
        try:
            rows += [{"model": label, **row} for row in measure(model, label, texts, out, settings, progress=progress)]
        except UserError as error:
            problems.append(error)
    rows = [row for row in before if row["model"] not in labels] + rows
    if rows:
        _write(out / MEASURES, "".join(json.dumps(row) + "\n" for row in rows))
        _write(out / ANALYSIS, json.dumps(record, indent=2) + "\n")
    if problems:
        for problem in problems[:-1]:
            say(f"resformer: error: {problem}")
        raise problems[-1]
    return rows


def versions() -> dict[str, str]:
    """Of the packages that make the numbers."""
    from importlib.metadata import version

    return {name: version(name) for name in ("resformer", "torch", "transformers", "tokenizers")}


def _write(file: Path, text: str) -> None:
    waiting = file.with_name(f".{file.name}.{os.getpid()}")
    waiting.write_text(text, encoding="utf-8")
    os.replace(waiting, file)


def check_place(out: Path, record: dict[str, Any], *, overwrite: bool) -> list[dict[str, Any]]:
    """The rows that are there already and may stay.

    Raises:
        UserError: `out` holds what no analysis wrote, or results of other settings that may not be replaced.
    """
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out}: is a file, expected a directory to write into")
    if not out.is_dir() or not any(out.iterdir()):
        return []
    if not (out / _STATE).is_dir():
        raise UserError(f"--out {out}: holds files that no analysis wrote; choose an empty or new directory")
    if not (out / MEASURES).exists():
        return []
    try:
        found = json.loads((out / ANALYSIS).read_text(encoding="utf-8"))["settings"]
        rows = [json.loads(line) for line in (out / MEASURES).read_text(encoding="utf-8").splitlines()]
        whole = all(isinstance(row["model"], str) for row in rows)
    except (OSError, ValueError, KeyError, TypeError):
        found, rows, whole = None, [], False
    if whole and found == record["settings"]:
        return rows
    if overwrite:
        return []
    wanted = record["settings"]
    different = [key for key in wanted if not isinstance(found, dict) or found.get(key) != wanted[key]]
    raise UserError(
        f"{out / MEASURES}: was measured with other settings ({', '.join(different)}); pass --overwrite or choose "
        "another --out"
    )


def measure(
    model: str, label: str, texts: Sequence[str], out: Path, settings: Settings, *, progress: bool
) -> list[dict[str, Any]]:
    """The rows of one model."""
    from resformer.evaluate.encoding import TextEncoder, start_of_documents
    from resformer.evaluate.loading import load_model

    loaded, tokenizer = load_model(model, settings.device)
    positions = getattr(loaded.config, "max_position_embeddings", None)
    if positions is not None and settings.length > positions:
        raise UserError(
            f"--sequence-length: got {settings.length}, but {model} has {positions} positions; give that or less"
        )
    tokens = windows(
        TextEncoder(tokenizer, vocab_size=loaded.get_input_embeddings().weight.shape[0]),
        start_of_documents(loaded, tokenizer, settings.bos),
        tokenizer.eos_token_id,
        texts,
        length=settings.length,
        count=settings.texts,
        source=settings.source,
    )
    if len(tokens) < settings.texts:
        say(f"{label}: the text gives {len(tokens)} windows of {settings.length} tokens, asked were {settings.texts}")
    groups = measurable(loaded, settings.groups, label)
    about = {
        "model": model,
        "weights": _identity(model),
        "length": settings.length,
        "groups": sorted(groups),
        "tokens": _digest(tokens.numpy().tobytes()),
        "versions": versions(),
    }
    file = out / _STATE / f"{_digest(model.encode())}.json"
    means = Means.load(file, about) or Means()
    if means.texts:
        say(f"{label}: {min(means.texts, len(tokens))} of {len(tokens)} windows are measured already")
    probe, device = Probe(loaded, groups), next(loaded.parameters()).device
    started = saved = said = time.perf_counter()
    before = means.texts
    for start in range(before, len(tokens), settings.batch):
        batch = tokens[start : start + settings.batch]
        means.add(probe(batch.to(device)), len(batch))
        now = time.perf_counter()
        if now - saved > _SAVE_SECONDS:
            means.save(file, about)
            saved = now
        if progress and (now - said > 10 or means.texts >= len(tokens)):
            left = (now - started) / (means.texts - before) * (len(tokens) - means.texts)
            say(f"{label}: {means.texts} of {len(tokens)} windows, {timedelta(seconds=round(left))} left")
            said = now
    means.save(file, about)
    return list(means.rows())


def measurable(model: Any, groups: Sequence[str], label: str) -> tuple[str, ...]:
    """`groups` without what this model has nothing to measure of, which is said."""
    left = list(groups)
    if "removal" in left:
        try:
            check_parts(model)
        except UserError as error:
            left.remove("removal")
            say(f"{label}: removal is left out ({error})")
    return tuple(left)


def _identity(model: str) -> list[Any]:
    """What says that a model is still the same: names, sizes and times of its files."""
    path = Path(model)
    files = sorted(f for kind in ("*.safetensors", "*.json") for f in path.rglob(kind)) if path.is_dir() else []
    return [[str(f.relative_to(path)), f.stat().st_size, f.stat().st_mtime_ns] for f in files]


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:20]
