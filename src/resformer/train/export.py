"""A run's model as a Hugging Face directory: weights, config, generation config, tokenizer, model card."""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from resformer.errors import UserError
from resformer.evaluate.loading import no_progress_bars
from resformer.models import ResFormerForCausalLM
from resformer.train import checkpoint, rundir, tensors
from resformer.train.build import build_model, model_config
from resformer.train.card import model_card
from resformer.train.configure import from_toml
from resformer.train.files import put_directory
from resformer.train.metrics import read_rows


def _say(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


def export_run(
    run: Path | str,
    step: int | None = None,
    out: Path | str | None = None,
    *,
    overwrite: bool = False,
    report: Callable[[str], None] = _say,
) -> Path:
    """Write a checkpoint of `run` as a directory that `from_pretrained` loads; return it.

    Args:
        run: a run directory.
        step: which checkpoint; none = the last one.
        out: where to; none = `run/model`.
        overwrite: replace an earlier export.
        report: is told which step was taken, and which newer checkpoints are damaged.

    Raises:
        UserError: no run, no such checkpoint, or `out` is there and not to be replaced.
    """
    run = Path(run)
    target = Path(out) if out is not None else run / rundir.MODEL
    if not (run / rundir.CONFIG).is_file():
        raise UserError(
            f"no run in {run} ({rundir.CONFIG} is missing); expected a directory that `resformer train` wrote"
        )
    directory, state = checkpoint.find(run / rundir.CHECKPOINTS, step=step, report=report)
    _check_target(target, overwrite)
    model, facts = _rebuilt(run)
    tensors.read_model(directory, model)
    ends = model.config.eos_token_id
    model.generation_config.pad_token_id = ends[0] if isinstance(ends, list) else ends
    rows = read_rows(run / rundir.METRICS) if (run / rundir.METRICS).is_file() else []

    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
    try:
        with no_progress_bars():
            model.save_pretrained(temporary)
        for path in sorted(path for path in (run / rundir.TOKENIZER).iterdir() if path.is_file()):
            shutil.copy(path, temporary / path.name)
        config = from_toml(run / rundir.CONFIG)
        card = model_card(config, model.config, facts, rows, step=state.step, tokens=state.tokens)
        (temporary / "README.md").write_text(card, encoding="utf-8")
        put_directory(temporary, target)
        report(f"exported step {state.step} of {config.train.steps}")
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return target


def _rebuilt(run: Path) -> tuple[ResFormerForCausalLM, dict]:
    """The model as configured, and environment.json."""
    config = from_toml(run / rundir.CONFIG)
    try:
        facts = json.loads((run / rundir.ENVIRONMENT).read_text(encoding="utf-8"))
        data = facts["data"]
        vocab_size, eos, bos = data["vocab_size"], data["eos_token_id"], data["bos_token_id"]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{run / rundir.ENVIRONMENT} cannot be used ({error!r}); expected what the run wrote") from None
    described = model_config(config, vocab_size=vocab_size, eos_token_id=eos, bos_token_id=bos)
    state = torch.get_rng_state()
    try:
        return build_model(config, described, torch.device("cpu")), facts
    finally:
        torch.set_rng_state(state)


def _check_target(target: Path, overwrite: bool) -> None:
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not target.is_dir():
        raise UserError(f"{target} is a file; expected a directory to write the model to")
    known = re.compile("|".join(rundir.MODEL_FILES))
    foreign = [path.name for path in target.iterdir() if not known.fullmatch(path.name) or path.is_dir()]
    if foreign:
        raise UserError(f"{target} holds other files ({', '.join(sorted(foreign)[:3])}); choose another --out")
    if not overwrite:
        raise UserError(f"{target} is there already; pass --overwrite or another --out")
