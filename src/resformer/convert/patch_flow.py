"""How values travel through a stock model whose code we do not touch.

One forward call of the module that runs the blocks has one `ValueStream`. It rides on the keyword arguments that every
block hands on to its attention, so it belongs to the call: nothing is kept on a module or in a global, two forward
passes before one backward pass have a stream each, and so have threads and replicas. Recomputation under checkpointing
gets the stream of its own forward pass, with the arguments.

Inside one attention call the layer's `Visit` leads from attention to its projections, which get no keyword arguments; a
context variable holds it, and attention's end puts back what was there before.

Hooks are functions of this module, or plain objects without a reference to any module, so that copies and pickles of a
model work on themselves. Shapes: B batch, T new tokens, H_kv key/value heads, H query heads, D head dimension.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from ..core.plan import Row
from ..core.policy import COEFFICIENTS_NAME, POLICY_NAME, Coefficients
from ..errors import UserError
from .patch_sites import Site

STREAM = "value_residual_stream"
"""The keyword argument."""
KEY: Any = "resformer_patch"
"""Of our hooks. torch counts its own from 0 in every process, so that numbers of an unpickled model would collide."""


class ValueStream:
    """Raw values of one forward call, `[B, T, H_kv, D]` by layer, and what parameters outside the blocks send.

    Not a dataclass, list or dict: FSDP2 rebuilds those when it casts a module's inputs.
    """

    def __init__(self, coefficients: Sequence[Sequence[Tensor]]) -> None:
        self.coefficients = coefficients
        self.gradients = torch.is_grad_enabled()
        self.values: dict[int, Tensor] = {}
        self.versions: dict[int, int] = {}
        self.closed = False

    def send(self, layer: int, value: Tensor) -> None:
        """Take a layer's raw value; a layer that is recomputed has sent it before."""
        if self.closed:
            return
        if layer in self.values:
            raise UserError(
                f"layer {layer} ran twice in one forward pass; a model that repeats its layers cannot be patched"
            )
        self.values[layer] = value
        self.versions[layer] = _version(value)

    def read(self, layer: int, like: Tensor) -> Tensor:
        """A layer's raw value, on the device and in the dtype of another."""
        if layer not in self.values:
            raise UserError(f"layer {layer} has not run before a layer that mixes its value; run the layers in order")
        value = self.values[layer]
        if not self.closed and _version(value) != self.versions[layer]:
            raise UserError(
                f"the value of layer {layer} was changed in place after its projection (as a clip does), so it is not "
                "raw any more; this model cannot be patched"
            )
        return value.to(device=like.device, dtype=like.dtype)

    def close(self) -> None:
        """The forward call is over. Only recomputation may still read: it wants the numbers, the graph has its own.

        Without that the stream, held by the arguments of a checkpoint that the graph holds, would hold the graph, and a
        forward pass that nobody runs backward would never be freed.
        """
        self.closed = True
        if not self.gradients:
            self.values = {}
            return
        self.values = {layer: _numbers(value) for layer, value in self.values.items()}
        self.coefficients = tuple(tuple(map(_numbers, sent)) for sent in self.coefficients)


def _numbers(tensor: Tensor) -> Tensor:
    """The same numbers, outside the graph; recomputation then saves the same tensors for the backward pass."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _version(value: Tensor) -> int:
    """How often a tensor was changed in place, 0 where nobody counts."""
    return 0 if torch.compiler.is_compiling() or value.is_inference() else value._version


class Visit:
    """One attention call of a layer that sends or mixes values."""

    def __init__(self, attention: nn.Module, site: Site, row: Row, stream: ValueStream, outer: Visit | None) -> None:
        self.attention, self.site, self.row, self.outer = attention, site, row, outer
        self.stream: ValueStream | None = stream
        self.to_correct: tuple[Tensor, Tensor, list[Tensor]] | None = None

    def mixed(self, projected: Tensor, hidden: Tensor) -> Tensor | None:
        """Send the raw value, and return the projection's output with the mixed one; None to leave it as it is."""
        row, stream = self.row, self.stream
        if stream is None:
            raise UserError(f"attention of layer {row.layer} makes its values twice; it cannot be patched")
        self.stream = None
        own = self.site.take(projected)
        if row.sends:
            stream.send(row.layer, own)
        if not row.mixes:
            return None
        policy: Any = getattr(self.attention, POLICY_NAME)
        reads = [stream.read(read.layer, own) for read in row.reads]
        mixed = policy.mix(own, reads, hidden, stream.coefficients[row.layer - 1] if row.coefficients else ())
        if policy.corrects:
            self.to_correct = (mixed, own, reads)
        return None if mixed is own else self.site.put(projected, mixed)

    def corrected(self, out: Tensor) -> Tensor:
        """Attention's output `[B, T, H D]` after the policy's correction."""
        assert self.to_correct is not None
        policy: Any = getattr(self.attention, POLICY_NAME)
        mixed, own, reads = self.to_correct
        self.to_correct = None
        groups = self.site.heads // self.site.kv_heads if policy.corrects_heads else 1
        mixed, own, *reads = [x if groups == 1 else x.repeat_interleave(groups, dim=-2) for x in (mixed, own, *reads)]
        heads = out.unflatten(-1, (self.site.heads, self.site.head_dim))
        return policy.correct(heads, mixed, own, reads).flatten(-2)


class _Current:
    """The visit of this thread's innermost attention call. torch.compile cannot trace a context variable: a visit that
    starts while it traces, which it does one thread at a time, is in a plain attribute until it ends.
    """

    def __init__(self) -> None:
        self.context: ContextVar[Visit | None] = ContextVar("resformer_patch_visit", default=None)
        self.traced: Visit | None = None

    def get(self) -> Visit | None:
        return self.traced if torch.compiler.is_compiling() or self.traced is not None else self.context.get()

    def set(self, visit: Visit | None) -> None:
        if torch.compiler.is_compiling() or self.traced is not None:
            self.traced = visit
        else:
            self.context.set(visit)


_current = _Current()
_following = threading.Lock()


def open_stream(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Before the blocks run: a fresh stream."""
    shared: Any = getattr(module, COEFFICIENTS_NAME, None)
    if shared is not None and not isinstance(shared, Coefficients):
        shared = shared.initial_values.__self__  # what PEFT's modules_to_save has put in its place
    return args, {**kwargs, STREAM: ValueStream(() if shared is None else shared.forward())}


def close_stream(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    """After the blocks have run, also when they failed."""
    stream = kwargs.get(STREAM)
    if stream is not None:
        stream.close()


class EnterAttention:
    """Before attention: take the stream out of its arguments, and start the layer's visit."""

    def __init__(self, site: Site, row: Row, corrects: bool) -> None:
        self.site, self.row, self.corrects = site, row, corrects

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        layer, stream = self.row.layer, kwargs.get(STREAM)
        if stream is None:
            raise UserError(
                f"the values of earlier layers did not reach attention of layer {layer} ({self.site.path}): either the "
                f"layer was called by itself, or {type(module).__name__} sits in a block that passes no keyword "
                "arguments on to it, and this architecture cannot be patched"
            )
        if stream.gradients and not torch.is_grad_enabled():
            raise UserError(
                f"layer {layer} runs without gradients inside a forward pass with gradients, as in reentrant "
                "checkpointing, which would silently lose the gradient of the values that other layers read; use "
                "gradient_checkpointing_enable({'use_reentrant': False})"
            )
        kwargs = {name: value for name, value in kwargs.items() if name != STREAM}
        if self.row.sends or self.row.mixes:
            follow(module, self.site.value, _value_hooks)
            if self.corrects:
                follow(module, self.site.output, _output_hooks)
            _current.set(Visit(module, self.site, self.row, stream, _current.get()))
        return args, kwargs


def leave_attention(module: nn.Module, args: Any, output: Any) -> None:
    """After attention, also when it failed: put back the visit that was there before."""
    visit = _current.get()
    if visit is None or visit.attention is not module:
        return
    _current.set(visit.outer)
    if output is not None and (visit.stream is not None or visit.to_correct is not None):
        name = visit.site.value if visit.stream is not None else visit.site.output
        raise UserError(
            f"attention of layer {visit.row.layer} ({visit.site.path}) did not use its {name}; this architecture "
            "cannot be patched"
        )


def mix_value(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
    """After the projection that makes values. Outside of attention it is the plain projection."""
    visit = _current.get()
    return None if visit is None else visit.mixed(output, args[0])


def correct_output(module: nn.Module, args: Any) -> Any:
    """Before the output projection."""
    visit = _current.get()
    return None if visit is None or visit.to_correct is None else (visit.corrected(args[0]), *args[1:])


def _value_hooks(module: nn.Module) -> tuple[dict[Any, Any], Any]:
    return module._forward_hooks, mix_value


def _output_hooks(module: nn.Module) -> tuple[dict[Any, Any], Any]:
    return module._forward_pre_hooks, correct_output


def follow(attention: nn.Module, name: str, hooks_of: Any) -> None:
    """See that a projection has its hook. Somebody may have wrapped or replaced it since (LoRA, quantisation): then the
    hook moves to what has taken its place, so that it sees all that this one adds.
    """
    projection = getattr(attention, name)
    hooks, hook = hooks_of(projection)
    if KEY in hooks:
        return
    with _following:
        for inner in projection.modules():
            hooks_of(inner)[0].pop(KEY, None)
        hooks[KEY] = hook


def attach(stack: nn.Module, attentions: Sequence[tuple[nn.Module, EnterAttention]]) -> None:
    """Register the hooks of a patched model."""
    stack._forward_pre_hooks[KEY] = open_stream
    stack._forward_pre_hooks_with_kwargs[KEY] = True
    stack._forward_hooks[KEY] = close_stream
    stack._forward_hooks_with_kwargs[KEY] = True
    stack._forward_hooks_always_called[KEY] = True
    for attention, enter in attentions:
        attention._forward_pre_hooks[KEY] = enter
        attention._forward_pre_hooks_with_kwargs[KEY] = True
        attention._forward_hooks[KEY] = leave_attention
        attention._forward_hooks_always_called[KEY] = True
        if enter.row.sends or enter.row.mixes:
            follow(attention, enter.site.value, _value_hooks)
        if enter.corrects:
            follow(attention, enter.site.output, _output_hooks)


def detach(model: nn.Module) -> list[nn.Module]:
    """Remove the hooks; returns the modules that had any."""
    found = []
    for module in model.modules():
        tables: tuple[dict[Any, Any], ...] = (
            module._forward_pre_hooks,
            module._forward_pre_hooks_with_kwargs,
            module._forward_hooks,
            module._forward_hooks_with_kwargs,
            module._forward_hooks_always_called,
        )
        removed = [table.pop(KEY, None) for table in tables]
        if any(hook is not None for hook in removed):
            found.append(module)
    return found


def is_attached(model: nn.Module) -> bool:
    """Some module has hooks of ours."""
    return any(KEY in module._forward_pre_hooks or KEY in module._forward_hooks for module in model.modules())
