"""Caches built from the plan.

A layer that reads its values from another one stores keys only: it hands the cache a values tensor of width 0, `[B,
H_kv, T, 0]`. A layer that reads its keys stores its values only, as the slot's first tensor, and one that reads both
never touches its slot. Every cache operation of transformers (concatenate, reorder, crop, repeat, select, static index
copy) holds for such slots, so a plain `DynamicCache` is right and small as well. Static and quantized layers need
their sizes said (`cache_layers`), and `token_cache` needs no values at all. Which slots keep only a window transformers
reads from the config's `layer_types`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import Cache, DynamicCache, QuantizedCache, StaticCache, StaticLayer

from ..errors import UserError, did_you_mean
from .accounting import kv_bytes, token_kv_bytes
from .cache_layers import fit, slots
from .compat import transformers_version
from .configuration import ResFormerConfig
from .token_cache import TokenCache, holds_tokens

Kind = Literal["dynamic", "static", "quantized", "offloaded", "tokens", "auto"]
KINDS: tuple[Kind, ...] = ("dynamic", "static", "quantized", "offloaded", "tokens", "auto")
BACKENDS = ("fp8", "quanto", "hqq")
OFFLOADS = ("cuda", "xpu")
COUNTS = ("batch_size", "held")
TENSORS = ("keys", "values", "_quantized_keys", "_quantized_values")


def build_cache(
    model_or_config: object, kind: Kind = "dynamic", max_length: int | None = None, **options: Any
) -> Cache:
    """A cache laid out by the plan of a model.

    | kind | what it is | options |
    |---|---|---|
    | dynamic | grows with the text | |
    | static | allocated once, for `torch.compile` | |
    | quantized | 8-bit floating point ("fp8"), or few-bit integers ("quanto", "hqq") | `backend`, and what it takes |
    | offloaded | grows in the memory of the host, one layer at a time on the accelerator | |
    | tokens | token ids in place of layer 1's values, which are read from a table (`token_cache`) | |
    | auto | "dynamic" or "tokens", whichever has the lower peak by `peak_bytes` | `batch_size`, `held` |

    Args:
        model_or_config: one of our models or its config; "tokens" and "auto" need the model.
        kind: see above.
        max_length: tokens that a static cache holds, or that "auto" reckons with; its default is the model's
            `max_position_embeddings`.
        options: see above.

    Raises:
        UserError: for an unknown kind, an option that the kind has not, a `max_length` below 1, or a kind that cannot
            work with this model, on its device or with this version of transformers.
    """
    config = getattr(model_or_config, "config", model_or_config)
    if not isinstance(config, ResFormerConfig):
        raise UserError(
            f"build_cache got {type(model_or_config).__name__}; expected a ResFormer model or ResFormerConfig"
        )
    if kind not in KINDS:
        raise UserError(f"cache kind is {kind!r}; expected one of {', '.join(KINDS)}{did_you_mean(str(kind), KINDS)}")
    length = config.max_position_embeddings if max_length is None else max_length
    for name, value in {"max_length": length, **{k: options[k] for k in COUNTS if k in options}}.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UserError(f"{name} is {value!r}; expected a whole number of at least 1")
    takes = {"auto": ("batch_size", "held"), "quantized": tuple(options)}.get(kind, ())
    for name in options:
        if name not in takes:
            raise UserError(f"a cache of kind {kind!r} takes no option {name!r}{did_you_mean(name, takes)}")
    if kind == "auto":
        _base(model_or_config, kind)
        kinds: tuple[Kind, ...] = ("dynamic", "tokens") if holds_tokens(config) else ("dynamic",)
        kind = min(kinds, key=lambda k: peak_bytes(model_or_config, k, length, **options))
    if kind == "quantized":
        cache = _quantized(config, **options)
    elif kind == "static":
        cache = StaticCache(config=config, max_cache_len=length)
    elif kind == "offloaded":
        refuse_offloading(getattr(model_or_config, "device", None))
        cache = DynamicCache(config=config, offloading=True)
    elif kind == "tokens":
        cache = TokenCache(_base(model_or_config, kind))
    else:
        cache = DynamicCache(config=config)
    fit(cache, config.plan(), config.shape())
    return cache


def _base(model: Any, kind: str) -> Any:
    """The model without its head."""
    model = getattr(model, "model", model)
    if not hasattr(model, "embed_tokens"):
        raise UserError(f"a cache of kind {kind!r} depends on the model's weights; give build_cache the model")
    return model


def _quantized(config: ResFormerConfig, backend: str = "fp8", **options: Any) -> Cache:
    if backend not in BACKENDS:
        raise UserError(
            f"backend is {backend!r}; expected one of {', '.join(BACKENDS)}{did_you_mean(backend, BACKENDS)}"
        )
    if backend == "fp8" and not hasattr(cache_utils, "Fp8QuantizedLayer"):
        raise UserError(
            f"transformers {transformers_version} has no fp8 cache; use a newer one (5.24 has it), or the backend "
            "'quanto' or 'hqq'"
        )
    try:
        return QuantizedCache(backend=backend, config=config, **options)
    except (ValueError, TypeError, ImportError) as error:  # a window, an option that is not there, a missing package
        what = " ".join(str(error).split())
        raise UserError(f"a quantized cache with backend {backend!r} cannot be made here: {what}") from None


def refuse_offloading(device: torch.device | None) -> None:
    """Raises UserError when there is nothing to offload from."""
    if device is not None and device.type not in OFFLOADS:
        raise UserError(
            f"an offloaded cache moves layers between an accelerator and the host, but the model is on "
            f"{device.type!r}; use the kind 'dynamic', or move the model to 'cuda'"
        )


def prepare(cache: Cache | None, model: Any, input_ids: Tensor | None, inputs: Tensor) -> None:
    """Make a user's own cache fit the plan before its first tokens (in place), or say what it costs.

    Args:
        cache: what the call got.
        model: the `ResFormerModel`.
        input_ids, inputs: token ids `[B, T]` if it got some, and embeddings `[B, T, C]`.

    Raises:
        UserError: for a cache that cannot work on the model's device or with its inputs.
    """
    if cache is None:
        return
    if getattr(cache, "offloading", False):
        refuse_offloading(model.embed_tokens.weight.device)
    if not torch.compiler.is_compiling():
        _check_room(cache, rows=inputs.shape[0], new=inputs.shape[1])
    if isinstance(cache, TokenCache):
        cache.note(model, input_ids)
    elif isinstance(cache, StaticCache | QuantizedCache):
        fit(cache, model.plan, model.config.shape())
    elif isinstance(cache, DynamicCache) and not cache.layers and any(row.slot_window for row in model.plan):
        warnings.warn(
            "this cache was made without the model's config, so that sliding layers keep all tokens in it; results are "
            "the same, and resformer.build_cache(model) makes a smaller one",
            stacklevel=3,
        )


def _check_room(cache: Cache, *, rows: int, new: int) -> None:
    first: Any = cache.layers[0] if getattr(cache, "layers", None) else None
    held = getattr(first, "keys", None)
    if isinstance(held, Tensor) and held.dim() == 4 and held.shape[0] != rows:
        raise UserError(f"the cache was made for {held.shape[0]} sequence(s), but the input has {rows}; make a new one")
    if isinstance(cache, StaticCache) and _readable(held):
        check_static_length(cache, int(cache.get_seq_length()) + new)


def _readable(held: Any) -> bool:
    """Whether the length that a static cache holds can be read without waiting for an accelerator."""
    return not isinstance(held, Tensor) or held.device.type == "cpu"


def check_static_length(cache: Cache, tokens: int) -> None:
    """Raises UserError when a static cache ends before the text does. Layers that slide never end."""
    ends = [layer.max_cache_len for layer in cache.layers if isinstance(layer, StaticLayer) and not layer.is_sliding]
    if ends and tokens > min(ends):
        raise UserError(
            f"a static cache of {min(ends)} tokens cannot hold {tokens}; make it with max_length={tokens} or more, or "
            "use the kind 'dynamic'"
        )


@dataclass(frozen=True, kw_only=True)
class CacheParts:
    """Bytes of a cache: what it stores, the table that a "tokens" cache reads from (one for all caches of a model that
    are copies of each other), and the plane of values that its next step gathers and then drops.
    """

    stored: int
    table: int = 0
    gathered: int = 0


def cache_parts(cache: Cache) -> CacheParts:
    """The bytes of a cache, counted on its real tensors."""
    table, gathered = cache.parts() if isinstance(cache, TokenCache) else (0, 0)
    return CacheParts(stored=cache_bytes(cache), table=table, gathered=gathered)


def cache_bytes(cache: Cache) -> int:
    """Bytes of the distinct storages behind a cache's real tensors, each counted once; quantized numbers with their
    scales, token ids included.
    """
    storages: dict[tuple[Any, int], int] = {}
    for layer in cache.layers:
        for name in TENSORS:
            for tensor in _tensors(getattr(layer, name, None)):
                if tensor.numel():
                    storage = tensor.untyped_storage()
                    storages[tensor.device, storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _tensors(value: Any) -> Iterator[Tensor]:
    """All tensors inside nested containers and tensor subclasses."""
    if isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__"):
        for name in value.__tensor_flatten__()[0]:
            yield from _tensors(getattr(value, name))
    elif isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def peak_bytes(model: Any, kind: str, tokens: int, *, batch_size: int = 1, held: int = 1) -> int:
    """Bytes of "dynamic" or "tokens" caches at the peak of a decoding step: `held` caches of `batch_size` sequences and
    `tokens` tokens are kept, and one of them decodes.

    The plane that a growing slot is copied through is the same in both kinds and left out. For held = 1 "tokens" never
    wins: what it does not store it gathers, and the table comes on top.
    """
    base = _base(model, kind)
    config, size = base.config, base.dtype.itemsize
    stored = batch_size * kv_bytes(config, tokens, dtype_bytes=size)
    if kind == "dynamic":
        return held * stored
    ids, table = token_kv_bytes(config, tokens, dtype_bytes=size)
    kept = batch_size * min(tokens, base.plan[0].slot_window or tokens)
    return held * batch_size * ids + kept * table // config.vocab_size + table


__all__ = [
    "KINDS",
    "CacheParts",
    "Kind",
    "build_cache",
    "cache_bytes",
    "cache_parts",
    "fit",
    "peak_bytes",
    "prepare",
    "refuse_offloading",
    "slots",
]
