"""A suite is checked when it is declared; the settings of its runs give them their names."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

import pytest

from resformer.errors import UserError
from resformer.experiments.settings import digest, resolve
from resformer.experiments.spec import Less, NotLess, Reference, RunSpec, Scale, Suite
from resformer.train.config import Config
from resformer.train.configure import edit, to_tree


def suite(*runs: RunSpec, **more) -> Suite:
    runs = runs or (RunSpec(variant="transformer"), RunSpec(variant="learnable"))
    scales = {"one": Scale(recipe="r"), "two": Scale(recipe="r", seeds=(0, 1), overrides={"train.steps": 700})}
    given = {"name": "s", "title": "", "scales": scales, "runs": runs, "baseline": "transformer"}
    return Suite(**(given | more))


def recipe(name: str) -> Config:
    assert name == "r"
    return Config()


def test_a_run_is_called_as_its_variant_unless_named() -> None:
    assert RunSpec(variant="sparse").name == "sparse"
    assert RunSpec(variant="sparse", name="sparse.5").name == "sparse.5"


@pytest.mark.parametrize("name", ["../x", "a b", "-x", "a/b"])
def test_a_run_name_is_fit_for_a_directory(name: str) -> None:
    with pytest.raises(UserError, match="run name"):
        RunSpec(variant="sparse", name=name)


def test_mistakes_in_a_suite_are_named() -> None:
    with pytest.raises(UserError, match="'transformer' is used twice"):
        suite(RunSpec(variant="transformer"), RunSpec(variant="transformer", overrides={"optim.lr": 1e-3}))
    with pytest.raises(UserError, match=r"baseline names the run 'transfromer'.*did you mean 'transformer'"):
        suite(baseline="transfromer")
    with pytest.raises(UserError, match="claim names the run 'sparse'"):
        suite(claims=(Less("sparse", "transformer"),))
    with pytest.raises(UserError, match=r"paper names the run 'lernable'.*did you mean 'learnable'"):
        suite(paper=(Reference(run="lernable", values={}, source="v1"),))
    with pytest.raises(UserError, match=r"has no scale 'twoo'.*did you mean 'two'"):
        suite().at("twoo")
    with pytest.raises(UserError, match="has no scale 'big'"):
        suite(RunSpec(variant="transformer", scales=("big",)))
    for seeds in ((1, 1), (), (-1,)):
        with pytest.raises(UserError, match="name each once"):
            suite(scales={"one": Scale(recipe="r", seeds=seeds)})
    with pytest.raises(UserError, match="--seeds are 0, 0; name each once"):
        suite().at(seeds=(0, 0))
    for name in ("../up", "runs", ""):
        with pytest.raises(UserError, match="suite name"):
            suite(name=name)
    with pytest.raises(UserError, match="scales is empty"):
        suite(scales={})
    with pytest.raises(UserError, match=r"is on 'val/nll'; expected validation/loss"):
        suite(claims=(Less("learnable", "transformer", on="val/nll"),))
    with pytest.raises(UserError, match="margin of claim learnable not < transformer is nan"):
        suite(claims=(NotLess("learnable", "transformer", margin=float("nan")),))


def test_a_scale_chooses_runs_claims_seeds_and_overrides() -> None:
    wide = RunSpec(variant="sparse", scales=("two",), scaled={"two": {"optim.lr": 2e-3}})
    found = suite(
        RunSpec(variant="transformer"), wide, claims=(Less("sparse", "transformer"), NotLess("transformer", "sparse"))
    )
    assert [run.name for run in found.at().runs] == ["transformer"] and found.at().claims == ()
    two = found.at("two")
    assert [str(claim) for claim in two.claims] == ["sparse < transformer", "transformer not < sparse"]
    settings = resolve(two, Path("d"), load_recipe=recipe)
    assert [(one.spec.name, one.seed) for one in settings] == [
        ("transformer", 0), ("sparse", 0), ("transformer", 1), ("sparse", 1)
    ]  # fmt: skip
    assert [one.config.optim.lr for one in settings] == [6e-4, 2e-3] * 2
    assert {one.config.train.steps for one in settings} == {700}
    assert found.at("two", seeds=(4, 5, 6)).scale.seeds == (4, 5, 6)
    # What the scale sets may be replaced by the user, what a run sets may not.
    assert resolve(two, Path("d"), ["train.steps=30"], load_recipe=recipe)[0].config.train.steps == 30
    with pytest.raises(UserError, match=r"optim\.lr is set by the suite"):
        resolve(two, Path("d"), ["optim.lr=1.0"], load_recipe=recipe)


def test_runs_differ_in_what_the_suite_says_and_in_nothing_else() -> None:
    plus = RunSpec(variant="learnable_plus", overrides={"model.variant_options": {"logit_init": "zeros"}})
    first, second = resolve(suite(RunSpec(variant="transformer"), plus).at(), Path("d"), load_recipe=recipe)
    a, b = to_tree(first.config), to_tree(second.config)
    different = {f"{s}.{k}" for s in a for k in a[s] if a[s][k] != b[s][k]}
    assert different == {"model.variant", "model.variant_options"}
    assert second.config.model.variant_options == {"logit_init": "zeros"}
    assert first.config.train.threads == 1


def test_the_users_overrides_reach_every_run_as_texts_or_values() -> None:
    for overrides in (["train.steps=30", "optim.lr=1e-3"], {"train.steps": 30, "optim.lr": 1e-3}):
        found = resolve(suite().at(), Path("d"), overrides, load_recipe=recipe)
        assert [(one.config.train.steps, one.config.optim.lr) for one in found] == [(30, 1e-3)] * 2
        assert "shortened" in found[0].notes[0]  # the warm-up of 120 steps


def test_overrides_that_make_no_sense_are_refused() -> None:
    with pytest.raises(UserError, match=r"model\.variant is set by the suite"):
        resolve(suite().at(), Path("d"), ["model.variant=sparse"], load_recipe=recipe)
    sweep = suite(
        RunSpec(variant="transformer"), RunSpec(variant="transformer", name="fast", overrides={"optim.lr": 1e-2})
    )
    with pytest.raises(UserError, match=r"optim\.lr is set by the suite"):
        resolve(sweep.at(), Path("d"), {"optim.lr": 1.0}, load_recipe=recipe)
    with pytest.raises(UserError, match=r"did you mean train\.steps"):
        resolve(suite().at(), Path("d"), ["train.step=3"], load_recipe=recipe)
    with pytest.raises(UserError, match="did you mean 'learnable'"):
        resolve(suite(RunSpec(variant="transformer"), RunSpec(variant="learnabel")).at(), Path("d"), load_recipe=recipe)


def test_an_id_depends_on_what_changes_numbers_and_on_nothing_else() -> None:
    one = resolve(suite().at(), Path("here"), load_recipe=recipe)[1]
    without_effect = [
        "train.checkpoint_every=7", "track.log_every_seconds=1", "train.threads=2", "parallel.shard=2",
        "train.micro_batch_size=2", "train.device=cuda", "train.compile=true", "train.async_save=true",
    ]  # fmt: skip
    again = resolve(suite().at(), Path("elsewhere"), without_effect, load_recipe=recipe)[1]
    assert one.id("f") == again.id("f") != one.id("g")
    assert one.id("f").startswith("learnable-") and len(one.id("f")) == len("learnable-") + 8
    for change in (
        {"train.seed": 1},
        {"optim.lr": 1e-3},
        {"model.variant_options": {"init_own": 1.0}},
        {"train.dtype": "bf16"},
        {"model.attention_bias": True},
    ):
        assert digest(edit(one.config, change), "f") != digest(one.config, "f")


def test_the_same_training_has_the_same_id_under_any_name_and_however_its_options_are_written() -> None:
    named = RunSpec(variant="learnable", name="half", overrides={"model.variant_options": {"init_own": 0.5}})
    plain, same = resolve(
        suite(RunSpec(variant="learnable"), named, baseline="learnable").at(), Path("d"), load_recipe=recipe
    )
    assert plain.id("f") == same.id("f")


def test_recorded_runs_are_found_again() -> None:
    """Ids of runs whose records are in the repository. If this fails after a key or an option was added, say in
    settings.ADDED_KEYS or ADDED_OPTIONS at which value it changes nothing; do not write new ids here.
    """
    variants = importlib.import_module("resformer.suites.variants").SUITE
    corpus = "9af514ca9754639cf4552b7f5b7c80b5748d31dc139bda1c449a36198c9977e1"
    found = [one.id(corpus) for one in resolve(variants.at("mini", (0,)), Path("data"))]
    assert found == [
        "transformer-46edccd7", "neutreno-d469d7a3", "denseformer-24d979c7", "identity-3fb0e7fc", "constant-0712a363",
        "sparse-79043027", "learnable-1007c031", "learnable_plus-53fe2ed7", "dense-51a58045", "svformer-4cf99f14",
        "query_residual-a0080ea1",
    ]  # fmt: skip


def test_every_key_counts_unless_it_is_said_that_it_does_not() -> None:
    """No key is left out because its name begins like another's."""
    from resformer.experiments.settings import WITHOUT_EFFECT, without_effect
    from resformer.train.config import keys

    left_out = {path for path in keys() if without_effect(path)}
    assert {path for path in left_out if not path.startswith(("parallel.", "track."))} == {
        name for name in WITHOUT_EFFECT if not name.endswith(".")
    }


def test_every_suite_that_comes_with_the_package_resolves() -> None:
    package = importlib.import_module("resformer.suites")
    names = [module.name for module in pkgutil.iter_modules(package.__path__)]
    assert "quick" in names
    for name in names:
        found = importlib.import_module(f"resformer.suites.{name}").SUITE
        assert found.name == name and found.title
        for scale in found.scales:
            planned = found.at(scale)
            settings = resolve(planned, Path("data"))
            assert len(settings) == len(planned.runs) * len(planned.scale.seeds)
            ids = [one.id("f") for one in settings]
            assert len(set(ids)) == len(ids), f"{name} at {scale} trains the same twice"


def test_quick_is_a_fair_comparison() -> None:
    quick = importlib.import_module("resformer.suites.quick").SUITE
    assert {"transformer", "learnable", "learnable_plus", "svformer"} <= {run.variant for run in quick.runs}
    trees = [to_tree(one.config) for one in resolve(quick.at(), Path("data"))]
    for tree in trees:
        tree["model"].pop("variant")
    assert all(tree == trees[0] for tree in trees)
