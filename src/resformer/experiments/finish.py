"""What a run needs after training before it can be compared: the loss on the whole validation split, by document;
tasks; an analysis of the model; one generated sample.

Run as a process of its own, `python -m resformer.experiments.finish RUN --data DIR`, so that a suite can do it beside
other runs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from resformer.errors import UserError
from resformer.experiments.runs import DOCUMENTS_FILE, EVAL_FILE, MEASURES_FILE, SAMPLES_FILE, Run, read_run
from resformer.train.files import write_atomic, write_json
from resformer.train.imports import import_files

MEASURED_WINDOWS = 16
MEASURED_GROUPS = ("attention", "values", "keys", "hidden", "spectra", "own_values")
KEPT = 32  # entries of a vector (positions, eigenvalues) that an analysis keeps: what the paper's figures show is there


def finish(
    run_dir: Path,
    data: Path,
    *,
    prompt: str,
    max_new_tokens: int,
    seed: int,
    tasks: Sequence[str] = (),
    task_files: Path | None = None,
) -> None:
    """Write eval.json, documents.json, measures.jsonl and samples.json into a trained run directory, each only if it is
    not there yet or is damaged.

    Raises:
        UserError: the run is not trained to its end, or data of a task cannot be had.
    """
    from resformer.data import open_dataset
    from resformer.evaluate.loading import load_model

    run = read_run(run_dir, {})
    if not run.trained:
        raise UserError(f"{run_dir} has {run.step} of {run.steps or '?'} steps; finish training first (--resume)")
    found = run.evaluation.get("tasks")
    missing = [task for task in tasks if not (isinstance(found, dict) and task in found)]
    if run.complete and not missing:
        return
    model, tokenizer = load_model(run_dir, str(run.config.get("train", {}).get("device", "auto")))
    dataset = open_dataset(data, verify="none")
    if not (run.scored and run.documents.get("step") == run.step):
        _score(run, model, dataset)
        run = read_run(run_dir, {})
    if not run.measures:
        write_atomic(run_dir / MEASURES_FILE, "".join(json.dumps(row) + "\n" for row in measure(model, dataset, run)))
    if not run.sampled:
        sample = continue_prompt(model, tokenizer, prompt=prompt, max_new_tokens=max_new_tokens, seed=seed)
        write_json(run_dir / SAMPLES_FILE, sample)
    if missing:
        write_json(run_dir / EVAL_FILE, run.evaluation | _tasks(model, tokenizer, tasks, task_files))


def _score(run: Run, model: Any, dataset: Any) -> None:
    from resformer.evaluate.documents import evaluate_documents

    data = run.config["data"]
    length, apart = int(data["sequence_length"]), bool(data.get("document_mask", False))
    result, documents = evaluate_documents(model, dataset, sequence_length=length, document_mask=apart)
    head = {"step": run.step, "data_fingerprint": dataset.fingerprint, "sequence_length": length}
    write_json(run.path / DOCUMENTS_FILE, head | {"domains": documents})
    write_json(run.path / EVAL_FILE, head | result)


def _tasks(model: Any, tokenizer: Any, tasks: Sequence[str], task_files: Path | None) -> dict[str, Any]:
    from resformer.evaluate.tasks import mean_accuracy, open_tasks, run_tasks

    with open_tasks(tasks, task_files=task_files) as opened:
        found = run_tasks(model, tokenizer, opened)
        return {"tasks": found, "tasks_mean_acc": mean_accuracy(found, opened.names)}


def measure(model: Any, dataset: Any, run: Run) -> list[dict[str, Any]]:
    """The rows of an analysis on the beginnings of validation documents, or on running text where documents are short:
    windows as long as the run's, each after an end-of-text id, so that the first token is common to all.
    """
    import torch

    from resformer.analyze.probe import Probe
    from resformer.analyze.record import Means

    rows_BT = measured_windows(dataset, int(run.config["data"]["sequence_length"]), MEASURED_WINDOWS)
    probe, means = Probe(model, MEASURED_GROUPS), Means()
    device = next(model.parameters()).device
    for row_T in rows_BT:
        means.add(probe(torch.from_numpy(row_T[None]).to(device)), 1)
    return [_shortened(row) for row in means.rows()]


def measured_windows(dataset: Any, length: int, count: int) -> np.ndarray:
    """Int64 `[count or fewer, length]`, from all domains in turns."""
    room = length - 1
    by_domain: list[list[np.ndarray]] = []
    for domain in dataset.domains:
        ends = dataset.document_ends("validation", domain)
        starts = np.concatenate([[0], ends[:-1]])
        stream = dataset.stream("validation", domain)
        at = starts[ends - starts >= room]
        if len(at) * len(dataset.domains) < count:
            at = np.arange(0, len(stream) - room + 1, room)
        share = -(-count // len(dataset.domains))
        by_domain.append([np.asarray(stream[int(a) : int(a) + room], dtype=np.int64) for a in at[:share]])
    turns = [rows[i] for i in range(max(map(len, by_domain))) for rows in by_domain if i < len(rows)][:count]
    if not turns:
        raise UserError(
            f"no domain has {room} tokens of validation text to analyse; hold more out (--validation-share)"
        )
    return np.stack([np.concatenate([[dataset.eos_token_id], row]) for row in turns])


def _shortened(row: dict[str, Any]) -> dict[str, Any]:
    """Five significant digits, and the first entries of a vector."""
    short = {key: float(f"{value:.5g}") if isinstance(value, float) else value for key, value in row.items()}
    if "values" in row:
        short["values"] = [x if x is None else float(f"{x:.5g}") for x in row["values"][:KEPT]]
    return short


def continue_prompt(model: Any, tokenizer: Any, *, prompt: str, max_new_tokens: int, seed: int) -> dict[str, Any]:
    """One continuation at temperature 0.8, shortened to what the model's positions allow."""
    from resformer.evaluate.generation import generate, prompt_ids

    room = int(model.config.max_position_embeddings) - int(prompt_ids(model, tokenizer, prompt).shape[1])
    made = generate(model, tokenizer, prompt, max_new_tokens=max(1, min(max_new_tokens, room)), seed=seed)
    return {"prompt": prompt, "text": made.text, "seed": seed, "max_new_tokens": max_new_tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--max-new-tokens", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--task", dest="tasks", action="append", default=[])
    parser.add_argument("--task-files", type=Path)
    parser.add_argument("--import", dest="imports", type=Path, action="append", default=[])
    given = parser.parse_args()
    import_files(given.imports)
    finish(
        given.run,
        given.data,
        prompt=given.prompt,
        max_new_tokens=given.max_new_tokens,
        seed=given.seed,
        tasks=given.tasks,
        task_files=given.task_files,
    )


if __name__ == "__main__":
    main()
