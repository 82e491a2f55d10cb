"""Checks on a variant's life around its formula: counting, grouping, initial values, saving, compiling."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from resformer.core.policy import Initialised
from resformer.evaluate.contract.subject import (
    ContractError,
    NotApplicable,
    Subject,
    gradients,
    ids,
    is_lambda,
    quiet,
    raw_memory_is_nan,
    same,
)
from resformer.models import ResFormerConfig, ResFormerForCausalLM
from resformer.models.accounting import account, plan_rows
from resformer.models.groups import optimizer_groups


def lambdas_are_grouped(subject: Subject) -> str:
    """lambdas are 1-D or more, fp32, without weight decay and with a learning rate of their own"""
    model = subject.model(moved=False)
    groups = optimizer_groups(model, lr=1.0, weight_decay=0.1, lambda_lr_scale=5.0)
    listed = {name: group for group in groups for name in group["names"]}
    if sorted(listed) != sorted(name for name, _ in model.named_parameters()):
        raise ContractError("the optimizer groups do not hold every parameter once")
    found = [(name, parameter) for name, parameter in model.named_parameters() if is_lambda(name)]
    for name, parameter in found:
        if parameter.dim() == 0:
            raise ContractError(f"{name} is 0-dim, which FSDP2 cannot shard; make it 1-D")
        if parameter.dtype != torch.float32:
            raise ContractError(f"{name} is {parameter.dtype}; lambdas are fp32")
        if listed[name]["weight_decay"] != 0.0 or listed[name]["lr"] != 5.0:
            raise ContractError(
                f"{name} is in the group {listed[name]['name']!r}, which decays or has no rate of its own"
            )
    if not found:
        raise NotApplicable("the variant has no lambdas")
    return f"{len(found)} parameters"


def costs_are_counted(subject: Subject) -> str:
    """parameters and FLOPs as computed from the plan are those of the live model"""
    for changes in ({}, {"attention_bias": True, "mlp_bias": True}, {"tie_word_embeddings": True}):
        model = subject.model(**changes)
        costs = account(model.config, sequence_length=12)
        if costs.parameters != model.num_parameters():
            raise ContractError(f"{model.num_parameters():,} parameters, computed are {costs.parameters:,} ({changes})")
        if sum(costs.parameters_by_group.values()) != costs.parameters:
            raise ContractError("parameters by group do not add up")
        model.set_attn_implementation("eager")
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(input_ids=ids(1, 12), use_cache=False)
        if costs.flops_per_token * 12 != counter.get_total_flops():
            raise ContractError(
                f"{counter.get_total_flops() / 12:,.0f} FLOPs a token, computed are {costs.flops_per_token:,}; "
                "a policy names in `matmuls` the parameters that enter matrix products"
            )
    return f"{costs.parameters:,} parameters, {costs.flops_per_token:,} FLOPs a token"


def config_survives_json(subject: Subject) -> str:
    """config and plan survive JSON"""
    config = subject.config()
    again = ResFormerConfig.from_dict(json.loads(config.to_json_string(use_diff=False)))
    if (again.variant_options, again.variant_formula) != (config.variant_options, config.variant_formula):
        raise ContractError(f"options {config.variant_options} become {again.variant_options}")
    if again.to_json_string() != config.to_json_string():
        raise ContractError("the config read back writes another file")
    rows = json.loads(json.dumps(plan_rows(config)))
    if [row["layer"] for row in rows] != list(range(1, subject.layers + 1)):
        raise ContractError("the plan's rows are not the layers in order")
    if not config.variant_formula:
        raise ContractError("formula() is empty: `resformer plan` and config.json would say nothing")
    return config.variant_formula


def initial_values_hold(subject: Subject) -> str:
    """every extra parameter starts from initial_values(), also when a plain Transformer's checkpoint is loaded"""
    with raw_memory_is_nan():
        fresh = subject.model(moved=False)
        _hold_initial_values(fresh)
        with tempfile.TemporaryDirectory() as directory, quiet():
            subject.baseline().model().save_pretrained(directory)
            loaded: Any = ResFormerForCausalLM.from_pretrained(
                directory, config=subject.config(), ignore_mismatched_sizes=True
            )
        _hold_initial_values(loaded)
    # What a variant shares with the Transformer came from the checkpoint.
    plain = subject.baseline().model().state_dict()
    for name, tensor in loaded.state_dict().items():
        if name in plain and plain[name].shape == tensor.shape and not torch.equal(plain[name], tensor):
            raise ContractError(f"{name} of the checkpoint was overwritten")
    return f"{sum(isinstance(m, Initialised) for m in fresh.modules())} modules"


def _hold_initial_values(model: ResFormerForCausalLM) -> None:
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise ContractError(f"{name} has no initial value: raw memory (give it one in initial_values)")
    for where, module in model.named_modules():
        if not isinstance(module, Initialised):
            continue
        own, values = dict(module.named_parameters(recurse=False)), module.initial_values()
        if own.keys() != values.keys():
            raise ContractError(f"{where} has parameters {sorted(own)} but initial values for {sorted(values)}")
        again = module.initial_values()
        for key, value in values.items():
            if torch.equal(value, again[key]):
                if not torch.equal(own[key].detach(), value.to(own[key].dtype)):
                    raise ContractError(f"{where}.{key} does not start from its initial value")
            elif not 0.2 < float(own[key].detach().std() / value.std()) < 5:  # drawn at random: the spread must fit
                raise ContractError(
                    f"{where}.{key} starts with a spread of {float(own[key].detach().std()):.1e}, not {value.std():.1e}"
                )


def saving_keeps_the_bits(subject: Subject) -> str:
    """a saved model loads (through the meta device) to the same bits; in bf16 its lambdas stay fp32"""
    model = subject.model()
    with tempfile.TemporaryDirectory() as directory, quiet(), raw_memory_is_nan():
        model.save_pretrained(directory)
        if not (Path(directory) / "model.safetensors").is_file():
            raise ContractError("no safetensors file was written")
        loaded: Any = ResFormerForCausalLM.from_pretrained(directory).eval()
        low: Any = ResFormerForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    got, want = _tensors(loaded), _tensors(model)
    if got.keys() != want.keys():
        raise ContractError(f"names differ: {', '.join(sorted(got.keys() ^ want.keys())[:3])}")
    for name, tensor in want.items():
        if not torch.equal(got[name], tensor):
            raise ContractError(f"{name} differs after loading")
    with torch.no_grad():
        if not torch.equal(loaded(input_ids=ids()).logits, model(input_ids=ids()).logits):
            raise ContractError("logits differ after loading")
        if not torch.isfinite(low(input_ids=ids()).logits).all():
            raise ContractError("loaded in bf16, logits are not finite")
    wrong = [name for name, p in low.named_parameters() if is_lambda(name) and p.dtype != torch.float32]
    if wrong:
        raise ContractError(f"{wrong[0]} is no longer fp32 when the model is loaded in bf16")
    return f"{len(want)} tensors"


def _tensors(model: ResFormerForCausalLM) -> dict[str, Tensor]:
    return {**model.state_dict(), **dict(model.named_buffers())}


def compiles_as_one_graph(subject: Subject) -> str:
    """torch.compile takes the model without a graph break, and gives the same loss and gradients"""
    torch._dynamo.reset()
    model = subject.model(num_hidden_layers=3) if _fits(subject, 3) else subject.model()
    model.train()
    compiled: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
    want = gradients(model, (1.0, ids()))
    model.zero_grad()
    compiled(input_ids=ids(), labels=ids(), use_cache=False).loss.backward()
    for name, parameter in model.named_parameters():
        expected = want[name]
        if parameter.grad is not None and expected is not None:
            same(parameter.grad, expected, f"compiled: the gradient of {name}")
    return "same gradients"


def blocks_share_graphs(subject: Subject) -> str:
    """blocks with equal rows and formulas share one compiled graph: Dynamo gives up after eight of them"""
    torch._dynamo.reset()
    model = subject.model(num_hidden_layers=12) if _fits(subject, 12) else subject.model()
    model.train()
    kinds = {
        (row, type(layer.self_attn.value_residual))
        for row, layer in zip(model.model.plan, model.model.layers, strict=True)
    }
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    dynamo: Any = torch._dynamo.config
    usual = dynamo.recompile_limit
    with dynamo.patch(recompile_limit=len(model.model.layers) + 1):  # so that all graphs are counted
        for layer in model.model.layers:
            layer.compile(backend=backend, fullgraph=True)
        loss: Any = model(input_ids=ids(), labels=ids(), use_cache=False).loss
        loss.backward()
    if len(graphs) > len(kinds):
        raise ContractError(
            f"{len(graphs)} graphs for {len(kinds)} kinds of blocks; numbers that differ from layer to layer reach "
            "the layers as tensors"
        )
    over = f"; over {usual}, raise torch._dynamo.config.recompile_limit" if len(graphs) > usual else ""
    return f"{len(graphs)} graphs, {len(kinds)} kinds of blocks in {len(model.model.layers)} layers{over}"


def _fits(subject: Subject, layers: int) -> bool:
    """The options make sense for a model of so many layers."""
    try:
        subject.config(num_hidden_layers=layers)
    except ValueError:
        return False
    return True
