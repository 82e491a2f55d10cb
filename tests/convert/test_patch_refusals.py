"""What cannot be patched is refused by name, with the way out."""

from __future__ import annotations

import copy
import re
from typing import Any

import patch_families as families
import pytest
import torch
import transformers
from torch import nn

import resformer
from resformer import ResFormerConfig, ResFormerForCausalLM, UserError
from resformer.convert.patch import lambda_names
from resformer.core import registry

SIZES = {"hidden_size": 16, "vocab_size": 31, "num_hidden_layers": 2}


def untouched(model: nn.Module) -> bool:
    hooked = any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    gained = any("value_residual" in name or "value_coefficients" in name for name, _ in model.named_modules())
    return not gained and not hooked and not hasattr(model.config, "resformer_patch")


@pytest.mark.parametrize(
    ("variant", "reason"),
    [
        ("svformer", "share queries, keys or values"),
        ("cla", "read the key of another layer|share queries, keys or values"),
        ("skipv1", "share queries, keys or values"),
        ("value_embeddings", "token tables"),
        ("denseformer", "averages the blocks' outputs"),
        ("hidden_residual", "averages the blocks' outputs"),
        ("query_residual", "the query of another layer"),
        ("key_residual", "the key of another layer"),
        ("attention_residual", "attention weights"),
        ("cross_attention", "the key of another layer"),
    ],
)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_variants_that_hooks_cannot_do(name: str, variant: str, reason: str) -> None:
    model = families.build(name)
    with pytest.raises(UserError, match=f"'{variant}' cannot be patched.*({reason})") as raised:
        resformer.patch(model, variant=variant)
    assert f"resformer convert MODEL --variant {variant}" in str(raised.value)
    assert untouched(model)


def test_every_registered_variant_is_patched_or_refused_by_name() -> None:
    refused = []
    for variant in registry.names():
        try:
            resformer.patch(families.build("llama"), variant=variant)
        except UserError as error:
            assert repr(variant) in str(error), error
            refused.append(variant)
    assert {"transformer", "svformer", "cla"} <= set(refused)
    assert not {"identity", "learnable", "learnable_plus", "dense", "gated", "rwkv", "neutreno"} & set(refused)


@pytest.mark.parametrize(
    ("variant", "options", "message"),
    [
        ("learnible", {}, "did you mean 'learnable'"),
        ("learnable", {"init_frist": 0.0}, "did you mean 'init_first'"),
        ("sparse", {"layers": "last:9"}, "the model has only 4 layers"),
        ("learnable", {"layers": [1]}, "layer 1 is the source"),
        ("identity", {"granularity": "head", "first": [0.1] * 3}, "a number or 2 of them"),
        ("transformer", {}, "nothing to patch"),
    ],
)
def test_bad_options_are_errors_before_anything_is_done(variant: str, options: dict[str, Any], message: str) -> None:
    model = families.build("llama")
    with pytest.raises(UserError, match=message):
        resformer.patch(model, variant=variant, variant_options=options)
    assert untouched(model)


def test_patching_twice_and_models_of_ours() -> None:
    model = resformer.patch(families.build("llama"), variant="identity")
    with pytest.raises(UserError, match=r"patched already \(variant 'identity'\).*resformer.unpatch"):
        resformer.patch(model, variant="learnable")
    for part in (model.model, model.model.layers[1], nn.Sequential(model)):
        with pytest.raises(UserError, match=r"patched already"):
            resformer.patch(part, variant="learnable")
    ours = ResFormerForCausalLM(ResFormerConfig(**SIZES, intermediate_size=16, num_attention_heads=2))
    with pytest.raises(UserError, match=r"is a model of ours.*ResFormerConfig"):
        resformer.patch(ours, variant="learnable")
    with pytest.raises(UserError, match="got str"):
        resformer.patch("meta-llama/Llama-3.2-1B", variant="learnable")  # type: ignore[type-var]


def test_architectures_without_known_attention() -> None:
    bert = transformers.BertModel(transformers.BertConfig(**SIZES, num_attention_heads=2, intermediate_size=16))
    with pytest.raises(UserError, match=r"BertModel: found no list of blocks.*BertSelfAttention"):
        resformer.patch(bert, variant="learnable")
    mamba = transformers.MambaForCausalLM(transformers.MambaConfig(**SIZES))
    with pytest.raises(UserError, match="MambaForCausalLM: found no list of blocks"):
        resformer.patch(mamba, variant="learnable")


def test_several_stacks_and_cross_attention() -> None:
    sides = ("encoder", "decoder")
    heads = {f"{side}_{what}": 2 for side in sides for what in ("layers", "attention_heads")}
    ffn = {f"{side}_ffn_dim": 16 for side in sides}
    bart = transformers.BartModel(transformers.BartConfig(vocab_size=31, d_model=16, **heads, **ffn))
    with pytest.raises(
        UserError, match=r"several lists of blocks, below 'encoder', 'decoder'; patch the one.*'decoder'"
    ):
        resformer.patch(bart, variant="learnable")
    with pytest.raises(UserError, match=r"several attentions \(layers.0.self_attn, layers.0.encoder_attn\)"):
        resformer.patch(bart.decoder, variant="learnable")
    gpt2 = transformers.GPT2Config(vocab_size=31, n_embd=16, n_layer=2, n_head=2, add_cross_attention=True)
    with pytest.raises(UserError, match="crossattention"):
        resformer.patch(transformers.GPT2LMHeadModel(gpt2), variant="learnable")


class NormedValues(transformers.models.llama.modeling_llama.LlamaAttention):
    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.v_norm = nn.LayerNorm(self.head_dim)


def test_attention_that_does_more_to_its_values() -> None:
    model = families.build("llama")
    model.model.layers[2].self_attn = NormedValues(model.config, 2)
    with pytest.raises(UserError, match=r"NormedValues \(model.layers.2.self_attn\) does more to its values.*v_norm"):
        resformer.patch(model, variant="learnable")
    assert untouched(model)


class GatedOutput(transformers.models.llama.modeling_llama.LlamaAttention):
    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.g_proj = nn.Linear(config.hidden_size, config.hidden_size)


def test_a_correction_needs_to_know_where_attention_ends() -> None:
    model = families.build("llama")
    model.model.layers[2].self_attn = GatedOutput(model.config, 2)
    with pytest.raises(UserError, match=r"'neutreno' changes attention's output.*GatedOutput \(model.layers.2"):
        resformer.patch(model, variant="neutreno")
    assert untouched(model)
    resformer.patch(model, variant="learnable")  # which only mixes values


def test_an_architecture_that_drops_what_it_does_not_know_is_found_out() -> None:
    sizes = {**SIZES, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = transformers.StableLmForCausalLM(transformers.StableLmConfig(**sizes))
    resformer.patch(model, variant="learnable")
    with pytest.raises(UserError, match=r"did not reach attention of layer 1.*StableLmAttention.*cannot be patched"):
        model(torch.zeros(1, 3, dtype=torch.long))

    class Closed(nn.Module):
        def __init__(self, layers: nn.ModuleList) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden

    with pytest.raises(UserError, match=r"Closed \(the model\) takes no keyword arguments"):
        resformer.patch(Closed(families.build("llama").model.layers), variant="learnable")


def test_values_that_are_changed_in_place_are_not_raw() -> None:
    sizes = {**SIZES, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = transformers.OlmoForCausalLM(transformers.OlmoConfig(**sizes, clip_qkv=1e-3))
    resformer.patch(model, variant="learnable")
    with pytest.raises(UserError, match="value of layer 1 was changed in place"):
        model(torch.zeros(1, 3, dtype=torch.long))


class Sharing(transformers.models.llama.modeling_llama.LlamaAttention):
    """A layer that takes its values from elsewhere, as with shared KV."""

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> Any:
        return self.o_proj(hidden_states), None


def test_attention_that_does_not_use_its_projection_is_found_out() -> None:
    model = families.build("llama")
    model.model.layers[2].self_attn = Sharing(model.config, 2)
    resformer.patch(model, variant="learnable")
    with pytest.raises(UserError, match=r"layer 3 \(model.layers.2.self_attn\) did not use its v_proj"):
        families.logits(model, families.inputs(model))


def test_layers_that_run_twice_or_out_of_order_are_found_out() -> None:
    model = families.build("llama")
    model.model.layers = nn.ModuleList([model.model.layers[0], *model.model.layers[:3]])
    resformer.patch(model, variant="learnable")
    with pytest.raises(UserError, match=r"layer . (ran twice|has not run)"):
        families.logits(model, families.inputs(model))


def uneven(*kv_heads: int) -> Any:
    """A Llama whose layers have different numbers of KV heads, as networks after pruning have."""
    torch.manual_seed(0)
    model = families.llama().eval()
    for index, count in enumerate(kv_heads):
        config = copy.deepcopy(model.config)
        config.num_key_value_heads = count
        layer = transformers.models.llama.modeling_llama.LlamaAttention(config, index)
        model.model.layers[index].self_attn = layer
    return model


def test_v_1_is_that_of_the_first_layer_of_the_same_shape() -> None:
    model, given = uneven(4, 2, 4, 2), families.inputs(families.llama())
    with pytest.raises(UserError) as raised:
        resformer.patch(model, variant="learnable")
    message = str(raised.value)
    assert "layer 2 (model.layers.1.self_attn, 2 heads of 8) cannot read layer 1" in message
    assert "(model.layers.0.self_attn, 4 heads of 8)" in message
    assert re.search(r"variant_options=\{'layers': \[3, 4\]\}", message)
    assert untouched(model)

    values: dict[int, torch.Tensor] = {}
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.v_proj.register_forward_hook(lambda m, a, out, index=index: values.setdefault(index, out))
    resformer.patch(model, variant="sparse", variant_options={"layers": [3, 4], "first": 1.0, "own": 0.0})
    mixed: dict[int, torch.Tensor] = {}
    for index, layer in enumerate(model.model.layers):  # after ours
        layer.self_attn.v_proj.register_forward_hook(lambda m, a, out, index=index: mixed.setdefault(index, out))
    families.logits(model, given)
    assert torch.equal(mixed[2], values[0])
    assert torch.equal(mixed[3], values[1])

    families.checkpointing(model.train())
    families.loss(model, given).backward()


def test_shapes_without_a_partner_are_named() -> None:
    for variant in ("dense", "learnable"):
        with pytest.raises(UserError, match=r"layer 3 \(model.layers.2.self_attn, 1 heads of 8\)"):
            resformer.patch(uneven(2, 2, 1, 2), variant=variant)
    with pytest.raises(UserError, match=r"layers differ.*layer 3.*'layers': \[2\]"):
        resformer.patch(uneven(2, 2, 1, 2), variant="learnable", variant_options={"source": "previous"})
    with pytest.raises(UserError, match=r"shared parameters.*granularity 'scalar'"):
        options = {"layers": [3, 4], "granularity": "head"}
        resformer.patch(uneven(4, 2, 4, 2), variant="learnable_plus", variant_options=options)
    resformer.patch(uneven(4, 2, 4, 2), variant="learnable_plus", variant_options={"layers": [3, 4]})
    options = {"layers": [3, 4], "granularity": "head"}
    model = resformer.patch(uneven(4, 2, 2, 2), variant="learnable_plus", variant_options=options)
    assert model.model.value_coefficients.logits.shape == (2, 2, 1)
    families.logits(model, families.inputs(model))
    with pytest.raises(UserError, match=r"first is a list of 4 numbers.*2 of them"):
        options = {"layers": [3, 4], "granularity": "head", "first": [0.5] * 4}
        resformer.patch(uneven(4, 2, 4, 2), variant="identity", variant_options=options)


def test_layers_without_attention_are_left_out_of_the_count() -> None:
    kinds = ["conv", "full_attention", "conv", "full_attention", "full_attention"]
    config = transformers.Lfm2Config(**{**families.DECODER, "num_hidden_layers": 5}, layer_types=kinds)
    torch.manual_seed(0)
    model = resformer.patch(transformers.Lfm2ForCausalLM(config).eval(), variant="learnable")
    assert {name.partition(".self_attn")[0] for name in lambda_names(model)} == {"model.layers.3", "model.layers.4"}
    ids = torch.randint(3, families.VOCAB, (1, 6))
    with torch.no_grad():
        ask = {"do_sample": False, "max_new_tokens": 4, "min_new_tokens": 4}
        assert torch.equal(model.generate(ids, **ask), model.generate(ids, **ask, use_cache=False))
