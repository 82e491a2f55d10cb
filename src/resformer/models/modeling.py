"""The host model for Hugging Face `transformers`. With the plan of plain attention it is Llama: same keys, same logits.

Shapes: B batch, T new tokens, C hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, StaticCache
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    MoeCausalLMOutputWithPast,
    MoeModelOutputWithPast,
)
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from ..core.carry import Carry
from ..core.plan import last_reader
from ..errors import UserError
from .batching import BatchedGeneration
from .cache import check_static_length, fit, prepare, refuse_offloading
from .compat import CACHE
from .configuration import ResFormerConfig
from .layers import DecoderLayer
from .masks import attention_masks, by_view, spans, views
from .mlp import load_balancing_loss
from .norm import make_norm
from .positions import LearnedPositions, RotaryEmbedding, consecutive, unpadded
from .pretrained import ResFormerPreTrainedModel


@dataclass
class RoutedModelOutput(MoeModelOutputWithPast):
    """Output of a model with experts: `router_logits` `[B, T, E]` of each layer, and `aux_loss`, the load-balancing
    loss of this call, before its coefficient.
    """

    aux_loss: Tensor | None = None


def is_padding_mask(attention_mask: Any) -> TypeGuard[Tensor]:
    """A mask `[B, S]` of tokens, not a ready one for attention."""
    return isinstance(attention_mask, Tensor) and attention_mask.dim() == 2


class ResFormerModel(ResFormerPreTrainedModel):
    """Embedding, blocks, final norm. The layer loop hands values from block to block as the plan says."""

    def __init__(self, config: ResFormerConfig) -> None:
        super().__init__(config)
        variant, shape = config.build_variant(), config.shape()
        self.plan = config.plan()
        self.views, self.last_reader = views(self.plan), last_reader(self.plan)
        self.mask_names = tuple(view.mask for view in self.views)
        self.padding_idx, self.vocab_size = config.pad_token_id, config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList(DecoderLayer(config, row, variant.policy(row, shape)) for row in self.plan)
        self.norm = make_norm(config)
        learned = config.position_embedding == "learned"
        self.embed_positions = LearnedPositions(config) if learned else None
        self.rotary_emb = None if learned else RotaryEmbedding(config)
        self.value_coefficients = variant.coefficients(self.plan, shape)
        self.value_tables = variant.tables(self.plan, shape)
        averages = {str(row.layer - 1): variant.depth(row, shape) for row in self.plan}
        self.depth_average = nn.ModuleDict({index: module for index, module in averages.items() if module is not None})
        self.gradient_checkpointing = False
        self.post_init()

    def layer_coefficients(self) -> tuple[tuple[Tensor, ...], ...]:
        """Per layer the tensors that parameters outside the blocks send to it."""
        return self.value_coefficients() if self.value_coefficients is not None else ((),) * len(self.plan)

    def table_values(self, input_ids: Tensor | None) -> tuple[Tensor | None, ...]:
        """Per layer what a token table says for the tokens `[B, T]`."""
        if self.value_tables is None:
            return ()
        if input_ids is None:
            raise UserError(
                f"variant {self.config.variant!r} reads token tables and needs input_ids; it got only inputs_embeds"
            )
        return self.value_tables(input_ids)

    def masks(
        self, hidden: Tensor, attention_mask: Any, position_ids: Tensor | None, cache: Cache | None
    ) -> dict[str, Any]:
        """The layers' masks by name (`View.mask`), unless `generate` or a batching manager has made them already."""
        if isinstance(attention_mask, dict):
            return by_view(self.views, attention_mask)
        extends = any(row.extends for row in self.plan)
        return attention_masks(
            self.config, self.views, hidden, attention_mask, position_ids, cache, materialise=extends
        )

    def positions(
        self, hidden: Tensor, attention_mask: Any, position_ids: Tensor | None, cache: Cache | None
    ) -> Tensor:
        """Positions `[B, T]` of the new tokens.

        Learned ones are counted without the padding, which rotary ones do not need: only distances matter to them.
        """
        new = hidden.shape[1]
        if position_ids is None and is_padding_mask(attention_mask) and self.embed_positions is not None:
            position_ids = unpadded(attention_mask, new)
        if position_ids is not None:  # a paged cache, whose requests have lengths of their own, always comes with them
            return position_ids
        return consecutive(new, cache.get_seq_length() if cache is not None else 0, hidden.device)

    def blocks(
        self, hidden: Tensor, tables: Sequence[Tensor | None], masks: dict[str, Any], cache: Cache | None, **kwargs: Any
    ) -> tuple[Tensor, list[Tensor]]:
        """The layer loop: hidden states `[B, T, C]` before the final norm, and each router's logits `[B, T, E]`.

        Args:
            hidden: embeddings, with positions if they are learned, `[B, T, C]`.
            tables: what `table_values` returned.
            masks: what `masks` returned.
            cache: storage; None for none.
            kwargs: what every block and its attention function get.
        """
        coefficients, averages = self.layer_coefficients(), dict(self.depth_average.items())
        carry = Carry(self.plan, tables, self.last_reader)
        carry.keep_hidden(0, hidden)
        router_logits: list[Tensor] = []
        span_of_layer = spans(self.views, cache, hidden.shape[1])
        for row, layer, mask, span in zip(self.plan, self.layers, self.mask_names, span_of_layer, strict=True):
            hidden, *sent = layer(
                hidden,
                *carry.received(row.layer),
                *coefficients[row.layer - 1],
                attention_mask=masks[mask],
                cache=cache,
                span=span,
                **kwargs,
            )
            if layer.routes:
                router_logits.append(sent.pop())
            carry.keep(row.layer, sent)
            carry.keep_hidden(row.layer, hidden)
            average = averages.get(str(row.layer - 1))
            if average is not None:
                hidden = average(hidden, carry.averaged(row.layer))
        return hidden, router_logits

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Any] | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast | RoutedModelOutput:
        """Hidden states `[B, T, C]` of the last layer after the final norm.

        Args:
            input_ids: `[B, T]`; or give `inputs_embeds` `[B, T, C]`.
            attention_mask: `[B, S]`, 1 for tokens and 0 for padding, a ready 4-D mask, or ready masks by name.
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
        prepare(cache, self, input_ids, hidden)

        # Positions that nobody gave are consecutive. The masks then need no check for packed documents, and a compiled
        # training step runs attention without a materialised mask.
        masks = self.masks(hidden, attention_mask, position_ids, cache)
        position_ids = self.positions(hidden, attention_mask, position_ids, cache)
        if self.embed_positions is not None:
            hidden = hidden + self.embed_positions(position_ids)
        position_embeddings = None if self.rotary_emb is None else self.rotary_emb(hidden, position_ids)

        hidden, router_logits = self.blocks(
            hidden,
            self.table_values(input_ids),
            masks,
            cache,
            position_ids=position_ids,
            position_embeddings=position_embeddings,
            **kwargs,
        )
        outputs: dict[str, Any] = {"last_hidden_state": self.norm(hidden), CACHE: cache}
        if not router_logits:
            return BaseModelOutputWithPast(**outputs)
        counted = attention_mask[:, -hidden.shape[1] :] if is_padding_mask(attention_mask) else None
        outputs["aux_loss"] = load_balancing_loss(router_logits, self.config.num_experts_per_tok, counted)
        return RoutedModelOutput(**outputs, router_logits=tuple(router_logits))  # type: ignore[arg-type]


class ResFormerForCausalLM(BatchedGeneration, ResFormerPreTrainedModel, GenerationMixin):
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
        output_router_logits: bool = False,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | MoeCausalLMOutputWithPast:
        """Logits `[B, T, V]`, and the mean loss in nats per token when `labels` `[B, T]` (-100 = ignore; shifted
        inside) are given.

        A model with experts returns `aux_loss` as well, the load-balancing loss of this call; the loss contains
        `router_aux_loss_coef` times it, as in Mixtral. `output_router_logits` adds each layer's `[B, T, E]`.

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
        result = {
            "loss": loss,
            "logits": logits,
            "hidden_states": outputs.hidden_states,
            "attentions": outputs.attentions,
            CACHE: getattr(outputs, CACHE),
        }
        if not self.config.num_experts:
            return CausalLMOutputWithPast(**result)
        if loss is not None:
            result["loss"] = loss + self.config.router_aux_loss_coef * outputs.aux_loss
        kept_logits = outputs.router_logits if output_router_logits else None
        return MoeCausalLMOutputWithPast(**result, aux_loss=outputs.aux_loss, router_logits=kept_logits)

    def _prepare_static_cache(  # type: ignore[override]
        self, *, batch_size: int, prefill_chunk_size: int | None = None, **kwargs: Any
    ) -> Cache:
        """transformers' static cache for `generate`, laid out by the plan; allocated ahead of time only after that."""
        cache = super()._prepare_static_cache(batch_size=batch_size, prefill_chunk_size=None, **kwargs)  # type: ignore[misc]
        shape = self.config.shape()
        fit(cache, self.model.plan, shape)
        if prefill_chunk_size is not None:
            cache.early_initialization(batch_size, shape.kv_heads, shape.head_dim, dtype=self.dtype, device=self.device)
        return cache

    def _prepare_cache_for_generation(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> Any:
        """As in transformers; a cache that cannot work here is refused before the prompt is read."""
        if "offloaded" in (generation_config.cache_implementation or ""):
            refuse_offloading(self.device)
        own = model_kwargs.get(CACHE)
        if isinstance(own, StaticCache):
            check_static_length(own, max_cache_length)
        arguments = (generation_config, model_kwargs, generation_mode, batch_size, max_cache_length)
        return super()._prepare_cache_for_generation(*arguments)  # type: ignore[misc]

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
            weights = layer.self_attn.value_residual.coefficient_map(coefficients)
            if weights:
                table["layers"].append(row.layer)
                table["first"].append(weights["first"])
                table["own"].append(weights["own"])
        return table if table["layers"] else {}
