"""A suite is checked when it is declared; the settings of its runs give them their names."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

import pytest

from resformer.errors import UserError
from resformer.experiments.settings import digest, resolve
from resformer.experiments.spec import Less, RunSpec, Suite
from resformer.train.config import Config
from resformer.train.configure import edit, to_tree


def suite(*runs: RunSpec, **more) -> Suite:
    runs = runs or (RunSpec(variant="transformer"), RunSpec(variant="learnable"))
    return Suite(**({"name": "s", "recipe": "r", "runs": runs, "baseline": "transformer"} | more))


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
        suite(RunSpec(variant="transformer"), RunSpec(variant="transformer", seed=1))
    with pytest.raises(UserError, match=r"baseline names the run 'transfromer'.*did you mean 'transformer'"):
        suite(baseline="transfromer")
    with pytest.raises(UserError, match="claim names the run 'sparse'"):
        suite(claims=(Less("sparse", "transformer"),))


def test_runs_differ_in_what_the_suite_says_and_in_nothing_else() -> None:
    plus = RunSpec(variant="learnable_plus", overrides={"model.variant_options": {"logit_init": "zeros"}}, seed=3)
    first, second = resolve(suite(RunSpec(variant="transformer"), plus), Path("d"), load_recipe=recipe)
    a, b = to_tree(first.config), to_tree(second.config)
    different = {f"{s}.{k}" for s in a for k in a[s] if a[s][k] != b[s][k]}
    assert different == {"model.variant", "model.variant_options", "train.seed"}
    assert second.config.model.variant_options == {"logit_init": "zeros"}
    assert first.config.train.threads == 1


def test_the_users_overrides_reach_every_run_as_texts_or_values() -> None:
    for overrides in (["train.steps=30", "optim.lr=1e-3"], {"train.steps": 30, "optim.lr": 1e-3}):
        found = resolve(suite(), Path("d"), overrides, load_recipe=recipe)
        assert [(one.config.train.steps, one.config.optim.lr) for one in found] == [(30, 1e-3)] * 2
        assert "shortened" in found[0].notes[0]  # the warm-up of 120 steps


def test_overrides_that_make_no_sense_are_refused() -> None:
    with pytest.raises(UserError, match=r"model\.variant is set by the suite"):
        resolve(suite(), Path("d"), ["model.variant=sparse"], load_recipe=recipe)
    sweep = suite(
        RunSpec(variant="transformer"), RunSpec(variant="transformer", name="fast", overrides={"optim.lr": 1e-2})
    )
    with pytest.raises(UserError, match=r"optim\.lr is set by the suite"):
        resolve(sweep, Path("d"), {"optim.lr": 1.0}, load_recipe=recipe)
    with pytest.raises(UserError, match=r"did you mean train\.steps"):
        resolve(suite(), Path("d"), ["train.step=3"], load_recipe=recipe)
    with pytest.raises(UserError, match="did you mean 'learnable'"):
        resolve(suite(RunSpec(variant="transformer"), RunSpec(variant="learnabel")), Path("d"), load_recipe=recipe)


def test_an_id_depends_on_what_changes_numbers_and_on_nothing_else() -> None:
    one = resolve(suite(), Path("here"), load_recipe=recipe)[1]
    again = resolve(
        suite(), Path("elsewhere"), ["train.checkpoint_every=7", "track.log_every_seconds=1"], load_recipe=recipe
    )[1]
    assert one.id("f") == again.id("f") != one.id("g")
    assert one.id("f").startswith("learnable-") and len(one.id("f")) == len("learnable-") + 8
    for change in (
        {"train.seed": 1},
        {"optim.lr": 1e-3},
        {"model.variant_options": {"init_own": 1.0}},
        {"train.threads": 2},
    ):
        assert digest(edit(one.config, change), "f") != digest(one.config, "f")


def test_an_id_is_the_same_on_every_day() -> None:
    assert digest(Config(), "f") == digest(Config(), "f")
    assert all(c in "0123456789abcdef" for c in digest(Config(), "f"))


def test_every_suite_that_comes_with_the_package_resolves() -> None:
    package = importlib.import_module("resformer.suites")
    names = [module.name for module in pkgutil.iter_modules(package.__path__)]
    assert "quick" in names
    for name in names:
        found = importlib.import_module(f"resformer.suites.{name}").SUITE
        assert found.name == name and found.title
        assert len(resolve(found, Path("data"))) == len(found.runs)


def test_quick_is_a_fair_comparison() -> None:
    quick = importlib.import_module("resformer.suites.quick").SUITE
    assert {"transformer", "learnable", "learnable_plus", "svformer"} <= {run.variant for run in quick.runs}
    trees = [to_tree(one.config) for one in resolve(quick, Path("data"))]
    for tree in trees:
        tree["model"].pop("variant")
    assert all(tree == trees[0] for tree in trees)
