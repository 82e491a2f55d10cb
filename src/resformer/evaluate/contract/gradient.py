"""Checks on gradients: every parameter and every tensor that is read gets one, and it does not depend on when or how
the backward pass is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from resformer.evaluate.contract.subject import ContractError, NotApplicable, Subject, gradients, ids
from resformer.models.compat import enable_checkpointing

MODES = {False: "non-reentrant", True: "reentrant"}


def every_parameter_gets_a_gradient(subject: Subject) -> str:
    """no parameter exists that training cannot move"""
    found = gradients(subject.model().train(), (1.0, ids()))
    dead = [name for name, gradient in found.items() if gradient is None or not gradient.abs().max() > 0]
    if dead:
        more = f" and {len(dead) - 1} more" if len(dead) > 1 else ""
        raise ContractError(f"{dead[0]}{more}: no gradient; a parameter that can get none must not exist")
    return f"{len(found)} parameters"


def every_read_gets_a_gradient(subject: Subject) -> str:
    """V_1 is not detached: the gradient flows back through every tensor that a layer reads"""
    model, plan, taken = subject.model().train(), subject.plan(), []
    if not any(row.reads for row in plan):
        raise NotApplicable("the variant reads nothing")

    def taking(names: list[str]) -> Any:
        def hook(module: nn.Module, args: Any) -> Any:
            packed = isinstance(args[1], tuple) if len(args) > 1 else False
            tensors = list(args[1] if packed else args[1:])
            for index, name in enumerate(names):
                if not tensors[index].requires_grad:
                    raise ContractError(f"{name} comes without a gradient")
                tensors[index] = tensors[index].clone()  # one for each reader: its own share of the gradient
                tensors[index].retain_grad()
                taken.append((name, tensors[index]))
            return (args[0], tuple(tensors)) if packed else (args[0], *tensors)

        return hook

    for row, layer in zip(plan, model.model.layers, strict=True):
        names = [
            f"the {read.state} {read.what} of layer {read.layer}, read by layer {row.layer}," for read in row.received
        ]
        if names:
            layer.register_forward_pre_hook(taking(names))
        names = [f"the output of layer {read.layer}, averaged after layer {row.layer}," for read in row.averaged]
        if names:
            model.model.depth_average[str(row.layer - 1)].register_forward_pre_hook(taking(names))
    gradients(model, (1.0, ids()))
    for name, tensor in taken:
        if tensor.grad is None or not tensor.grad.abs().max() > 0:
            raise ContractError(f"{name} gets no gradient: detached, or not used")
    return f"{len(taken)} reads"


def checkpointing_changes_nothing(subject: Subject) -> str:
    """dW_v of the layers that are read is not zero, and checkpointing (both modes) changes no gradient"""
    model, plan = subject.model().train(), subject.plan()
    tokens = (1.0, ids())
    plain = gradients(model, tokens)
    sources = [row.layer for row in plan if row.owns_value and any(what == "value" for what, _ in row.sends)]
    for layer in sources:
        weight = plain[f"model.layers.{layer - 1}.self_attn.v_proj.weight"]
        if weight is None or not weight.abs().max() > 0:
            raise ContractError(f"W_v of layer {layer}, which is read, gets no gradient")
    for mode in MODES:
        _compare(_checkpointed(subject, mode, tokens), plain, f"{MODES[mode]} checkpointing")
    return f"W_v of layers read: {', '.join(map(str, sources)) or 'none'}"


def two_forwards_before_one_backward(subject: Subject) -> str:
    """two calls before one backward pass give the sum of their gradients, also under checkpointing (both modes)"""
    model = subject.model().train()
    a, b = ids(seed=6), ids(seed=7)
    one, two = gradients(model, (1.0, a)), gradients(model, (2.0, b))
    want = {name: None if (g := one[name]) is None or (h := two[name]) is None else g + h for name in one}
    _compare(gradients(model, (1.0, a), (2.0, b)), want, "two calls before one backward pass")
    for mode in MODES:
        _compare(
            _checkpointed(subject, mode, (1.0, a), (2.0, b)),
            want,
            f"two calls before one backward pass under {MODES[mode]} checkpointing",
        )
    return "same gradients"


def nothing_is_kept_on_modules(subject: Subject) -> str:
    """a call leaves nothing behind: no tensor on a module or its class, and the same tokens give the same bits again"""
    for training in (False, True):
        model = subject.model().train(training)
        before = {where for where, _ in kept_tensors(model)}
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        with torch.no_grad():
            first = model(input_ids=ids(seed=6)).logits
            model(input_ids=ids(rows=3, length=9, seed=7))
            again = model(input_ids=ids(seed=6)).logits
        left = sorted({where for where, _ in kept_tensors(model)} - before)
        if left:
            raise ContractError(f"{left[0]} keeps a tensor after the call; values travel as tensors in, tensors out")
        changed = [name for name, buffer in model.named_buffers() if not torch.equal(buffer, buffers[name])]
        if changed:
            raise ContractError(f"the buffer {changed[0]} is changed by a call")
        if not torch.equal(first, again):
            raise ContractError("the same tokens give other logits after a call with others: something is kept")
    return "no tensors left"


def kept_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tensors in attributes of modules and their classes, parameters and buffers apart, with where they are."""
    for name, module in model.named_modules():
        own = {key: value for key, value in vars(module).items() if key not in ("_parameters", "_buffers", "_modules")}
        for where, attributes in ((name or "the model", own), (type(module).__name__, vars(type(module)))):
            for key, value in attributes.items():
                values = value.values() if isinstance(value, dict) else value
                for item in values if isinstance(value, dict | list | tuple | set) else [value]:
                    if isinstance(item, Tensor):
                        yield f"{where}.{key}", item


def _checkpointed(subject: Subject, reentrant: bool, *terms: tuple[float, Tensor]) -> dict[str, Tensor | None]:
    model, calls = subject.model().train(), []
    enable_checkpointing(model, use_reentrant=reentrant)
    model.model.layers[-1].input_layernorm.register_forward_hook(lambda *_: calls.append(1))
    found = gradients(model, *terms)
    assert len(calls) == 2 * len(terms), "the layers were not recomputed: checkpointing was silently off"
    return found


def _compare(got: dict[str, Tensor | None], want: dict[str, Tensor | None], when: str) -> None:
    for name, expected in want.items():
        gradient = got[name]
        if gradient is None or expected is None:
            if gradient is not expected:
                raise ContractError(f"{when}: {name} gets {'no' if gradient is None else 'a'} gradient")
            continue
        difference = float((gradient - expected).abs().max())
        if not difference <= 1e-6 + 1e-4 * float(expected.abs().max()):
            raise ContractError(f"{when}: the gradient of {name} differs by {difference:.1e}")
