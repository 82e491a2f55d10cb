"""Checks on what a variant computes: its plan, its neutral options, precision, and what it does to tensors it reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from resformer.core.plan import Plan, link
from resformer.evaluate.contract.subject import SIZES, ContractError, NotApplicable, Subject, ids, is_extra, is_lambda
from resformer.models import ResFormerForCausalLM


def plan_is_valid(subject: Subject) -> str:
    """the plan can be run: sources come earlier, own what is read, and every layer can attend"""
    plan = subject.plan()
    try:
        again = link(plan)
    except AssertionError as error:
        raise ContractError(str(error)) from error
    if again != plan:
        raise ContractError("rows do not say what they send; build the plan with resformer.core.plan.link")
    if subject.plan() != plan:
        raise ContractError("two calls of plan() give different plans; it must follow from options and sizes alone")
    return f"{sum(bool(row.reads) for row in plan)} of {len(plan)} layers read others"


def builds_and_runs(subject: Subject) -> str:
    """a model can be built, and one call gives finite logits"""
    model = subject.model()
    with torch.no_grad():
        logits = model(input_ids=ids()).logits
    if not torch.isfinite(logits).all():
        raise ContractError("logits are not finite")
    extra = sum(p.numel() for name, p in model.named_parameters() if is_extra(name))
    return f"{extra:,} extra parameters"


def neutral_is_the_transformer(subject: Subject) -> str:
    """with its neutral options the variant is the Transformer bit for bit, gradients included"""
    config = subject.config()
    neutral = config.build_variant().neutral(config.shape())
    if neutral is None:
        raise NotApplicable("the variant names no neutral options")
    base = subject.baseline().model(moved=False)
    with torch.no_grad():
        for parameter in base.parameters():
            parameter.mul_(4.0 if parameter.dim() > 1 else 1.0)
    neutral_subject = Subject(name=subject.name, options=neutral, kv_heads=subject.kv_heads, layers=subject.layers)
    model = neutral_subject.model(moved=False)
    # A variant that runs with one attention implementation only is compared with the Transformer under that one.
    base.set_attn_implementation(model.config._attn_implementation)
    report = model.load_state_dict(base.state_dict(), strict=False)
    wrong = [*report.unexpected_keys, *(key for key in report.missing_keys if not is_extra(key))]
    if wrong:
        raise ContractError(f"with {neutral} the parameters differ from the Transformer's: {', '.join(wrong[:3])}")
    tokens = ids()
    got, want = model(input_ids=tokens, labels=tokens), base(input_ids=tokens, labels=tokens)
    if not torch.equal(got.logits, want.logits):
        raise ContractError(
            f"with {neutral} logits differ by {float((got.logits - want.logits).detach().abs().max()):.1e}"
        )
    got.loss.backward()
    want.loss.backward()
    for name, parameter in base.named_parameters():
        ours = model.get_parameter(name).grad
        if ours is None or parameter.grad is None or not torch.equal(ours, parameter.grad):
            raise ContractError(f"with {neutral} the gradient of {name} differs")
    return ", ".join(f"{key}={value}" for key, value in neutral.items()) or "its defaults"


def one_layer_is_the_transformer(subject: Subject) -> str:
    """a model of one layer has nothing to mix: it is the Transformer without an extra parameter"""
    if any(read.layer == 0 for row in subject.plan() for read in row.reads):
        raise NotApplicable("the variant reads embeddings or token tables, which one layer has as well")
    single = Subject(name=subject.name, kv_heads=subject.kv_heads, layers=1)  # options may name layers beyond it
    base, model = single.baseline().model(), single.model()
    if base.state_dict().keys() != model.state_dict().keys():
        extra = sorted(model.state_dict().keys() ^ base.state_dict().keys())
        raise ContractError(f"with one layer the parameters differ from the Transformer's: {', '.join(extra[:3])}")
    model.load_state_dict(base.state_dict())
    with torch.no_grad():
        if not torch.equal(model(input_ids=ids()).logits, base(input_ids=ids()).logits):
            raise ContractError("with one layer the logits differ from the Transformer's")
    return "same parameters, same logits"


def reads_are_left_alone(subject: Subject) -> str:
    """V_1 is raw: no block changes in place what it reads, and what it sends is its own projection"""
    model, plan = subject.model(), subject.plan()
    if not any(row.reads for row in plan):
        raise NotApplicable("the variant reads nothing")
    with watched(model, plan) as seen, torch.no_grad():
        model(input_ids=ids())
    # What is read comes first: a sender whose value a reader changed is not to blame.
    for where, tensor, before in sorted(seen, key=lambda one: "read by" not in one[0]):
        if not torch.equal(tensor, before):
            raise ContractError(f"{where} is changed in place, by up to {float((tensor - before).abs().max()):.1e}")
    return f"{len(seen)} tensors watched"


@contextmanager
def watched(model: ResFormerForCausalLM, plan: Plan) -> Iterator[list[tuple[str, Tensor, Tensor]]]:
    """Collect (where, tensor, what it must hold) of every tensor that is read or sent while the model runs."""
    seen: list[tuple[str, Tensor, Tensor]] = []
    handles: list[Any] = []

    def read_hook(who: str, names: list[str]) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            tensors = args[1] if names and isinstance(args[1], tuple) else args[1:]
            # `hidden` itself may be read later as well (it is the block's output X_n).
            pairs = [(f"the input of {who}", args[0]), *zip(names, tensors, strict=False)]
            seen.extend((where, tensor, tensor.clone()) for where, tensor in pairs)

        return hook

    def own_hook(values: dict[str, Tensor]) -> Any:
        def hook(module: nn.Module, args: Any, out: Tensor) -> None:
            values["own"] = out.clone()

        return hook

    def sent_hook(row: Any, values: dict[str, Tensor]) -> Any:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            for (what, state), tensor in zip(row.sends, out[1:], strict=True):
                if (what, state) == ("value", "raw"):
                    seen.append((f"the raw value of layer {row.layer}", tensor.flatten(-2), values["own"]))

        return hook

    for row, layer in zip(plan, model.model.layers, strict=True):
        who, values = f"layer {row.layer}", {}  # type: ignore[var-annotated]
        names = [f"the {read.state} {read.what} of layer {read.layer}, read by {who}," for read in row.received]
        handles.append(layer.register_forward_pre_hook(read_hook(who, names)))
        if row.owns_value:
            handles.append(layer.self_attn.v_proj.register_forward_hook(own_hook(values)))
        handles.append(layer.register_forward_hook(sent_hook(row, values)))
        average = model.model.depth_average
        if str(row.layer - 1) in average:
            names = [f"the output of layer {read.layer}, averaged after {who}," for read in row.averaged]
            handles.append(average[str(row.layer - 1)].register_forward_pre_hook(read_hook(f"{who}'s average", names)))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def precision_is_kept(subject: Subject) -> str:
    """float64 stays float64: nothing is rounded to a smaller type on the way, forward or backward"""
    model = subject.model().double()
    generator = torch.Generator().manual_seed(2)
    tokens = ids()
    probe = torch.randn(*tokens.shape, SIZES["vocab_size"], generator=generator, dtype=torch.float64)

    def objective() -> Tensor:
        logits = model(input_ids=tokens, use_cache=False).logits
        if logits.dtype != torch.float64:
            raise ContractError(f"logits are {logits.dtype} in a float64 model")
        return (logits * probe).sum()

    parameters = list(model.parameters())
    slopes = torch.autograd.grad(objective(), parameters)
    errors = []
    for _ in range(3):  # a kink (relu) may spoil one direction, rounding spoils all of them
        direction = [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in parameters]
        norm = torch.stack([d.square().sum() for d in direction]).sum().sqrt()
        step, ends = 1e-5 / float(norm), []
        with torch.no_grad():
            for scale in (step, -2 * step, step):
                for parameter, along in zip(parameters, direction, strict=True):
                    parameter.add_(along, alpha=scale)
                ends.append(float(objective()))
        want = sum(float((slope * along).sum()) for slope, along in zip(slopes, direction, strict=True))
        errors.append(abs((ends[0] - ends[1]) / (2 * step) - want) / max(abs(want), 1e-12))
    if not min(errors) < 1e-5:
        raise ContractError(
            f"in float64 the gradient and differences of the output disagree by {min(errors):.0e} of it: something "
            "is rounded to a smaller type (use resformer.core.mixing.upcast, which never does)"
        )
    return f"gradient and differences agree to {min(errors):.0e}"


def low_precision_runs(subject: Subject) -> str:
    """in bf16 with lambdas in fp32, and under autocast, values keep their type and logits are finite"""
    plain = subject.model()
    model: Any = subject.model()
    model.to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if is_lambda(name):
            parameter.data = plain.get_parameter(name).data.clone()
    with torch.no_grad():
        for kind, logits in (
            ("bf16", model(input_ids=ids()).logits),
            ("autocast", _autocast_logits(plain)),
        ):
            if not torch.isfinite(logits).all():
                raise ContractError(f"{kind}: logits are not finite")
            if logits.dtype != torch.bfloat16:
                raise ContractError(f"{kind}: logits are {logits.dtype}; a mix must return its values' type")
    return "finite"


def _autocast_logits(model: ResFormerForCausalLM) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(input_ids=ids()).logits
