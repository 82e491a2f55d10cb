"""The command that converts models."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from resformer import lookup
from resformer.errors import UserError

if TYPE_CHECKING:
    from resformer.convert.checkpoint import Converted


_PIECE = 4096  # characters of calibration text that stay together


def convert(
    model: str,
    /,
    *,
    out: Path,
    variant: str | None = None,
    set: tuple[str, ...] = (),
    inexact: bool = False,
    calibration: tuple[str, ...] = (),
    calibration_tokens: int = 65536,
    to_hf: bool = False,
    ignore_field: tuple[str, ...] = (),
    overwrite: bool = False,
    import_: tuple[Path, ...] = (),
) -> None:
    """Convert a model of transformers into one of ours that starts as an exact copy, or one of ours back.

    Every field of the architecture is carried over or the conversion stops and names it. Logits of both models are
    compared at positions 0, 20 and 200 from a new process before anything takes the name --out; if something fails,
    nothing is left there. docs/convert.md lists the families, and says what variants without an exact start begin with.

    Example: `resformer convert ORG/NAME --variant learnable --out models/learnable`

    Args:
        model: A directory, hub name or GGUF file (FILE.gguf; ORG/NAME/FILE.gguf on the hub) of a Llama-shaped model, or
            a run or an exported model of ours.
        out: The directory to write.
        variant: The variant of the new model.
        set: Options of the variant, as option=value: `--set granularity=head layers=last_third`; what is not set is
            chosen for an exact start. Layers that share a value are the last third unless set, and share that of the
            layer before them.
        inexact: Convert although the variant has no exact start with these options; the new model computes something
            else from the first token on.
        calibration: Text on which output and down projections of layers that share values are fitted: files,
            directories or patterns, read as `resformer data prepare` reads them.
        calibration_tokens: Tokens of --calibration to use, at least 16 windows of 512 (or of the longest input).
        to_hf: The way back: write a model of ours as the class of transformers that it came from, if its variant is
            neutral.
        ignore_field: Fields of the source's config that have nothing to do with what it computes.
        overwrite: Replace the model that is in --out.
        import_: A Python file of yours that registers variants (@register_variant), run before anything is built; may
            be given several times.
    """
    _check_flags(variant, to_hf=to_hf, given={"--set": set, "--inexact": inexact, "--calibration": calibration})
    lookup.check_range("--calibration-tokens", calibration_tokens, low=1024)
    source = _place(model)
    lookup.import_variants(import_, using=(model,) if Path(model).is_dir() else ())
    lookup.quiet_libraries()
    with _stopping_cleanly():
        if to_hf:
            from resformer.convert.back import convert_back

            differences = convert_back(source, out, overwrite=overwrite)
            print(f"equal to {model}: {_gaps(differences)}")
        else:
            assert variant is not None, "checked above"
            from resformer.convert.checkpoint import convert_checkpoint
            from resformer.convert.source import open_source

            result = convert_checkpoint(
                source,
                out,
                variant=variant,
                options=_options(variant, set, open_source(source).config),
                inexact=inexact,
                calibration=_texts(calibration) if calibration else None,
                calibration_tokens=calibration_tokens,
                ignored_fields=ignore_field,
                overwrite=overwrite,
                prelude=_prelude(import_),
            )
            _show(model, result)
    print(f"model: {out}")


def _check_flags(variant: str | None, *, to_hf: bool, given: Mapping[str, Any]) -> None:
    """Refuse what makes no sense together, before anything is read."""
    if not to_hf:
        if variant is None:
            raise UserError("--variant is missing: which variant is the new model to have? (--to-hf for the way back)")
        return
    if variant not in (None, "transformer"):
        raise UserError(f"--to-hf writes a plain Transformer, which is no {variant!r}; leave --variant out")
    wrong = [flag for flag, value in given.items() if value]
    if wrong:
        raise UserError(f"--to-hf takes no {', '.join(wrong)}: it writes what the model computes")


def _place(model: str) -> str:
    """What `from_pretrained` takes: of a run its export."""
    from resformer.evaluate.loading import model_directory

    if model.endswith(".gguf"):
        return model
    if Path(model).is_file():
        raise UserError(f"{model} is a file; expected a directory with config.json, a hub name or a GGUF file")
    return model_directory(model)


def _options(variant: str, texts: tuple[str, ...], config: Any) -> dict[str, Any]:
    """The options of `--set`, read as `train --set model.variant_options.option=value` is, for a model of these sizes.

    Raises:
        UserError: unknown options, wrong types, options that make no sense for the model.
    """
    from resformer.train.config import Config
    from resformer.train.configure import configure

    for text in texts:
        option, equals, _ = text.partition("=")
        if not equals or "." in option:
            raise UserError(f"--set {text}: expected option=value, an option of the variant {variant!r}")
    sizes = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    flags = {f"model.{name}": getattr(config, name, None) for name in sizes if getattr(config, name, None)}
    overrides = [f"model.variant_options.{text}" for text in texts]
    return dict(
        configure(Config(), overrides=overrides, flags={**flags, "model.variant": variant}).model.variant_options
    )


def _texts(inputs: tuple[str, ...]) -> Iterator[str]:
    """Pieces of all files in turn, the beginning of each document before the rest of any: as many tokens as are asked
    for may fit into the first file, or into one book of it.
    """
    from resformer.data import sources
    from resformer.evaluate.text_source import TextSource

    def pieces(name: str) -> Iterator[str]:
        source = TextSource((name,))
        for document, _ in source.documents():
            yield document.text[:_PIECE]
        for document, _ in source.documents():
            for start in range(_PIECE, len(document.text), _PIECE):
                yield document.text[start : start + _PIECE]

    try:
        sources.check_inputs(list(inputs))
        names = [
            file
            for name in inputs
            for file in (
                [str(file) for file, _ in sources.input_files(name, None)] if sources.is_path(name) else [name]
            )
        ]
        turns = deque(map(pieces, names))
        while turns:  # a file is opened when its turn comes, and no more of them than are needed
            piece = next(turns[0], None)
            if piece is None:
                turns.popleft()
                continue
            yield piece
            turns.rotate(-1)
    except UserError as error:  # which knows these inputs under other flags
        raise UserError(str(error).replace("--text", "--calibration").replace("--input", "--calibration")) from None


def _prelude(imports: tuple[Path, ...]) -> tuple[str, ...]:
    """What the process that checks runs first, so that it knows the user's variants."""
    if not imports:
        return ()
    files = [str(path.resolve()) for path in imports]
    return ("from resformer.train.imports import import_files", f"import_files({files!r})")


def _show(model: str, result: Converted) -> None:
    print(f"variant: {result.config.variant_formula}")
    gaps = _gaps(result.differences)
    print(f"equal to {model}: {gaps}" if result.exact else f"NOT equal to {model}: {gaps}; it needs training")
    if result.losses:
        words = {"source": "of the source", "naive": "with its weights", "fitted": "with fitted projections"}
        found = ", ".join(f"{value:.3f} {words[name]}" for name, value in result.losses.items())
        print(f"loss on held-out calibration text, nats per token: {found}")
    for what in result.unseen:
        print(f"not shown by so short a sequence: {what}")


def _gaps(differences: Mapping[int, float]) -> str:
    return "logits differ by at most " + ", ".join(f"{gap:.2g} at position {at}" for at, gap in differences.items())


@contextlib.contextmanager
def _stopping_cleanly() -> Iterator[None]:
    """A SIGTERM ends the command as an exception does, so that what is half written is removed."""

    def stop(number: int, frame: FrameType | None) -> None:
        sys.exit(143)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
