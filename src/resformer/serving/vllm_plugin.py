"""The entry point of group `vllm.general_plugins`: makes our models known to vLLM.

vLLM calls `register` in each of its processes, for every model that anybody serves on the machine; so it only adds
names, and refuses nothing. What cannot be served is refused when one of our models is asked for.
"""

from __future__ import annotations

from typing import Any

ARCHITECTURE = "ResFormerForCausalLM"
MODEL_CLASS = "resformer.serving.vllm_model:ServedResFormer"


class EarlyCheck:
    """What vLLM asks about a model's configuration in the process of the user, before it starts an engine."""

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """Refuse what cannot be served.

        Raises:
            UserError: see `vllm_checks.check`; vLLM shows its text as that of a ValidationError.
        """
        from .vllm_checks import check

        check(vllm_config)

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        """Nothing to do."""


def register() -> None:
    """Tell vLLM the model's class by name, to be imported when one is served. The config needs no more than `import
    resformer`, after which transformers' Auto classes know it.
    """
    from vllm import ModelRegistry
    from vllm.model_executor.models import config as model_configs

    ModelRegistry.register_model(ARCHITECTURE, MODEL_CLASS)
    checks = getattr(model_configs, "MODELS_CONFIG_MAP", None)
    if isinstance(checks, dict):  # without it the model itself checks, in the engine's process
        checks[ARCHITECTURE] = EarlyCheck
