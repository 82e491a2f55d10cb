"""The host model for Hugging Face `transformers`. With the plan of plain attention it is Llama: same keys, same logits.

Shapes: B batch, T new tokens, C hidden size, V vocabulary.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from ..core.carry import Carry
from ..core.policy import COEFFICIENTS_NAME, POLICY_NAME, Coefficients, Policy
from .cache import lay_out
from .compat import CACHE, create_causal_mask
from .configuration import REMOTE_CODE_FILE, ResFormerConfig
from .layers import Attention, DecoderLayer, RotaryEmbedding
from .norm import RMSNorm

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
    _keep_in_fp32_modules_strict = {POLICY_NAME, COEFFICIENTS_NAME}  # noqa: RUF012

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
        elif isinstance(module, RMSNorm):
            init.ones_(module.weight)
        elif isinstance(module, RotaryEmbedding):
            inv_freq, _ = module.rope_init_fn(self.config)
            for buffer in module.buffers():
                init.copy_(buffer, inv_freq)
        elif isinstance(module, Policy | Coefficients):
            for name, value in module.initial_values().items():
                init.copy_(module.get_parameter(name), value)

    @classmethod
    def register_for_auto_class(cls, auto_class: str | type = "AutoModel") -> None:
        """Do nothing: exports carry a file that imports the installed package, never a copy of this one."""

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """As in transformers, plus the three-line remote-code file named by the config's `auto_map`."""
        super().save_pretrained(save_directory, *args, **kwargs)
        if kwargs.get("is_main_process", True):
            Path(save_directory, f"{REMOTE_CODE_FILE}.py").write_text(REMOTE_CODE, encoding="utf-8")


class ResFormerModel(ResFormerPreTrainedModel):
    """Embedding, blocks, final norm. The layer loop hands values from block to block as the plan says."""

    def __init__(self, config: ResFormerConfig) -> None:
        super().__init__(config)
        variant, shape = config.build_variant(), config.shape()
        self.plan = variant.plan(shape)
        self.padding_idx, self.vocab_size = config.pad_token_id, config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList(DecoderLayer(config, row, variant.policy(row, shape)) for row in self.plan)
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(config)
        self.value_coefficients = variant.coefficients(self.plan, shape)
        self.gradient_checkpointing = False
        self.post_init()

    def layer_coefficients(self) -> tuple[tuple[Tensor, ...], ...]:
        """Per layer the tensors that parameters outside the blocks send to it."""
        return self.value_coefficients() if self.value_coefficients is not None else ((),) * len(self.plan)

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Hidden states `[B, T, C]` of the last layer after the final norm.

        Args:
            input_ids: `[B, T]`; or give `inputs_embeds` `[B, T, C]`.
            attention_mask: `[B, S]`, 1 for tokens and 0 for padding, or a ready 4-D mask.
            position_ids: `[B, T]`; positions that restart mark packed documents (when neither mask nor cache is given).
            cache, past_key_values: the same thing under the names of transformers >= 5.24 and before.
            use_cache: return a cache; ignored while gradient checkpointing is on, since the backward pass would fill it
                twice.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        cache = cache if cache is not None else past_key_values
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            cache, use_cache = None, False
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)

        # Positions that nobody gave are consecutive. The mask then needs no check for packed documents, and a compiled
        # training step runs attention without a materialised mask.
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=hidden,
            attention_mask=attention_mask,
            position_ids=position_ids,
            **{CACHE: cache},
        )
        if position_ids is None:
            past = cache.get_seq_length() if cache is not None else 0
            position_ids = (torch.arange(hidden.shape[1], device=hidden.device) + past).unsqueeze(0)

        position_embeddings = self.rotary_emb(hidden, position_ids)
        coefficients = self.layer_coefficients()
        carry = Carry(self.plan)
        for row, layer in zip(self.plan, self.layers, strict=True):
            hidden, *sent = layer(
                hidden,
                *carry.received(row.layer),
                *coefficients[row.layer - 1],
                attention_mask=mask,
                position_embeddings=position_embeddings,
                position_ids=position_ids,
                cache=cache,
                **kwargs,
            )
            carry.keep(row.layer, sent)
        outputs: dict[str, Any] = {"last_hidden_state": self.norm(hidden), CACHE: cache}
        return BaseModelOutputWithPast(**outputs)


class ResFormerForCausalLM(ResFormerPreTrainedModel, GenerationMixin):
    """The language model: `ResFormerModel` and an output head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    _tp_plan = {"lm_head": "colwise_gather_output"}  # noqa: RUF012

    def __init__(self, config: ResFormerConfig) -> None:
        super().__init__(config)
        self.model = ResFormerModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits `[B, T, V]`, and the mean loss in nats per token when `labels` `[B, T]` (-100 = ignore; shifted
        inside) are given.

        A call with gradients in training mode returns no cache unless asked for by `use_cache=True`: nobody reads it
        there, and it would switch off the detection of packed documents.
        """
        if use_cache is None and self.training and torch.is_grad_enabled():
            use_cache = False
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache if cache is not None else past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept, :])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            **{CACHE: getattr(outputs, CACHE)},
        )

    def _prepare_static_cache(  # type: ignore[override]
        self, *, batch_size: int, prefill_chunk_size: int | None = None, **kwargs: Any
    ) -> Cache:
        """transformers' static cache for `generate`, laid out by the plan; allocated ahead of time only after that."""
        cache = super()._prepare_static_cache(batch_size=batch_size, prefill_chunk_size=None, **kwargs)  # type: ignore[misc]
        lay_out(cache, self.model.plan)
        if prefill_chunk_size is not None:
            shape = self.config.shape()
            cache.early_initialization(batch_size, shape.kv_heads, shape.head_dim, dtype=self.dtype, device=self.device)
        return cache

    @torch.no_grad()
    def lambda_map(self) -> dict[str, list]:
        """Effective weights by layer: `{"layers": [2, ...], "first": [...], "own": [...]}`, empty when no layer has
        such a pair.

        Means over heads or channels where a weight is finer than a scalar. Layers count from 1.
        """
        table: dict[str, list] = {"layers": [], "first": [], "own": []}
        for row, layer, coefficients in zip(
            self.model.plan, self.model.layers, self.model.layer_coefficients(), strict=True
        ):
            policy = layer.self_attn.value_residual
            weights = policy.coefficient_map(coefficients) if policy is not None else {}
            if weights:
                table["layers"].append(row.layer)
                table["first"].append(weights["first"])
                table["own"].append(weights["own"])
        return table if table["layers"] else {}
