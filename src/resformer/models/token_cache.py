"""A cache that holds token ids in place of the first layer's values.

Layer 1 sees nothing but the embedding of its own token: with rotary positions, which turn queries and keys only, its
value is W_v norm(E[token]), a row of a table over the vocabulary. So the ids and the table say what the value plane
says. In SVFormer that plane is the only one, and what is left to store are the keys: half of a Transformer's cache.

A step still gathers the plane, since every later layer reads it. So the cache is smaller *between* steps: it pays for
caches that are kept (conversations, shared prefixes) while another one decodes, and not for the peak of a single one.

Shapes: B batch, T new tokens, S all tokens so far, H_kv key/value heads, D head dimension, V vocabulary, C hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from ..core.plan import Plan
from ..errors import UserError
from .configuration import ResFormerConfig

ROWS_AT_ONCE = 4096  # of the vocabulary, while the table is made
SPOT_ROWS = 8


class ValueTable:
    """Layer 1's values of all tokens, `[V, H_kv * D]`, as the weights of a model (a `ResFormerModel`) give them now.

    Copies of a cache share it.
    """

    def __init__(self, model: Any) -> None:
        self.made_of = _made_of(model)
        self.heads, self.width = model.config.shape().kv_heads, model.config.shape().head_dim
        self.values_VD = _first_values(model, torch.arange(model.vocab_size))

    def __call__(self, ids_BT: Tensor) -> Tensor:
        """The values `[B, H_kv, T, D]` of tokens `[B, T]`."""
        values = F.embedding(ids_BT, self.values_VD)
        return values.unflatten(-1, (self.heads, self.width)).transpose(1, 2)

    def __deepcopy__(self, memo: dict[int, Any]) -> ValueTable:
        return self

    def __reduce__(self) -> Any:
        raise UserError("a 'tokens' cache belongs to a model of this process and cannot be pickled; use 'dynamic'")

    def check(self, model: Any, *, fresh: bool) -> None:
        """Raises UserError when the table is not that of `model` as it is now.

        Other parameters, another dtype and operations in place are noticed; what goes through `parameter.data` only
        before the first tokens (`fresh`), when a few rows are made again.
        """
        same = len(found := _made_of(model)) == len(self.made_of) and all(
            ours[0] is theirs[0] and ours[1:] == theirs[1:] for ours, theirs in zip(self.made_of, found, strict=True)
        )
        if same and fresh:
            ids = torch.linspace(0, model.vocab_size - 1, SPOT_ROWS).long()
            again, kept = _first_values(model, ids), self.values_VD[ids.to(self.values_VD.device)]
            # The same products in another order: rounding apart.
            same = bool((again - kept).abs().max() <= 0.02 * kept.abs().max())
        if not same:
            raise UserError(
                "this 'tokens' cache was made for other weights (another model, or this one before they changed); make "
                "a new one with resformer.build_cache(model, 'tokens')"
            )


class _TokenSlot(DynamicLayer):
    """A slot that stores keys `[B, H_kv, S, D]` and, in place of values, token ids `[B, 1, S, 1]`."""

    table: ValueTable
    new_ids: Tensor | None

    @classmethod
    def like(cls, layer: DynamicLayer, table: ValueTable) -> DynamicLayer:
        """A fresh layer as it is, with a table."""
        slot = cls.__new__(cls)
        slot.__dict__.update(layer.__dict__, table=table, new_ids=None)
        return slot

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        # Older versions of transformers give both the type of the keys; ids appended to floats are no ids any more.
        self.values = value_states.new_empty(0)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        ids, self.new_ids = self.new_ids, None
        if ids is None or ids.shape[-1] != key_states.shape[-2]:
            raise UserError("a 'tokens' cache works only with the model that it was made for (resformer.build_cache)")
        new = ids.to(device=key_states.device, dtype=torch.int32)[:, None, :, None]
        keys, all_ids = super().update(key_states, new, *args, **kwargs)
        return keys, self.table(all_ids[:, 0, :, 0])


class TokenSlot(_TokenSlot):
    """For slots that keep all tokens."""


class SlidingTokenSlot(_TokenSlot, DynamicSlidingWindowLayer):
    """For slots that keep the last tokens of a window."""


class TokenCache(DynamicCache):
    """A growing cache whose first slot holds token ids in place of values; see `resformer.build_cache`."""

    def __init__(self, model: Any, **options: Any) -> None:
        check_plan(model.config, model.plan)
        super().__init__(config=model.config, **options)
        self.table = ValueTable(model)
        first: Any = self.layers[0]
        slot = SlidingTokenSlot if isinstance(first, DynamicSlidingWindowLayer) else TokenSlot
        self.layers[0] = slot.like(first, self.table)

    def note(self, model: Any, input_ids: Tensor | None) -> None:
        """Take the ids `[B, T]` of the tokens whose keys `model` stores next.

        Raises:
            UserError: without ids, or for a model whose table this is not.
        """
        if input_ids is None:
            raise UserError(
                "a 'tokens' cache needs input_ids, but the model got only inputs_embeds; use the kind 'dynamic'"
            )
        first: Any = self.layers[0]
        self.table.check(model, fresh=not first.is_initialized)
        first.new_ids = input_ids

    def parts(self) -> tuple[int, int]:
        """Bytes of the table, and of the values plane that the next step gathers."""
        table, ids = self.table.values_VD, self.layers[0].values  # type: ignore[union-attr]
        tokens = ids.numel() if isinstance(ids, Tensor) else 0
        return table.nbytes, tokens * table.shape[1] * table.element_size()


def check_plan(config: ResFormerConfig, plan: Plan) -> None:
    """Raises UserError when layer 1's value does not depend on the token alone, or is not stored."""
    if config.position_embedding != "rope":
        raise UserError(
            f"a 'tokens' cache needs values that depend on the token alone, but position_embedding is "
            f"{config.position_embedding!r} and adds positions to them; use the kind 'dynamic'"
        )
    first = plan[0]
    if first.stores != "mixed" or not first.owns_key or any(read.what != "table" for read in first.received):
        raise UserError(
            f"a 'tokens' cache takes the place of values that layer 1 stores, and variant {config.variant!r} stores "
            "none there; use the kind 'dynamic'"
        )


def holds_tokens(config: ResFormerConfig) -> bool:
    """Whether a "tokens" cache can be made for such a model."""
    try:
        check_plan(config, config.plan())
    except UserError:
        return False
    return True


def _made_of(model: Any) -> list[tuple[Any, ...]]:
    """The parameters that the table follows from, each with what tells that it has changed."""
    layer = model.layers[0]
    modules = [model.embed_tokens, layer.input_layernorm, layer.self_attn.v_proj, layer.self_attn.value_residual]
    found = [parameter for module in modules for parameter in module.parameters()]
    found += model.value_tables.parameters() if model.value_tables is not None else []
    return [(one, one.data_ptr(), one.dtype, None if one.is_inference() else one._version) for one in found]


@torch.no_grad()
def _first_values(model: Any, ids_V: Tensor) -> Tensor:
    """Layer 1's values `[V, H_kv * D]` of some tokens."""
    layer, coefficients = model.layers[0], model.layer_coefficients()[0]
    parts = []
    for ids in ids_V.to(model.embed_tokens.weight.device).split(ROWS_AT_ONCE):
        hidden = layer.input_layernorm(model.embed_tokens(ids[None]))
        reads = [model.table_values(ids[None])[0] for _ in model.plan[0].received]
        own = layer.self_attn.v_proj(hidden).unflatten(-1, (-1, layer.self_attn.head_dim))
        parts.append(layer.self_attn.value_residual.mix(own, reads, hidden, coefficients).flatten(-2)[0])
    return torch.cat(parts)
