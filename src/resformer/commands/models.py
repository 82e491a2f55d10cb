"""Commands that use a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from resformer.commands.evaluation import Request, run


def evaluate(
    model: str,
    /,
    *,
    data: str | None = None,
    text: tuple[str, ...] = (),
    tasks: tuple[str, ...] = (),
    task_files: Path | None = None,
    limit: int | None = None,
    num_fewshot: int | None = None,
    sequence_length: int | None = None,
    stride: int | None = None,
    bos: Literal["auto", "none", "model"] = "auto",
    batch_size: int = 16,
    max_tokens: int | None = None,
    dtype: Literal["fp32", "bf16"] = "fp32",
    device: str = "auto",
    text_column: str = "text",
    domain_from: str = "auto",
    on_bad_line: Literal["error", "skip"] = "error",
    json: Path | None = None,
    overwrite: bool = False,
    import_: tuple[Path, ...] = (),
) -> None:
    """Measure loss, perplexity and bits per byte on text, by domain, and accuracy on tasks.

    The result is printed and written to eval.json in MODEL's directory. A run that kept documents apart
    (data.document_mask) is measured like that. `torchrun ... -m resformer eval ...` shares the work among processes.
    docs/evaluation.md says what each number is.

    Example: `resformer eval runs/a --text books/ notes.jsonl --stride 512 --tasks paper --task-files tasks`

    Args:
        model: A run directory, an exported directory or a hub name; any causal LM of transformers.
        data: A corpus written by `resformer data prepare`, with the model's tokenizer; its validation text is scored.
        text: Raw text instead: whatever `resformer data prepare --input` reads; each document is scored alone, with the
            model's own tokenizer.
        tasks: Tasks of lm-eval by name, with spaces or commas between: hellaswag,piqa,wikitext,blimp ...;
            "paper" is the paper's six. Needs the extra `eval`.
        task_files: A directory with local files for tasks, by name (hellaswag.jsonl); what has none is read from the
            hub.
        limit: Documents per task, the first ones; all of them when not given.
        num_fewshot: Examples before each question of a task; the task's own number when not given.
        sequence_length: Tokens per window; the model's number of positions, at most 2048, when not given.
        stride: Tokens that a window adds to the one before, each scored with at least sequence_length - stride tokens
            of context; windows that do not overlap when not given.
        bos: What stands before a document of --text: auto (as in training), none (its first token is not scored) or
            model (the model's begin-of-text token).
        batch_size: Windows per forward pass.
        max_tokens: Tokens to score per domain; all of them when not given.
        dtype: Of the weights: fp32 or bf16.
        device: auto, cpu, cuda or mps.
        text_column: Column of --text that holds the text.
        domain_from: Column of --text that names the domain; auto is meta.redpajama_set_name where there is one, else
            the file; or "file".
        on_bad_line: What a line of --text that cannot be read is: error or skip.
        json: Write the result to this file instead.
        overwrite: Replace a result that is there already.
        import_: A Python file of yours that registers variants (@register_variant), run before anything is built; may
            be given several times.
    """
    run(
        Request(
            model=model,
            data=data,
            text=text,
            tasks=tasks,
            task_files=task_files,
            limit=limit,
            num_fewshot=num_fewshot,
            sequence_length=sequence_length,
            stride=stride,
            bos=bos,
            batch_size=batch_size,
            max_tokens=max_tokens,
            dtype=dtype,
            device=device,
            text_column=text_column,
            domain_from=domain_from,
            on_bad_line=on_bad_line,
            json=json,
            overwrite=overwrite,
            imports=import_,
        )
    )
