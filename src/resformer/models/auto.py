"""Registration with the Auto classes of transformers, in either import order, without importing torch or transformers.

`import resformer` must stay fast, and transformers may be imported before or after it. So what is registered at first
is a stand-in: an entry in transformers' config mapping that loads the real classes at the first look-up. Looking up
happens when a user calls `AutoConfig.from_pretrained` and the like, long after all imports are done; registering the
real classes *during* an import of transformers would run into half-initialised modules.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import Any

MODEL_TYPE = "resformer"
TARGET = "transformers.models.auto.configuration_auto"


def register() -> None:
    """Register the real classes (imports transformers and torch). Called again, it does nothing new."""
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    from .configuration import ResFormerConfig
    from .modeling import ResFormerForCausalLM, ResFormerModel

    AutoConfig.register(MODEL_TYPE, ResFormerConfig, exist_ok=True)
    AutoModel.register(ResFormerConfig, ResFormerModel, exist_ok=True)
    AutoModelForCausalLM.register(ResFormerConfig, ResFormerForCausalLM, exist_ok=True)
    # `transformers serve` asks no Auto class: it looks config.architectures up in the namespace of transformers.
    for namespace in _namespaces():
        setattr(namespace, ResFormerForCausalLM.__name__, ResFormerForCausalLM)


def _namespaces() -> list[ModuleType]:
    """Every module object that is known as transformers: its own code runs `transformers/__init__.py` twice, and each
    of its modules keeps the object that was there when it was imported.
    """
    held = [
        vars(module).get("transformers")
        for name, module in list(sys.modules.items())
        if name.startswith("transformers.")
    ]
    return [*{id(one): one for one in (sys.modules["transformers"], *held) if isinstance(one, ModuleType)}.values()]


class _ConfigStandIn:
    """Stands for `ResFormerConfig` in transformers' config mapping until somebody looks it up."""

    model_type = MODEL_TYPE
    __name__ = "ResFormerConfig"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._real()(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real(), name)

    @staticmethod
    def _real() -> Any:
        register()
        from .configuration import ResFormerConfig

        return ResFormerConfig


def _announce(module: ModuleType) -> None:
    module.CONFIG_MAPPING.register(MODEL_TYPE, _ConfigStandIn(), exist_ok=True)


class _Finder(importlib.abc.MetaPathFinder):
    """Waits for transformers' config mapping to be imported, announces us to it, and is gone."""

    def find_spec(
        self, fullname: str, path: Any = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != TARGET:
            return None
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            _announce(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Announce the model type to transformers now, if it is imported, or as soon as it is."""
    module = sys.modules.get(TARGET)
    if module is not None and hasattr(module, "CONFIG_MAPPING"):
        _announce(module)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
