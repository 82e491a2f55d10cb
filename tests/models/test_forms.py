"""Every host form with every variant: it learns, its cache changes nothing, its costs are the counted ones."""

from __future__ import annotations

import json

import pytest
import torch
from form_models import FORMS, ids, left_padded, make
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache

from resformer import ResFormerConfig, build_cache
from resformer.core.registry import build, names
from resformer.errors import UserError
from resformer.models.accounting import account, kv_bytes
from resformer.models.cache import cache_bytes
from resformer.models.compat import CACHE, enable_checkpointing

# Forms that make no sense with a variant, and the reason that is given.
REFUSED = {
    ("cross_attention", "sliding in part"): "both must see the same window",
    ("attention_residual", "sliding in part"): "both must see the same window",
}
PAIRS = [(variant, form) for variant in names() for form in FORMS if (variant, form) not in REFUSED]
# `make test` runs every variant in the form that has everything at once, and these in each form.
IN_EACH_FORM = {
    "transformer",
    "learnable_plus",
    "dense",
    "svformer",
    "cla",
    "neutreno",
    "skipv1",
    "denseformer",
    "gated",
}
pairs = pytest.mark.parametrize(
    ("variant", "form"),
    [
        pytest.param(v, f, marks=() if v in IN_EACH_FORM or f == "all at once" else pytest.mark.slow, id=f"{v}-{f}")
        for v, f in PAIRS
    ],
)


@pytest.mark.parametrize(("variant", "form"), REFUSED)
def test_what_makes_no_sense_is_refused(variant, form):
    with pytest.raises(UserError, match=REFUSED[variant, form]):
        make(variant, **FORMS[form])


@pairs
def test_every_parameter_learns_with_and_without_checkpointing(variant, form):
    """Two forwards before one backward as well: nothing is kept on the modules."""
    model = make(variant, num_hidden_layers=3, **FORMS[form]).train()
    x = ids()
    loss = model(x, labels=x).loss
    model(x.flip(0), labels=x)
    loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    alive = [name for name in gradients if "experts" not in name]  # an expert that nobody chose moves nothing
    assert all(gradients[name].abs().max() > 0 for name in alive)
    for reentrant in (False, True):
        model.zero_grad()
        enable_checkpointing(model, use_reentrant=reentrant)
        model(x, labels=x).loss.backward()
        for name, parameter in model.named_parameters():
            assert torch.allclose(parameter.grad, gradients[name], rtol=1e-5, atol=1e-7), name


@pairs
def test_cache_changes_nothing_left_padded_and_beyond_the_window(variant, form):
    model = make(variant, num_hidden_layers=3, **FORMS[form])
    x, mask = ids(2, 15), torch.ones(2, 15, dtype=torch.long)
    x[0, :4], mask[0, :4] = 0, 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        want = model(x, attention_mask=mask, position_ids=positions, use_cache=False).logits
        alone = model(x[:1, 4:], use_cache=False).logits
        assert (want[:1, 4:] - alone).abs().max() < 1e-4  # padding leaks nowhere
        for cache in (build_cache(model), build_cache(model, kind="static", max_length=15), DynamicCache()):
            got, done = [], 0
            for part in x.split((11, 1, 1, 2), dim=1):
                new = slice(done, done := done + part.shape[1])
                inputs = {"attention_mask": mask[:, :done], "position_ids": positions[:, new], CACHE: cache}
                got.append(model(part, **inputs).logits)
            assert (torch.cat(got, dim=1) - want)[mask.bool()].abs().max() < 1e-4, type(cache)


@pytest.mark.parametrize("form", ["gpt2", "experts", "all at once"])
@pytest.mark.parametrize("variant", ["learnable", "svformer", "skipv1"])
@pytest.mark.parametrize(
    "settings", [{}, {"num_beams": 3}, {"cache_implementation": "static"}], ids=["greedy", "beam3", "static"]
)
def test_generation_with_cache_equals_without(variant, form, settings):
    model = make(variant, num_hidden_layers=3, **FORMS[form])
    x, mask = left_padded()
    common = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    beams = {key: value for key, value in settings.items() if key == "num_beams"}
    with_cache = model.generate(x, **common, **settings)
    assert torch.equal(with_cache, model.generate(x, **common, **beams, use_cache=False))


@pairs
def test_account_equals_the_live_model(variant, form):
    """Parameters and FLOPs (within the window, where eager scores are not wider than it), and the cache's bytes."""
    model = make(variant, num_hidden_layers=3, **FORMS[form])
    costs = account(model.config, sequence_length=5)
    assert costs.parameters == model.num_parameters() == sum(costs.parameters_by_group.values())
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(ids(1, 5), use_cache=False)
    assert costs.flops_per_token * 5 == counter.get_total_flops()
    for tokens in (3, 20):
        cache = build_cache(model)
        with torch.no_grad():
            for part in ids(1, tokens).split((tokens - 2, 1, 1), dim=1):
                model(part, **{CACHE: cache})
        assert cache_bytes(cache) == kv_bytes(model.config, tokens)
        assert account(model.config, sequence_length=tokens).kv_bytes == kv_bytes(model.config, tokens)


@pairs
def test_config_survives_json_and_neutral_options_give_the_transformer(variant, form):
    model = make(variant, num_hidden_layers=3, **FORMS[form])
    again = ResFormerConfig.from_dict(json.loads(model.config.to_json_string(use_diff=False)))
    assert again.to_json_string() == model.config.to_json_string() and again.plan() == model.config.plan()
    neutral = build(variant, {}, model.config.shape()).neutral(model.config.shape())
    if neutral is not None:
        base = make("transformer", num_hidden_layers=3, **FORMS[form])
        same = make(variant, num_hidden_layers=3, **FORMS[form], variant_options=neutral)
        same.load_state_dict({**same.state_dict(), **base.state_dict()})
        for name, module in same.named_modules():
            if hasattr(module, "reset_parameters") and ("value_" in name or "depth_average" in name):
                module.reset_parameters()
        base.set_attn_implementation(same.config._attn_implementation)
        assert torch.equal(same(ids()).logits, base(ids()).logits)


@pytest.mark.parametrize(
    ("variant", "form"),
    [("learnable_plus", "all at once"), ("svformer", "sliding in part"), ("skipv1", "gpt2"), ("cla", "qk norm")],
)
def test_compiles_without_graph_breaks(variant, form):
    torch._dynamo.reset()
    model = make(variant, num_hidden_layers=3, **FORMS[form]).train()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    loss = compiled(input_ids=ids(), labels=ids(), use_cache=False).loss
    loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    want = model(ids(), labels=ids(), use_cache=False).loss
    assert torch.allclose(loss, want, atol=1e-6)
    want.backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, gradients[name], rtol=1e-4, atol=1e-6), name


def test_first_block_without_its_input():
    """H_1 = f_1(H_0): block 1's attention output stands alone, and the feed-forward half keeps its residual."""
    model = make("transformer", first_block_residual=False)
    first = model.model.layers[0]
    with torch.no_grad():
        states = model(ids(), output_hidden_states=True).hidden_states
        hidden = model.model.embed_tokens(ids())
        rotary = model.model.rotary_emb(hidden, torch.arange(12)[None])
        out = first.self_attn(first.input_layernorm(hidden), position_embeddings=rotary)[0]
        assert torch.allclose(states[1], out + first.mlp(first.post_attention_layernorm(out)), atol=1e-6)
    kept = make("transformer")
    kept.load_state_dict(model.state_dict())
    assert (kept(ids()).logits - model(ids()).logits).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm": "layernrom"}, "norm is 'layernrom'; did you mean 'layernorm'"),
        ({"mlp": "swiglu"}, "mlp is 'swiglu'.*gated or plain"),
        ({"position_embedding": "alibi"}, "position_embedding is 'alibi'.*rope or learned"),
        ({"hidden_act": "gelu_nwe"}, "hidden_act is 'gelu_nwe'; did you mean 'gelu_new'"),
        ({"sliding_window": 1}, "sliding_window is 1; expected at least 2"),
        ({"sliding_window": 8, "sliding_layers": [0, 2]}, "the model has layers 1 to 5"),
        ({"sliding_window": 8, "sliding_layers": [2, 2]}, "named twice"),
        ({"sliding_window": 8, "sliding_layers": "first"}, "expected 'all', 'none' or a list"),
        ({"sliding_layers": [1]}, "sliding_window is not set"),
        ({"layer_types": ["sliding_attention"] * 5}, "set sliding_window"),
        ({"num_experts": 1}, "expected at least 2"),
        ({"num_experts": 4, "num_experts_per_tok": 5}, "expected 1 to num_experts, 4"),
        ({"num_experts": 4, "mlp": "plain"}, "num_experts to 0"),
        ({"num_experts": 4, "mlp_bias": True}, "num_experts to 0"),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else "",
)
def test_wrong_fields_are_refused_in_one_line(changes, message):
    with pytest.raises(UserError, match=message) as caught:
        make("transformer", **changes)
    assert "\n" not in str(caught.value)


def test_too_long_for_learned_positions():
    with pytest.raises(UserError, match=r"position 65.*learned 64"):
        make("transformer", **FORMS["gpt2"])(torch.ones(1, 65, dtype=torch.long))
