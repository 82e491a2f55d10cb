"""The contract as a command's checks: built-in variants pass, and every mistake is caught by the check meant for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from resformer.core import registry
from resformer.core.mixing import upcast
from resformer.core.plan import Read, Row, link
from resformer.core.policy import Policy, declare_parameters
from resformer.core.registry import Variant, register_variant
from resformer.core.residual import SourceForm
from resformer.errors import UserError
from resformer.evaluate.contract import suite
from resformer.evaluate.contract.subject import SIZES, Subject


def verdicts(name: str, *checks: suite.Check, **options: object) -> dict[str, suite.Result]:
    """Results by check of the named checks only (all when none is named), grouped queries."""
    with pytest.MonkeyPatch.context() as patch:
        if checks:
            patch.setattr(suite, "CHECKS", checks)
        return {one.check: one for one in suite.run(name, options, heads={"GQA": 4})}


@pytest.fixture(autouse=True)
def own_names(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test registers is gone after it."""
    registry.names()
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    yield


# ----------------------------------------------------------------------------------------------- built-in variants


@pytest.mark.parametrize("name", ["gated", "svformer"])
def test_built_in_variants_pass(name: str) -> None:
    found = verdicts(name)
    assert [one.check for one in found.values() if one.result == "failed"] == []
    assert len(found) == len(suite.CHECKS)


@pytest.mark.slow
@pytest.mark.parametrize("name", registry.names())
def test_every_variant_passes_everything(name: str) -> None:
    failed = [one for one in suite.run(name, compile=True) if one.result == "failed"]
    assert failed == []


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("learnable", {"source": 2, "granularity": "channel", "tie": "lerp"}),
        ("svformer", {"key_group": 2, "gamma": True, "anchors": [1, 3]}),
    ],
)
def test_options_reach_the_checks(name: str, options: dict[str, object]) -> None:
    assert [one.check for one in verdicts(name, **options).values() if one.result == "failed"] == []


def test_what_does_not_apply_is_said_and_is_no_failure() -> None:
    found = verdicts("transformer")
    assert found["every_read_gets_a_gradient"].result == "skipped"
    assert found["every_read_gets_a_gradient"].detail == "the variant reads nothing"
    assert found["lambdas_are_grouped"].result == "skipped"


def test_unknown_names_and_options_are_refused_before_the_first_check() -> None:
    with pytest.raises(UserError, match="did you mean 'gated'"):
        next(suite.run("gatd"))
    with pytest.raises(UserError, match="did you mean 'activation'"):
        next(suite.run("gated", {"activatoin": "tanh"}))
    with pytest.raises(UserError, match="source is 9"):
        next(suite.run("learnable", {"source": 9}))


def test_every_check_says_what_it_is_about() -> None:
    for check in suite.CHECKS + suite.COMPILE_CHECKS:
        assert check.__doc__ and "\n" not in check.__doc__.strip(), check.__name__


def test_a_model_is_the_same_each_time_and_its_lambdas_are_moved() -> None:
    subject = Subject(name="learnable")
    one, two = subject.model().state_dict(), subject.model().state_dict()
    assert all(torch.equal(one[key], two[key]) for key in one)
    key = "model.layers.1.self_attn.value_residual.first"
    assert one[key] != subject.model(moved=False).state_dict()[key]


# ------------------------------------------------------------------------------------------------------- mistakes


class OneWeight(Policy):
    """A right policy, `V_n + weight V_1`, from which each mistake below differs by one line."""

    weight: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        declare_parameters(self)

    def initial_values(self):
        return {"weight": torch.full((1,), 0.5)}

    def mix(self, own, reads, hidden, coefficients):
        return (own + reads[0] * self.weight).to(own.dtype)


class Detached(OneWeight):
    def mix(self, own, reads, hidden, coefficients):
        return (own + reads[0].detach() * self.weight).to(own.dtype)


class InPlace(OneWeight):
    def mix(self, own, reads, hidden, coefficients):
        with torch.no_grad():
            reads[0].mul_(0.5)
        return (own + reads[0] * self.weight).to(own.dtype)


class InPlaceOwn(OneWeight):
    """Layer 1 has no policy, so the source here is a layer that mixes: what it sends must still be raw."""

    def mix(self, own, reads, hidden, coefficients):
        mixed = (own + reads[0] * self.weight).to(own.dtype)
        with torch.no_grad():
            own.mul_(0.5)
        return mixed


class NeverUsed(OneWeight):
    def initial_values(self):
        return {"weight": torch.full((1,), 0.5), "spare": torch.zeros(2)}


class Keeps(OneWeight):
    def mix(self, own, reads, hidden, coefficients):
        self.kept = reads[0]
        return (own + self.kept * self.weight).to(own.dtype)


KEPT: dict[str, torch.Tensor] = {}


class RawMemory(OneWeight):
    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("raw", nn.Parameter(torch.empty(2)))

    def mix(self, own, reads, hidden, coefficients):
        return (own + reads[0] * self.weight + self.raw.sum()).to(own.dtype)


class KeptInitial(OneWeight):
    """The initial value is a tensor made in __init__: a fake one where models are built on the meta device."""

    def __init__(self) -> None:
        Policy.__init__(self)
        self.start = torch.full((1,), 0.5)
        declare_parameters(self)

    def initial_values(self):
        return {"weight": self.start}


class Rounds(OneWeight):
    def mix(self, own, reads, hidden, coefficients):
        return (own + (reads[0].float() * self.weight.float()).to(own.dtype)).to(own.dtype)


class WrongType(OneWeight):
    def mix(self, own, reads, hidden, coefficients):
        return upcast(own) + reads[0] * self.weight


class ZeroDim(OneWeight):
    def __init__(self) -> None:
        Policy.__init__(self)
        self.register_parameter("weight", nn.Parameter(torch.tensor(0.5)))

    def initial_values(self):
        return {"weight": torch.tensor(0.5)}


class UncountedGate(OneWeight):
    def __init__(self) -> None:
        Policy.__init__(self)
        declare_parameters(self)

    def initial_values(self):
        return {"weight": torch.full((4, SIZES["hidden_size"]), 0.1)}

    def mix(self, own, reads, hidden, coefficients):
        gate = nn.functional.linear(upcast(hidden), self.weight.to(upcast(hidden).dtype))
        return (own + gate.unsqueeze(-1) * reads[0]).to(own.dtype)


class DependsOnLength(OneWeight):
    """What a token gets depends on how many come in the same call: not the same with a cache, in pieces or padded."""

    def mix(self, own, reads, hidden, coefficients):
        return (own + reads[0] * self.weight * (own.shape[1] % 5)).to(own.dtype)


class Graphs(OneWeight):
    """A Python number that differs from layer to layer is baked into the graph."""

    count = 0

    def __init__(self) -> None:
        super().__init__()
        Graphs.count += 1
        self.number = 1.0 + Graphs.count / 7

    def mix(self, own, reads, hidden, coefficients):
        return (own + reads[0] * self.weight * self.number).to(own.dtype)


def register(kind: type[Policy], **attributes: object) -> str:
    """Register a variant whose mixing layers have a policy of this kind; `attributes` replace methods of its."""

    @register_variant("faulty")
    @dataclass(frozen=True, kw_only=True)
    class Faulty(SourceForm):
        equation = "V_n <- V_n + w V_1"

        def policy(self, row, shape):
            return kind() if row.mixes else None

    for name, value in attributes.items():
        setattr(Faulty, name, value)
    return "faulty"


def test_the_variant_without_a_mistake_passes() -> None:
    assert [one.check for one in verdicts(register(OneWeight)).values() if one.result == "failed"] == []


@pytest.mark.parametrize(
    ("policy", "check", "says"),
    [
        (Detached, "every_read_gets_a_gradient", "value of layer 1, read by layer 2, gets no gradient: detached"),
        (InPlace, "reads_are_left_alone", "layer 1, read by layer 2, is changed in place"),
        (NeverUsed, "every_parameter_gets_a_gradient", "spare"),
        (Keeps, "nothing_is_kept_on_modules", "value_residual.kept keeps a tensor after the call"),
        (RawMemory, "initial_values_hold", "value_residual.raw has no initial value: raw memory"),
        (KeptInitial, "initial_values_hold", "meta"),
        (Rounds, "precision_is_kept", "rounded to a smaller type"),
        (WrongType, "low_precision_runs", ""),
        (ZeroDim, "lambdas_are_grouped", "weight is 0-dim"),
        (UncountedGate, "costs_are_counted", "`matmuls`"),
        (DependsOnLength, "chunked_prefill", "logits differs by"),
        (DependsOnLength, "greedy_decoding", "with a cache other tokens are generated"),
        (DependsOnLength, "padding_does_not_leak", "when it is padded"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_a_mistake_is_caught_by_the_check_meant_for_it(policy: type[Policy], check: str, says: str) -> None:
    name, (function,) = register(policy), [one for one in suite.CHECKS if one.__name__ == check]
    found = verdicts(name, function)[check]
    assert found.result == "failed"
    assert says in found.detail
    assert "\n" not in found.detail


def test_what_a_layer_sends_must_be_raw() -> None:
    name = register(InPlaceOwn)
    found = verdicts(name, suite.formula.reads_are_left_alone, source="previous")["reads_are_left_alone"]
    assert found.result == "failed" and "the raw value of layer 2 is changed in place" in found.detail


def test_values_that_travel_outside_the_plan_break_two_forwards_before_one_backward() -> None:
    """Layer 1's value through a global: the recomputation of the first call reads the second call's."""

    class FirstLayer(OneWeight):
        def initial_values(self):
            return {}

        def mix(self, own, reads, hidden, coefficients):
            KEPT["first"] = own
            return own

    class Later(OneWeight):
        def mix(self, own, reads, hidden, coefficients):
            return (own + KEPT["first"] * self.weight).to(own.dtype)

    @register_variant("smuggles")
    @dataclass(frozen=True, kw_only=True)
    class Smuggles(Variant):
        equation = "V_n <- V_n + w V_1"

        def policy(self, row, shape):
            return FirstLayer() if row.layer == 1 else Later()

    found = verdicts("smuggles", suite.gradient.two_forwards_before_one_backward)["two_forwards_before_one_backward"]
    assert found.result == "failed"


def test_a_plan_that_cannot_run_and_one_without_its_links_are_caught() -> None:
    def backwards(self, shape):
        return tuple(Row(layer=n, reads=(Read(layer=n),)) for n in range(1, shape.layers + 1))

    def unlinked(self, shape):
        return tuple(Row(layer=n, reads=(Read(layer=1),) if n > 1 else ()) for n in range(1, shape.layers + 1))

    for plan, says in ((backwards, "does not come before it"), (unlinked, "plan.link")):
        found = verdicts(register(OneWeight, plan=plan), suite.formula.plan_is_valid)["plan_is_valid"]
        assert found.result == "failed" and says in found.detail


def test_neutral_options_that_are_not_neutral_are_caught() -> None:
    name = register(OneWeight, neutral=lambda self, shape: {"layers": "last:1"})
    found = verdicts(name, suite.formula.neutral_is_the_transformer)["neutral_is_the_transformer"]
    assert found.result == "failed" and "layers" in found.detail


def test_a_parameter_of_a_model_of_one_layer_is_caught() -> None:
    class Always(OneWeight):
        def mix(self, own, reads, hidden, coefficients):
            return own * self.weight

    name = register(Always, policy=lambda self, row, shape: Always())
    found = verdicts(name, suite.formula.one_layer_is_the_transformer)["one_layer_is_the_transformer"]
    assert found.result == "failed" and "value_residual.weight" in found.detail


def test_a_slot_that_is_not_used_is_caught_by_the_bytes() -> None:
    """A plan that promises an empty slot which the host then fills would be a cache small on paper."""

    def plan(self, shape):
        return link(
            Row(layer=n, owns_value=n == 1, stores="mixed" if n == 1 else "none", reads=self.reads(n))
            for n in range(1, shape.layers + 1)
        )

    name = register(
        OneWeight,
        plan=plan,
        reads=lambda self, n: (Read(layer=1, state="stored"),) if n > 1 else (),
        policy=lambda self, row, shape: None,
    )
    with pytest.MonkeyPatch.context() as patch:
        found = verdicts(name, suite.caching.cache_bytes_are_counted)["cache_bytes_are_counted"]
        assert found.result == "passed"
        patch.setattr(suite.caching, "cache_bytes", lambda cache: 10_000)
        found = verdicts(name, suite.caching.cache_bytes_are_counted)["cache_bytes_are_counted"]
        assert found.result == "failed" and "the plan says" in found.detail


@pytest.mark.slow
def test_numbers_that_differ_from_layer_to_layer_are_caught_by_the_graphs() -> None:
    name = register(Graphs)
    assert verdicts(name, suite.life.blocks_share_graphs)["blocks_share_graphs"].result == "failed"
    assert verdicts(register(OneWeight), suite.life.blocks_share_graphs)["blocks_share_graphs"].result == "passed"
