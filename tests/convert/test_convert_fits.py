"""Fitted projections of layers that share."""

from __future__ import annotations

import re

import pytest
import torch
from convert_models import VOCAB, make
from torch import Tensor

from resformer.convert import fits, weights
from resformer.convert.checkpoint import in_memory
from resformer.convert.course import Course
from resformer.convert.start import whole
from resformer.errors import UserError
from resformer.models.configuration import ResFormerConfig
from resformer.models.modeling import ResFormerForCausalLM

SHAPED = {
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 32,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}


def text_ids(rows: int = 64, length: int = 32) -> Tensor:
    return torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def spoken_by(model, rows: int = 64, length: int = 32) -> Tensor:
    """Text that the model itself predicts best."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, VOCAB, (rows, 1), generator=generator)
    while ids.shape[1] < length:
        chances = model(ids, use_cache=False).logits[:, -1].softmax(-1)
        ids = torch.cat((ids, torch.multinomial(chances, 1, generator=generator)), dim=1)
    return ids


def pair(variant: str, theirs=None, **options):
    """The source in our host, and the new model with the source's weights."""
    theirs = make("llama", **SHAPED) if theirs is None else theirs
    source = in_memory(theirs, variant="transformer")
    config = ResFormerConfig(**{**plain_fields(source), "variant": variant, "variant_options": options})
    return source, weights.build(config, source.state_dict())


def plain_fields(source) -> dict:
    fields = {k: v for k, v in source.config.to_dict().items() if k in ResFormerConfig.__dataclass_fields__}
    return fields | {"variant_formula": None}


def test_values_that_are_linear_maps_of_the_first_are_found_exactly():
    """The stream stays at the embeddings up to the last layer, and its W_v is a map of layer 1's for each KV head."""
    theirs = make("llama", **{**SHAPED, "attention_bias": False, "mlp_bias": False})
    generator = torch.Generator().manual_seed(4)
    maps = torch.randn(2, 8, 8, generator=generator)
    with torch.no_grad():
        layers = theirs.model.layers
        for layer in layers[:-1]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        layers[-1].input_layernorm.weight.copy_(layers[0].input_layernorm.weight)
        first = layers[0].self_attn.v_proj.weight.view(2, 8, -1)
        layers[-1].self_attn.v_proj.weight.copy_((maps @ first).flatten(0, 1))
    source, model = pair("svformer", theirs, layers=[6])
    said: list[str] = []
    losses = fits.fit(source, model, spoken_by(theirs), say=said.append)
    assert losses["naive"] - losses["source"] > 1e-3
    # What is left is the ridge's doing.
    assert abs(losses["fitted"] - losses["source"]) < 0.05 * (losses["naive"] - losses["source"])
    assert len(said) == 1
    assert float(said[0].removeprefix("layer 6: attention gives ").partition("%")[0]) > 95


@pytest.mark.parametrize(
    ("variant", "options", "changed"),
    [
        ("svformer", {"layers": "last_third"}, (5, 6)),
        ("svformer", {"layers": [3, 4, 6], "anchors": (1, 5), "gamma": True}, (3, 4, 6)),
        ("skipv1", {"layers": "last_third"}, (5, 6)),
        ("cla", {}, (2, 4, 6)),
        ("cla", {"share": "k", "group": 3}, (2, 3, 5, 6)),
        ("cla", {"share": "q"}, (2, 4, 6)),
    ],
)
def test_a_fit_touches_projections_of_layers_that_share_and_helps(variant, options, changed):
    source, model = pair(variant, **options)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    kept = {name: x.clone() for name, x in source.state_dict().items()}
    ids = spoken_by(source, rows=192)
    losses = fits.fit(source, model, ids, say=lambda text: None)
    assert losses["fitted"] < losses["naive"]
    assert abs(losses["fitted"] - fits.mean_loss(model, ids[::8])) < 1e-6
    moved = {name for name, x in model.state_dict().items() if not torch.equal(x, before[name])}
    fitted = ("self_attn.o_proj", "mlp.down_proj")
    assert moved == {f"model.layers.{layer - 1}.{name}.weight" for layer in changed for name in fitted}
    assert all(torch.equal(x, kept[name]) for name, x in source.state_dict().items())  # shared memory is left alone


def test_low_precision_weights_come_back_in_their_dtype():
    theirs = make("llama", **SHAPED).to(torch.bfloat16)
    source, model = pair("svformer", theirs, layers="last_third", gamma=True)
    fits.fit(source, model, text_ids(), say=lambda text: None)
    dtypes = {name: x.dtype for name, x in model.named_parameters()}
    assert dtypes["model.layers.5.self_attn.o_proj.weight"] == torch.bfloat16
    assert dtypes["model.layers.5.self_attn.value_residual.gamma"] == torch.float32


@pytest.mark.parametrize(("noise", "rows", "chosen"), [(0.0, 4000, 0.003), (4.0, 40, 1.0)])
def test_the_ridge_is_the_one_that_held_out_text_wants(noise, rows, chosen):
    """Little and noisy text: close to the source's weights. Much and clean text: close to what it says."""
    generator = torch.Generator().manual_seed(5)
    truth, start = torch.randn(12, 7, generator=generator).double(), torch.randn(7, 12, generator=generator)
    truth = truth if noise == 0 else start.double().T + 0.1 * truth

    def sums(rows):
        x = torch.randn(rows, 12, generator=generator).double()
        y = x @ truth + noise * torch.randn(rows, 7, generator=generator).double()
        return x.T @ x, x.T @ y, float(y.square().sum())

    seen, held = sums(rows), sums(500)
    xx, xy, _ = seen
    found, left = fits._solve(seen, held, start)
    losses = {}
    for ridge in fits.RIDGES:
        eye = ridge * xx.diagonal().mean() * torch.eye(12).double()
        W_IC = torch.linalg.solve(xx + eye, xy + eye @ start.double().T)
        losses[ridge] = fits._left(W_IC, held)
        if ridge == chosen:
            assert torch.allclose(found, W_IC.T.float(), atol=1e-5)
    assert min(losses, key=losses.__getitem__) == chosen
    assert left == pytest.approx(losses[chosen], abs=1e-6) and found.shape == (7, 12) and found.is_contiguous()


def test_the_ridge_is_chosen_on_windows_that_are_not_fitted_to(monkeypatch):
    seen, solved, course, solve = [], [], fits.Course.of, fits._solve

    def spy_course(model, ids):
        seen.append(ids)
        return course(model, ids)

    def spy_solve(fitted, check, start):
        solved.append(solve(fitted, check, start))
        return solved[-1]

    monkeypatch.setattr(fits.Course, "of", spy_course)
    monkeypatch.setattr(fits, "_solve", spy_solve)
    source, model = pair("svformer", layers="last_third")
    windows, said = text_ids(), []
    fits.fit(source, model, windows, say=said.append)
    used, held = seen
    assert torch.equal(held, windows[::8]) and len(used) + len(held) == len(windows)
    assert not (used[:, None] == held[None]).all(-1).any()
    told = [share for text in said[:2] for share in re.findall(r"[-0-9.]+%", text)]
    assert told == [f"{1 - left:.1%}" for _, left in solved] and len(told) == 4


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "variant", "options"),
    [
        ("llama", "svformer", {"layers": [3, 5], "anchors": [1, 4]}),
        ("olmo2", "svformer", {"layers": [3, 5], "anchors": [1, 4]}),
        ("llama", "skipv1", {"layers": [4, 5]}),
        ("llama", "cla", {"group": 3}),
        ("llama", "cla", {"share": "q"}),
    ],
)
def test_projections_are_fitted_to_what_the_stream_lacks(family, variant, options, monkeypatch):
    """Layer after layer, against whole forward passes: to the source's stream where that says what is lacking, to what
    its projections give where norms stand behind them.
    """
    shaped = {key: value for key, value in SHAPED.items() if family == "llama" or key != "head_dim"}
    theirs = make(family, **shaped)
    source, model = pair(variant, theirs, **options)
    kept = {name: x.clone() for name, x in model.state_dict().items()}
    solve, solved = fits._solve, []

    def spy(used, held, start):
        weight, left = solve(used, held, start)
        solved.append((used, weight.clone()))
        return weight, left

    monkeypatch.setattr(fits, "_solve", spy)
    ids, said = text_ids(), []
    fits.fit(source, model, ids, say=said.append)
    assert ("what the source's does" in said[0], "what the stream lacks" in said[0]) == (
        family == "olmo2",
        family != "olmo2",
    )

    used = ids[torch.arange(len(ids)) % 8 != 0]
    model.load_state_dict(kept)
    sharing = [row.layer - 1 for row in model.config.plan() if not whole(row)]
    places = [f"model.layers.{n}.{name}" for n in sharing for name in ("self_attn.o_proj", "mlp.down_proj")]
    for place, (found, weight) in zip(places, solved, strict=True):
        block = place.rpartition(".layers.")[0] + ".layers." + place.split(".")[2]
        ours, theirs_ = watch(model, used, block, place), watch(source, used, block, place)
        x, made = ours["given"], ours["made"]
        if family == "olmo2":
            y = theirs_["made"]
        elif "self_attn" in place:
            y = theirs_["block_in"] + theirs_["made"] - ours["block_in"]
        else:
            y = theirs_["block_out"] - (ours["block_out"] - made)
        bias = model.get_submodule(place).bias
        y = y if bias is None else y - bias
        assert torch.allclose(found[0], (x.mT @ x).double(), rtol=1e-4, atol=1e-4 * float(found[0].abs().max()))
        assert torch.allclose(found[1], (x.mT @ y).double(), rtol=1e-4, atol=1e-4 * float(found[1].abs().max()))
        assert found[2] == pytest.approx(float(y.double().square().sum()), rel=1e-4)
        model.get_submodule(place).weight = torch.nn.Parameter(weight)  # the next one sees it; no one else's memory


def watch(model, ids: Tensor, block: str, projection: str) -> dict[str, Tensor]:
    seen: dict[str, Tensor] = {}

    def into(name):
        def hook(_module, args, output):
            given, made = (args[0], output[0] if isinstance(output, tuple) else output)
            for key, tensor in ((f"{name}given", given), (f"{name}made", made)):
                seen[key] = tensor.flatten(0, -2)

        return hook

    handles = [
        model.get_submodule(block).register_forward_hook(into("block_")),
        model.get_submodule(projection).register_forward_hook(into("")),
    ]
    model(ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return {"block_in": seen["block_given"], "block_out": seen["block_made"], **seen}


def host(**fields) -> ResFormerForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
    return ResFormerForCausalLM(ResFormerConfig(**{**sizes, **heads, "variant": "transformer", **fields})).eval()


@torch.no_grad()
@pytest.mark.parametrize(
    "fields",
    [
        {"sliding_window": 5, "sliding_layers": [2, 3, 5]},
        {"sliding_window": 5, "sliding_layers": [1], "nope_layers": [2, 6]},
        {"position_embedding": "learned", "norm": "layernorm", "mlp": "plain"},
        {"num_experts": 4},
        {"norm_placement": "post", "qk_norm": True},
        {"variant": "svformer", "variant_options": {"layers": [2, 5, 6], "anchors": [1, 4], "gamma": True}},
        {"variant": "skipv1"},
        {"variant": "cla", "variant_options": {"share": "kv", "group": 3}, "sliding_window": 5},
        {"variant": "cla", "variant_options": {"share": "q"}},
        {"variant": "dense"},
    ],
    ids=str,
)
def test_a_course_is_the_models_own_forward_pass(fields):
    model, ids = host(**fields), text_ids(rows=6)  # a batch of four and one of two
    expected: list[Tensor] = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda _m, _a, output: expected.append(output[0]))
    model(ids, use_cache=False)
    whole_pass = list(expected)
    course = Course.of(model, ids)
    assert [len(stream) for stream in course.streams] == [4, 2]
    for index, wanted in enumerate(whole_pass):
        for part in range(len(course)):
            course.step(index, part)
        assert torch.allclose(torch.cat(course.streams), wanted, atol=1e-5, rtol=1e-5), f"layer {index + 1}"


def test_a_course_refuses_what_goes_around_the_blocks():
    for variant in ("denseformer", "value_embeddings"):
        with pytest.raises(UserError, match="token tables or averages over depth"):
            Course.of(host(variant=variant), text_ids(rows=1))


@torch.no_grad()
@pytest.mark.parametrize("experts", [0, 4])
def test_the_mean_loss_is_that_of_tokens_alone(experts):
    """Five windows go in batches of four and one, and experts add nothing."""
    model, ids = host(num_experts=experts), text_ids(rows=5)
    logits = model(ids, use_cache=False).logits[:, :-1].double()
    picked = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])
    assert fits.mean_loss(model, ids) == pytest.approx(-float(picked.mean()), abs=1e-5)


def test_a_fit_that_hurts_is_not_taken(monkeypatch):
    monkeypatch.setattr(fits, "_solve", lambda used, held, start: (30 * torch.randn_like(start), 1.0))
    source, model = pair("svformer", layers="last_third")
    before = {name: x.clone() for name, x in model.state_dict().items()}
    said: list[str] = []
    losses = fits.fit(source, model, spoken_by(source), say=said.append)
    assert said[-1].startswith("the fit does not lower the held-out loss and is left out")
    assert losses["fitted"] == losses["naive"] > losses["source"]
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


@torch.no_grad()
def test_experts_keep_their_down_projections():
    source = host(num_experts=4)
    config = ResFormerConfig(**{**plain_fields(source), "variant": "svformer", "variant_options": {"layers": [5, 6]}})
    model = weights.build(config, source.state_dict())
    before = {name: x.clone() for name, x in model.state_dict().items()}
    losses = fits.fit(source, model, spoken_by(source, rows=192), say=lambda text: None)
    assert losses["fitted"] < losses["naive"]
    moved = {name for name, x in model.state_dict().items() if not torch.equal(x, before[name])}
    assert moved == {f"model.layers.{index}.self_attn.o_proj.weight" for index in (4, 5)}


class Words:
    """A tokenizer of words that are numbers."""

    def __call__(self, text, verbose=True):
        return type("Encoding", (), {"input_ids": [int(word) for word in text.split()]})()


def test_windows_are_cut_from_joined_texts():
    config = ResFormerConfig(variant="transformer", vocab_size=100, max_position_embeddings=4, hidden_size=64)
    texts = ("1 2 3", "4 5 " * 50, "6 7 " * 1000)
    found = fits.windows(iter(texts), Words(), tokens=100, limit=config)
    assert found.shape == (25, 4) and found[0].tolist() == [1, 2, 3, 4]
    with pytest.raises(UserError, match=r"has 3 tokens; expected at least 64"):
        fits.windows(("1 2 3",), Words(), tokens=100, limit=config)
    with pytest.raises(UserError, match="has an id 100, but the model 100 of them"):
        fits.windows(("100 " * 100,), Words(), tokens=100, limit=config)
    with pytest.raises(UserError, match="needs the tokenizer"):
        fits.windows(("1 2 3",), None, tokens=100, limit=config)
