"""The cache of a generation by its kind, for our models and for any other, and the check of it against no cache.

Shapes: B rows, T prompt tokens with padding, N new tokens, S = T + N, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, QuantizedCache, StaticCache

from resformer.errors import UserError, did_you_mean
from resformer.evaluate.compiled import DecodingLoop, rounded_length
from resformer.models.cache import KINDS, build_cache
from resformer.models.compat import CACHE
from resformer.models.configuration import ResFormerConfig

OTHER_KINDS = ("dynamic", "static", "quantized", "offloaded")
"""What transformers offers for a model without a plan."""

TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-10, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Largest difference between logits with and without an exact cache, as a share of the largest logit."""

LOSSY_TOLERANCE = 0.1
"""The same for a quantized cache, which changes what later tokens see."""


def make_cache(model: Any, kind: str, *, length: int, rows: int = 1) -> Any:
    """An empty cache of `kind` for `rows` sequences of up to `length` tokens; None leaves it to the model (a model
    whose state is no transformers cache).

    Raises:
        UserError: an unknown kind, or one that cannot work for this model, its device or this installation.
    """
    if isinstance(model.config, ResFormerConfig):
        options = {"batch_size": rows} if kind == "auto" else {}
        return build_cache(model, kind, max_length=length, **options)  # type: ignore[arg-type]
    name = type(model).__name__
    if kind not in KINDS:
        raise UserError(f"cache kind is {kind!r}; expected one of {', '.join(KINDS)}{did_you_mean(kind, KINDS)}")
    if kind not in OTHER_KINDS:
        raise UserError(
            f"a cache of kind {kind!r} is laid out by a plan, which {name} has not; use one of {', '.join(OTHER_KINDS)}"
        )
    if not model._supports_default_dynamic_cache():
        if kind != "dynamic":
            raise UserError(f"{name} keeps a state of its own and takes no cache of kind {kind!r}; use 'dynamic'")
        return None
    config = model.config.get_text_config(decoder=True)
    if kind == "static":
        return StaticCache(config=config, max_cache_len=length)
    if kind == "quantized":
        try:
            return QuantizedCache(backend="quanto", config=config)
        except (ImportError, ValueError, TypeError) as error:
            raise UserError(f"a quantized cache cannot be made here: {' '.join(str(error).split())}") from None
    if kind == "offloaded" and model.device.type == "cpu":
        raise UserError(
            "a cache of kind 'offloaded' moves layers between an accelerator and the host, but the model is on 'cpu'; "
            "use the kind 'dynamic'"
        )
    return DynamicCache(config=config, offloading=kind == "offloaded")


@dataclass(frozen=True, kw_only=True)
class CacheCheck:
    """What a cache does to the logits.

    `difference` is the largest absolute difference between logits with and without it, `scale` the largest absolute
    logit without it, `tolerance` what the difference may be as a share of the scale, for the model's dtype and the kind
    of cache; `lossy` says that the kind is meant to change the logits.
    """

    difference: float
    scale: float
    tolerance: float
    lossy: bool

    @property
    def relative(self) -> float:
        """The difference as a share of the scale."""
        return self.difference / max(self.scale, 1e-12)

    @property
    def passed(self) -> bool:
        """Whether the difference is within the tolerance; not a number never is."""
        return self.relative <= self.tolerance


def tolerance(dtype: torch.dtype, kind: str) -> float:
    """The share of the largest logit by which a cache of `kind` may change logits of `dtype`."""
    return LOSSY_TOLERANCE if kind == "quantized" else TOLERANCES.get(dtype, 1e-1)


@torch.inference_mode()
def compare(
    model: Any,
    texts: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    kind: str,
    pad: int,
    compiled: bool = False,
) -> CacheCheck:
    """Compare logits with and without a cache over prompts and their new tokens (pairs of ids).

    With the cache all rows are one batch, padded on the left, read at once and then continued token by token, as
    generation does (with the compiled step, if asked for); without it each row is alone and whole. All logits `[S, V]`
    of all rows are held at once.
    """
    width, new = max(len(prompt) for prompt, _ in texts), max(len(tokens) for _, tokens in texts)
    plain = [_plain_logits(model, [*prompt, *tokens]) for prompt, tokens in texts]
    ids_BT, mask_BT = left_padded([prompt for prompt, _ in texts], pad=pad, device=model.device)
    length = rounded_length(width + new) if compiled else width + new
    cache = make_cache(model, kind, length=length, rows=len(texts))
    pieces = _compiled_logits if compiled else _cached_logits
    worst = 0.0
    for first, logits in pieces(model, ids_BT, mask_BT, [tokens for _, tokens in texts], cache):
        for row, (prompt, tokens) in enumerate(texts):
            place = first - (width - len(prompt))  # of the piece's first column in the row without its padding
            begin, end = max(place, 0), min(place + logits.shape[1], len(prompt) + len(tokens))
            if begin < end:
                ours = logits[row, begin - place : end - place].float()
                worst = max(worst, _largest(ours - plain[row][begin:end]))
    scale = max(_largest(one) for one in plain)
    lossy = kind == "quantized"
    return CacheCheck(difference=worst, scale=scale, tolerance=tolerance(model.dtype, kind), lossy=lossy)


def _plain_logits(model: Any, ids: Sequence[int]) -> Tensor:
    return model(torch.tensor([list(ids)], device=model.device), use_cache=False).logits[0].float()


def _largest(values: Tensor) -> float:
    """The largest absolute value; NaN, if there is one, counts as infinite."""
    return float(values.abs().nan_to_num(nan=float("inf")).max())


def _cached_logits(
    model: Any, ids_BT: Tensor, mask_BT: Tensor | None, tokens: Sequence[Sequence[int]], cache: Any
) -> Iterable[tuple[int, Tensor]]:
    """Column of the first token and logits of each piece: the prompts, then one new token of every row."""
    mask = torch.ones_like(ids_BT) if mask_BT is None else mask_BT
    output = model(ids_BT, use_cache=True, **_given(cache), **_attending(mask_BT, mask, ids_BT.shape[1]))
    yield 0, output.logits
    for step, column in enumerate(_columns(tokens, ids_BT.device)):
        mask = torch.cat([mask, mask.new_ones((mask.shape[0], 1))], dim=1)
        cache = output.get(CACHE, cache)
        output = model(column, use_cache=True, **_given(cache), **_attending(mask_BT, mask, 1))
        yield ids_BT.shape[1] + step, output.logits


def _compiled_logits(
    model: Any, ids_BT: Tensor, mask_BT: Tensor | None, tokens: Sequence[Sequence[int]], cache: Any
) -> Iterable[tuple[int, Tensor]]:
    """The same from the compiled step, which gives the prompts' last logits only."""
    loop = DecodingLoop(model, ids_BT, mask_BT, cache)
    yield ids_BT.shape[1] - 1, loop.prefill()[:, None]
    for step, column in enumerate(_columns(tokens, ids_BT.device)):
        yield ids_BT.shape[1] + step, loop.next(column[:, 0])[:, None]


def _columns(tokens: Sequence[Sequence[int]], device: torch.device) -> Iterable[Tensor]:
    """One new token of every row at a time; a row that has no more goes on with any, and nobody looks at it."""
    for step in range(max(map(len, tokens))):
        yield torch.tensor([[row[min(step, len(row) - 1)] if row else 0] for row in tokens], device=device)


def _given(cache: Any) -> dict[str, Any]:
    return {} if cache is None else {CACHE: cache}


def _attending(padded: Tensor | None, mask: Tensor, new: int) -> dict[str, Tensor]:
    """Mask and positions, where padding makes them necessary."""
    if padded is None:
        return {}
    return {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)[:, -new:]}


def left_padded(rows: Sequence[Sequence[int]], *, pad: int, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Ids `[B, T]` and their mask, None when all rows are of one length."""
    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in rows], dtype=torch.long, device=device)
    if all(len(row) == width for row in rows):
        return ids, None
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    return ids, mask
