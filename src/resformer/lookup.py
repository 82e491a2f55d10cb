"""From the words of a command line to what they name: recipes, sizes, suites, corpora. Imports happen inside."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from resformer.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from resformer.experiments.spec import Suite
    from resformer.models import ResFormerConfig
    from resformer.train.config import Config

DEFAULT_VOCAB_SIZE = 4096
"""What `data prepare` trains unless told otherwise; `plan` has no data to ask."""


TYPED = {
    "data.dir": "--data",
    "model.variant": "--variant",
    "model.vocab_size": "--vocab-size",
    "train.steps": "--steps",
    "train.seed": "--seed",
    "train.init_from": "--init-from",
}
"""Configuration keys that have a flag of their own."""


def check_range(flag: str, value: int | None, *, low: int = 1, high: int = 2**31 - 1) -> None:
    """Raise UserError unless the number of a flag is in its range; None is "not given"."""
    if value is not None and not low <= value <= high:
        raise UserError(f"{flag} is {value}; expected {low} to {high}")


def run_config(recipe: str, *, file: Path | None, overrides: tuple[str, ...], flags: dict[str, Any]) -> Config:
    """A recipe with the keys of a file, of `--set` and of flags put over it, in this order."""
    from resformer.recipes import recipe as base
    from resformer.train.configure import configure

    return configure(base(recipe), file=file, overrides=overrides, flags=flags, typed=TYPED)


def model_config(
    name: str, *, config: Path | None, overrides: tuple[str, ...], variant: str | None, vocab_size: int | None
) -> ResFormerConfig:
    """The model's config for `plan`: a recipe's, or one of the paper's sizes as a Transformer."""
    from resformer.models.sizes import SIZES
    from resformer.recipes import names, unknown
    from resformer.train import build
    from resformer.train.adopt import adopted
    from resformer.train.config import Config
    from resformer.train.configure import configure, edit

    flags = {"model.variant": variant, "model.vocab_size": vocab_size}
    if name in SIZES:
        sized = edit(Config(), {"model.variant": "transformer", **{f"model.{k}": v for k, v in SIZES[name].items()}})
        chosen = configure(sized, file=config, overrides=overrides, flags=flags, typed=TYPED)
    elif name not in names():
        raise unknown(name, [*names(), *SIZES])
    else:
        chosen = adopted(run_config(name, file=config, overrides=overrides, flags=flags))
    return build.model_config(chosen, vocab_size=chosen.model.vocab_size or DEFAULT_VOCAB_SIZE)


def import_variants(files: tuple[Path, ...], *, using: tuple[Path | str, ...] = ()) -> None:
    """Run the user's files that register variants, then see that the runs or models in `using` have theirs.

    Raises:
        UserError: a file that cannot be run, or a variant that no file registered.
    """
    import sys

    from resformer.train.imports import check_available, import_files

    for path, imported in zip(files, import_files(files), strict=True):
        if not imported.variants:
            print(f"note: {path} registers no variant", file=sys.stderr)
    for place in using:
        for note in check_available(place):
            print(f"note: {note}", file=sys.stderr)


def run_of(config: Path | None, variant: str | None) -> tuple[Path, ...]:
    """The run whose configuration file is taken, and with it, unless a flag names another, its variant."""
    if config is None or variant is not None or not (config.parent / "environment.json").is_file():
        return ()
    return (config.parent,)


def variant_options(name: str, texts: tuple[str, ...], *, layers: int) -> dict[str, Any]:
    """Options of a variant from `option=value` texts, read as `train --set model.variant_options.option=value` is, for
    a model of so many layers.
    """
    from resformer.core import registry
    from resformer.train.config import Config
    from resformer.train.configure import configure

    registry.get(name)
    for text in texts:
        option, equals, _ = text.partition("=")
        if not equals or "." in option:
            raise UserError(f"--set {text}: expected option=value, an option of the variant {name!r}")
    overrides = [f"model.variant_options.{text}" for text in texts]
    flags = {"model.variant": name, "model.num_hidden_layers": layers}
    return dict(configure(Config(), overrides=overrides, flags=flags).model.variant_options)


def quiet_libraries() -> None:
    """Switch off the progress bars with which transformers reads and writes weights; downloads keep theirs."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def check_tokenizer(model: str, tokenizer: Any, dataset: Any) -> None:
    """Raise UserError unless the model reads ids as the corpus wrote them."""
    from tokenizers import Tokenizer

    theirs, ours = tokenizer.get_vocab(), Tokenizer.from_file(str(dataset.tokenizer_dir / "tokenizer.json")).get_vocab()
    if theirs != ours:
        raise UserError(
            f"the tokenizer of {model} ({len(theirs)} entries) is not the one that {dataset.tokenizer_dir} holds "
            f"({len(ours)} entries); prepare the text again with --tokenizer"
        )


def weights(pairs: tuple[str, ...]) -> dict[str, float] | None:
    """`domain=number` texts as a dictionary, None when there are none."""
    found = {}
    for pair in pairs:
        domain, _, number = pair.partition("=")
        if domain in found:
            raise UserError(f"--weights: {domain!r} is named twice; give one weight")
        try:
            found[domain] = float(number)
        except ValueError:
            raise UserError(f"--weights: expected domain=number, got {pair!r}") from None
    return found or None


def suites() -> dict[str, Suite]:
    """Every suite by name. Suites and recipes are found by name only: no module imports them."""
    import importlib
    import pkgutil

    package = importlib.import_module("resformer.suites")
    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    return {name: importlib.import_module(f"resformer.suites.{name}").SUITE for name in names}


def suite(name: str) -> Suite:
    """The suite of that name, or the `SUITE` of a Python file; UserError with the nearest name when there is none."""
    if name.endswith(".py"):
        return _suite_of(Path(name))
    known = suites()
    if name not in known:
        raise UserError(f"unknown suite {name!r}{did_you_mean(name, known)} (known: {', '.join(known)})")
    return known[name]


def _suite_of(file: Path) -> Suite:
    """`SUITE` of a file of the user's."""
    import runpy

    from resformer.experiments.spec import Suite

    if not file.is_file():
        raise UserError(f"{file}: no such file; expected a Python file that defines SUITE, or a suite's name")
    try:
        found = runpy.run_path(str(file)).get("SUITE")
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{file}: {type(error).__name__}: {error}") from error
    if not isinstance(found, Suite):
        raise UserError(f"{file}: defines no SUITE, a resformer.experiments.spec.Suite; docs/reproduce.md shows one")
    return found
