"""What a variant computes, against references written from the equations."""

from __future__ import annotations

import pytest
import torch
from cases import ADDED, SIZES, Case, ids, make
from naive import REFERENCES, naive_logits

from resformer import ResFormerForCausalLM
from resformer.core.plan import validate
from resformer.core.policy import Policy
from resformer.core.registry import build, get, names
from resformer.models.compat import enable_checkpointing


def test_every_variant_has_a_reference():
    assert sorted(names()) == sorted(REFERENCES)


def test_documented_defaults_are_the_code_s(variant):
    defaults = {k: list(v) if isinstance(v, tuple) else v for k, v in get(variant).options().items()}
    assert defaults == REFERENCES[variant].defaults


def test_plan_is_valid(any_case):
    config = any_case.config()
    plan = config.plan()
    validate(plan)
    assert len(plan) == SIZES["num_hidden_layers"]


class Leaves:
    """Random tensors of every kind that hooks get, as float64 leaves; equal for equal seeds."""

    def __init__(self, model: ResFormerForCausalLM) -> None:
        generator = torch.Generator().manual_seed(3)
        shape, config = model.config.shape(), model.config
        B, T, D, self.all = 2, 6, shape.head_dim, []

        def leaf(*size: int) -> torch.Tensor:
            tensor = torch.randn(*size, generator=generator, dtype=torch.float64).requires_grad_()
            self.all.append(tensor)
            return tensor

        self.query, self.key, self.value, self.attention, self.out, self.h = {}, {}, {}, {}, {}, {}
        self.hidden = {0: leaf(B, T, shape.hidden_size)}
        for n, layer in enumerate(model.model.layers, start=1):
            for kind in ("query", "key", "value"):
                projection = getattr(layer.self_attn, f"{kind[0]}_proj", None)
                if projection is not None:
                    getattr(self, kind)[n] = leaf(B, T, projection.out_features // D, D)
            self.attention[n] = leaf(B, config.num_attention_heads, T, T)
            self.out[n] = leaf(B, T, config.num_attention_heads, D)
            self.h[n], self.hidden[n] = leaf(B, T, shape.hidden_size), leaf(B, T, shape.hidden_size)


def hooks(model: ResFormerForCausalLM, x: Leaves, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Every hook's result in every layer, with what its row says it gets."""
    coefficients, tables, results = model.model.layer_coefficients(), model.model.table_values(tokens), {}
    groups = model.config.num_attention_heads // model.config.num_key_value_heads

    def repeated(values):
        return values[:, :, [head // groups for head in range(model.config.num_attention_heads)]]

    for row, layer in zip(model.model.plan, model.model.layers, strict=True):
        n, policy = row.layer, layer.self_attn.value_residual
        reads = {"value": [], "key": [], "query": [], "attention": [], "hidden": []}
        for read in row.reads:
            kind = "value" if read.what == "table" else read.what
            reads[kind].append(tables[n - 1] if read.what == "table" else getattr(x, kind)[read.layer])
        results[f"query {n}"] = policy.mix_query(x.query.get(n), reads["query"])
        results[f"key {n}"] = policy.mix_key(x.key[n], reads["key"]) if row.owns_key else reads["key"][0]
        results[f"attention {n}"] = policy.mix_attention(x.attention[n], reads["attention"])
        values, own = [] if row.extends else reads["value"], x.value.get(n)
        mixed = results[f"value {n}"] = policy.mix(own, values, x.h[n], coefficients[n - 1])
        results[f"output {n}"] = x.out[n]
        if policy.corrects:
            all_own = None if own is None else repeated(own)
            results[f"output {n}"] = policy.correct(x.out[n], repeated(mixed), all_own, [repeated(v) for v in values])
        results[f"hidden {n}"] = x.hidden[n]
        if str(n - 1) in model.model.depth_average:
            results[f"hidden {n}"] = model.model.depth_average[str(n - 1)](x.hidden[n], reads["hidden"])
    return results


def references(config, state, x: Leaves, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same by the book."""
    book, results = REFERENCES[config.variant](config, state), {}
    for n in range(1, config.num_hidden_layers + 1):
        results[f"query {n}"], results[f"key {n}"] = book.query(n, x.query), book.key(n, x.key)
        results[f"attention {n}"] = book.attention(n, x.attention)
        mixed = results[f"value {n}"] = book.value(n, x.value, x.h[n], tokens)
        results[f"output {n}"] = book.output(n, x.out[n], mixed, x.value)
        results[f"hidden {n}"] = book.hidden(n, x.hidden)
    return results


def probe(results: dict[str, torch.Tensor]) -> None:
    """Backward through all results at once, each with random weights of its own."""
    generator = torch.Generator().manual_seed(4)
    sum((results[k] * torch.randn(results[k].shape, generator=generator)).sum() for k in sorted(results)).backward()


def test_hooks_equal_the_equations_in_float64(any_case):
    """Forward and every gradient (inputs, normed hidden states, parameters, tables) of every hook, to 1e-10."""
    model = any_case.make().double()
    state = {k: v.detach().clone().requires_grad_() for k, v in model.state_dict().items()}
    ours, theirs, tokens = Leaves(model), Leaves(model), ids(2, 6)
    got, want = hooks(model, ours, tokens), references(model.config, state, theirs, tokens)
    assert got.keys() == want.keys()
    for name in want:
        assert got[name].dtype == torch.float64
        assert torch.allclose(got[name], want[name], rtol=0, atol=1e-10), name
    probe(got)
    probe(want)
    for number, (one, other) in enumerate(zip(ours.all, theirs.all, strict=True)):
        assert (one.grad is None) == (other.grad is None), f"leaf {number}"
        assert one.grad is None or torch.allclose(one.grad, other.grad, rtol=0, atol=1e-10), f"leaf {number}"
    for name, parameter in model.named_parameters():
        one, other = parameter.grad, state[name].grad
        assert (one is None) == (other is None), name
        assert one is None or torch.allclose(one, other, rtol=0, atol=1e-10), f"gradient of {name}"


def test_whole_model_equals_the_naive_model(any_case):
    """Logits to 1e-5, and every parameter's gradient, which is never zero: a parameter that training cannot move may
    not exist (DDP would hang on it).
    """
    model = any_case.make()
    state = {k: v.detach().double().requires_grad_() for k, v in model.state_dict().items()}
    got, want = model(ids()).logits, naive_logits(state, model.config, ids())
    assert (got - want).abs().max() < 1e-5
    weights = torch.randn(got.shape, generator=torch.Generator().manual_seed(6))
    (got * weights).sum().backward()
    (want * weights).sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    rounding = 1e-6 * max(gradient.abs().max() for gradient in gradients.values())
    for name, gradient in gradients.items():
        assert gradient.abs().max() > 0, name
        expected = state[name].grad
        assert (gradient - expected).abs().max() <= 1e-4 * expected.abs().max() + rounding, name


def test_parameters_start_as_the_paper_says(any_case):
    """Which parameters a variant adds, and their values in a fresh model."""
    torch.manual_seed(0)
    model = ResFormerForCausalLM(any_case.config())
    starts = REFERENCES[any_case.variant](model.config, {}).starts()
    added = {name: p for name, p in model.named_parameters() if ADDED & set(name.split("."))}
    assert added.keys() == starts.keys()
    for name, parameter in added.items():
        assert parameter.dim() >= 1, f"{name} is 0-dim"
        assert starts_at(parameter.detach(), starts[name]), name


def starts_at(parameter: torch.Tensor, start) -> bool:
    if callable(start):
        return bool(start(parameter))
    want = torch.tensor(start)
    return (want.dim() == 0 or want.shape == parameter.shape) and torch.allclose(parameter, want.expand_as(parameter))


def test_variants_that_name_neutral_options():
    """Those of the table in the design document, the baseline apart."""
    named = {name for name in names() if _neutral(name) is not None}
    assert named == set(names()) - {"cross_attention", "identity_mapping", "rwkv", "skipv1", "value_embeddings"}


def _neutral(name: str) -> dict | None:
    shape = Case(name, {}, 4).config().shape()
    return build(name, {}, shape).neutral(shape)


def test_neutral_options_give_the_transformer_bit_for_bit(case):
    neutral = _neutral(case.variant)
    if neutral is None:
        pytest.skip(f"{case.variant} has no neutral options")
    torch.manual_seed(0)
    model = ResFormerForCausalLM(Case(case.variant, neutral, case.kv_heads).config()).eval()
    base = make("transformer", case.kv_heads)
    base.set_attn_implementation(model.config._attn_implementation)
    report = model.load_state_dict(base.state_dict(), strict=False)
    assert not report.unexpected_keys
    starts = REFERENCES[case.variant](model.config, {}).starts()
    assert set(report.missing_keys) == set(starts)
    got, want = model(ids(), labels=ids()), base(ids(), labels=ids())
    assert torch.equal(got.logits, want.logits)
    got.loss.backward()
    want.loss.backward()
    for name, parameter in base.named_parameters():
        assert torch.equal(parameter.grad, model.get_parameter(name).grad), name


def test_one_layer_is_the_transformer_without_extra_parameters(variant):
    model = make(variant, num_hidden_layers=1)
    if model.model.plan[0].reads:
        pytest.skip(f"layer 1 of {variant} reads embeddings or a token table, so the variant is not based on V_1")
    base = make("transformer", num_hidden_layers=1)
    base.set_attn_implementation(model.config._attn_implementation)
    assert base.state_dict().keys() == model.state_dict().keys()
    model.load_state_dict(base.state_dict())
    assert torch.equal(model(ids()).logits, base(ids()).logits)


def test_what_is_sent_is_not_detached(variant):
    """The source's projection gets gradient from its readers too: cutting what it sends changes it."""
    model = make(variant, 2).train()
    senders = [row for row in model.model.plan if row.sends]
    if not senders:
        pytest.skip("no layer sends anything to another one")
    letters = {"value": "v", "key": "k", "query": "q", "attention": "q"}
    weights = [
        getattr(model.model.layers[row.layer - 1].self_attn, f"{letters[what]}_proj").weight
        for row in senders
        for what, _ in row.sends
    ]
    full = torch.autograd.grad(model(ids(), labels=ids()).loss, weights)
    handles = [
        model.model.layers[row.layer - 1].register_forward_hook(
            lambda module, args, out: (out[0], *(tensor.detach() for tensor in out[1:]))
        )
        for row in senders
    ]
    cut = torch.autograd.grad(model(ids(), labels=ids()).loss, weights)
    for handle in handles:
        handle.remove()
    for one, other in zip(full, cut, strict=True):
        assert (one - other).abs().max() > 1e-3 * one.abs().max()


def test_checkpointing_changes_no_gradient(case):
    """In both modes; also with two forward passes before one backward pass, where values kept on modules would be mixed
    up.
    """
    model = case.make(num_hidden_layers=4).train()
    parameters = dict(model.named_parameters())

    def gradients(*seeds: int) -> dict[str, torch.Tensor]:
        """Of the summed losses on batches of these seeds: all forward passes, then one backward pass."""
        losses = [model(ids(seed=seed), labels=ids(seed=seed)).loss for seed in seeds]
        return dict(zip(parameters, torch.autograd.grad(sum(losses), parameters.values()), strict=True))

    def recomputed(*seeds: int) -> dict[str, torch.Tensor]:
        model.zero_grad()
        losses = [model(ids(seed=seed), labels=ids(seed=seed)).loss for seed in seeds]
        sum(losses).backward()  # reentrant checkpointing works with this only
        return {name: parameter.grad for name, parameter in parameters.items()}

    one, two, both = gradients(1), gradients(2), gradients(1, 2)
    for name, gradient in both.items():
        assert torch.allclose(one[name] + two[name], gradient, rtol=1e-4, atol=1e-6), name
    for row in model.model.plan:
        if ("value", "raw") in row.sends or ("value", "stored") in row.sends:
            assert both[f"model.layers.{row.layer - 1}.self_attn.v_proj.weight"].abs().max() > 0
    calls = []
    model.model.layers[1].self_attn.o_proj.register_forward_hook(lambda *_: calls.append(1))
    for reentrant in (False, True):
        enable_checkpointing(model, use_reentrant=reentrant)
        calls.clear()
        for name, gradient in recomputed(1, 2).items():
            assert torch.allclose(both[name], gradient, rtol=1e-5, atol=1e-7), (reentrant, name)
        assert len(calls) == 4, "the layers were not recomputed: checkpointing was silently off"


def test_correct_is_applied_after_attention_with_heads_repeated():
    """A user's NeuTRENO under grouped queries: U_n = A_n V_n + 0.4 (V_1 - V_n), per query head, before o_proj."""
    from dataclasses import dataclass

    from resformer.core import registry
    from resformer.core.plan import Read, Row, link

    class Correction(Policy):
        corrects = True

        def correct(self, out, mixed, own, reads):
            return out + 0.4 * (reads[0] - mixed)

        def mix(self, own, reads, hidden, coefficients):
            return own

    try:

        @registry.register_variant("corrected")
        @dataclass(frozen=True, kw_only=True)
        class Corrected(registry.Variant):
            def plan(self, shape):
                return link(Row(layer=n, reads=(Read(layer=1),) if n > 1 else ()) for n in range(1, shape.layers + 1))

            def policy(self, row, shape):
                return Correction() if row.mixes else None

        model, seen = make("corrected", 2), []
        base = make("transformer", 2)
        base.load_state_dict(model.state_dict())
        for source in (model, base):
            layers = source.model.layers
            layers[0].self_attn.v_proj.register_forward_hook(lambda m, i, out: seen.append(out))
            layers[1].self_attn.v_proj.register_forward_hook(lambda m, i, out: seen.append(out))
            layers[1].self_attn.o_proj.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
        with torch.no_grad():
            model(ids())
            base(ids())
        first, own, got, _, _, plain = seen[:6]
        correction = (first - own).view(2, 12, 2, 1, 8).expand(2, 12, 2, 2, 8).reshape(2, 12, 32)
        assert torch.allclose(got, plain + 0.4 * correction, atol=1e-6)
    finally:
        registry._registered.pop("corrected")
