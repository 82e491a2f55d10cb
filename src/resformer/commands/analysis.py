"""Commands that look into models."""

from __future__ import annotations

from pathlib import Path

from resformer import lookup


def analyze(
    models: tuple[str, ...],
    /,
    *,
    text: tuple[str, ...],
    out: Path,
    sequence_length: int = 2048,
    texts: int = 16,
    batch_size: int = 1,
    measures: tuple[str, ...] = ("attention", "values", "keys", "hidden", "spectra", "own_values", "removal"),
    window: str = "auto",
    bos: str = "auto",
    device: str = "auto",
    no_figures: bool = False,
    overwrite: bool = False,
    import_: tuple[Path, ...] = (),
) -> None:
    """Measure one or several models on the same text and draw the figures.

    Attention entropy, sinks, drains, norms, similarity of tokens, spectra, what V_1 adds, and what each layer is worth:
    the paper's measurements, layer by layer. The models may be ours or any causal LM of transformers. Writes
    measures.jsonl, analysis.json (the settings) and figures/ (PNG, PDF, and the numbers behind each as CSV) into --out.
    Stopped, the same command goes on where it was; models that are measured there with the same settings stay in the
    results when another one is added.

    Example: `resformer analyze runs/a runs/b --text my/texts --out analysis --sequence-length 512`

    Args:
        models: Run directories, exported directories or hub names.
        text: Files, directories or patterns with text, read as `resformer data prepare` reads them.
        out: Directory for the results.
        sequence_length: Tokens of each window; compare models at equal lengths only.
        texts: Windows to measure.
        batch_size: Windows per forward pass.
        measures: What to measure, of attention, values, keys, hidden, spectra, own_values, removal, cross_layer.
        window: documents (the beginnings of long enough ones), joined (documents after one another), or auto.
        bos: What stands before a window: auto (as in training, or what the tokenizer puts there), none, or model.
        device: auto, cpu, cuda or mps.
        no_figures: Draw no figures.
        overwrite: Replace the results that are there.
        import_: A Python file of yours that registers variants (@register_variant), run before anything is built; may
            be given several times.
    """
    from resformer.analyze.run import Settings
    from resformer.analyze.run import analyze as run

    settings = Settings(
        inputs=text,
        length=sequence_length,
        texts=texts,
        batch=batch_size,
        groups=measures,
        source=window,
        bos=bos,
        device=device,
    )
    lookup.import_variants(import_, using=models)
    lookup.quiet_libraries()
    rows = run(models, out, settings, overwrite=overwrite)
    if not no_figures:
        from resformer.analyze.curves import read_run
        from resformer.analyze.figures import draw_all
        from resformer.analyze.run import labels_of

        named = zip(models, labels_of(models), strict=True)
        runs = [read_run(Path(model), label) for model, label in named if (Path(model) / "metrics.jsonl").is_file()]
        drawn = draw_all(rows, out / "figures", runs=runs)
        print(f"{len({path.stem for path in drawn})} figures in {out / 'figures'}")
    print(f"{len(rows):,} measurements in {out / 'measures.jsonl'}")
