"""Our model as vLLM wants it: the host of `models/`, unchanged, with attention that goes through vLLM's cache.

Shapes: T new tokens of all requests in one row, C hidden size, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.modeling_utils import AttentionInterface

from ..errors import UserError
from ..models.modeling import ResFormerModel
from .vllm_checks import check
from .vllm_slots import Slot, build_slots

ATTENTION = "resformer_vllm"


def served_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    slots: Sequence[Slot] = (),
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' interface of attention: queries `[1, H, T, D]`, keys and values `[1, H_kv, T, D]` of the new
    tokens; output `[1, T, H, D]`. Masks are vLLM's business.
    """
    flat = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    return slots[module.layer_idx](*flat).unsqueeze(0), None


AttentionInterface.register(ATTENTION, served_attention)


class ServedResFormer(nn.Module):
    """A causal language model with vLLM's interface (`vllm.model_executor.models.interfaces_base`).

    Weights have the names of the checkpoint. Lambdas, gates and logits stay fp32, whatever dtype vLLM serves in.
    """

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        """Args: vLLM's configuration, and a prefix for the names of the cache's slots.

        Raises:
            UserError: see `vllm_checks.check`.
        """
        super().__init__()
        found = check(vllm_config)
        self.config = copy.deepcopy(vllm_config.model_config.hf_config)
        self.config._attn_implementation = ATTENTION
        with init.no_init_weights():  # every weight comes from the checkpoint
            self.model = ResFormerModel(self.config).eval()
        self.lm_head = nn.Linear(self.config.hidden_size, self.config.vocab_size, bias=False)
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.cache, self.slots = build_slots(self.config, found, vllm_config, f"{prefix}." if prefix else "")

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Embeddings `[T, C]` of token ids `[T]`."""
        return self.model.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """Hidden states `[T, C]` after the final norm.

        Args:
            input_ids: `[T]`, or None with embeddings.
            positions: `[T]`.
            intermediate_tensors: None; for pipeline parallelism, which is refused.
            inputs_embeds: `[T, C]` in place of token ids.

        Raises:
            UserError: for embeddings where layers read token tables.
        """
        model = self.model
        if inputs_embeds is None:
            assert input_ids is not None, "vLLM gives token ids or embeddings"
            inputs_embeds = self.embed_input_ids(input_ids)
        hidden, positions = inputs_embeds.unsqueeze(0), positions.unsqueeze(0)
        if model.embed_positions is not None:
            hidden = hidden + model.embed_positions(positions)
        turns = None if model.rotary_emb is None else model.rotary_emb(hidden, positions)
        tables = model.table_values(None if input_ids is None else input_ids.unsqueeze(0))
        no_masks = dict.fromkeys(model.mask_names)
        hidden, _router_logits = model.blocks(
            hidden, tables, no_masks, None, position_embeddings=turns, slots=self.slots
        )
        return model.norm(hidden)[0]

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Logits `[T, V]` of hidden states `[T, C]`."""
        return self.lm_head(hidden_states)

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Copy a checkpoint's tensors by name; returns the names.

        Raises:
            UserError: for a weight that is missing, unknown or of another size.
        """
        own = dict(self.named_parameters())
        loaded: set[str] = set()
        problems = []
        for name, tensor in weights:
            if name == "lm_head.weight" and name not in own:
                continue  # tied
            if name not in own:
                problems.append(f"it has {name!r}, which the model has not")
            elif own[name].shape != tensor.shape:
                problems.append(f"{name!r} is {list(tensor.shape)}; the model needs {list(own[name].shape)}")
            else:
                own[name].copy_(tensor)
                loaded.add(name)
        problems += [f"it lacks {name!r}" for name in own if name not in loaded]
        if problems:
            more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
            raise UserError(
                f"the checkpoint does not fit variant {self.config.variant!r}: {'; '.join(problems[:5])}{more}; export "
                "the model again, or mend config.json"
            )
        return loaded
