"""resformer: the reference library for value residual learning (ResFormer and SVFormer, arXiv 2410.17897) in PyTorch.

Importing it is cheap: names load what they need when they are first used. It also makes
`AutoModelForCausalLM.from_pretrained` and the other Auto classes of transformers find our models, whichever package is
imported first.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .models import auto as _auto

__version__ = "0.1.0"

_HOMES = {
    "ResFormerConfig": "models",
    "ResFormerModel": "models",
    "ResFormerForCausalLM": "models",
    "build_cache": "models.cache",
    "optimizer_groups": "models.groups",
    "register_variant": "core.registry",
    "patch": "convert.patch",
    "unpatch": "convert.patch",
    "load_patched": "convert.patch_load",
    "UserError": "errors",
}
__all__ = [*_HOMES, "__version__"]

if TYPE_CHECKING:
    from .convert.patch import patch as patch
    from .convert.patch import unpatch as unpatch
    from .convert.patch_load import load_patched as load_patched
    from .core.registry import register_variant as register_variant
    from .errors import UserError as UserError
    from .models import ResFormerConfig as ResFormerConfig
    from .models import ResFormerForCausalLM as ResFormerForCausalLM
    from .models import ResFormerModel as ResFormerModel
    from .models.cache import build_cache as build_cache
    from .models.groups import optimizer_groups as optimizer_groups


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'resformer' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])


_auto.install()
