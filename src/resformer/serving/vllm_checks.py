"""What vLLM may be asked to do with our models, and what is refused, before an engine is started."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

from ..errors import UserError
from ..models.configuration import ResFormerConfig
from .layout import Layout, layout

TRIED = "0.32."
# Their implementations take keys and values out of a slot in the two ways that `vllm_slots.Pair` knows.
SPLITTING_BACKENDS = ("CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN")


def check(vllm_config: Any) -> Layout:
    """The layout of the cache of the model that vLLM is about to serve.

    Args:
        vllm_config: a `vllm.config.VllmConfig`.

    Raises:
        UserError: one that lists every option that this model cannot be served with, or see `layout.layout`.
    """
    import vllm

    config = vllm_config.model_config.hf_config
    if not isinstance(config, ResFormerConfig):
        raise UserError(
            f"vLLM gives a {type(config).__name__} for architecture ResFormerForCausalLM; expected a ResFormerConfig: "
            "model_type in config.json must be 'resformer'"
        )
    if not vllm.__version__.startswith(TRIED):
        warnings.warn(
            f"resformer's plug-in is tried with vLLM {TRIED}x, and this is {vllm.__version__}; compare some texts with "
            "those of model.generate",
            stacklevel=2,
        )
    found = layout(config)
    problems = [*_engine_problems(vllm_config), *(() if found.paired else _plane_problems(vllm_config))]
    problems += _head_problems(config)
    if problems:
        raise UserError("vLLM cannot serve this model so: " + "; ".join(problems))
    return found


def check_backend(name: str) -> None:
    """Refuse an attention backend whose implementation we cannot hand keys and values of different slots.

    Raises:
        UserError: naming those that work.
    """
    if name not in SPLITTING_BACKENDS:
        raise UserError(
            f"this model's layers share keys or values, which vLLM's attention backend {name!r} cannot read; choose "
            f"another with --attention-backend: {' or '.join(SPLITTING_BACKENDS[1:])}"
        )


def _engine_problems(vllm_config: Any) -> Iterator[str]:
    """Options that no variant of ours can be served with."""
    parallel = vllm_config.parallel_config
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "decode_context_parallel_size"):
        size = getattr(parallel, name, 1)
        if size > 1:
            yield (
                f"{name} is {size}, and the model is not split over devices; leave it at 1 (data_parallel_size serves "
                "more requests)"
            )
    quantization = getattr(vllm_config.model_config, "quantization", None)
    if quantization is not None:
        yield f"quantization is {quantization!r}, and weights are not quantized; leave it out"
    if vllm_config.lora_config is not None:
        yield "enable_lora is set, and adapters are not applied; merge the adapter into the model and leave it out"


def _plane_problems(vllm_config: Any) -> Iterator[str]:
    """Options that a cache whose keys and values lie in different slots cannot be served with."""
    dtype = str(vllm_config.cache_config.cache_dtype)
    if dtype not in ("auto", "float32", "float16", "bfloat16"):
        yield f"kv_cache_dtype is {dtype!r}, and shared values are not quantized; leave it at 'auto'"
    if getattr(vllm_config, "kv_transfer_config", None) is not None:
        yield "kv_transfer_config is set, and connectors move slots of keys and values together; leave it out"


def _head_problems(config: ResFormerConfig) -> Iterator[str]:
    """Sizes of heads that vLLM's kernels for this machine do not have."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return  # vLLM chooses a backend by the size
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    sizes, size = CPUAttentionBackend.get_supported_head_sizes(), config.shape().head_dim
    if size not in sizes:
        yield f"head_dim is {size}, and vLLM's kernel for CPUs has {', '.join(map(str, sizes))}; use model.generate"
