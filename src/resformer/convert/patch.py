"""Put value residual into a stock model of transformers: `patch`, `unpatch`.

The model's code stays as it is. Hooks carry the raw values from layer to layer (`patch_flow`), and each mixing layer
gets the policy that a model of ours would have, under the same name: `...self_attn.value_residual.first`. So
`optimizer_groups`, logs and checkpoints find its parameters by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from torch import nn

from ..core.plan import Plan, Read, Row, link
from ..core.policy import COEFFICIENTS_NAME, LAMBDA_NAMES, POLICY_NAME, Shape
from ..core.registry import Variant, build
from ..errors import UserError
from .patch_flow import EnterAttention, attach, detach, is_attached
from .patch_sites import Site, find_stack
from .start import whole

Model = TypeVar("Model", bound=nn.Module)
RECORD = "resformer_patch"
"""The field of a model's config that says how it is patched."""
VERSION = 1
"""Of what the record means."""


def patch(model: Model, *, variant: str, variant_options: Mapping[str, Any] | None = None) -> Model:
    """Put value residual into a stock model, in place, and return it.

    The model keeps its class, weights and names of parameters. Mixing layers gain a module `value_residual` with the
    variant's parameters (fp32; `learnable_plus` also `value_coefficients` beside the blocks), and the config gains
    `resformer_patch`, from which `load_patched` patches the saved model again.

    Args:
        model: a model of transformers with one self-attention a block: `LlamaForCausalLM`, `GPT2LMHeadModel`,
            `ViTModel` and the like, or a part of one.
        variant: name of a registered variant whose layers all keep their own keys and values.
        variant_options: its options; layers are numbered from 1 among the layers with attention.

    Raises:
        UserError: a variant or an architecture that cannot be patched, bad options, or a model that is patched already
            or has PEFT adapters (patch first, then add adapters).
    """
    if not isinstance(model, nn.Module):
        raise UserError(f"expected a model of transformers, got {type(model).__name__}")
    config = config_of(model)
    _check_model(model, config)
    if getattr(config, RECORD, None) is not None:
        raise UserError(
            f"{type(model).__name__} was saved patched, but loaded without its patch, so the parameters of the value "
            "residual are lost; load it with resformer.load_patched"
        )
    return install(model, variant, variant_options)


def install(model: Model, variant: str, variant_options: Mapping[str, Any] | None) -> Model:
    """`patch` without a look at what the config says of an earlier one."""
    stack, config = find_stack(model), config_of(model)
    vocab_size = int(getattr(config, "vocab_size", 0) or 0)
    shapes = [_shape(site, len(stack.sites), vocab_size) for site in stack.sites]
    built = build(variant, variant_options, shapes[0])
    plan = _plan(built, stack.sites, shapes)
    for shape in {shape for row, shape in zip(plan, shapes, strict=True) if row.mixes}:
        build(variant, variant_options, shape)  # options may list one number for each head

    policies = [built.policy(row, shape) if row.mixes else None for row, shape in zip(plan, shapes, strict=True)]
    shared = built.coefficients(plan, next(shape for row, shape in zip(plan, shapes, strict=True) if row.mixes))
    for policy, site in zip(policies, stack.sites, strict=True):
        if policy is not None and policy.corrects and not site.plain:
            raise UserError(
                f"variant {variant!r} changes attention's output before the output projection, but "
                f"{type(model.get_submodule(site.path)).__name__} ({site.path}) has more between the two; take a "
                "variant that mixes values"
            )

    parent, attentions = model.get_submodule(stack.path), [model.get_submodule(site.path) for site in stack.sites]
    enters = []
    for row, site, policy, attention in zip(plan, stack.sites, policies, attentions, strict=True):
        if policy is not None:
            attention.add_module(POLICY_NAME, _placed(policy, attention, site))
        enters.append(EnterAttention(site, row, policy is not None and policy.corrects))
    if shared is not None:
        parent.add_module(COEFFICIENTS_NAME, _placed(shared, attentions[0], stack.sites[0]))
    attach(parent, list(zip(attentions, enters, strict=True)))
    if config is not None:
        options = {**type(built).options(), **(variant_options or {})}
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()}
        setattr(config, RECORD, {"variant": variant, "variant_options": plain, "version": VERSION})
    return model


def unpatch(model: Model) -> Model:
    """Take the value residual out again, in place, and return the model as it was before `patch`. The parameters of the
    value residual are dropped; the model's own keep what training has made of them.

    Raises:
        UserError: the model is not patched.
    """
    modules = detach(model)
    if not modules:
        raise UserError(f"{type(model).__name__} is not patched")
    for module in modules:
        for name in (POLICY_NAME, COEFFICIENTS_NAME):
            if name in dict(module.named_children()):
                delattr(module, name)
    for part in model.modules():  # a model of several parts has a config for each
        config: Any = getattr(part, "config", None)
        if hasattr(config, RECORD):
            delattr(config, RECORD)
    return model


def config_of(model: nn.Module) -> Any:
    """The config of a model of transformers, also below a wrapper or of a part; None if there is none."""
    return next(
        (module.config for module in model.modules() if hasattr(getattr(module, "config", None), "to_dict")), None
    )


def lambda_names(model: nn.Module) -> list[str]:
    """Names of the parameters that a patch has added."""
    return [name for name, _ in model.named_parameters() if set(LAMBDA_NAMES) & set(name.split("."))]


def _check_model(model: nn.Module, config: Any) -> None:
    who = type(model).__name__
    if is_attached(model):
        record = getattr(config, RECORD, None) or {"variant": "unknown"}
        raise UserError(f"{who} is patched already (variant {record['variant']!r}); call resformer.unpatch first")
    if getattr(config, "model_type", None) == "resformer":
        raise UserError(f"{who} is a model of ours; name the variant in its config: ResFormerConfig(variant=...)")
    if hasattr(model, "peft_config") or any(hasattr(module, "base_layer") for module in model.modules()):
        raise UserError(
            f"{who} has PEFT adapters, which would be saved without the value residual; patch the model first, then "
            f"add adapters, with modules_to_save=[{POLICY_NAME!r}, {COEFFICIENTS_NAME!r}] to train the residual too"
        )


def _shape(site: Site, layers: int, vocab_size: int) -> Shape:
    return Shape(
        layers=layers,
        hidden_size=site.hidden_size,
        heads=site.heads,
        kv_heads=site.kv_heads,
        head_dim=site.head_dim,
        vocab_size=vocab_size,
    )


def _placed(module: nn.Module, attention: nn.Module, site: Site) -> nn.Module:
    """A new module on the device of a layer's value projection."""
    weight = next(getattr(attention, site.value).parameters())
    return module.to(device=weight.device).train(attention.training)


def _plan(variant: Variant, sites: Sequence[Site], shapes: Sequence[Shape]) -> Plan:
    """The variant's plan for these layers.

    Raises:
        UserError: for what hooks on stock attention cannot do: by name, with the way out.
    """
    plan = variant.plan(shapes[0])
    reason = next((why for row in plan if (why := _obstacle(variant, row, shapes[0]))), None)
    if reason is not None:
        raise UserError(
            f"variant {variant.name!r} cannot be patched into a stock model: {reason}. Make a model of ours of it: "
            f"`resformer convert MODEL --variant {variant.name} --out DIR`"
        )
    if not any(row.mixes for row in plan):
        raise UserError(
            f"variant {variant.name!r} mixes no value in a model with {len(sites)} attention layers (from "
            f"{sites[0].path} on), so there is nothing to patch"
        )
    plan = rebound(plan, sites)
    sizes = {_coefficient_sizes(variant, plan, shape) for row, shape in zip(plan, shapes, strict=True) if row.mixes}
    if len(sizes) > 1:
        raise UserError(
            f"variant {variant.name!r}: its shared parameters would need a size of their own for layers of different "
            "value shapes; take granularity 'scalar', or name layers of one shape"
        )
    return plan


def _obstacle(variant: Variant, row: Row, shape: Shape) -> str | None:
    """What a layer does that stock attention cannot, None if it can."""
    if variant.depth(row, shape) is not None:
        return "it averages the blocks' outputs"
    for read in row.reads:
        if read.what != "value":
            what = {"table": "token tables", "hidden": "hidden states", "attention": "attention weights"}
            return f"its layers read {what.get(read.what, f'the {read.what} of another layer')}"
    if not whole(row):
        return "its layers share queries, keys or values in place of their own"
    if row.stores != "mixed" or row.extends or any(read.state != "raw" for read in row.reads):
        return "its layers read what another layer's cache stores"
    return None


def _coefficient_sizes(variant: Variant, plan: Plan, shape: Shape) -> tuple[Any, ...]:
    shared = variant.coefficients(plan, shape)
    return () if shared is None else tuple(parameter.shape for parameter in shared.parameters())


def rebound(plan: Plan, sites: Sequence[Site]) -> Plan:
    """The plan for layers of different value shapes: a layer reads the first layer of its own shape, from the one that
    the plan names on.

    Raises:
        UserError: a layer has none before it, or would read one twice.
    """
    problems, rows = [], []
    for row in plan:
        reads = [_same_shape(read, row, sites) for read in row.reads]
        if None in reads or len(set(reads)) != len(reads):
            problems.append(row.layer)
        rows.append(replace(row, reads=tuple(read for read in reads if read is not None)))
    if not problems:
        return plan if all(old.reads == new.reads for old, new in zip(plan, rows, strict=True)) else link(rows)
    named = "; ".join(f"layer {n} ({_described(sites[n - 1])})" for n in problems)
    good = [row.layer for row in plan if row.reads and row.layer not in problems]
    first = next(read.layer for row in plan if row.layer == problems[0] for read in row.reads)
    raise UserError(
        f"layers differ in their values: {named} cannot read layer {first} ({_described(sites[first - 1])}), and no "
        f"layer between has the same heads; name the layers that mix: variant_options={{'layers': {good}}}"
    )


def _same_shape(read: Read, row: Row, sites: Sequence[Site]) -> Read | None:
    """The read, of the first layer from the one that it names on whose values have the row's shape."""
    wanted, layers = sites[row.layer - 1].value_shape, range(read.layer, row.layer)
    return next((replace(read, layer=n) for n in layers if sites[n - 1].value_shape == wanted), None)


def _described(site: Site) -> str:
    return f"{site.path}, {site.kv_heads} heads of {site.head_dim}"
