"""What a conversion starts from: a directory, a hub name or a GGUF file, as a model of transformers."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import UserError
from ..models.configuration import ResFormerConfig
from .patch_load import check_records, load_patched, patched_parts
from .talk import quiet
from .weights import broken, check_loading

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "merges.txt")
GGUF = ".gguf"


@dataclass(frozen=True, kw_only=True)
class Source:
    """A model to convert: its config is read, its weights are not yet.

    Attributes:
        name: what it was called.
        place: what `from_pretrained` takes.
        file: name of a GGUF file in `place`; none for safetensors.
        config: of transformers.
    """

    name: str
    place: str
    file: str | None
    config: Any

    @property
    def ours(self) -> bool:
        """It is a model of this library."""
        return isinstance(self.config, ResFormerConfig)

    @property
    def patch(self) -> dict[str, Any] | None:
        """What `resformer.patch` noted in its config; None for a stock model, and for one of ours."""
        return next(iter(patched_parts(self.config)), None)

    @property
    def label(self) -> str:
        """What to call it elsewhere: without the directories of this machine."""
        here = Path(self.place)
        if self.file is not None or not here.is_dir():
            return self.file or self.name
        return here.resolve().parent.name if here.name == "model" else here.resolve().name  # a run's export

    def _arguments(self) -> dict[str, Any]:
        return {"trust_remote_code": False, **({"gguf_file": self.file} if self.file else {})}

    def model(self) -> Any:
        """The model with its weights as they are stored, in evaluation mode. No pickle is read, no code of it runs.

        Raises:
            UserError: weights that cannot be read, do not fit the config to the last name, or are not finite.
        """
        from transformers import AutoModelForCausalLM

        if self.patch is not None:
            with _said_of(self.name), quiet():
                return self._finite(load_patched(self.place, dtype="auto"))
        # Dequantised numbers are fp32; transformers has no safetensors to insist on there.
        kind: dict[str, Any] = {"dtype": torch.float32} if self.file else {"dtype": "auto", "use_safetensors": True}
        with _said_of(self.name), quiet():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                self.place, output_loading_info=True, ignore_mismatched_sizes=True, **kind, **self._arguments()
            )
        model, info = loaded
        check_loading(info)
        return self._finite(model)

    def _finite(self, model: Any) -> Any:
        name = broken(model)
        if name is not None:
            raise UserError(f"{self.name}: its weight {name} is not finite")
        return model.eval()

    def tokenizer(self) -> Any | None:
        """Its tokenizer; None where there is none."""
        from transformers import AutoTokenizer

        here = Path(self.place)
        if here.is_dir() and self.file is None and not any((here / name).is_file() for name in TOKENIZERS):
            return None
        with _said_of(f"the tokenizer of {self.name}"), quiet():
            return AutoTokenizer.from_pretrained(self.place, **self._arguments())


def open_source(name: str) -> Source:
    """The model of that name: a directory that `from_pretrained` takes, a name on the hub, or a GGUF file (for one on
    the hub, ORG/NAME/FILE.gguf).

    Raises:
        UserError: nothing there, or a config that cannot be read.
    """
    from transformers import AutoConfig

    place, file = name, None
    if name.endswith(GGUF):
        if importlib.util.find_spec("gguf") is None:
            raise UserError(
                f"{name}: reading GGUF needs the package gguf; `pip install 'resformer[convert]'` or `pip install gguf`"
            )
        parent, _, file = name.rpartition("/")
        place = parent or "."
        if not (Path(place) / file).is_file() and (Path(place).is_dir() or place.count("/") != 1):
            raise UserError(f"no file {name}; expected a GGUF file, a directory or a hub name")
    found = Source(name=name, place=place, file=file, config=None)
    with _said_of(name), quiet():
        config = AutoConfig.from_pretrained(place, **found._arguments())
        if patched_parts(config):
            check_records(config, name)
    return Source(name=name, place=place, file=file, config=config)


@contextmanager
def _said_of(what: str) -> Iterator[None]:
    """What transformers has to say, as one line that names the model."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{what}: {error}") from None
    except MemoryError:
        raise
    except Exception as error:  # a damaged file: tokenizers raises bare ones, GGUF's reader what it stumbles over
        raise UserError(f"{what} cannot be loaded: {' '.join(str(error).split())[:300]}") from error
