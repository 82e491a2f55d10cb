"""What a run needs after training before it can be compared: one generated sample and the loss on the whole validation
split.

Run as a process of its own, `python -m resformer.experiments.finish RUN --data DIR`, so that a suite can do it beside
other runs.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from resformer.errors import UserError
from resformer.experiments.runs import EVAL_FILE, SAMPLES_FILE, Run, read_run
from resformer.train.files import write_json
from resformer.train.imports import import_files


def finish(run_dir: Path, data: Path, *, prompt: str, max_new_tokens: int, seed: int) -> None:
    """Write eval.json and samples.json into a trained run directory, each only if it is not there yet or is damaged.

    Raises UserError when the run is not trained to its end.
    """
    from resformer.data import open_dataset
    from resformer.evaluate.loading import load_model

    run = read_run(run_dir.parent.parent, {"id": run_dir.name})
    if not run.trained:
        raise UserError(f"{run_dir} has {run.step} of {run.steps or '?'} steps; finish training first (--resume)")
    todo_eval, todo_sample = not run.scored, not run.sampled
    if not (todo_eval or todo_sample):
        return
    model, tokenizer = load_model(run_dir, str(run.config.get("train", {}).get("device", "auto")))
    if todo_eval:
        dataset = open_dataset(data, verify="none")
        result = _last_validation(run) or _evaluate(model, dataset, run)
        head = {"model": str(run_dir), "data": str(data), "data_fingerprint": dataset.fingerprint, "step": run.step}
        write_json(run_dir / EVAL_FILE, head | result)
    if todo_sample:
        sample = continue_prompt(model, tokenizer, prompt=prompt, max_new_tokens=max_new_tokens, seed=seed)
        write_json(run_dir / SAMPLES_FILE, sample)


def _last_validation(run: Run) -> dict[str, Any] | None:
    """The loop's last validation if it was on the whole split (no `train.validation_tokens`), else None."""
    if run.config.get("train", {}).get("validation_tokens") is not None:
        return None
    domains = {
        d: {k: c.last(k) for k in ("loss", "bits_per_byte", "tokens")} for d, c in run.validation.items() if d != "all"
    }
    overall = run.validation["all"]
    return {"domains": domains, "loss": overall.last("loss"), "bits_per_byte": overall.last("bits_per_byte")}


def _evaluate(model: Any, dataset: Any, run: Run) -> dict[str, Any]:
    from resformer.evaluate.loss import evaluate

    return evaluate(
        model,
        dataset,
        sequence_length=int(run.config["data"]["sequence_length"]),
        batch_size=16,
        max_tokens=None,
        device=model.device,
        document_mask=bool(run.config["data"].get("document_mask", False)),
    )


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
    parser.add_argument("--import", dest="imports", type=Path, action="append", default=[])
    given = parser.parse_args()
    import_files(given.imports)
    finish(given.run, given.data, prompt=given.prompt, max_new_tokens=given.max_new_tokens, seed=given.seed)


if __name__ == "__main__":
    main()
