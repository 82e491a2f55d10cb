"""The suites that come with the package: they resolve at every scale, share what they say they share, and quote the
paper with sources.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import torch

from resformer.experiments.settings import Settings, resolve
from resformer.experiments.spec import Less, NotLess, Planned, Suite
from resformer.lookup import suites
from resformer.models import ResFormerForCausalLM
from resformer.models.accounting import Account, account
from resformer.train.build import model_config
from resformer.train.configure import to_tree
from resformer.train.estimate import MFU, PEAKS
from resformer.train.optim import build_optimizers

PAPER_VOCABULARY = 50_277
PAPER = [name for name in suites() if name != "quick"]
PAIRS = [(name, scale) for name, suite in suites().items() for scale in suite.scales]


@cache
def planned(name: str, scale: str) -> Planned:
    return suites()[name].at(scale)


@cache
def resolved(name: str, scale: str) -> tuple[Settings, ...]:
    return tuple(resolve(planned(name, scale), Path("data")))


@cache
def run(name: str, scale: str, called: str) -> Settings:
    """A run of the suite, of its first seed."""
    return next(one for one in resolved(name, scale) if one.spec.name == called)


@cache
def costs(name: str, scale: str, called: str) -> Account:
    config = run(name, scale, called).config
    return account(model_config(config, vocab_size=PAPER_VOCABULARY), sequence_length=config.data.sequence_length)


def test_every_suite_of_the_paper_is_there() -> None:
    assert set(suites()) == {
        "quick",
        "variants",
        "constant_lambda",
        "sparse_layers",
        "source",
        "where",
        "kv_efficient",
        "learning_rate",
        "scaling",
        "analysis",
        "combine",
        "logit_init",
    }


@pytest.mark.parametrize("name", suites())
def test_a_suite_says_what_it_is(name: str) -> None:
    suite = suites()[name]
    assert suite.name == name and suite.title and suite.question.endswith("?")
    assert suite.baseline == "transformer"
    assert all(note.endswith(".") for note in suite.notes)
    assert len(suite.paper) == 0 or suite.paper_setting


@pytest.mark.parametrize("name", PAPER)
def test_scales_are_those_of_the_documentation(name: str) -> None:
    scales = suites()[name].scales
    assert list(scales) == ["mini", "small", "paper"]
    assert [scale.recipe for scale in scales.values()][:2] == ["mini", "small"]
    large = name in ("variants", "analysis")
    assert scales["paper"].recipe == ("paper_468m" if large else "paper_82m")
    assert scales["mini"].seeds == ((0, 1, 2) if name in ("variants", "logit_init") else (0,))
    assert (scales["small"].seeds, scales["paper"].seeds) == ((0, 1, 2), (42,))
    assert [scale.processes for scale in scales.values()] == [1, 1, 8]
    assert [bool(scale.inputs) for scale in scales.values()] == [True, False, False]
    assert scales["mini"].tasks == ()


@pytest.mark.parametrize(("name", "scale"), PAIRS)
def test_every_run_resolves_to_a_model_of_its_own(name: str, scale: str) -> None:
    found = resolved(name, scale)
    assert len(found) == len(planned(name, scale).runs) * len(planned(name, scale).scale.seeds)
    ids = Counter(one.id("corpus") for one in found)
    assert not [one.spec.name for one in found if ids[one.id("corpus")] > 1], "the same training under two names"
    assert not [note for one in found for note in one.notes], "nothing has to be adjusted"
    for one in found:
        config, processes = one.config, planned(name, scale).scale.processes
        model_config(config, vocab_size=PAPER_VOCABULARY).plan()
        share = config.train.batch_size // processes
        assert config.train.batch_size % processes == 0 and share % min(config.micro_batch_size, share) == 0


@pytest.mark.parametrize(("name", "scale"), PAIRS)
def test_runs_differ_in_what_the_suite_says_and_in_nothing_else(name: str, scale: str) -> None:
    base = to_tree(run(name, scale, "transformer").config)
    for one in resolved(name, scale)[: len(planned(name, scale).runs)]:
        tree = to_tree(one.config)
        different = {f"{s}.{key}" for s in tree for key in tree[s] if tree[s][key] != base[s][key]}
        assert different <= {"model.variant", *one.spec.overrides, *one.spec.scaled.get(scale, {})}, one.spec.name


@pytest.mark.parametrize("name", suites())
def test_claims_are_about_runs_of_one_scale_and_say_what_the_paper_found(name: str) -> None:
    suite = suites()[name]
    for claim in suite.claims:
        assert claim.left != claim.right and claim.paper, str(claim)
        assert not claim.on.startswith("tasks/"), "mini scores no tasks"
    assert len({(claim.kind, claim.left, claim.right, claim.on) for claim in suite.claims}) == len(suite.claims)
    alive = {claim for scale in suite.scales for claim in planned(name, scale).claims}
    assert alive == set(suite.claims), "a claim whose two runs meet at no scale"


@pytest.mark.parametrize("name", suites())
def test_what_the_paper_reports_has_a_source(name: str) -> None:
    for row in suites()[name].paper:
        assert re.search(r"^v[15]\b.*\[(v1|sum|2nd)\]", row.source), row
        for measure, value in row.values.items():
            assert measure == "loss" or re.fullmatch(r"tasks/\w+|validation/\w+/(loss|perplexity)", measure), measure
            assert math.isfinite(value) and (value < 1) == measure.startswith("tasks/"), row


def test_claims_agree_with_the_papers_own_numbers() -> None:
    """A claim's direction is that of the references, wherever both of its runs have one."""
    compared = 0
    for suite in suites().values():
        losses = {row.run: row.values["loss"] for row in suite.paper if "loss" in row.values}
        for claim in suite.claims:
            if claim.on == "validation/loss" and {claim.left, claim.right} <= set(losses):
                gap = losses[claim.left] - losses[claim.right]
                assert gap < 0 if isinstance(claim, Less) else gap > -claim.margin, (suite.name, str(claim))
                compared += 1
    assert compared > 20


def test_the_claims_of_variants_are_those_of_the_paper() -> None:
    suite = suites()["variants"]
    said = {(one.left, one.right) for one in suite.claims if isinstance(one, Less) and one.on == "validation/loss"}
    for left in ("identity", "learnable", "constant", "sparse", "learnable_plus"):
        assert (left, "transformer") in said
    chain = {("learnable", "identity"), ("sparse", "constant"), ("learnable_plus", "sparse"), ("identity", "neutreno")}
    assert chain <= said
    (none,) = [one for one in suite.claims if isinstance(one, NotLess)]
    assert (none.left, none.right, none.margin) == ("query_residual", "transformer", 0.02)


@pytest.mark.parametrize("scale", ["mini", "small", "paper"])
def test_suites_of_one_recipe_share_their_runs(scale: str) -> None:
    """Without overrides a variant is the same run in all suites, but for those of another shape."""
    seen: dict[tuple[str, str, int], set[str]] = {}
    for name in PAPER:
        if name == "kv_efficient" and scale == "mini":  # has more heads
            continue
        for one in resolved(name, scale):
            if not one.overrides or one.overrides == {"model.variant_options": {"logit_init": "linear"}}:
                key = (planned(name, scale).scale.recipe, one.spec.variant, one.seed)
                seen.setdefault(key, set()).add(one.id("corpus"))
    assert all(len(ids) == 1 for ids in seen.values())
    assert len(seen) >= 10


@pytest.mark.parametrize(
    ("first", "second", "scale"),
    [
        (("constant_lambda", "lambda_2"), ("variants", "constant"), "mini"),
        (("sparse_layers", "last_3"), ("variants", "sparse"), "mini"),
        (("sparse_layers", "last_7"), ("constant_lambda", "lambda_5"), "mini"),
        (("logit_init", "linear"), ("variants", "learnable_plus"), "mini"),
        (("where", "query_residual"), ("variants", "query_residual"), "mini"),
        (("analysis", "cross_attention"), ("where", "cross_attention"), "mini"),
        (("scaling", "identity_468m"), ("variants", "identity"), "paper"),
        (("scaling", "learnable_plus_468m"), ("analysis", "learnable_plus"), "paper"),
        (("scaling", "svformer_468m"), ("variants", "svformer"), "paper"),
        (("kv_efficient", "svformer"), ("learning_rate", "svformer"), "small"),
    ],
)
def test_a_run_under_two_names_is_trained_once(first: tuple[str, str], second: tuple[str, str], scale: str) -> None:
    (one_suite, one), (other_suite, other) = first, second
    assert run(one_suite, scale, one).id("corpus") == run(other_suite, scale, other).id("corpus")


def test_learnable_plus_always_says_how_its_logits_start() -> None:
    for name in PAPER:
        for one in suites()[name].runs:
            if one.variant == "learnable_plus":
                assert one.overrides["model.variant_options"]["logit_init"] in ("linear", "zeros")  # type: ignore[index]


def test_parameters_at_468m_are_the_papers() -> None:
    plain, layers = 467_921_920, 24
    expected = {
        "transformer": plain,
        "neutreno": plain,
        "identity": plain,
        "constant": plain,
        "sparse": plain,
        "query_residual": plain,
        "denseformer": plain + layers * (layers + 3) // 2,
        "learnable": plain + 2 * (layers - 1),
        "learnable_plus": plain + 2 * (layers - 1) + 1,
        "dense": plain + layers * (layers + 1) // 2 - 1,  # n weights in layer n, none in the first
        "svformer": plain - (layers - 1) * 1024**2,
    }
    assert {one.name for one in planned("variants", "paper").runs} == set(expected)
    for name, parameters in expected.items():
        assert costs("variants", "paper", name).parameters == parameters


def test_sizes_of_the_paper() -> None:
    for name, parameters in {"": 81_901_056, "_180m": 179_874_048, "_468m": 467_921_920}.items():
        assert costs("scaling", "paper", f"transformer{name}").parameters == parameters
    assert costs("scaling", "paper", "svformer").parameters == 80_066_048
    assert round(costs("combine", "paper", "transformer_gpt2").parameters / 1e6) == 78  # what v1 calls its GPT-2


def test_groups_of_equal_cache_are_of_equal_cache() -> None:
    shares = {
        "svformer": 9 / 16,
        "gqa2": 1 / 2,
        "cla": 1 / 2,
        "skipv1": 25 / 32,
        "gqa8": 1 / 8,
        "cla_gqa4": 1 / 8,
        "svformer_gqa4": 9 / 64,
        "anchors_2": 10 / 16,
        "anchors_4": 12 / 16,
    }
    for scale in ("mini", "paper"):
        whole = costs("kv_efficient", scale, "transformer").kv_bytes_per_token
        assert {name: costs("kv_efficient", scale, name).kv_bytes_per_token / whole for name in shares} == shares


def test_other_lengths_have_as_many_tokens_in_a_batch() -> None:
    for scale, length in {"mini": 64, "small": 512, "paper": 64_000}.items():
        base, other = (run("kv_efficient", scale, name).config for name in ("svformer", f"svformer_{length}"))
        batches = [config.train.batch_size * config.data.sequence_length for config in (base, other)]
        assert other.data.sequence_length == length and batches[1] / batches[0] == pytest.approx(1, abs=0.025)
    lengths = {one.config.data.sequence_length for one in resolved("kv_efficient", "paper")}
    assert lengths == {512, 2048, 8192, 32_000, 64_000}  # table 3


def test_experts_and_gpt2_are_of_the_same_size_as_what_they_stand_beside() -> None:
    for scale in ("mini", "paper"):
        base = costs("combine", scale, "transformer")
        routers = 8 * 4 * run("combine", scale, "transformer").config.model.hidden_size
        assert costs("combine", scale, "transformer_experts").active_parameters - base.parameters == routers
        gpt2 = costs("combine", scale, "transformer_gpt2").parameters
        assert gpt2 / base.parameters == pytest.approx(1, abs=0.06)


def test_boosts_of_layer_1_reach_parameters() -> None:
    for name, count in {"layer_1_x2": 9, "value_1_x5": 1}.items():
        config = run("learning_rate", "mini", name).config
        model = ResFormerForCausalLM(model_config(config, vocab_size=64))
        groups = [group for one in build_optimizers(model, config.optim) for group in one.param_groups]
        boosted = [p for group in groups if group["lr_scale"] != 1 for p in group["params"]]
        assert len(boosted) == count
        assert any(p is model.model.layers[0].self_attn.v_proj.weight for p in boosted)


def _structure(one: Settings) -> str:
    return repr((one.config.model, one.config.data.sequence_length))


@pytest.mark.parametrize("name", PAPER)
def test_every_model_of_mini_takes_a_step(name: str) -> None:
    for one in {_structure(one): one for one in resolved(name, "mini")}.values():
        torch.manual_seed(0)
        model = ResFormerForCausalLM(model_config(one.config, vocab_size=64))
        ids = torch.randint(64, (1, 16))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        missing = [key for key, p in model.named_parameters() if p.grad is None and "experts" not in key]
        assert torch.isfinite(loss) and not missing, (one.spec.name, missing)


def test_the_documentation_has_the_right_numbers() -> None:
    """Runs and hours by suite in docs/reproduce.md; each suite is named in its tables."""
    page = (Path(__file__).parents[2] / "docs" / "reproduce.md").read_text(encoding="utf-8")
    rows = {cells[0].strip("`"): cells[1:] for line in page.splitlines() if len(cells := _cells(line)) == 6}
    every: dict[str, dict[str, float]] = {"mini": {}, "small": {}, "paper": {}}
    for name in PAPER:
        assert f"resformer suite run {name}" in page
        hours = {scale: {one.id("c"): _hours(one) for one in resolved(name, scale)} for scale in every}
        assert rows[name] == _row(hours), name
        for scale, found in hours.items():
            every[scale] |= found
    assert rows["all, shared runs once"] == _row(every)
    assert f"--array=1-{len(resolved('variants', 'paper'))} " in page
    assert f"--array=1-{len(resolved('variants', 'small'))} " in page


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []


def _hours(one: Settings) -> float:
    config = one.config
    tokens = config.train.steps * config.train.batch_size * config.data.sequence_length
    return 3 * _flops(_structure(one), one) * tokens / (MFU * PEAKS["A100"]) / 3600


_FLOPS: dict[str, int] = {}


def _flops(structure: str, one: Settings) -> int:
    """Forward, a token; many runs have one structure."""
    if structure not in _FLOPS:
        described = model_config(one.config, vocab_size=PAPER_VOCABULARY)
        _FLOPS[structure] = account(described, sequence_length=one.config.data.sequence_length).flops_per_token
    return _FLOPS[structure]


def _row(hours: dict[str, dict[str, float]]) -> list[str]:
    counts = {scale: f"{len(found):,}" for scale, found in hours.items()}
    sums = {scale: f"{sum(found.values()):,.0f}" for scale, found in hours.items()}
    return [counts["mini"], counts["small"], sums["small"], counts["paper"], sums["paper"]]


def test_quick_shows_the_librarys_defaults() -> None:
    suite: Suite = suites()["quick"]
    assert list(suite.scales) == ["quick"] and suite.scales["quick"].seeds == (0,)
    assert [one.variant for one in suite.runs] == ["transformer", "learnable", "learnable_plus", "svformer"]
    assert not any(one.overrides for one in suite.runs)
    assert [str(claim) for claim in suite.claims] == ["learnable < transformer", "learnable_plus < transformer"]
