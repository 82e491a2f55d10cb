"""Host forms from a training configuration: keys, complaints, a run with experts and windows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from resformer.core.registry import names
from resformer.errors import UserError
from resformer.models import ResFormerForCausalLM
from resformer.parallel.wrap import compile_blocks
from resformer.recipes import recipe
from resformer.train.build import build_model, model_config
from resformer.train.config import Config
from resformer.train.configure import configure, edit, from_toml, nearest, to_toml
from resformer.train.loop import train
from resformer.train.loss import accumulate

FORM = {
    "model.first_block_residual": False,
    "model.qk_norm": True,
    "model.position_embedding": "learned",
    "model.norm": "layernorm",
    "model.layer_norm_eps": 1e-6,
    "model.hidden_act": "gelu",
    "model.sliding_window": 16,
    "model.sliding_layers": [1, 2],
    "model.num_experts": 3,
    "model.num_experts_per_tok": 1,
    "model.router_aux_loss_coef": 0.1,
}


def test_every_field_reaches_the_model_and_survives_toml(tmp_path: Path) -> None:
    config = edit(recipe("tiny"), FORM)
    described = model_config(config, vocab_size=50)
    for path, value in FORM.items():
        assert getattr(described, path.removeprefix("model.")) == value
    (tmp_path / "c.toml").write_text(to_toml(config))
    assert from_toml(tmp_path / "c.toml") == config
    plain = edit(recipe("tiny"), {"model.mlp": "plain"})
    assert model_config(plain, vocab_size=50).mlp == "plain"


def test_layers_from_the_command_line() -> None:
    def layers(text: str) -> object:
        overrides = ["model.sliding_window=16", f"model.sliding_layers={text}"]
        return configure(recipe("tiny"), overrides=overrides).model.sliding_layers

    assert layers("[2, 1]") == [2, 1] and layers("none") == "none" and layers("all") == "all"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.norm=layer"], "model.norm=layer: got 'layer', expected one of 'rmsnorm', 'layernorm'"),
        (["model.sliding_layers=first"], "got 'first', expected all, none or a list of layer numbers"),
        (["model.sliding_layers=[1, 'x']"], "expected all, none or a list of layer numbers"),
        (["model.sliding_layers=[1]"], "model.sliding_layers is [1], but sliding_window is not set; give its tokens"),
        (["model.sliding_window=1"], "got 1, expected at least 2"),
        (["model.sliding_window=8", "model.sliding_layers=[99]"], "model.sliding_layers is [99]; the model has layers"),
        (["model.num_experts=2", "model.num_experts_per_tok=3"], "expected 1 to num_experts, 2"),
        (["model.num_experts=2", "model.mlp=plain"], "model.experts are gated"),
        (["model.hidden_act=gelu_nwe"], "model.hidden_act is 'gelu_nwe'; did you mean 'gelu_new'?"),
        (["model.qk_nrom=true"], "did you mean model.qk_norm?"),
        (["model.window=8"], "did you mean model.sliding_window?"),
        (
            ["model.variant=cross_attention", "model.sliding_window=8", "model.sliding_layers=[1]"],
            "both must see the same window",
        ),
    ],
)
def test_mistakes_are_one_line(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        configure(recipe("tiny"), overrides=overrides)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_names_of_other_trainers() -> None:
    assert nearest("model.num_local_experts") == "model.num_experts"
    assert nearest("use_qk_norm") == "model.qk_norm"
    assert nearest("model.layer_types") == "model.sliding_layers"


def test_balance_moves_routers_but_is_not_in_the_loss() -> None:
    """Gradients are those of the loss of `ForCausalLM`, whatever the micro-batch where one batch is one."""
    torch.manual_seed(0)
    config = edit(recipe("tiny"), {"model.num_experts": 4, "model.router_aux_loss_coef": 0.5})
    model = ResFormerForCausalLM(model_config(config, vocab_size=50)).train()
    tokens = torch.randint(0, 50, (4, 17))
    loss = accumulate(model, tokens, micro_batch_size=4)
    ours = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    out = model(tokens[:, :-1])
    nll = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), tokens[:, 1:].flatten())
    assert loss.item() == pytest.approx(nll.item(), rel=1e-5)
    (nll + 0.5 * out.aux_loss).backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, ours[name], rtol=1e-4, atol=1e-6), name
    assert ours["model.layers.0.mlp.gate.weight"].abs().max() > 0


def test_a_run_with_experts_windows_and_learned_positions(config: Config, tmp_path: Path) -> None:
    result = train(edit(config, {**FORM, "train.steps": 3}), tmp_path / "run")
    assert result.final_validation["all"]["loss"] < 20
    described = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert described["layer_types"] == ["sliding_attention"] * 2
    model = ResFormerForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert model.config.num_experts == 3 and model.model.layers[1].mlp.experts.down_proj.shape[0] == 3


@pytest.mark.parametrize("variant", names())
def test_every_variant_trains_from_a_configuration_that_names_only_it(variant: str) -> None:
    """attention_residual among them, which runs with one attention implementation only."""
    config = edit(recipe("tiny"), {"model.variant": variant})
    model = build_model(config, model_config(config, vocab_size=50), torch.device("cpu"))
    assert torch.isfinite(accumulate(model, torch.randint(50, (2, 9)), micro_batch_size=1))
    assert model.config._attn_implementation == ("eager" if variant == "attention_residual" else "sdpa")


def test_compiled_blocks_of_as_many_kinds_as_layers_stay_compiled() -> None:
    """Past its limit Dynamo runs a block eagerly without a word."""
    config = edit(recipe("tiny"), {"model.variant": "dense", "model.num_hidden_layers": 12})
    model = build_model(config, model_config(config, vocab_size=50), torch.device("cpu"))
    with torch._dynamo.config.patch(recompile_limit=8):
        compile_blocks(model, backend=(backend := Counting()))
        model(torch.randint(50, (2, 8)), use_cache=False)
    assert backend.graphs == 12


class Counting:
    """A backend that runs graphs as they are and counts them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        self.graphs += 1
        return graph.forward
