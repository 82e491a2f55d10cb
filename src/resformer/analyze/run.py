"""`resformer analyze`: measure models on the same texts, keep the numbers, draw the figures."""

from __future__ import annotations

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
from resformer.analyze.texts import read_texts, windows
from resformer.data.console import say
from resformer.errors import UserError, did_you_mean

MEASURES = "measures.jsonl"
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
    "standard_error"}`, or `"values"` for what is by position or by eigenvalue. What was measured is kept as it grows,
    in `out/.state`: the same call goes on after a stop, and another model is added to those that are there.

    UserError: a model that cannot be loaded or seen, texts that are too short, or an `out` that holds something else.
    """
    if len(set(models)) < len(models):
        raise UserError("MODEL: the same model is named twice; name each once")
    check_place(out, overwrite=overwrite)
    texts = read_texts(settings.inputs, enough=max(_LEAST_TEXT, _TEXT_PER_TOKEN * settings.length * settings.texts))
    rows: list[dict[str, Any]] = []
    (out / ".state").mkdir(parents=True, exist_ok=True)
    for label, model in zip(labels_of(models), models, strict=True):
        for row in measure(model, label, texts, out, settings, progress=progress):
            rows.append({"model": label, **row})
    waiting = out / f".{MEASURES}.{os.getpid()}"
    waiting.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    os.replace(waiting, out / MEASURES)
    return rows


def check_place(out: Path, *, overwrite: bool) -> None:
    """UserError where `out` holds what was not written by an analysis, or measures that may not be replaced."""
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out}: is a file, expected a directory to write into")
    if out.is_dir() and any(out.iterdir()) and not (out / ".state").is_dir():
        raise UserError(f"--out {out}: holds files that no analysis wrote; choose an empty or new directory")
    if (out / MEASURES).exists() and not overwrite:
        raise UserError(f"{out / MEASURES}: is there already; pass --overwrite or choose another --out")


def measure(
    model: str, label: str, texts: Sequence[str], out: Path, settings: Settings, *, progress: bool
) -> list[dict[str, Any]]:
    """The rows of one model."""
    from resformer.evaluate.loading import load_model

    loaded, tokenizer = load_model(model, settings.device)
    positions = getattr(loaded.config, "max_position_embeddings", None)
    if positions is not None and settings.length > positions:
        raise UserError(
            f"--sequence-length: got {settings.length}, but {model} has {positions} positions; give that or less"
        )
    tokens = windows(tokenizer, texts, length=settings.length, count=settings.texts, source=settings.source)
    if len(tokens) < settings.texts:
        say(f"{label}: the text gives {len(tokens)} windows of {settings.length} tokens, asked were {settings.texts}")
    about = {
        "model": model,
        "weights": _identity(model),
        "length": settings.length,
        "groups": sorted(settings.groups),
        "tokens": _digest(tokens),
    }
    file = out / ".state" / f"{_digest_text(model)}.json"
    means = Means.load(file, about) or Means()
    if means.texts:
        say(f"{label}: {min(means.texts, len(tokens))} of {len(tokens)} windows are measured already")
    probe, device = Probe(loaded, settings.groups), next(loaded.parameters()).device
    started = saved = said = time.perf_counter()
    before = means.texts
    for start in range(before, len(tokens), settings.batch):
        means.add(probe(tokens[start : start + settings.batch].to(device)))
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


def _identity(model: str) -> list[Any]:
    """What says that the weights are still the same: names, sizes and times of their files."""
    path = Path(model)
    files = sorted(path.rglob("*.safetensors")) if path.is_dir() else []
    return [[str(f.relative_to(path)), f.stat().st_size, f.stat().st_mtime_ns] for f in files]


def _digest(tokens: Any) -> str:
    import hashlib

    return hashlib.sha256(tokens.numpy().tobytes()).hexdigest()[:20]


def _digest_text(text: str) -> str:
    import hashlib

    return hashlib.sha256(text.encode()).hexdigest()[:20]
