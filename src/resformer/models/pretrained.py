"""Loading, saving, initialisation and masks for `generate`: what the model classes share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.modeling_utils import PreTrainedModel

from ..core.policy import LAMBDA_NAMES, Initialised
from ..errors import UserError
from .attention import Attention, implementations
from .compat import CACHE
from .configuration import REMOTE_CODE_FILE, ResFormerConfig
from .layers import DecoderLayer
from .masks import attention_masks, views
from .mlp import Experts
from .norm import RMSNorm
from .positions import RotaryEmbedding

REMOTE_CODE = """\
# This model's code is the installed package: pip install resformer
# Loading with trust_remote_code=True imports it from here; after `import resformer` no remote code is needed.
from resformer import ResFormerConfig, ResFormerForCausalLM, ResFormerModel  # noqa: F401
"""


class ResFormerPreTrainedModel(PreTrainedModel):
    """Loading, saving and initialisation that the model classes share."""

    config_class = ResFormerConfig
    config: ResFormerConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DecoderLayer"]  # noqa: RUF012
    _skip_keys_device_placement = [CACHE]  # noqa: RUF012
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": DecoderLayer, "attentions": Attention}  # noqa: RUF012
    # A bf16 weight of 0.5 has 8 bits: lambdas, gates and logits stay fp32 whatever dtype the model is loaded in.
    _keep_in_fp32_modules_strict = set(LAMBDA_NAMES)  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        std = self.config.initializer_range
        if isinstance(module, nn.Linear):
            init.normal_(module.weight, mean=0.0, std=std)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, mean=0.0, std=std)
            if module.padding_idx is not None and not getattr(module.weight, "_is_hf_initialized", False):
                init.zeros_(module.weight[module.padding_idx])
        elif isinstance(module, Experts):
            init.normal_(module.gate_up_proj, mean=0.0, std=std)
            init.normal_(module.down_proj, mean=0.0, std=std)
        elif isinstance(module, RMSNorm | nn.LayerNorm):
            init.ones_(module.weight)
            if isinstance(module, nn.LayerNorm):
                init.zeros_(module.bias)
        elif isinstance(module, RotaryEmbedding):
            inv_freq, _ = module.rope_init_fn(self.config)
            for buffer in module.buffers():
                init.copy_(buffer, inv_freq)
        elif isinstance(module, Initialised):
            for name, value in module.initial_values().items():
                init.copy_(module.get_parameter(name), value)

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *args: Any, **kwargs: Any) -> str:
        """As in transformers, but a plan that touches attention weights or masks runs only where these exist."""
        allowed = implementations(self.config.plan())
        if allowed and attn_implementation is None:
            attn_implementation = allowed[0]
        if allowed and attn_implementation not in allowed:
            raise UserError(
                f"attention implementation is {attn_implementation!r}, but variant {self.config.variant!r} runs only "
                f"with {' or '.join(map(repr, allowed))}; choose that, or leave it to the model"
            )
        return super()._check_and_adjust_attn_implementation(attn_implementation, *args, **kwargs)

    @staticmethod
    def create_masks_for_generate(
        config: ResFormerConfig,
        inputs_embeds: Tensor,
        attention_mask: Tensor | None,
        cache: Cache | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        **_: Any,
    ) -> Any:
        """What `generate` makes ahead of a compiled step with a static cache: one mask, or several by name."""
        plan = config.plan()
        masks = attention_masks(
            config,
            views(plan),
            inputs_embeds,
            attention_mask,
            position_ids,
            cache if cache is not None else past_key_values,
            materialise=any(row.extends for row in plan),
        )
        return masks if len(masks) > 1 else next(iter(masks.values()))

    @classmethod
    def register_for_auto_class(cls, auto_class: str | type = "AutoModel") -> None:
        """Do nothing: exports carry a file that imports the installed package, never a copy of this one."""

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """As in transformers, plus the three-line remote-code file named by the config's `auto_map`."""
        super().save_pretrained(save_directory, *args, **kwargs)
        if kwargs.get("is_main_process", True):
            Path(save_directory, f"{REMOTE_CODE_FILE}.py").write_text(REMOTE_CODE, encoding="utf-8")
