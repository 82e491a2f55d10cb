"""Commands that make and export a run."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from resformer import lookup


def train(
    recipe: str,
    /,
    *,
    out: Path,
    data: str | None = None,
    variant: str | None = None,
    steps: int | None = None,
    seed: int | None = None,
    config: Path | None = None,
    set: tuple[str, ...] = (),
    resume: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    on_change: Literal["refuse", "continue"] = "refuse",
    init_from: str | None = None,
    import_: tuple[Path, ...] = (),
) -> None:
    """Train one model; the run directory holds everything needed to repeat, resume and use it.

    Keys are taken from the recipe, then `--config`, then `--set`, then the flags below; the last word wins.

    Example: `resformer train quick --data data/embedded --out runs/a --variant svformer --set optim.lr=1e-3`

    Args:
        recipe: The recipe to start from (quick, tiny, ...).
        out: The run directory; refused if it holds a run already, unless --resume or --overwrite.
        data: A corpus written by `resformer data prepare` (the key data.dir).
        variant: The variant to train (model.variant), with its default options.
        steps: Optimizer steps (train.steps); the recipe's when not given.
        seed: Seed of the weights and of the order of the data (train.seed); the recipe's when not given.
        config: A TOML file whose keys replace the recipe's, for example the config.toml of another run.
        set: Single keys to replace, as section.key=value: `--set optim.lr=1e-3 train.batch_size=32`.
        resume: Go on from the last checkpoint of the run in --out, or from its first step if it has none yet.
        overwrite: Start anew in --out; only files that a run wrote are removed.
        on_change: With --resume: what it means that steps, batch size, validation or optimizer settings differ from the
            run's. refuse, or continue with the new values from the last checkpoint on (the data go on where they were).
        init_from: Run directory, exported model or hub name whose weights to start with (train.init_from).
        dry_run: Print the full configuration, parameters and FLOPs, and stop before training.
        import_: A Python file of yours that registers variants (@register_variant), run before anything is built; may
            be given several times.
    """
    lookup.import_variants(import_, using=((out,) if resume else ()) + lookup.run_of(config, variant))
    from resformer.train.loop import train as run_training

    flags = {
        "data.dir": data,
        "model.variant": variant,
        "train.steps": steps,
        "train.seed": seed,
        "train.init_from": init_from,
    }
    lookup.quiet_libraries()
    with said_once():
        effective = lookup.run_config(recipe, file=config, overrides=set, flags=flags)
        run_training(
            effective,
            out,
            resume=resume,
            overwrite=overwrite,
            dry_run=dry_run,
            on_change=on_change,
            command=_command_line(),
        )


def watch(run: Path, /, *, once: bool = False, every: float = 2.0) -> None:
    """Show what a run is doing: loss, lambdas, speed, time left; ends with it, or with Ctrl-C.

    Args:
        run: A run directory; the run may be starting, at work, or finished.
        once: Say it once and stop.
        every: Seconds between looks.
    """
    from resformer.errors import UserError
    from resformer.train.watch import watch as show

    if not 0.1 <= every <= 3600:
        raise UserError(f"--every is {every:g}; expected 0.1 to 3600 seconds")
    show(run, once=once, every_seconds=every)


@contextlib.contextmanager
def said_once() -> Iterator[None]:
    """Let the first process of each machine alone report what all of them see before they know of each other."""
    from resformer.errors import UserError

    try:
        yield
    except UserError:
        import torch.distributed as dist

        from resformer.parallel import Elsewhere

        together = dist.is_available() and dist.is_initialized()
        if not together and os.environ.get("LOCAL_RANK", "0") != "0":
            raise Elsewhere(2) from None
        raise


def export(
    run: Path,
    /,
    *,
    step: int | None = None,
    out: Path | None = None,
    overwrite: bool = False,
    import_: tuple[Path, ...] = (),
) -> None:
    """Write a run's model as a Hugging Face directory with tokenizer, generation config and model card.

    Args:
        run: A run directory.
        step: The checkpoint to export, by step; the last one when not given.
        out: Where to write; RUN/model when not given.
        overwrite: Replace an export that is there already.
        import_: A Python file of yours that registers variants (@register_variant), run before anything is built; may
            be given several times.
    """
    lookup.import_variants(import_, using=(run,))
    from resformer.train.export import export_run

    lookup.quiet_libraries()
    print(f"model: {export_run(run, step=step, out=out, overwrite=overwrite)}")


def _command_line() -> list[str]:
    """The command as it was typed, for the run's records."""
    return [Path(sys.argv[0]).name, *sys.argv[1:]]
