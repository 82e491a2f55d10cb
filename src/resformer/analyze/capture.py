"""See what a model's attention works on, layer by layer, without keeping it.

transformers lets an attention implementation be registered by name. Ours computes the output head by head, shows each
layer's queries, keys, values and the attention that tokens receive to whoever watches, and forgets them: memory is that
of one head of one layer, whatever the model. It serves every model of transformers whose attention goes through that
interface, ours among them, with grouped queries, windows, soft-capping and sinks.

Shapes: B texts, H query heads, H_kv key/value heads, T tokens, D channels a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from resformer.errors import UserError

NAME = "resformer_capture"


@dataclass(frozen=True, kw_only=True)
class Layer:
    """What one layer's attention saw. layer counts from 1.

    query `[B, H, T, D]`, key and value `[B, H_kv, S, D]`: as attention uses them, keys and queries after the positions,
    values after mixing; S is T, or 2 T where a layer attends to another one's keys beside its own. received `[B, T]`:
    attention that each token receives, summed over queries and heads.
    """

    layer: int
    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    received: Tensor
    weights: Callable[[int], Tensor]
    """Attention of one head `[B, T, S]`, made anew."""
    scores: Callable[[int, Tensor], Tensor]
    """What this layer's softmax would get of one head for other keys `[B, S, D]`: scaled, capped and masked as its own,
    `[B, T, S]`, and a last column where the layer has a sink."""

    def output(self, value: Tensor) -> Tensor:
        """What this attention makes of other values `[B, H_kv, S, D]`: `[B, T, H D]`."""
        groups = self.query.shape[1] // value.shape[1]
        heads = [self.weights(h) @ value[:, h // groups] for h in range(self.query.shape[1])]
        return torch.cat(heads, dim=-1)


@dataclass(kw_only=True)
class _Watch:
    """Who watches, and the layers seen so far in this forward pass."""

    see: Callable[[Layer], None]
    queries: Tensor | None = None  # [B, T], which rows count
    layers: dict[int, int] = field(default_factory=dict)  # id of a module -> the layer that it is in
    seen: set[int] = field(default_factory=set)


_watching: ContextVar[_Watch | None] = ContextVar("resformer_capture", default=None)


def capture_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    mix: Callable[[Tensor], Tensor] | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention as transformers' eager one, `[B, T, H, D]`; whole weights only where somebody mixes or sends them."""
    watch = _watching.get()
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    groups = query.shape[1] // key.shape[1]
    length = key.shape[2]

    def scored(h: int, keys: Tensor) -> Tensor:
        scores = query[:, h] @ keys.transpose(1, 2) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if attention_mask is not None:
            scores = scores + attention_mask[:, min(h, attention_mask.shape[1] - 1), :, :length]
        if s_aux is None:
            return scores
        return torch.cat((scores, s_aux.reshape(-1)[h].to(scores.dtype).expand(*scores.shape[:-1], 1)), dim=-1)

    def head(h: int) -> Tensor:
        weights = scored(h, key[:, h // groups]).softmax(dim=-1, dtype=torch.float32)
        return weights[..., :length].to(query.dtype)

    whole = None
    if mix is not None or _sends_weights(module):
        whole = torch.stack([head(h) for h in range(query.shape[1])], dim=1)
    used = whole if mix is None or whole is None else mix(whole)

    def weights(h: int) -> Tensor:
        return head(h) if used is None else used[:, h]

    received = torch.zeros(key.shape[0], length, dtype=torch.float64, device=query.device)
    outputs = []
    for h in range(query.shape[1]):
        weight = weights(h)
        outputs.append(weight @ value[:, h // groups])
        rows = weight if watch is None or watch.queries is None else weight * watch.queries[:, :, None]
        received += rows.sum(dim=1, dtype=torch.float64)
    if watch is not None:
        number = watch.layers.get(id(module), len(watch.seen) + 1)
        watch.seen.add(id(module))
        received = received.unflatten(1, (-1, query.shape[2])).sum(dim=1)
        watch.see(
            Layer(
                layer=number,
                module=module,
                query=query,
                key=key,
                value=value,
                received=received,
                weights=weights,
                scores=scored,
            )
        )
    return torch.stack(outputs, dim=2), whole


def _sends_weights(module: nn.Module) -> bool:
    """Whether a later layer of ours reads this one's attention."""
    row = getattr(module, "row", None)
    return row is not None and any(what == "attention" for what, _ in row.sends)


ALL_ATTENTION_FUNCTIONS.register(NAME, capture_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, eager_mask)


@contextmanager
def captured(model: Any) -> Iterator[Callable[..., Any]]:
    """Let a model's attention be seen. Yields `look(see, **inputs)`, which runs the model without gradients and without
    a cache, calls `see` with each `Layer` and returns the model's output.

    UserError where the model's attention does not go through transformers' interface.
    """
    before = model.config._attn_implementation
    _choose(model, NAME)
    try:
        layers = {id(part): n for n, block in enumerate(blocks_of(model), start=1) for part in block.modules()}
    except UserError:  # then they are counted as they come
        layers = {}

    def look(see: Callable[[Layer], None], **inputs: Any) -> Any:
        watch = _Watch(see=see, layers=layers)
        mask = inputs.get("attention_mask")
        if mask is not None:
            watch.queries = mask.bool()
        if mask is not None and not bool(mask[:, 0].all()):  # padding on the left: positions count tokens
            inputs = {**inputs, "position_ids": (mask.long().cumsum(dim=1) - 1).clamp_min(0)}
        token = _watching.set(watch)
        try:
            with torch.no_grad():
                output = model(**inputs, use_cache=False)
        finally:
            _watching.reset(token)
        if not watch.seen:
            raise UserError(
                f"{type(model).__name__}: its attention cannot be seen, since it does not go through transformers' "
                "attention interface; take a model whose attention does"
            )
        return output

    try:
        yield look
    finally:
        _choose(model, before)


def _choose(model: Any, name: str) -> None:
    """Set the attention implementation, also of a model that runs with its own choice only."""
    try:
        model.set_attn_implementation(name)
    except (ValueError, UserError):
        model.config._attn_implementation = name


def blocks_of(model: Any) -> nn.ModuleList:
    """The model's layers: the list of as many modules as the config has layers.

    UserError where there is none, or more than one.
    """
    wanted = model.config.get_text_config().num_hidden_layers
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == wanted]
    # A list of norms or projections, one a layer, is no list of layers: those have attention inside.
    lists = [m for m in lists if sum(1 for _ in m[0].children()) > 1]
    if not lists:
        raise UserError(f"{type(model).__name__}: found no list of {wanted} layers; its hidden states cannot be seen")
    return lists[0]


_FINAL_NORMS = ("norm", "ln_f", "final_layernorm", "final_layer_norm", "final_norm")


def final_norm_of(model: Any) -> nn.Module | None:
    """The norm after the last layer, by its usual names beside the list of layers; None where there is none."""
    blocks = blocks_of(model)
    for parent in model.modules():
        if any(child is blocks for child in parent.children()):
            return next((m for name in _FINAL_NORMS if isinstance(m := getattr(parent, name, None), nn.Module)), None)
    return None


@contextmanager
def hidden_states(model: Any, see: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Call `see(layer, states)` with the states `[B, T, C]` that leave each layer as they are made. Layer 0 are the
    embeddings, the layer after the last one is the last one's states after the final norm, if there is one (what
    transformers returns as the last of `hidden_states`).
    """
    blocks, norm = blocks_of(model), final_norm_of(model)

    def first(module: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        see(0, inputs[0] if inputs else kwargs["hidden_states"])

    def after(number: int) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            see(number, output if isinstance(output, Tensor) else output[0])

        return hook

    handles = [blocks[0].register_forward_pre_hook(first, with_kwargs=True)]
    handles += [block.register_forward_hook(after(i + 1)) for i, block in enumerate(blocks)]
    if norm is not None:
        handles.append(norm.register_forward_hook(after(len(blocks) + 1)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
