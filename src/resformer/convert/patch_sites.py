"""Where a stock model makes its values: the list of its blocks, and in each block the attention with its projections.

Shapes: H query heads, H_kv key/value heads, D head dimension, C width of attention's input.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..core.policy import POLICY_NAME
from ..errors import UserError

Layout = Literal["whole", "last", "by_head"]

# Attention whose queries, keys and values come out of one projection: its name, the output projection's, and how the
# three lie in it: one after another, or one after another in each head.
FUSED: dict[str, tuple[str, str, Layout]] = {
    "GPT2Attention": ("c_attn", "c_proj", "last"),
    "Phi3Attention": ("qkv_proj", "o_proj", "last"),
    "GPTNeoXAttention": ("query_key_value", "dense", "by_head"),
}
SPLIT = {"q_proj", "k_proj", "v_proj"}
OUTPUTS = ("o_proj", "out_proj", "dense")
# What attention may hold besides without doing anything to its values or to its output before the output projection.
HARMLESS = {"q_norm", "k_norm", "q_layernorm", "k_layernorm", "rotary_emb", "rotary_fn"}
HARMLESS |= {"attn_dropout", "resid_dropout", POLICY_NAME}


@dataclass(frozen=True, kw_only=True)
class Site:
    """One layer's attention.

    Attributes:
        path: name of the attention module in the model.
        value, output: names of the projections that make the values, and that read attention's output.
        layout: how values lie in what `value` gives: all of it, the last part, or the last third of each head.
        plain: queries, keys and values are projected and the output of attention is projected, with nothing between.
    """

    path: str
    value: str
    output: str
    layout: Layout
    plain: bool
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def value_shape(self) -> tuple[int, int]:
        """(H_kv, D)."""
        return self.kv_heads, self.head_dim

    def take(self, projected: Tensor) -> Tensor:
        """The values `[..., H_kv, D]` in the projection's output, as a view."""
        if self.layout == "whole":  # under tensor parallelism there are only this process's heads
            return projected.unflatten(-1, (-1, self.head_dim))
        if self.layout == "last":
            return projected[..., -self.kv_heads * self.head_dim :].unflatten(-1, self.value_shape)
        return projected.unflatten(-1, (self.kv_heads, 3, self.head_dim))[..., 2, :]

    def put(self, projected: Tensor, values: Tensor) -> Tensor:
        """The projection's output with other values `[..., H_kv, D]` in it, as a new tensor."""
        if self.layout == "whole":
            return values.flatten(-2)
        if self.layout == "last":
            return torch.cat((projected[..., : -self.kv_heads * self.head_dim], values.flatten(-2)), dim=-1)
        parts = projected.unflatten(-1, (self.kv_heads, 3, self.head_dim))
        return torch.cat((parts[..., :2, :], values.unsqueeze(-2)), dim=-2).flatten(-3)


@dataclass(frozen=True, kw_only=True)
class Stack:
    """The module that runs the blocks one after another, by name, and its attention layers in order."""

    path: str
    sites: tuple[Site, ...]


def find_stack(model: nn.Module) -> Stack:
    """The one list of blocks with attention in it.

    Raises:
        UserError: none, several (an encoder and a decoder, a text and a vision part), or attention that cannot be
            patched.
    """
    found: dict[str, list[list[str]]] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{other}.") for other in found)
        if isinstance(module, nn.ModuleList) and not inside:
            blocks = [[_join(f"{name}.{i}", path) for path in _attentions(block)] for i, block in enumerate(module)]
            if any(blocks):
                found[name] = blocks
    if not found:
        raise UserError(_nothing_found(model))
    if len(found) > 1:
        parts = [name.rpartition(".")[0] for name in found]
        raise UserError(
            f"{type(model).__name__} has several lists of blocks, below {', '.join(map(repr, parts))}; patch the one "
            f"that is meant, as in resformer.patch(model.get_submodule({parts[-1]!r}), ...)"
        )
    (name, blocks), *_ = found.items()
    for paths in blocks:
        if len(paths) > 1:
            raise UserError(
                f"{type(model).__name__}: one block has several attentions ({', '.join(paths)}), as with cross-"
                "attention; only models with one self-attention a block can be patched"
            )
    parent = name.rpartition(".")[0]
    for path in (parent, *(f"{name}.{i}" for i in range(len(blocks)))):
        _check_keywords(model.get_submodule(path), path)
    return Stack(path=parent, sites=tuple(_site(model, path) for paths in blocks for path in paths))


def _join(name: str, path: str) -> str:
    return f"{name}.{path}" if path else name


def _attentions(block: nn.Module) -> Iterator[str]:
    """Names of the modules in a block that have projections we know."""
    return (name for name, module in block.named_modules() if _projections(module) is not None)


def _projections(module: nn.Module) -> tuple[str, str, Layout] | None:
    """Names of the value and output projection, and the values' layout; None for what is no attention we know."""
    children = {name for name, _ in module.named_children()}
    for cls in type(module).__mro__:
        fused = FUSED.get(cls.__name__)
        if fused is not None and {fused[0], fused[1]} <= children:
            return fused
    output = next((name for name in OUTPUTS if name in children), None)
    return ("v_proj", output, "whole") if output is not None and children >= SPLIT else None


def _nothing_found(model: nn.Module) -> str:
    classes = sorted({type(m).__name__ for m in model.modules() if "attention" in type(m).__name__.lower()})
    seen = f"; its attention classes are {', '.join(classes)}" if classes else ""
    return (
        f"{type(model).__name__}: found no list of blocks whose attention has q_proj, k_proj and v_proj beside an "
        f"{', '.join(OUTPUTS[:-1])} or {OUTPUTS[-1]}, or is one of {', '.join(FUSED)}{seen}"
    )


def _check_keywords(module: nn.Module, path: str) -> None:
    """Values ride on keyword arguments, so every module on the way must take what it does not know."""
    kinds = [parameter.kind for parameter in inspect.signature(module.forward).parameters.values()]
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        raise UserError(
            f"{type(module).__name__} ({path or 'the model'}) takes no keyword arguments that it could pass on to "
            "attention, and values would have to travel there; this architecture cannot be patched"
        )


def _site(model: nn.Module, path: str) -> Site:
    """Read one attention's sizes off its projections."""
    module = model.get_submodule(path)
    who = f"{type(module).__name__} ({path})"
    names = _projections(module)
    assert names is not None, f"{who} was found by its projections"
    value, output, layout = names
    children = {name for name, _ in module.named_children()}
    others = sorted(name for name in children - {value} if name.startswith(("v_", "value_")) and name != POLICY_NAME)
    if others:
        raise UserError(
            f"{who} does more to its values than project them ({', '.join(others)}); such attention cannot be patched"
        )
    head_dim: Any = getattr(module, "head_dim", getattr(module, "head_size", None))
    if not isinstance(head_dim, int):
        raise UserError(f"{who} does not say its head_dim, so its values cannot be cut into heads")
    hidden_size, width = _features(getattr(module, value), f"{path}.{value}")
    out_width, _ = _features(getattr(module, output), f"{path}.{output}")
    heads, kv_heads = out_width // head_dim, width // head_dim
    plain = children - HARMLESS - {value, output} == (SPLIT - {value} if layout == "whole" else set())
    if layout == "whole":
        plain = plain and _features(module.q_proj, f"{path}.q_proj")[1] == out_width
    else:
        kv_heads = (kv_heads - heads) // 2
    fused_width = (heads + 2 * kv_heads) * head_dim
    if width != (kv_heads * head_dim if layout == "whole" else fused_width) or out_width != heads * head_dim:
        raise UserError(f"{who}: {value} gives {width} numbers, which are no whole heads of {head_dim}")
    return Site(
        path=path,
        value=value,
        output=output,
        layout=layout,
        plain=plain,
        hidden_size=hidden_size,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
    )


def _features(projection: Any, path: str) -> tuple[int, int]:
    """Width of a projection's input and output: of `nn.Linear` and what imitates it, or of GPT-2's `Conv1D`."""
    if hasattr(projection, "in_features"):
        return int(projection.in_features), int(projection.out_features)
    if hasattr(projection, "nf"):
        return int(projection.nx), int(projection.nf)
    raise UserError(f"{path} is a {type(projection).__name__}; expected a linear layer")
