"""What a probe finds equals naive references on whole tensors, ours and others', and it leaves the model alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from resformer import ResFormerConfig, ResFormerForCausalLM, measures
from resformer.analyze.capture import captured
from resformer.analyze.probe import GROUPS, Probe
from resformer.analyze.removal import losses, removal
from resformer.core.registry import names
from resformer.errors import UserError

SIZES: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
TOKENS = torch.randint(60, (2, 14), generator=torch.Generator().manual_seed(0))


def others() -> dict[str, Any]:
    gpt2 = GPT2Config(vocab_size=60, n_embd=32, n_layer=3, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0)
    return {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
        "gpt2": lambda: GPT2LMHeadModel(gpt2),
        "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(head_dim=8, sliding_window=5, **SIZES)),
        "mistral": lambda: MistralForCausalLM(MistralConfig(sliding_window=4, **SIZES)),
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(head_dim=8, **SIZES)),
    }


MODELS = [*others(), *names()]


def build(name: str) -> Any:
    torch.manual_seed(1)
    made = others()[name]() if name in others() else ResFormerForCausalLM(ResFormerConfig(variant=name, **SIZES))
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return made.eval()


def reference(model: Any, tokens: Tensor) -> Any:
    """The model's own eager attention and hidden states, all at once."""
    before = model.config._attn_implementation
    if before != "eager":
        model.set_attn_implementation("eager")
    with torch.no_grad():
        output = model(tokens, output_attentions=True, output_hidden_states=True, use_cache=False)
    if before != "eager":
        model.set_attn_implementation(before)
    return output


@pytest.mark.parametrize("name", MODELS)
def test_a_probe_equals_measures_of_whole_tensors(name: str) -> None:
    model = build(name)
    before = model.config._attn_implementation
    found = Probe(model, GROUPS)(TOKENS)
    assert model.config._attn_implementation == before
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    expected = reference(model, TOKENS)
    for n in (1, 2, 3):
        # Where attention is mixed, or goes to two sets of keys, what the model returns is not what it used.
        if name not in ("attention_residual", "cross_attention"):
            weights = expected.attentions[n - 1]
            assert torch.allclose(found["importance", n], measures.token_importance(weights), rtol=1e-5)
            entropy = measures.token_importance_entropy(weights)
            assert torch.allclose(found["importance_entropy", n], entropy, rtol=1e-5)
        hidden = expected.hidden_states[n] if n < 3 else None  # the last one is after the final norm
        if hidden is not None:
            assert torch.allclose(
                found["hidden_similarity", n], measures.token_similarity(hidden), rtol=1e-4, atol=1e-6
            )
            assert torch.allclose(found["hidden_norm", n], measures.state_norms(hidden), rtol=1e-5)
            spectrum = measures.spectrum(hidden, centred=True)
            assert torch.allclose(found["hidden_spectrum", n], spectrum, rtol=1e-4, atol=1e-5)
    normed = measures.token_similarity(expected.hidden_states[-1])
    assert torch.allclose(found["normed_hidden_similarity", 3], normed, rtol=1e-4, atol=1e-6)
    assert torch.allclose(found["hidden_norm", 0], measures.state_norms(expected.hidden_states[0]), rtol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_padding_and_the_cut_into_batches_change_nothing(name: str) -> None:
    model = build(name)
    groups = [group for group in GROUPS if group != "removal"]
    mask = torch.ones_like(TOKENS)
    mask[0, 9:] = 0
    both = Probe(model, groups)(TOKENS, mask)
    alone = [Probe(model, groups)(TOKENS[:1, :9]), Probe(model, groups)(TOKENS[1:])]
    for key, values in both.items():
        if key[0] == "own_value_layer_similarity":
            continue  # at other positions
        for b in range(2):
            a, c = values[b], alone[b][key][0]
            if a.dim():
                a, rest = a[: len(c)], a[len(c) :]
                assert float(rest.abs().sum()) < 1e-4 * float(c.abs().sum()), key
            assert torch.allclose(a, c, rtol=2e-4, atol=1e-5), key


@pytest.mark.parametrize("name", [m for m in MODELS if m not in ("attention_residual", "cross_attention")])
def test_padding_on_the_left_changes_nothing(name: str) -> None:
    model = build(name)
    tokens = torch.cat((torch.zeros(1, 5, dtype=torch.long), TOKENS[:1]), dim=1)
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    groups = ["attention", "values", "keys", "hidden", "spectra"]
    both, alone = Probe(model, groups)(tokens, mask), Probe(model, groups)(TOKENS[:1])
    for key, values in alone.items():
        found = both[key][:, 5:] if key[0] in ("importance", "value_norm", "hidden_norm") else both[key]
        found = found[:, : values.shape[1]] if values.dim() > 1 else found
        assert torch.allclose(found, values, rtol=2e-4, atol=1e-5), key


def test_values_are_those_that_attention_uses_and_the_share_of_v_1() -> None:
    for variant, options, share in (
        ("learnable", {"init_first": 0.0, "init_own": 1.0}, 0.0),
        ("constant", {"first": 2.0, "own": 0.0}, 1.0),
        ("svformer", {}, 1.0),
        ("identity", {}, None),
    ):
        torch.manual_seed(0)
        model = ResFormerForCausalLM(ResFormerConfig(variant=variant, variant_options=options, **SIZES)).eval()
        kept: list[Tensor] = []
        with captured(model) as look:
            look(lambda layer, kept=kept: kept.append(layer.value), input_ids=TOKENS)
        found = Probe(model, ["values"])(TOKENS)
        for n in (2, 3):
            if share is not None:
                assert found["read_value_share", n].tolist() == pytest.approx([share] * 2, abs=1e-6)
            else:
                assert ((found["read_value_share", n] > 0.2) & (found["read_value_share", n] < 0.8)).all()
            norms = measures.state_norms(kept[n - 1].transpose(1, 2))
            assert torch.allclose(found["value_norm", n], norms, rtol=1e-6)
        assert ("read_value_share", 1) not in found
        if variant == "svformer":
            assert torch.equal(kept[1], kept[0])


def test_the_weight_of_v_1_by_head_is_the_lambda_or_the_mean_gate() -> None:
    model = build("learnable")
    found, table = Probe(model, ["values"])(TOKENS), model.lambda_map()
    for layer, first in zip(table["layers"], table["first"], strict=True):
        assert found["read_weight_by_head", layer] == pytest.approx(torch.full((2, 2), first).numpy(), rel=1e-4)
        assert found["lambda_first", layer].tolist() == pytest.approx([first] * 2)
    gated = build("gated")
    weights = Probe(gated, ["values"])(TOKENS)["read_weight_by_head", 2]
    assert weights.shape == (2, 2) and float(weights.abs().max()) <= 1.0 and float(weights.std()) > 0


def test_own_values_are_compared_across_layers_before_mixing() -> None:
    model = build("learnable")
    seen: dict[int, Tensor] = {}
    handles = [
        layer.self_attn.v_proj.register_forward_hook(lambda m, i, o, n=n: seen.__setitem__(n, o))
        for n, layer in enumerate(model.model.layers)
    ]
    found = Probe(model, ["own_values"])(TOKENS)
    for handle in handles:
        handle.remove()
    for n in range(3):
        for m in range(3):
            expected = torch.cosine_similarity(seen[n].double(), seen[m].double(), dim=-1).mean(1)
            assert found["own_value_layer_similarity", n + 1][:, m].tolist() == pytest.approx(expected.tolist())


def test_cross_layer_attention_is_exact_where_it_should_be() -> None:
    """With equal weights in all layers and nothing added to the stream, keys and values of all layers are equal."""
    model = build("transformer")
    for layer in model.model.layers:
        layer.load_state_dict(model.model.layers[0].state_dict())
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    found = Probe(model, ["cross_layer"])(TOKENS)
    assert ("cross_layer_cosine_eq4", 1) not in found
    for n in (2, 3):
        assert found["cross_layer_cosine_eq4", n].tolist() == pytest.approx([1.0, 1.0], abs=1e-6)
        assert (found["cross_layer_cosine_eq6", n] < 0.999).all()


@pytest.mark.parametrize("name", ["mistral", "gemma2", "llama"])
def test_cross_layer_attention_has_the_layer_s_own_window_and_cap(name: str) -> None:
    model = build(name)
    layers: list[Any] = []
    with captured(model) as look:
        look(layers.append, input_ids=TOKENS)
    found = Probe(model, ["cross_layer"])(TOKENS)
    one, two = layers[:2]
    length = TOKENS.shape[1]
    allowed = torch.ones(length, length, dtype=torch.bool).tril()
    window = getattr(two.module, "sliding_window", None) or (4 if name == "mistral" else None)
    if window is not None:
        allowed &= ~torch.ones(length, length, dtype=torch.bool).tril(-window)
    cap = model.config.attn_logit_softcapping if name == "gemma2" else None
    outputs: dict[str, list[Tensor]] = {"all": [], "eq4": []}
    for h in range(4):
        scores = [two.query[:, h] @ layer.key[:, h // 2].transpose(1, 2) * two.module.scaling for layer in (one, two)]
        scores = [s if cap is None else cap * torch.tanh(s / cap) for s in scores]
        scores = [s.masked_fill(~allowed, -torch.inf) for s in scores]
        values = [layer.value[:, h // 2] for layer in (one, two)]
        outputs["all"].append(torch.cat(scores, -1).softmax(-1) @ torch.cat(values, 1))
        outputs["eq4"].append(scores[1].softmax(-1) @ (values[0] + values[1]) / 2)
    whole, part = (torch.cat(outputs[key], -1) for key in ("all", "eq4"))
    expected = torch.cosine_similarity(whole.double(), part.double(), dim=-1).mean(1)
    assert found["cross_layer_cosine_eq4", 2].tolist() == pytest.approx(expected.tolist(), rel=1e-4)


def test_fused_projections_are_no_own_values() -> None:
    config = Phi3Config(**{**SIZES, "pad_token_id": 0})
    found = Probe(Phi3ForCausalLM(config).eval(), ["own_values"])(TOKENS)
    assert found == {}


@pytest.mark.parametrize("name", ["llama", "gpt2", "learnable", "svformer", "denseformer"])
def test_removal_equals_zeroed_output_weights(name: str) -> None:
    model = build(name)
    found = removal(model, TOKENS)
    whole = losses(model, TOKENS)
    assert torch.equal(found["loss", 0], whole)
    blocks = model.transformer.h if name == "gpt2" else model.model.layers
    for n, block in enumerate(blocks, start=1):
        outputs = (
            {"attention": block.attn.c_proj, "mlp": block.mlp.c_proj}
            if name == "gpt2"
            else {"attention": block.self_attn.o_proj, "mlp": block.mlp.down_proj}
        )
        for part, last in outputs.items():
            kept = {k: v.clone() for k, v in last.state_dict().items()}
            for parameter in last.parameters():
                torch.nn.init.zeros_(parameter)
            expected = losses(model, TOKENS) - whole
            last.load_state_dict(kept)
            assert found[f"loss_without_{part}", n].tolist() == pytest.approx(expected.tolist(), abs=1e-6)


def test_what_cannot_be_seen_is_said() -> None:
    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = LlamaConfig(**SIZES)
            self.body = torch.nn.Linear(2, 2)

        def set_attn_implementation(self, name: str) -> None:
            pass

        def forward(self, **_: Any) -> None:
            return None

    with captured(Odd()) as look, pytest.raises(UserError, match="its attention cannot be seen"):
        look(lambda layer: None, input_ids=TOKENS)
    with pytest.raises(UserError, match="found no list of 3 layers"):
        Probe(Odd(), ["attention"])(TOKENS)
    with pytest.raises(ValueError, match="groups: got 'x'"):
        Probe(Odd(), ["x"])
