"""The Hugging Face-native host model, its config, cache, accounting and sizes. The host names no variant."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .configuration import ResFormerConfig as ResFormerConfig
    from .modeling import ResFormerForCausalLM as ResFormerForCausalLM
    from .modeling import ResFormerModel as ResFormerModel

_CLASSES = ("ResFormerConfig", "ResFormerForCausalLM", "ResFormerModel")
__all__ = list(_CLASSES)


def __getattr__(name: str) -> Any:
    """The classes, registered with the Auto classes as they are first asked for."""
    if name not in _CLASSES:
        raise AttributeError(f"module 'resformer.models' has no attribute {name!r}")
    from . import auto, configuration, modeling

    auto.register()
    return getattr(configuration if name == "ResFormerConfig" else modeling, name)
