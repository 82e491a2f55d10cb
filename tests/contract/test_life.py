"""A variant's life outside the formula: counting, saving, compiling, grouping."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from conftest import ids, make
from torch.utils.flop_counter import FlopCounterMode

from resformer import ResFormerConfig, optimizer_groups
from resformer.core.registry import names
from resformer.models.accounting import account, plan_rows


def test_account_equals_the_live_model(variant, kv_heads):
    for changes in ({}, {"attention_bias": True, "mlp_bias": True}, {"tie_word_embeddings": True}, {"head_dim": 6}):
        model = make(variant, kv_heads, **changes)
        costs = account(model.config, sequence_length=12)
        assert costs.parameters == model.num_parameters() == sum(costs.parameters_by_group.values()), changes
        model.set_attn_implementation("eager")
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(ids(1, 12), use_cache=False)
        assert costs.flops_per_token * 12 == counter.get_total_flops(), changes


def test_plan_rows_are_json(variant):
    rows = plan_rows(make(variant).config)
    assert [row["layer"] for row in json.loads(json.dumps(rows))] == [1, 2, 3, 4, 5]


def test_optimizer_groups_cover_every_parameter_once(variant):
    model = make(variant)
    groups = optimizer_groups(model, lr=1.0, weight_decay=0.1, lambda_lr_scale=5.0)
    listed = [name for group in groups for name in group["names"]]
    assert sorted(listed) == sorted(name for name, _ in model.named_parameters())
    for group in groups:
        for name in group["names"]:
            is_lambda = "value_residual" in name or "value_coefficients" in name
            assert (group["name"] == "lambdas") == is_lambda
            assert group["lr"] == (5.0 if is_lambda else 1.0)
            assert group["weight_decay"] == (0.1 if group["name"] == "matrices" else 0.0)


def test_config_survives_json(variant):
    config = make(variant).config
    again = ResFormerConfig.from_dict(json.loads(config.to_json_string(use_diff=False)))
    assert again.variant_options == config.variant_options
    assert again.variant_formula == config.variant_formula
    assert again.to_json_string() == config.to_json_string()


RELOAD = """
import sys, torch, resformer
from transformers import AutoModelForCausalLM
from pathlib import Path
for folder in sorted(Path(sys.argv[1]).iterdir()):
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    saved = torch.load(folder / "expected.pt", weights_only=True)
    assert type(model).__name__ == "ResFormerForCausalLM"
    state = dict(model.state_dict(), **dict(model.named_buffers()))
    assert state.keys() == saved["state"].keys()
    for key, value in saved["state"].items():
        assert torch.equal(state[key], value), (folder.name, key)
    with torch.no_grad():
        assert torch.equal(model(saved["ids"]).logits, saved["logits"]), folder.name
print("reloaded", len(list(Path(sys.argv[1]).iterdir())))
"""


def test_saved_models_reload_to_the_same_bits_in_a_new_process(tmp_path):
    for variant in names():
        for kv_heads in (4, 2):
            model = make(variant, kv_heads)
            folder = tmp_path / f"{variant}-{kv_heads}"
            model.save_pretrained(folder)
            with torch.no_grad():
                state = dict(model.state_dict(), **dict(model.named_buffers()))
                torch.save({"state": state, "ids": ids(), "logits": model(ids()).logits}, folder / "expected.pt")
    done = subprocess.run([sys.executable, "-c", RELOAD, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[-1] == str(2 * len(names()))


def test_compiles_without_graph_breaks(variant, kv_heads):
    torch._dynamo.reset()
    model = make(variant, kv_heads, num_hidden_layers=3).train()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    loss = compiled(input_ids=ids(), labels=ids(), use_cache=False).loss
    assert torch.allclose(loss, model(ids(), labels=ids()).loss, atol=1e-6)
    loss.backward()
    compiled_gradient = model.model.layers[0].self_attn.v_proj.weight.grad.clone()
    model.zero_grad()
    model(ids(), labels=ids()).loss.backward()
    assert torch.allclose(compiled_gradient, model.model.layers[0].self_attn.v_proj.weight.grad, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["transformer", "learnable_plus", "svformer"])
def test_inductor_gives_the_same_loss(name):
    torch._dynamo.reset()
    model = make(name, 2, num_hidden_layers=3).train()
    loss = torch.compile(model)(input_ids=ids(), labels=ids(), use_cache=False).loss
    assert torch.allclose(loss, model(ids(), labels=ids()).loss, atol=1e-5)
    loss.backward()


def test_blocks_with_equal_rows_share_one_compiled_graph(variant):
    """Dynamo gives up on a code object after 8 variants and then runs it eagerly without a word; so layer numbers must
    not be guarded on.
    """
    torch._dynamo.reset()
    model = make(variant, num_hidden_layers=12).train()
    frames = []

    def backend(graph, inputs):
        frames.append(graph)
        return graph.forward

    for layer in model.model.layers:
        layer.compile(backend=backend, fullgraph=True)
    model(ids(), labels=ids(), use_cache=False).loss.backward()
    kinds = {
        (row, type(layer.self_attn.value_residual))
        for row, layer in zip(model.model.plan, model.model.layers, strict=True)
    }
    assert len(frames) <= len(kinds)
