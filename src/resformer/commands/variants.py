"""Commands on variants: what one costs, and whether it keeps the contract."""

from __future__ import annotations

import json as json_module
import sys
from pathlib import Path

from resformer import lookup, tables
from resformer.train.files import check_output


def plan(
    recipe: str,
    /,
    *,
    variant: str | None = None,
    config: Path | None = None,
    set: tuple[str, ...] = (),
    sequence_length: int | None = None,
    vocab_size: int | None = None,
    json: bool = False,
    import_: tuple[Path, ...] = (),
) -> None:
    """Show what each layer owns, reads and stores; parameters, FLOPs per token, KV bytes per token.

    Example: `resformer plan 82m --variant svformer --vocab-size 50277`

    Args:
        recipe: A recipe (quick, ...) or one of the paper's sizes (2m, 82m, 180m, 468m).
        variant: The variant to plan; the recipe's own when not given.
        config: A TOML file whose keys replace the recipe's.
        set: Single keys to replace, as section.key=value: `--set model.hidden_size=256 model.variant_options.first=2`.
        sequence_length: Tokens per sequence, for the FLOPs of attention; the recipe's when not given.
        vocab_size: Entries of the vocabulary; a size's own (50277) or 4096 when not given. Training takes the data's.
        json: Print one JSON object instead of tables.
        import_: A Python file of yours that registers variants (@register_variant), run before anything is built; may
            be given several times.
    """
    lookup.check_range("--sequence-length", sequence_length)
    lookup.check_range("--vocab-size", vocab_size)
    lookup.import_variants(import_, using=lookup.run_of(config, variant))
    from resformer.models.accounting import account, plan_rows

    chosen = lookup.model_config(recipe, config=config, overrides=set, variant=variant, vocab_size=vocab_size)
    totals = account(chosen, sequence_length=sequence_length).asdict()
    rows = plan_rows(chosen)
    title = " ".join([recipe, *([f"--config {config}"] if config else []), *(f"--set {text}" for text in set)])
    head = {"recipe": title, "variant": chosen.variant, "formula": chosen.variant_formula}
    if json:
        print(json_module.dumps({**head, **totals, "layers": rows}, indent=2))
    else:
        tables.show_plan(head, totals, rows)


def check_variant(
    name: str,
    /,
    *,
    set: tuple[str, ...] = (),
    layers: int = 4,
    compile: bool = False,
    json: Path | None = None,
    overwrite: bool = False,
    import_: tuple[Path, ...] = (),
) -> None:
    """Hold a variant to the contract: gradients, caches, initial values, files, counts, precision.

    Tiny models are built, as many KV heads as query heads (8) and half of them; it takes some seconds. Exit code 0 if
    every check passed, 1 if one failed.

    Example: `resformer check-variant mine --import my_variants.py --set strength=0.2`

    Args:
        name: The variant.
        set: Options of the variant, as option=value.
        layers: Layers of the tiny models; give more if an option names a later one.
        compile: Check torch.compile as well; half a minute more.
        json: Write the results to this file.
        overwrite: Replace a file of --json that is there already.
        import_: A Python file of yours that registers variants (@register_variant), run before anything is built; may
            be given several times.
    """
    lookup.check_range("--layers", layers, high=1024)
    if json is not None:
        check_output(json, overwrite=overwrite, flag="--json")
    lookup.import_variants(import_)
    options = lookup.variant_options(name, set, layers=layers)
    from resformer.evaluate.contract.suite import run

    results = tables.with_progress(run(name, options, layers=layers, compile=compile), "checking")
    tables.show_checks(name, results)
    if json is not None:
        from resformer.train.files import write_json

        found = {"variant": name, "options": options, "layers": layers, "checks": [one.asdict() for one in results]}
        write_json(json, found)
        print(f"written: {json}")
    failed = [one.check for one in results if one.result == "failed"]
    if failed:
        sys.stdout.flush()
        print(f"check-variant: {name} fails {len(failed)} of {len(results)}: {', '.join(failed)}", file=sys.stderr)
        raise SystemExit(1)
