"""Checks on the cache: it is storage only, so numbers are the same with it, without it, in pieces and padded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from resformer.evaluate.contract.subject import ContractError, Subject, ids, same
from resformer.models import ResFormerForCausalLM
from resformer.models.accounting import account
from resformer.models.cache import Kind, build_cache, cache_bytes
from resformer.models.compat import CACHE

LENGTHS = (3, 7, 12)


def greedy_decoding(subject: Subject) -> str:
    """greedy decoding of left-padded prompts gives the same tokens with and without a cache"""
    return _decoded(subject, {})


def beam_search(subject: Subject) -> str:
    """beam search gives the same tokens with and without a cache"""
    return _decoded(subject, {"num_beams": 3})


def padding_does_not_leak(subject: Subject) -> str:
    """a prompt padded on the left gives the tokens that it gives alone"""
    model, (tokens, mask) = subject.model(), _left_padded()
    batch = _generate(model, tokens, attention_mask=mask)
    for row, length in enumerate(LENGTHS):
        alone = _generate(model, tokens[row : row + 1, -length:])
        if not torch.equal(batch[row, tokens.shape[1] - length :], alone[0]):
            raise ContractError(f"a prompt of {length} tokens continues otherwise when it is padded")
    return f"prompts of {', '.join(map(str, LENGTHS))} tokens"


def chunked_prefill(subject: Subject) -> str:
    """a prompt in pieces gives the logits of the whole, with a growing and with a static cache"""
    model, worst = subject.model(), 0.0
    with torch.no_grad():
        want = model(input_ids=ids(), use_cache=False).logits
        for kind in ("dynamic", "static"):
            for chunks in ([12], [5, 7], [1] * 12, [7, 1, 1, 3]):
                cache = _cache(model, kind, 16)
                parts = ids().split(chunks, dim=1)
                got = torch.cat([model(input_ids=part, **{CACHE: cache}).logits for part in parts], dim=1)
                worst = max(worst, same(got, want, f"{kind} cache, pieces of {chunks}: logits"))
    return f"logits to {worst:.0e}"


def cache_bytes_are_counted(subject: Subject) -> str:
    """KV bytes as computed from the plan are those of the cache's real tensors"""
    model, length = subject.model(), 24
    per_token = account(model.config).kv_bytes_per_token
    for kind in ("dynamic", "static"):
        cache = _cache(model, kind, length)
        with torch.no_grad():
            model(input_ids=ids(1, length), **{CACHE: cache})
        if cache_bytes(cache) != length * per_token:
            raise ContractError(
                f"{kind} cache: {cache_bytes(cache) / length:g} bytes a token, the plan says {per_token}"
            )
    return f"{per_token:,} bytes a token, {account(model.config).kv_ratio:.3f} of the Transformer's"


def _cache(model: ResFormerForCausalLM, kind: Kind, length: int) -> Any:
    return build_cache(model, kind=kind, max_length=length if kind == "static" else None)


def _left_padded() -> tuple[Tensor, Tensor]:
    tokens, mask = ids(len(LENGTHS), max(LENGTHS)), torch.ones(len(LENGTHS), max(LENGTHS), dtype=torch.long)
    for row, length in enumerate(LENGTHS):
        tokens[row, : max(LENGTHS) - length], mask[row, : max(LENGTHS) - length] = 0, 0
    return tokens, mask


def _generate(model: ResFormerForCausalLM, tokens: Tensor, **settings: Any) -> Tensor:
    generate: Any = model.generate
    return generate(tokens, max_new_tokens=8, do_sample=False, pad_token_id=0, **settings)


def _decoded(subject: Subject, settings: dict[str, Any]) -> str:
    model, (tokens, mask) = subject.model(), _left_padded()
    with_cache = _generate(model, tokens, attention_mask=mask, **settings)
    without = _generate(model, tokens, attention_mask=mask, use_cache=False, **settings)
    if not torch.equal(with_cache, without):
        at = int((with_cache != without).any(0).nonzero()[0]) - tokens.shape[1] + 1
        raise ContractError(f"with a cache other tokens are generated, from the {at}th new one on")
    return "8 new tokens, three prompts"
