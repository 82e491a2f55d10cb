"""A model's slots in vLLM's paged cache, and attention through them.

vLLM allocates what its `Attention` modules ask for, and gives every such module a tensor of blocks. A slot of keys and
values is one module. Where layers share keys or values, each plane of keys and each plane of values is a module of its
own that asks for "keys only" (`head_size_v=0`): planes of equal size, which vLLM puts into one group with one table of
blocks, so that a block's number means the same tokens in all of them. SVFormer of N layers has N + 1 planes, half a
slot each. The kernels take keys and values as two tensors of equal strides; which plane each comes from is nothing to
them.

Shapes: T new tokens of all requests, H query heads, H_kv key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..models.configuration import ResFormerConfig
from .layout import Layout, Plane
from .vllm_checks import check_backend

# Queries [T, H, D], keys and values [T, H_kv, D] of the new tokens -> output [T, H, D].
Slot = Callable[[Tensor, Tensor, Tensor], Tensor]


class Pair:
    """A plane of keys and a plane of values in place of the one tensor of both that vLLM's implementations of attention
    split. It knows the two ways in which they do: `view` and `chunk` (CPU), `transpose` and `split` (FlashAttention,
    Triton). An implementation that does anything else fails with an AttributeError.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values

    def size(self) -> torch.Size:
        """Of either plane: blocks, H_kv, tokens of a block, D."""
        return self.keys.size()

    def view(self, *_: Any) -> Pair:
        """Each plane is already what the halves of the view would be."""
        return self

    def chunk(self, chunks: int, dim: int) -> tuple[Tensor, Tensor]:
        """Keys and values."""
        assert chunks == 2, f"keys and values are two, not {chunks}"
        return self.keys, self.values

    def transpose(self, dim0: int, dim1: int) -> Pair:
        """Both planes transposed."""
        return Pair(self.keys.transpose(dim0, dim1), self.values.transpose(dim0, dim1))

    def split(self, size: int, dim: int) -> tuple[Tensor, Tensor]:
        """Keys and values."""
        assert size == self.keys.shape[dim], f"heads have {self.keys.shape[dim]} channels, not {size}"
        return self.keys, self.values


class SharedSlot:
    """Attention of one layer to the keys of one plane and the values of another.

    New keys and values are written by each layer that attends to them: layers that share a plane write the same numbers
    to the same place, which costs less than a kernel of its own that writes one of the two.
    """

    def __init__(self, keys: Any, values: Any) -> None:
        """Args: vLLM's `Attention` modules of the two planes."""
        self.keys, self.values = keys, values

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        from vllm.model_executor.layers.attention.attention import get_attention_context

        metadata, layer, _, new_slots = get_attention_context(self.keys.layer_name)
        out = torch.empty_like(query)
        if metadata is None:  # vLLM measures memory: there is no cache yet
            return out.zero_()
        planes = Pair(self.keys.kv_cache, self.values.kv_cache)
        if new_slots is not None:
            layer.impl.do_kv_cache_update(layer, key, value, planes, new_slots)
        layer.impl.forward(layer, query, key, value, planes, metadata, output=out)
        return out


class OwnSlot:
    """Attention of one layer through a slot of keys and values: vLLM's own, as it is."""

    def __init__(self, attention: Any) -> None:
        self.attention = attention

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.attention(*(x.flatten(1) for x in (query, key, value))).view(query.shape)


def build_slots(
    config: ResFormerConfig, found: Layout, vllm_config: Any, prefix: str
) -> tuple[nn.ModuleList, list[Slot]]:
    """vLLM's modules for the cache, and per layer how it attends.

    Args:
        config: the model's config.
        found: its layout.
        vllm_config: a `vllm.config.VllmConfig`.
        prefix: of the modules' names, by which vLLM knows their slots.

    Raises:
        UserError: for an attention backend that cannot read shared planes.
    """
    from vllm.model_executor.layers.attention import Attention

    shape = config.shape()

    def attention(name: str, layer: int, **kind: Any) -> Any:
        return Attention(
            shape.heads,
            shape.head_dim,
            shape.head_dim**-0.5,
            num_kv_heads=shape.kv_heads,
            cache_config=vllm_config.cache_config,
            per_layer_sliding_window=found.windows[layer - 1],
            prefix=f"{prefix}{name}",
            **kind,
        )

    if found.paired:
        owned: list[Any] = []
        for layer, (source, _) in enumerate(found.places, start=1):
            shared = None if source == layer else owned[source - 1].layer_name
            owned.append(attention(f"layers.{layer - 1}.attn", layer, kv_sharing_target_layer_name=shared))
        return nn.ModuleList(owned), [OwnSlot(module) for module in owned]
    planes: dict[Plane, Any] = {
        plane: attention(f"planes.{index}", plane[0], head_size_v=0) for index, plane in enumerate(found.planes)
    }
    check_backend(next(iter(planes.values())).attn_backend.get_name())
    places = [SharedSlot(planes[keys, "key"], planes[values, "value"]) for keys, values in found.places]
    return nn.ModuleList(planes.values()), list(places)
