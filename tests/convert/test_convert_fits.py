"""Fitted output projections of layers that share."""

from __future__ import annotations

import pytest
import torch
from convert_models import VOCAB, make
from torch import Tensor

from resformer.convert import fits, weights
from resformer.convert.checkpoint import in_memory
from resformer.errors import UserError
from resformer.models.configuration import ResFormerConfig

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
    fields = {k: v for k, v in source.config.to_dict().items() if k in ResFormerConfig.__dataclass_fields__}
    fields |= {"variant": variant, "variant_options": options, "variant_formula": None}
    model = weights.build(ResFormerConfig(**fields), source.state_dict())
    return source, model


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
    assert len(said) == 1 and float(said[0].removeprefix("layer 6: ").partition("%")[0]) > 95


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
def test_a_fit_touches_the_output_projections_of_layers_that_share_and_helps(variant, options, changed):
    source, model = pair(variant, **options)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    kept = {name: x.clone() for name, x in source.state_dict().items()}
    losses = fits.fit(source, model, text_ids(), say=lambda text: None)
    assert losses["fitted"] <= losses["naive"]
    assert abs(losses["fitted"] - fits.mean_loss(model, text_ids()[::8])) < 1e-6
    moved = {name for name, x in model.state_dict().items() if not torch.equal(x, before[name])}
    assert moved <= {f"model.layers.{layer - 1}.self_attn.o_proj.weight" for layer in changed}
    assert all(torch.equal(x, kept[name]) for name, x in source.state_dict().items())  # shared memory is left alone


def test_low_precision_weights_come_back_in_their_dtype():
    theirs = make("llama", **SHAPED).to(torch.bfloat16)
    source, model = pair("svformer", theirs, layers="last_third", gamma=True)
    fits.fit(source, model, text_ids(), say=lambda text: None)
    dtypes = {name: x.dtype for name, x in model.named_parameters()}
    assert dtypes["model.layers.5.self_attn.o_proj.weight"] == torch.bfloat16
    assert dtypes["model.layers.5.self_attn.value_residual.gamma"] == torch.float32


@pytest.mark.parametrize(("noise", "rows", "chosen"), [(0.0, 4000, 0.003), (4.0, 40, 0.3)])
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
    seen, solved, sums, solve = [], [], fits._sums, fits._solve

    def spy_sums(source, model, ids, layers, **more):
        seen.append(ids)
        return sums(source, model, ids, layers, **more)

    def spy_solve(fitted, check, start):
        solved.append(solve(fitted, check, start))
        return solved[-1]

    monkeypatch.setattr(fits, "_sums", spy_sums)
    monkeypatch.setattr(fits, "_solve", spy_solve)
    source, model = pair("svformer", layers="last_third")
    windows, said = text_ids(), []
    fits.fit(source, model, windows, say=said.append)
    used, held = seen
    assert torch.equal(held, windows[::8]) and len(used) + len(held) == len(windows)
    assert not (used[:, None] == held[None]).all(-1).any()
    assert [text.split()[2] for text in said[:2]] == [f"{1 - left:.1%}" for _, left in solved]


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
