"""Each measure against a naive loop, known answers, and that padding changes nothing."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from resformer import measures
from resformer.measures.layers import causal_bias


def attention(batch: int, heads: int, length: int, seed: int = 0) -> Tensor:
    scores = 3 * torch.randn(batch, heads, length, length, generator=torch.Generator().manual_seed(seed))
    return (scores + causal_bias(length, scores)).softmax(-1)


def states(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) + 0.3


def naive_importance(weights: Tensor) -> list[float]:
    heads, length, _ = weights.shape
    a = [sum(float(weights[h, i, j]) for h in range(heads) for i in range(length)) / length for j in range(length)]
    return [x / sum(a) for x in a]


def test_importance_entropy_and_shares_equal_a_loop() -> None:
    weights = attention(3, 2, 9)
    found = measures.token_importance(weights)
    entropy = measures.token_importance_entropy(weights)
    for b in range(3):
        a = naive_importance(weights[b])
        assert found[b].tolist() == pytest.approx(a, rel=1e-6)
        assert float(entropy[b]) == pytest.approx(-sum(x * math.log(x) for x in a), rel=1e-6)
        assert float(measures.first_token_share(found)[b]) == pytest.approx(a[0], rel=1e-6)
        for top, count in ((1, 1), (3, 3), (20, 9), (0.01, 1), (0.5, 4)):
            expected = sum(sorted(a, reverse=True)[:count])
            assert float(measures.top_share(found, top)[b]) == pytest.approx(expected, rel=1e-6)
    assert torch.equal(found, measures.token_importance(weights.double().mean(1)))


@pytest.mark.parametrize("length", [16, 500, 2048])
def test_known_entropies(length: int) -> None:
    uniform = torch.ones(1, length, length).tril() / torch.arange(1, length + 1)[None, :, None]
    entropy = float(measures.token_importance_entropy(uniform))
    harmonic = [sum(1 / i for i in range(j, length + 1)) / length for j in range(1, length + 1)]
    assert entropy == pytest.approx(-sum(a * math.log(a) for a in harmonic), rel=1e-6)
    if length == 2048:
        assert entropy == pytest.approx(7.2025, abs=5e-5)
        assert entropy == pytest.approx(math.log(length) - 0.42, abs=3e-3)
    assert float(measures.token_importance_entropy(torch.eye(length)[None])) == pytest.approx(math.log(length))
    sink = torch.zeros(1, length, length)
    sink[:, :, 0] = 1
    assert float(measures.token_importance_entropy(sink)) == 0.0


@pytest.mark.parametrize("heads", ["concatenated", "averaged"])
def test_similarity_and_norms_equal_a_loop(heads: str) -> None:
    x = states(2, 7, 3, 5)
    x[0, 2] = 0
    for b in range(2):
        rows = [x[b, t].flatten() if heads == "concatenated" else x[b, t].mean(0) for t in range(7)]
        pairs = [torch.cosine_similarity(rows[i], rows[j], dim=0) for i in range(7) for j in range(7) if i != j]
        assert float(measures.token_similarity(x, heads=heads)[b]) == pytest.approx(
            float(torch.stack(pairs).mean()), rel=1e-5
        )
        norms = [float(row.norm()) for row in rows]
        assert measures.state_norms(x, heads)[b].tolist() == pytest.approx(norms, rel=1e-6)
        ratio = norms[0] / (sum(norms[1:]) / 6)
        assert float(measures.first_token_ratio(measures.state_norms(x, heads))[b]) == pytest.approx(ratio, rel=1e-6)


def test_known_similarities() -> None:
    assert float(measures.token_similarity(torch.ones(1, 5, 4))) == pytest.approx(1.0)
    assert float(measures.token_similarity(torch.eye(6)[None])) == pytest.approx(0.0, abs=1e-12)
    assert float(measures.token_similarity(torch.tensor([[[1.0], [-1.0]]]))) == pytest.approx(-1.0)
    assert math.isnan(float(measures.token_similarity(torch.ones(1, 1, 4))))


@pytest.mark.parametrize(("length", "width"), [(6, 9), (9, 6)])
@pytest.mark.parametrize("centred", [False, True])
def test_spectrum_equals_the_matrix_s(length: int, width: int, centred: bool) -> None:
    x = states(2, length, width)
    found = measures.spectrum(x, centred=centred)
    assert found.shape == (2, min(length, width))
    for b in range(2):
        rows = x[b].double().numpy()
        if centred:
            rows = rows - rows.mean(0)
        matrix = torch.tensor(sum(rows[i][:, None] * rows[i][None, :] for i in range(length)) / length)
        expected = torch.linalg.eigvalsh(matrix).flip(0)[: min(length, width)].clamp_min(0)
        assert found[b].tolist() == pytest.approx(expected.tolist(), rel=1e-6, abs=1e-9)


def test_known_spectra() -> None:
    one = torch.arange(1.0, 9.0)[None, :, None] * torch.tensor([3.0, 4.0])[None, None]
    eigenvalues = measures.spectrum(one)
    assert eigenvalues[0].tolist() == pytest.approx([25 * sum(i * i for i in range(1, 9)) / 8, 0.0], abs=1e-9)
    assert float(measures.effective_rank(eigenvalues)) == pytest.approx(1.0)
    assert int(measures.components_for(eigenvalues, 0.99)) == 1
    equal = measures.spectrum(torch.eye(5)[None])
    assert float(measures.effective_rank(equal)) == pytest.approx(5.0)
    assert [int(measures.components_for(equal, s)) for s in (0.2, 0.21, 0.8, 1.0)] == [1, 2, 4, 5]
    assert float(measures.spectrum(torch.ones(1, 5, 3), centred=True).abs().max()) < 1e-12


def test_layer_similarity_equals_a_loop() -> None:
    x = states(3, 2, 4, 5)
    found = measures.layer_similarity(x)
    for b in range(2):
        for n in range(3):
            for m in range(3):
                expected = torch.cosine_similarity(x[n, b], x[m, b], dim=-1).mean()
                assert float(found[b, n, m]) == pytest.approx(float(expected), rel=1e-5)


def padded(x: Tensor, left: int, right: int, *, dims: tuple[int, ...]) -> Tensor:
    """`x` with rubbish around it along `dims`."""
    shape = list(x.shape)
    for dim in dims:
        shape[dim] += left + right
    whole = 7 * torch.randn(shape, generator=torch.Generator().manual_seed(5)).abs()
    place = [slice(None)] * x.dim()
    for dim in dims:
        place[dim] = slice(left, left + x.shape[dim])
    whole[tuple(place)] = x
    return whole


@pytest.mark.parametrize(("left", "right"), [(0, 3), (2, 0), (1, 4)])
def test_padding_changes_nothing(left: int, right: int) -> None:
    weights, x, y = attention(2, 2, 8), states(2, 8, 3, 5), states(2, 8, 3, 5, seed=9)
    mask = torch.zeros(2, left + 8 + right, dtype=torch.bool)
    mask[:, left : left + 8] = True
    wide, tall, other = padded(weights, left, right, dims=(2, 3)), *(padded(s, left, right, dims=(1,)) for s in (x, y))

    def same(a: Tensor, b: Tensor) -> None:
        assert torch.allclose(a.double(), b.double(), rtol=1e-9, atol=1e-12)

    importance, clean = measures.token_importance(wide, mask), measures.token_importance(weights)
    same(importance[:, left : left + 8], clean)
    same(measures.importance_entropy(importance), measures.importance_entropy(clean))
    same(measures.first_token_share(importance, mask), measures.first_token_share(clean))
    for top in (1, 3, 0.3):
        same(measures.top_share(importance, top, mask), measures.top_share(clean, top))
    same(measures.token_similarity(tall, mask), measures.token_similarity(x))
    norms = measures.state_norms(tall)
    same(measures.first_token_ratio(norms, mask), measures.first_token_ratio(measures.state_norms(x)))
    for centred in (False, True):
        k = min(8, 15)
        same(measures.spectrum(tall, mask, centred=centred)[:, :k], measures.spectrum(x, centred=centred)[:, :k])
    same(
        measures.contribution(tall.flatten(2), other.flatten(2), mask),
        measures.contribution(x.flatten(2), y.flatten(2)),
    )
    same(measures.cosine(tall.flatten(2), other.flatten(2), mask), measures.cosine(x.flatten(2), y.flatten(2)))
    both, clean_both = torch.stack([tall, other]).flatten(3), torch.stack([x, y]).flatten(3)
    same(measures.layer_similarity(both, mask), measures.layer_similarity(clean_both))


def test_contributions_of_parts_sum_to_one() -> None:
    a, b = states(2, 6, 4), states(2, 6, 4, seed=3)
    whole = a + b
    shares = measures.contribution(a, whole), measures.contribution(b, whole)
    assert (shares[0] + shares[1]).tolist() == pytest.approx([1.0, 1.0])
    expected = [float(((a[i] * whole[i]).sum(-1) / (whole[i] ** 2).sum(-1)).mean()) for i in range(2)]
    assert shares[0].tolist() == pytest.approx(expected, rel=1e-5)


def test_the_weight_of_a_value_by_head() -> None:
    value = states(2, 6, 3, 4)
    gates = torch.linspace(-1, 2, 2 * 6 * 3).reshape(2, 6, 3)
    orthogonal = torch.zeros_like(value)
    orthogonal[..., 0], orthogonal[..., 1] = -value[..., 1], value[..., 0]
    found = measures.weight_by_head(gates[..., None] * value + orthogonal, value)
    assert torch.allclose(found, gates.mean(1).double(), atol=1e-6)
    mask = torch.tensor([[True] * 4 + [False] * 2] * 2)
    assert torch.allclose(measures.weight_by_head(gates[..., None] * value, value, mask), gates[:, :4].mean(1).double())


def test_cross_layer_attention_and_its_approximations() -> None:
    q, *kv = (states(1, 2, 5, 4, seed=i) for i in range(5))
    keys, values = kv[:2], kv[2:]
    found = measures.cross_layer_attention(q, keys, values, None, 0.5)
    for h in range(2):
        for i in range(5):
            scores = torch.stack([0.5 * (q[0, h, i] @ k[0, h, j]) for k in keys for j in range(i + 1)])
            rows = torch.stack([v[0, h, j] for v in values for j in range(i + 1)])
            assert torch.allclose(found[0, h, i], scores.softmax(0) @ rows, atol=1e-6)
    # With equal keys eq. 4 is no approximation.
    weights = (0.5 * q @ keys[0].transpose(2, 3) + causal_bias(5, q)).softmax(-1)
    same = measures.cross_layer_attention(q, [keys[0], keys[0]], values, None, 0.5)
    assert torch.allclose(same, measures.shared_attention(weights, values), atol=1e-6)
    control = measures.identity_mapping(weights, values[0], [values[1]])
    assert torch.allclose(control, weights @ values[0] + values[1], atol=1e-6)


@pytest.mark.parametrize(
    "call",
    [
        lambda: measures.top_share(torch.ones(1, 3), 0),
        lambda: measures.top_share(torch.ones(1, 3), 1.5),
        lambda: measures.components_for(torch.ones(1, 3), 0.0),
        lambda: measures.token_similarity(torch.ones(1, 3, 2, 2), heads="sum"),  # type: ignore[arg-type]
    ],
)
def test_mistakes_are_named(call) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match="got"):
        call()
