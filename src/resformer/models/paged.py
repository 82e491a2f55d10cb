"""Continuous batching (`generate_batch`, `transformers serve --continuous-batching`) with a paged cache laid out by the
plan.

transformers cuts the cache into blocks of a few tokens, and gives every layer of a block a page of keys and a page of
values. Our allocators give a block the pages that the plan stores and no others, so the same memory holds more tokens.
All pages of a block are equally long, which keeps transformers' index arithmetic, sharing, forking and copying of
blocks as they are: where layers store different numbers of heads, a page holds as many heads as divide all of them.

Nothing of transformers is changed for anybody else. Its function that makes a manager's cache is called with other
globals, by managers of our models only.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from math import gcd
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cache import ATTN_TYPE_TO_ALLOCATOR, PagedAttentionCache
from transformers.generation.continuous_batching.cache_allocators import (
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    FullAttentionCacheAllocator,
    SlidingAttentionCacheAllocator,
)
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

from ..core.plan import Plan
from ..core.policy import Shape
from ..errors import UserError
from .attention import implementations
from .cache import slots
from .compat import transformers_version
from .configuration import ResFormerConfig
from .masks import layer_type


def layer_groups(config: ResFormerConfig) -> dict[str, list[int]]:
    """Layer indices with a slot of their own by what the slot keeps; each group has an allocator."""
    groups: dict[str, list[int]] = {}
    for row in config.plan():
        if row.layer in row.slots:
            groups.setdefault(layer_type(row.slot_window), []).append(row.layer - 1)
    return groups


def page_heads(plan: Plan, shape: Shape, layers: list[int]) -> dict[int, tuple[int, int]]:
    """Layer index -> heads of the two tensors of its slot, 0 for one that is not stored."""
    return {index: tuple(heads if width else 0 for heads, width in slots(plan[index], shape)) for index in layers}  # type: ignore[misc]


class _Planned:
    """What makes an allocator of transformers follow the plan; goes before it among the bases."""

    # The kernels that read pages themselves return no earlier keys and values, but layers may read them; nor is there
    # always a page of both.
    supports_block_table = False
    rows_per_token = 1

    def __init__(
        self, *, index: int, config: ResFormerConfig, cache_dtype: torch.dtype, layer_indices: list[int], **rest: Any
    ) -> None:
        super().__init__(index=index, config=config, cache_dtype=cache_dtype, layer_indices=layer_indices, **rest)  # type: ignore[call-arg]
        shape = config.shape()
        heads = page_heads(config.plan(), shape, layer_indices)
        self.heads = gcd(*(n for pair in heads.values() for n in pair))
        numbers: Iterator[int] = iter(range(sum(map(sum, heads.values())) // self.heads))
        self.pages = {
            layer: tuple([next(numbers) for _ in range(count // self.heads)] for count in pair)
            for layer, pair in heads.items()
        }
        self.width = shape.head_dim
        # Pages of a block take the part that layers have in stock allocators.
        self._before_cache_tensor_init(  # type: ignore[attr-defined]
            index=index,
            layer_indices=[page for pair in self.pages.values() for pages in pair for page in pages],
            tokens_per_page=rest["page_size"],
            bytes_per_page=rest["page_size"] * self.heads * self.width * cache_dtype.itemsize,
            allow_block_sharing=rest["allow_block_sharing"],
        )
        self.layer_indices, self.cache_dtype = layer_indices, cache_dtype

    def register_cache_tensor(
        self, bytes_per_sector: int, non_trash_bytes: int, cache_tensor: Tensor, pool: Any
    ) -> None:
        """Take the cache's bytes; views of them, shifted to each page of a block, are all that `update` needs."""
        self.bytes_per_sector = bytes_per_sector
        self._copy_view = cache_tensor.view(-1, self.bytes_per_block)  # type: ignore[attr-defined]
        self._after_cache_tensor_init(non_trash_bytes, bytes_per_sector, cache_tensor, pool)  # type: ignore[attr-defined]
        rows = cache_tensor.view(self.cache_dtype).view(-1, self.heads, self.width)
        tokens: int = self.tokens_per_page  # type: ignore[attr-defined]
        self.views = {
            layer: tuple([rows[page * tokens :] for page in pages] for pages in pair)
            for layer, pair in self.pages.items()
        }

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, read_index: Tensor, write_index: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Write what is new, `[T, heads, D]`, and return it after what the requests have stored, `[S, heads, D]`. What
        the plan does not store comes back as it is.
        """
        keys, values = self.views[layer_idx]
        return (
            self._extend(key_states, keys, read_index, write_index),
            self._extend(value_states, values, read_index, write_index),
        )

    def _extend(self, states: Tensor, pages: list[Tensor], read_index: Tensor, write_index: Tensor) -> Tensor:
        if not pages:
            return states
        parts = states.split(self.heads, dim=1)
        stored = [self._exchange(page, part, read_index, write_index) for page, part in zip(pages, parts, strict=True)]
        return stored[0] if len(stored) == 1 else torch.cat(stored, dim=1)

    def _exchange(self, page: Tensor, new: Tensor, read_index: Tensor, write_index: Tensor) -> Tensor:
        """Write first: a new token is read where it was written. No index to read says that nothing was stored."""
        page.index_copy_(0, write_index, new)
        return page.index_select(0, read_index) if read_index.numel() else new


class PlannedAllocator(_Planned, FullAttentionCacheAllocator):
    """For slots that keep all tokens."""


class PlannedSlidingAllocator(_Planned, SlidingAttentionCacheAllocator):
    """For slots that keep the last tokens of a window."""

    def _exchange(self, page: Tensor, new: Tensor, read_index: Tensor, write_index: Tensor) -> Tensor:
        """Read first: a new token may take the place of one that is still seen. Marks in the index stand for the new
        tokens.
        """
        if not read_index.numel():
            page.index_copy_(0, write_index, new)
            return new
        stored = page.index_select(0, read_index)
        stored[read_index == self.sentinel_index] = new
        page.index_copy_(0, write_index, new)
        return stored


PLANNED = {FULL_ATTENTION: PlannedAllocator, SLIDING_ATTENTION: PlannedSlidingAllocator}


def with_globals(function: Callable[..., Any], **names: Any) -> Callable[..., Any]:
    """A copy of a function that sees other objects under some global names. Everybody else's stays as it is."""
    assert isinstance(function, FunctionType)
    missing = set(names) - set(function.__code__.co_names)
    if missing:
        raise UserError(
            f"continuous batching of transformers {transformers_version} is not what resformer knows "
            f"({function.__qualname__} does not use {', '.join(sorted(missing))}); install one from 5.19 to 5.24, or "
            "use model.generate"
        )
    rebound = FunctionType(
        function.__code__,
        {**function.__globals__, **names},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    rebound.__kwdefaults__ = function.__kwdefaults__
    return rebound


class PlannedPagedCache(PagedAttentionCache):
    """The paged cache of one of our models. Where the plan stores all there is to store, its allocators are
    transformers' own, which know faster kernels.
    """

    def __init__(self, config: ResFormerConfig, *args: Any, **kwargs: Any) -> None:
        allocators = ATTN_TYPE_TO_ALLOCATOR if stores_all(config) else PLANNED
        _cache_init(allocators)(self, config, *args, **kwargs)

    @property
    def bytes_per_token(self) -> float:
        """Bytes of the cache tensor for a token that all slots keep."""
        return sum(one.bytes_per_block / one.tokens_per_page for one in self.cache_allocators.values())

    @property
    def token_capacity(self) -> int:
        """Tokens that the cache tensor holds in all slots."""
        return int(self.num_sectors * self.bytes_per_sector / self.bytes_per_token)


def _cache_init(allocators: dict[str, Any]) -> Callable[..., Any]:
    return with_globals(
        PagedAttentionCache.__init__, group_layers_by_attn_type=layer_groups, ATTN_TYPE_TO_ALLOCATOR=allocators
    )


def stores_all(config: ResFormerConfig) -> bool:
    """Every slot keeps keys and values of all heads, and no layer reads what another stores."""
    shape = config.shape()
    full = ((shape.kv_heads, shape.head_dim),) * 2
    return all(
        slots(row, shape) == full and row.stores == "mixed" and not any(read.state == "stored" for read in row.reads)
        for row in config.plan()
    )


def prepared(config: ResFormerConfig, batching: ContinuousBatchingConfig | None) -> ContinuousBatchingConfig:
    """The user's settings of a manager without what the plan cannot have."""
    ready = ContinuousBatchingConfig() if batching is None else copy.copy(batching)
    if not stores_all(config):
        ready.max_blocks_per_request = 0  # no kernel reads our pages by itself
    if implementations(config.plan()):
        ready.auto_switch_to_flash = False
    return ready


def plan_manager(manager: ContinuousBatchingManager, config: ResFormerConfig) -> ContinuousBatchingManager:
    """Let a manager of ours make its cache by the plan.

    Raises:
        UserError: for shared heads that are split over devices, or a transformers that makes its cache differently.
    """
    if manager.distributed_helper.tp_size > 1 and not stores_all(config):
        raise UserError(
            f"variant {config.variant!r} stores less than all keys and values, and continuous batching splits only "
            "full caches over devices; load the model without a tensor-parallel plan"
        )
    _cache_init(PLANNED)  # complain here, not in the manager's thread
    create = with_globals(ContinuousBatchingManager._create_batch_processor, PagedAttentionCache=PlannedPagedCache)
    manager._create_batch_processor = MethodType(create, manager)  # type: ignore[method-assign]
    return manager
