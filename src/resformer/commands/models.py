"""Commands that use a trained model."""

from __future__ import annotations

from pathlib import Path

from resformer import lookup, tables
from resformer.train.files import check_output, write_json


def evaluate(
    model: str,
    /,
    *,
    data: str,
    sequence_length: int | None = None,
    batch_size: int = 16,
    max_tokens: int | None = None,
    device: str = "auto",
    json: Path | None = None,
    overwrite: bool = False,
    import_: tuple[Path, ...] = (),
) -> None:
    """Measure loss, perplexity and bits per byte on the validation text, by domain.

    The result is printed and written to eval.json in MODEL's directory. A run that kept documents apart
    (data.document_mask) is measured like that.

    Args:
        model: A run directory, an exported directory or a hub name.
        data: A corpus written by `resformer data prepare`, with the model's tokenizer.
        sequence_length: Tokens per window; the model's number of positions, at most 2048, when not given.
        batch_size: Windows per forward pass.
        max_tokens: Validation tokens to score per domain; all of them when not given.
        device: auto, cpu, cuda or mps.
        json: Write the result to this file instead.
        overwrite: Replace a result that is there already.
        import_: A Python file of yours that registers variants (@register_variant), run before anything is built; may
            be given several times.
    """
    lookup.check_range("--sequence-length", sequence_length)
    lookup.check_range("--batch-size", batch_size)
    lookup.check_range("--max-tokens", max_tokens, high=10**15)
    target = json or (Path(model) / "eval.json" if Path(model).is_dir() else None)
    if target is not None:
        check_output(target, overwrite=overwrite, flag="--json" if json else "the result")
    lookup.import_variants(import_, using=(model,))
    from resformer.data import open_dataset
    from resformer.evaluate.loading import load_model
    from resformer.evaluate.loss import evaluate as measure

    dataset = open_dataset(data, verify="sample")
    lookup.quiet_libraries()
    loaded, tokenizer = load_model(model, device)
    lookup.check_tokenizer(model, tokenizer, dataset)
    positions = getattr(loaded.config, "max_position_embeddings", None) or 2048
    result = measure(
        loaded,
        dataset,
        sequence_length=sequence_length if sequence_length is not None else min(positions, 2048),
        batch_size=batch_size,
        max_tokens=max_tokens,
        document_mask=_apart(model),
        device=loaded.device,
    )
    tables.show_evaluation(model, result)
    if target is not None:
        write_json(target, {"model": model, "data": str(data), "data_fingerprint": dataset.fingerprint, **result})
        print(f"written: {target}")


def _apart(model: str) -> bool:
    """Whether a model is a run that kept the documents of a sequence apart."""
    from resformer.train.configure import from_toml

    config = Path(model) / "config.toml"
    return config.is_file() and from_toml(config).data.document_mask
