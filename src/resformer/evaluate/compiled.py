"""Decoding with a compiled step: a static cache, one graph for every token, and a loop that adds little to it.

transformers' `generate` compiles on accelerators only, and around each step it runs as much Python as a small model's
forward takes on a CPU (masks, positions, keyword arguments). `generate` takes a loop of the caller's own
(`custom_generate`), so everything around the loop stays transformers': options, processors, criteria. Inside, the mask
is made in the graph, and a product of a matrix with one row is written as a sum, which inductor fuses into a loop that
reads the weights once; the library call it would make instead is slower for one row.

Shapes: B rows, T prompt tokens, M tokens that the cache holds, V vocabulary.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers.cache_utils import Cache, StaticCache, StaticSlidingWindowLayer

from resformer.errors import RunError, UserError
from resformer.models.compat import CACHE

Notify = Callable[[str], None]
GRAPHS = 64
_known: weakref.WeakKeyDictionary[Any, set[tuple[Any, ...]]] = weakref.WeakKeyDictionary()


def last_logits_only(model: Any) -> dict[str, int]:
    """The argument that saves a model the logits of all tokens but the last, if it takes it."""
    return {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}


def rounded_length(tokens: int) -> int:
    """Length of the static cache for so many tokens: few different ones, so that few graphs are compiled, and at most a
    quarter (or 256 tokens) more than needed.
    """
    step = 256
    while step * 8 <= tokens:
        step *= 2
    return -(-tokens // step) * step


class _RowProducts(TorchFunctionMode):
    """Linear layers on a single row, as sums of products."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and not kwargs and args[0].numel() == args[0].shape[-1] and args[0].device.type == "cpu":
            row, weight = args[0], args[1]
            out = (row.reshape(1, -1) * weight).sum(-1)
            if len(args) > 2 and args[2] is not None:
                out = out + args[2]
            return out.reshape(*row.shape[:-1], -1)
        return func(*args, **(kwargs or {}))


def _step(model: Any, ids_B1: Tensor, positions: Tensor | None, mask_BM: Tensor | None, cache: Cache) -> Tensor:
    """Logits `[B, V]` after one more token of each row."""
    given = {} if positions is None else {"position_ids": positions}
    with _RowProducts():
        return model(ids_B1, attention_mask=mask_BM, use_cache=True, **{CACHE: cache}, **given).logits[:, -1]


@functools.cache
def _graph() -> Callable[..., Tensor]:
    """`_step`, compiled when it is called; made late, since the compiler takes seconds to import."""
    return torch.compile(_step, fullgraph=True, dynamic=False)


def check(model: Any, cache: Any) -> None:
    """Raises UserError where a compiled step could not work."""
    if not getattr(model, "_can_compile_fullgraph", False) or not isinstance(cache, StaticCache):
        raise UserError(f"compile needs a model that transformers can compile, and {type(model).__name__} is none")
    if any(isinstance(layer, StaticSlidingWindowLayer) for layer in cache.layers):
        raise UserError(
            "compile knows no sliding-window layers: their cache counts tokens in Python, which would compile every "
            "step anew; leave compile away"
        )


def compile_for(
    model: Any, ids_BT: Tensor, mask_BT: Tensor | None, make_cache: Callable[[], Any], announce: Notify
) -> None:
    """Compile the step for batches and caches of this size, unless that has been done.

    That takes 10 to 60 s, which `announce` is told before.
    """
    cache = make_cache()
    check(model, cache)
    rows, length = ids_BT.shape[0], _length(cache)
    weight = next(model.parameters())
    key = (rows, length, mask_BT is not None, weight.dtype, weight.device)
    if key in _known.setdefault(model, set()):
        return
    announce(f"compiling the decoding step, once, for {rows} sequence(s) of up to {length} tokens (10 to 60 s) ...")
    loop = DecodingLoop(model, ids_BT[:, :1], None if mask_BT is None else torch.ones_like(mask_BT[:, :1]), cache)
    tokens_B = loop.prefill().argmax(-1)
    for _ in range(2):  # the second call finds the graph, or compiles what differs after the first
        tokens_B = loop.next(tokens_B).argmax(-1)
    _known[model].add(key)


def _length(cache: StaticCache) -> int:
    return int(cache.layers[0].max_cache_len)  # type: ignore[union-attr]


class DecodingLoop:
    """A batch that is read once and then continued token by token over a static cache.

    Args:
        model: any causal LM of transformers that `check` lets pass.
        ids_BT: the prompts, padded on the left.
        mask_BT: 1 for tokens, 0 for padding; None when there is no padding.
        cache: an empty static cache.
    """

    def __init__(self, model: Any, ids_BT: Tensor, mask_BT: Tensor | None, cache: Any) -> None:
        self.model, self.ids_BT, self.mask_BT, self.cache = model, ids_BT, mask_BT, cache
        rows, length = ids_BT.shape
        if mask_BT is None:
            self.positions = torch.arange(length, device=ids_BT.device).expand(rows, -1)
            self.mask_BM = None
        else:
            self.positions = (mask_BT.long().cumsum(-1) - 1).clamp(min=0)
            # What lies ahead is hidden by causality, so the mask has one shape for all steps.
            self.mask_BM = mask_BT.new_ones((rows, _length(cache)))
            self.mask_BM[:, :length] = mask_BT
        self.next_positions = self.positions[:, -1:].clone()
        self.guarded = False

    def prefill(self) -> Tensor:
        """Logits `[B, V]` after the prompts, not compiled: every prompt has another length."""
        output = self.model(
            self.ids_BT,
            attention_mask=self.mask_BT,
            position_ids=self.positions,
            use_cache=True,
            **{CACHE: self.cache},
            **last_logits_only(self.model),
        )
        return output.logits[:, -1]

    def next(self, tokens_B: Tensor) -> Tensor:
        """Logits `[B, V]` after one more token of each row.

        The first step checks all that the graph was compiled for (a third of a small model's step, with a hundred
        modules to look at). The steps after it differ from it in nothing but numbers inside tensors, so they skip that.

        Raises:
            RunError: this model cannot be compiled here.
        """
        from torch._dynamo import config
        from torch._dynamo.exc import TorchDynamoException

        self.next_positions = self.next_positions + 1
        given = (self.model, tokens_B[:, None], self.next_positions, self.mask_BM, self.cache)
        if self.guarded:
            with torch.compiler.set_stance(skip_guard_eval_unsafe=True):
                return _graph()(*given)
        try:
            with config.patch(recompile_limit=GRAPHS, accumulated_recompile_limit=4 * GRAPHS):
                logits_BV = _graph()(*given)
        except TorchDynamoException as error:
            reason = " ".join(str(error).split())
            raise RunError(f"the decoding step cannot be compiled: {reason[:300]}; leave compile away") from error
        self.guarded = True
        return logits_BV


def compiled_generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    **model_kwargs: Any,
) -> dict[str, Any]:
    """The loop for `generate(custom_generate=...)`, after transformers' own `_sample` without sampling: it returns the
    sequences `[B, T + new]` and the cache.
    """
    cache = model_kwargs[CACHE]
    loop = DecodingLoop(model, input_ids, model_kwargs.get("attention_mask"), cache)
    going_B = torch.ones(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
    pad = generation_config.pad_token_id or 0
    logits_BV = loop.prefill()
    while True:
        scores_BV = logits_processor(input_ids, logits_BV.float())
        tokens_B = torch.where(going_B, scores_BV.argmax(-1), pad)
        input_ids = torch.cat([input_ids, tokens_B[:, None]], dim=-1)
        going_B = going_B & ~stopping_criteria(input_ids, None)
        if not going_B.any():
            return {"sequences": input_ids, CACHE: cache}
        logits_BV = loop.next(tokens_B)
