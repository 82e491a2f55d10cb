"""A variant's life outside the formula: counting, saving, compiling, grouping."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from cases import ADDED, CACHED, DEFAULTS, OPTIONS, PARAMETERS, Case, ids, make
from naive import REFERENCES
from test_formula import starts_at
from torch.utils.flop_counter import FlopCounterMode

from resformer import ResFormerConfig, ResFormerForCausalLM, optimizer_groups
from resformer.core.registry import names
from resformer.models.accounting import account, plan_rows

slow = pytest.mark.slow


def assert_counts(model: ResFormerForCausalLM, label: object) -> None:
    """Parameters and FLOPs of the account are the live model's."""
    costs = account(model.config, sequence_length=12)
    assert costs.parameters == model.num_parameters() == sum(costs.parameters_by_group.values()), label
    model.set_attn_implementation("eager")  # the counter sees no fused attention on a CPU
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(ids(1, 12), use_cache=False)
    assert costs.flops_per_token * 12 == counter.get_total_flops(), label


COUNTED = [case for case in [*DEFAULTS, *OPTIONS] if case in PARAMETERS or case in CACHED or case.variant == "rwkv"]


@pytest.mark.parametrize("counted_case", COUNTED, ids=str)
def test_account_equals_the_live_model(counted_case):
    assert_counts(counted_case.make(), counted_case)


def test_account_counts_biases_tied_heads_and_odd_head_sizes(variant):
    assert_counts(make(variant, 2, attention_bias=True, mlp_bias=True), "biases")
    assert_counts(make(variant, 2, tie_word_embeddings=True, head_dim=6), "tied, odd head size")


def test_plan_rows_are_json(any_case):
    rows = plan_rows(any_case.config())
    assert [row["layer"] for row in json.loads(json.dumps(rows))] == [1, 2, 3, 4, 5]


def test_optimizer_groups_cover_every_parameter_once(parameter_case):
    """Lambdas, gates, logits and alphas get no decay and a learning rate of their own; token tables are matrices."""
    model = parameter_case.make()
    groups = optimizer_groups(model, lr=1.0, weight_decay=0.1, lambda_lr_scale=5.0)
    listed = [name for group in groups for name in group["names"]]
    assert sorted(listed) == sorted(name for name, _ in model.named_parameters())
    for group in groups:
        for name, parameter in zip(group["names"], group["params"], strict=True):
            assert parameter is model.get_parameter(name)
            is_lambda = bool(ADDED & set(name.split("."))) and "value_tables" not in name
            kind = "lambdas" if is_lambda else "matrices" if parameter.dim() > 1 else "vectors"
            assert group["name"] == kind, name
            assert group["lr"] == (5.0 if is_lambda else 1.0)
            assert group["weight_decay"] == (0.1 if kind == "matrices" else 0.0)


def test_config_survives_json(any_case):
    config = any_case.config()
    again = ResFormerConfig.from_dict(json.loads(config.to_json_string(use_diff=False)))
    assert again.variant_options == config.variant_options
    assert again.variant_formula == config.variant_formula
    assert again.to_json_string() == config.to_json_string()


RELOAD = """
import sys, torch, resformer
from transformers import AutoModelForCausalLM
from pathlib import Path
folders = sorted(Path(sys.argv[1]).iterdir())
for folder in folders:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    saved = torch.load(folder / "expected.pt", weights_only=True)
    assert type(model).__name__ == "ResFormerForCausalLM"
    state = dict(model.state_dict(), **dict(model.named_buffers()))
    assert state.keys() == saved["state"].keys(), folder.name
    for key, value in saved["state"].items():
        assert torch.equal(state[key], value), (folder.name, key)
    with torch.no_grad():
        assert torch.equal(model(saved["ids"]).logits, saved["logits"]), folder.name
print("reloaded", len(folders))
"""


def test_saved_models_reload_to_the_same_bits_in_a_new_process(tmp_path):
    for number, case in enumerate(PARAMETERS):
        model, folder = case.make(), tmp_path / f"{number}"
        model.save_pretrained(folder)
        with torch.no_grad():
            state = dict(model.state_dict(), **dict(model.named_buffers()))
            torch.save({"state": state, "ids": ids(), "logits": model(ids()).logits}, folder / "expected.pt")
    done = subprocess.run([sys.executable, "-c", RELOAD, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[-1] == str(len(PARAMETERS))


@pytest.fixture(scope="module")
def plain_checkpoint(tmp_path_factory):
    """A Transformer's checkpoint, to be loaded into variants."""
    folder = tmp_path_factory.mktemp("plain")
    make("transformer", 2).save_pretrained(folder)
    return folder


def test_a_plain_checkpoint_leaves_added_parameters_at_their_start(parameter_case, plain_checkpoint):
    """What the checkpoint lacks is initialised by the variant's formula, not left as memory happened to be; in full
    precision also when the model is loaded in bf16.
    """
    torch.manual_seed(0)
    model = ResFormerForCausalLM.from_pretrained(
        plain_checkpoint, config=parameter_case.config(), dtype=torch.bfloat16, ignore_mismatched_sizes=True
    )
    plain = make("transformer", 2).state_dict()
    starts = REFERENCES[parameter_case.variant](model.config, {}).starts()
    for name, parameter in model.state_dict().items():
        if name in starts:
            assert starts_at(parameter.float(), starts[name]), name
        elif parameter.shape == plain[name].shape:
            assert torch.equal(parameter, plain[name].bfloat16()), name


def test_bf16_keeps_lambdas_in_fp32(parameter_case, tmp_path):
    """Token tables are embeddings and follow the model's dtype."""
    parameter_case.make().save_pretrained(tmp_path)
    model = ResFormerForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        is_lambda = bool(ADDED & set(name.split("."))) and "value_tables" not in name
        assert parameter.dtype == (torch.float32 if is_lambda else torch.bfloat16), name
    with torch.no_grad():
        logits, exact = model(ids()).logits, parameter_case.make()(ids()).logits
    assert logits.dtype == torch.bfloat16
    assert (logits - exact).abs().max() < 0.1 * exact.abs().max()


# Tracing a model takes five seconds: `make test` compiles those with something outside the blocks as well, and the
# blocks of every variant (below).
COMPILED = [
    pytest.param(name, marks=() if name in ("learnable_plus", "value_embeddings") else slow) for name in names()
]


@pytest.mark.parametrize("variant", COMPILED)
def test_compiles_without_graph_breaks(variant):
    """Two layers: one that sends and one that reads."""
    torch._dynamo.reset()
    model = make(variant, 2, num_hidden_layers=2).train()
    loss = torch.compile(model, fullgraph=True, backend="aot_eager")(
        input_ids=ids(), labels=ids(), use_cache=False
    ).loss
    loss.backward()
    got = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    eager = model(ids(), labels=ids()).loss
    eager.backward()
    assert torch.allclose(loss, eager, atol=1e-6)
    for name, parameter in model.named_parameters():
        assert torch.allclose(got[name], parameter.grad, rtol=1e-4, atol=1e-6), name


@slow
@pytest.mark.parametrize("name", ["transformer", "learnable_plus", "svformer"])
def test_inductor_gives_the_same_loss(name):
    torch._dynamo.reset()
    model = make(name, 2, num_hidden_layers=3).train()
    loss = torch.compile(model)(input_ids=ids(), labels=ids(), use_cache=False).loss
    assert torch.allclose(loss, model(ids(), labels=ids()).loss, atol=1e-5)
    loss.backward()


SHARED = [
    *(case for case in DEFAULTS if case.kv_heads == 2),
    Case("svformer", {"key_group": 2, "anchors": [1, 5]}),
    Case("cla", {"share": "k"}),
    Case("denseformer", {"period": 4}),
]


def kinds_of_blocks(model: ResFormerForCausalLM) -> int:
    """How many graphs the blocks need. Hidden states are averaged outside them and make no difference."""
    kinds = {
        (
            tuple((read.what, read.state) for read in row.received),
            row.owns_key,
            row.owns_value,
            row.owns_query,
            row.sends,
        )
        for row in model.model.plan
    }
    return len(kinds)


@pytest.mark.parametrize("shared_case", SHARED, ids=str)
def test_blocks_with_equal_rows_share_one_compiled_graph(shared_case):
    """Dynamo gives up on a code object after 8 variants and then runs it eagerly without a word; so layer numbers must
    not be guarded on. Where every layer reads another number of tensors there is nothing to share: four will do.
    """
    torch._dynamo.reset()
    model = shared_case.make(num_hidden_layers=10)
    if kinds_of_blocks(model) > 8:
        model = shared_case.make(num_hidden_layers=4)
    frames = []

    def backend(graph, inputs):
        frames.append(graph)
        return graph.forward

    for layer in model.train().model.layers:
        layer.compile(backend=backend, fullgraph=True)
    model(ids(), use_cache=False)
    assert 1 <= len(frames) <= kinds_of_blocks(model)
