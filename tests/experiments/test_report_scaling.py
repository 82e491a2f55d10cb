"""What is saved, and where SVFormer is overtaken, on suites whose answers are known."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from pages import Page, report
from synthetic import loss_at, pairs, quick, write_suite

from resformer.experiments.report_critical import reads_one_value
from resformer.experiments.report_scaling import PAPER, scaling
from resformer.experiments.tables_scaling import round_sizes

Found = tuple[Page, dict]
SHARE = 0.1


def scaled(out: Path, *, share: float = 0.1, seeds: tuple[int, ...] = (), bump: float = 0.0, **more: object) -> Path:
    """Identity against the Transformer at three sizes and, of the largest, three numbers of steps. All losses are
    100 size^-0.2 (steps / 250)^-0.1, of identity with a size 1 / (1 - `share`) times as large, and so it saves `share`
    of the parameters and 1 - (1 - `share`)^2 of the steps; `bump` is added to its loss at the middle size. Beside them
    SVFormer, by training losses ahead of the Transformer until step 100 at 256 tokens and 150 at 64.
    """
    runs: list[dict] = []
    for variant, factor in (("transformer", 1.0), ("identity", 1 / (1 - share))):
        for name, size, steps in (("", 2e6, 250), ("_w64", 1e6, 250), ("_w192", 4e6, 250), ("_w192_125", 4e6, 125),
                                  ("_w192_175", 4e6, 175)):  # fmt: skip
            loss = 100 * (size * factor) ** -0.2 * (steps / 250) ** -0.1
            loss += bump if variant == "identity" and size == 2e6 else 0.0
            overrides = {"model.hidden_size": size / 1e5} if name else {}
            overrides |= {"train.steps": steps, "optim.warmup_steps": 1} if steps < 250 else {}
            gain = (loss_at(steps, 0.0) + 0.06 - loss) / (1 - math.exp(-steps / 60))
            runs.append({"variant": variant, "name": variant + name, "gain": gain, "steps": steps,
                         "parameters": int(size), "overrides": overrides})  # fmt: skip
    short = {"data.sequence_length": 64}
    runs += [{"variant": "svformer", "gain": 0.0},
             {"variant": "svformer", "name": "svformer_64", "gain": 0.0, "overrides": short},
             {"variant": "transformer", "name": "transformer_64", "gain": 0.0, "overrides": short}]  # fmt: skip
    write_suite(out, runs, seeds=seeds, name="scaling", **more)
    described = json.loads((out / "suite.json").read_text())["runs"]
    paths = {(run["name"], run["seed"]): out / "runs" / run["id"] for run in described}
    for (name, seed), path in paths.items():
        if name.endswith("_64"):
            config = (path / "config.toml").read_text()
            (path / "config.toml").write_text(config.replace("sequence_length = 256", "sequence_length = 64"))
        if name.startswith("svformer"):
            other = paths[name.replace("svformer", "transformer"), seed]
            base = [json.loads(line) for line in (other / "metrics.jsonl").read_text().splitlines()]
            for row in base:
                if row["split"] == "train":
                    row["loss"] += 0.001 * (row["step"] - (150 if name.endswith("_64") else 100))
            (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in base))
    return out


@pytest.fixture(scope="module")
def one_seed(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return report(scaled(tmp_path_factory.mktemp("scaling"), share=SHARE))


@pytest.fixture(scope="module")
def three_seeds(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return report(scaled(tmp_path_factory.mktemp("seeds"), share=SHARE, seeds=(0, 1, 2)))


def row(name: str, parameters: int, loss: float, **overrides: object) -> dict:
    """A finished run as `results.json` has it, as far as savings need it."""
    validation = {"loss": loss}
    settings = {key.replace("__", "."): value for key, value in overrides.items()}
    return {
        "name": name, "variant": name.split("_")[0], "overrides": settings,
        "parameters": parameters, "train_tokens": 1e6, "validation": validation,
        "seeds": [{"seed": 0, "state": "finished", "validation": validation}],
    }  # fmt: skip


def three(variant: str, losses: tuple[float, float, float] = (4.0, 3.0, 2.0), **overrides: object) -> list[dict]:
    return [
        row(f"{variant}_{n}", n * 1_000_000, loss, model__hidden_size=n, **overrides)
        for n, loss in zip((1, 2, 4), losses, strict=True)
    ]


def test_savings_are_those_that_were_planted(one_seed: Found) -> None:
    _, results = one_seed
    (parameters,), (tokens,) = results["scaling"]["parameters"], results["scaling"]["tokens"]
    assert parameters["tokens"] == 250 * 4096 and tokens["parameters"] == 4_000_000
    for panel, share in ((parameters, SHARE), (tokens, 1 - (1 - SHARE) ** 2)):
        (saved,) = panel["savings"]
        assert saved["method"] == "identity" and saved["reason"] == "" and saved["seeds"] == [0]
        assert [p["share"] for p in saved["points"]] == pytest.approx([share] * 3)
        assert [p["extrapolated"] for p in saved["points"]] == [True, False, False]
        assert {p["low"] for p in saved["points"]} == {p["high"] for p in saved["points"]} == {None}
    assert [p["run"] for p in saved["points"]] == ["transformer_w192_125", "transformer_w192_175", "transformer_w192"]


def test_fitted_laws_are_those_that_were_planted(one_seed: Found) -> None:
    _, results = one_seed
    base, own = results["scaling"]["parameters"][0]["curves"]
    assert base["name"] == "transformer" and base["x"] == [1e6, 2e6, 4e6]
    assert base["fit"]["values"] == pytest.approx({"a": 100, "b": 0.2})
    assert own["fit"]["values"] == pytest.approx({"a": 100 * (1 - SHARE) ** 0.2, "b": 0.2})


def test_the_page_shows_savings_beside_the_papers(one_seed: Found) -> None:
    page, _ = one_seed
    assert "Parameters saved, at 1.02M training tokens" in page.text and "Data saved, at 4.00M parameters" in page.text
    for share in ("10.4", "13.3", "16.11", "13.6", "15.4", "20.3"):
        assert f"{share} %" in page.text
    assert "The fit behind the paper's figures is not known" in page.text
    assert "10.0 % extrapolated one seed" in page.text and "19.0 % one seed" in page.text
    drawings = [a for name, a in page.elements if name == "figure" and str(a.get("id")).startswith("chart-scaling")]
    assert len(drawings) == 2


def test_several_seeds_give_an_interval_that_holds_the_planted_share(three_seeds: Found) -> None:
    page, results = three_seeds
    for kind, share in (("parameters", SHARE), ("tokens", 1 - (1 - SHARE) ** 2)):
        (saved,) = results["scaling"][kind][0]["savings"]
        assert saved["seeds"] == [0, 1, 2]
        assert all(p["low"] < share < p["high"] for p in saved["points"])
    assert "95 % interval" in page.text and "3 seeds" in page.text


def test_a_curve_that_does_not_fall_has_a_reason_and_no_number(tmp_path: Path) -> None:
    page, results = report(scaled(tmp_path, bump=1.0))
    (panel,) = results["scaling"]["parameters"]
    (saved,) = panel["savings"]
    assert saved["points"] == [] and saved["reason"].startswith("identity does not fall from 1.00M to 2.00M")
    assert panel["curves"][1]["fit"] is None and panel["curves"][0]["fit"] is not None
    assert "No number: identity does not fall" in page.text
    assert results["scaling"]["tokens"][0]["savings"][0]["points"]  # the other figure is not touched by it


def test_a_baseline_that_does_not_fall_has_a_reason_too() -> None:
    found = scaling([*three("transformer", (3.0, 3.1, 2.0)), *three("identity")], "transformer_1")
    assert found is not None
    assert found["parameters"][0]["savings"][0]["reason"].startswith("transformer does not fall")


@pytest.mark.parametrize("case", ["too few", "alike", "other settings", "no baseline", "other tokens"])
def test_nothing_is_said_where_runs_do_not_allow_it(case: str) -> None:
    base, own = three("transformer"), three("identity")
    if case == "too few":
        own = own[:2]
    elif case == "alike":
        own[1]["parameters"] = round(1.04 * own[0]["parameters"])
    elif case == "other settings":
        own = three("identity", optim__lr=1.0)
    elif case == "other tokens":
        own = [r | {"train_tokens": 2e6} for r in own]
    assert scaling([*base, *own], "absent" if case == "no baseline" else "transformer_1") is None


def test_methods_that_differ_in_options_are_curves_of_their_own_and_svformer_has_the_papers_number() -> None:
    option = {"model__variant_options": {"gamma": True}}
    rows = [
        *three("transformer"),
        *three("svformer"),
        *(r | {"name": f"g{r['name']}"} for r in three("svformer", **option)),
    ]
    found = scaling(rows, "transformer_1")
    assert found is not None
    assert [one["method"] for one in found["parameters"][0]["savings"]] == ["svformer_1", "gsvformer_1"]
    assert found["paper"][:-1] == list(PAPER) and found["paper"][-1]["parameters"] == -0.122


def test_four_sizes_are_fitted_with_an_offset() -> None:
    def losses(factor: float) -> list[float]:
        return [50 * (factor * n * 1e6) ** -0.3 + 1.5 for n in (1, 2, 4, 8)]

    rows = [
        row(f"{variant}_{n}", n * 1_000_000, loss, model__hidden_size=n)
        for variant, factor in (("transformer", 1.0), ("identity", 1.2))
        for n, loss in zip((1, 2, 4, 8), losses(factor), strict=True)
    ]
    found = scaling(rows, "transformer_1")
    assert found is not None
    assert found["parameters"][0]["curves"][0]["fit"]["values"] == pytest.approx(
        {"a": 50, "b": 0.3, "c": 1.5}, rel=1e-3
    )


def test_critical_points_are_where_they_were_planted(one_seed: Found, three_seeds: Found) -> None:
    page, results = one_seed
    short, long = results["critical_points"]
    assert (short["run"], short["against"], short["sequence_length"]) == ("svformer_64", "transformer_64", 64)
    assert (long["run"], long["against"], long["sequence_length"]) == ("svformer", "transformer", 256)
    for found, step in ((short, 150), (long, 100)):
        assert found["kind"] == "crossed" and found["step"] == pytest.approx(step, abs=0.01)
        assert found["tokens"] == pytest.approx(4096 * step, rel=1e-3)
        assert found["window"] == 25 and found["low"] <= found["step"] <= found["high"]
    assert "Where one value for all layers is overtaken" in page.text and "614k tokens" in page.text
    page, results = three_seeds
    assert [len(one["by_seed"]) for one in results["critical_points"]] == [3, 3]
    assert "mean of 3; seed 0 crossed at 150, 1 crossed at 150" in page.text


def test_a_run_that_stays_ahead_has_no_step(tmp_path: Path) -> None:
    page, results = report(quick(tmp_path))
    (found,) = results["critical_points"]
    assert found["kind"] == "never" and found["step"] is None and found["high"] is None
    assert "not in sight" in page.text and results["scaling"] is None and "What is saved" not in page.text


def test_runs_that_were_not_trained_alike_have_no_critical_point(tmp_path: Path) -> None:
    page, results = report(pairs(tmp_path))  # its SVFormer has other steps than the baseline
    assert results["critical_points"] is None and results["scaling"] is None
    assert "Where one value for all layers" not in page.text and "What is saved" not in page.text


def test_which_runs_read_one_value() -> None:
    assert reads_one_value("svformer", {}) and reads_one_value("svformer", {"gamma": True, "anchors": [1]})
    assert not reads_one_value("svformer", {"anchors": [1, 4]}) and not reads_one_value("cla", {})
    assert not reads_one_value("svformer", {"layers": "last_third"})


def test_round_sizes_are_inside_and_few() -> None:
    for low, high in ((9e5, 6e6), (7e7, 5e8), (1e6, 1e9), (3.1e6, 3.3e6)):
        found = round_sizes(low, high)
        assert all(low <= x <= high for x in found) and len(found) <= 7 and found == sorted(found)
    assert np.allclose(round_sizes(7e7, 5e8), [7e7, 1e8, 1.5e8, 2e8, 3e8, 4e8, 5e8])
