"""The report on suites like the paper's: several seeds, verdicts, the paper's numbers beside ours, many runs, pairs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from pages import Page, report
from rich.console import Console
from scipy import stats
from synthetic import less, pairs, sparse_layers, variants, write_suite

from resformer.experiments.chart import FAINT, SLOTS
from resformer.experiments.report_claims import on_of, unit, what
from resformer.experiments.report_curves import slots
from resformer.experiments.results import SEED_NOISE_NATS
from resformer.experiments.tables_dots import is_sweep, order
from resformer.experiments.terminal import print_results

Found = tuple[Path, Page, dict]


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Found:
    out = variants(tmp_path_factory.mktemp("variants"))
    return (out, *report(out))


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Found:
    out = sparse_layers(tmp_path_factory.mktemp("sparse"))
    return (out, *report(out))


@pytest.fixture(scope="module")
def paired(tmp_path_factory: pytest.TempPathFactory) -> Found:
    out = pairs(tmp_path_factory.mktemp("pairs"))
    return (out, *report(out))


def rows(results: dict) -> dict[str, dict]:
    return {row["name"]: row for row in results["runs"]}


def losses(row: dict) -> np.ndarray:
    return np.array([one["validation"]["loss"] for one in row["seeds"]])


def test_a_row_is_the_mean_of_its_seeds_and_a_difference_is_paired(three: Found) -> None:
    _, _, results = three
    found = rows(results)
    assert results["seeds"] == [0, 1, 2] and results["evidence"] == "measured, 3 seeds"
    own, base = losses(found["sparse"]), losses(found["transformer"])
    assert found["sparse"]["validation"]["loss"] == pytest.approx(own.mean())
    assert found["sparse"]["validation"]["low"] == pytest.approx(own.min())
    expected = stats.ttest_rel(own, base).confidence_interval(0.95)
    difference = found["sparse"]["difference"]
    assert (difference["low"], difference["high"]) == pytest.approx((expected.low, expected.high))
    assert list(difference["by_seed"].values()) == pytest.approx(list(own - base))
    assert difference["share"] == pytest.approx((own - base).mean() / base.mean())
    assert found["transformer"]["difference"] is None


def test_every_verdict_is_there_with_its_reason_and_what_did_not_hold_comes_first(three: Found) -> None:
    _, page, results = three
    assert results["verdicts"] == {"not held": 1, "undecided": 2, "held": 5, "not run": 1}
    verdicts = [words for words in page.words if words in ("not held", "undecided", "held", "not run")]
    assert verdicts == ["not held"] + ["undecided"] * 2 + ["held"] * 5 + ["not run"]
    claims = {claim["statement"] + claim["on"]: claim for claim in results["claims"]}
    assert claims["learnable < constantvalidation/loss"]["verdict"] == "not held"
    assert claims["query_residual not < transformervalidation/loss"]["verdict"] == "held"
    assert all(claim["reason"] for claim in results["claims"])
    assert page.text.index("not held") < page.text.index("Beside the paper") < page.text.index("Results Loss on")
    assert "2.687 against 2.700 at 82M (v5)" in page.text


def test_perplexity_is_that_of_the_loss_by_seed(three: Found) -> None:
    _, page, results = three
    row = rows(results)["identity"]
    each = [np.exp(one["validation"]["domains"]["wikipedia"]["loss"]) for one in row["seeds"]]
    assert row["validation"]["domains"]["wikipedia"]["perplexity"] == pytest.approx(np.mean(each))
    claim = next(claim for claim in results["claims"] if claim["unit"] == "perplexity")
    assert claim["difference"]["mean"] < -1
    assert f"{np.mean(each):.2f}" in page.text


def test_the_papers_numbers_stand_beside_ours(three: Found) -> None:
    _, page, results = three
    found = {(one["run"], one["on"]): one for one in results["paper"]}
    sparse = found["sparse", "validation/loss"]
    assert sparse["paper_difference"] == pytest.approx(2.687 - 2.739)
    assert sparse["ours"] == rows(results)["sparse"]["validation"]["loss"]
    assert sparse["difference"]["mean"] == rows(results)["sparse"]["difference"]["mean"]
    assert sparse["agrees"] == "same sign"
    assert found["transformer", "validation/loss"]["agrees"] is None
    assert found["identity", "validation/wikipedia/perplexity"]["paper_difference"] == pytest.approx(-1.0)
    assert "absent" not in {one["run"] for one in results["paper"]}  # of another scale
    assert "The scales differ" in page.text and "20B tokens of SlimPajama" in page.text
    assert "here they are linear in depth" in page.text


def test_tasks_have_accuracies_and_an_average(three: Found) -> None:
    _, page, results = three
    tasks = rows(results)["constant"]["tasks"]
    assert tasks["average"] == pytest.approx((tasks["piqa"] + tasks["arc_easy"]) / 2)
    assert rows(results)["constant"]["difference_by_task"]["piqa"]["mean"] == pytest.approx(0.168 / 4)
    assert "Zero-shot accuracy" in page.text


def test_a_run_without_all_tasks_has_no_average(tmp_path: Path) -> None:
    runs = [
        {"variant": "transformer", "gain": 0.0, "tasks": {"piqa": 0.5, "arc_easy": 0.3}},
        {"variant": "identity", "gain": 0.1, "tasks": {"piqa": 0.6}},
    ]
    _, results = report(write_suite(tmp_path, runs, claims=[less("transformer", "identity", "tasks/average")]))
    assert set(rows(results)["identity"]["tasks"]) == {"piqa"}
    assert results["claims"][0]["verdict"] == "not run"


def test_evaluation_noise_is_named_as_what_it_is(three: Found) -> None:
    _, page, results = three
    noise = rows(results)["sparse"]["evaluation_noise"]
    assert noise["documents"] == 240 and noise["seeds"] == 3
    assert 0 < noise["half_width"] < 0.02
    assert "evaluation ±" in page.text and "It is not the noise of training" in page.text
    assert rows(results)["transformer"]["evaluation_noise"] is None


def test_measures_by_layer_are_means_over_seeds_and_only_those_by_layer(three: Found) -> None:
    _, page, results = three
    found = rows(results)["identity"]["measures"]
    assert set(found) == {"importance_entropy", "first_token_importance", "value_similarity", "value_norm"}
    assert found["value_norm"]["mean"] == [1.5] * 8  # of its positions
    assert found["importance_entropy"]["layers"] == list(range(1, 9))
    assert np.all(np.array(found["value_similarity"]["low"]) <= found["value_similarity"]["mean"])
    assert "Inside the models" in page.text


def test_lambdas_are_means_over_seeds(three: Found) -> None:
    _, page, results = three
    assert rows(results)["learnable"]["lambdas"]["seeds"] == 3
    assert page.text.count("mean of 3 seeds") == 2


def test_cost_adds_up(three: Found) -> None:
    _, page, results = three
    cost = results["cost"]
    assert cost["runs"] == 24 and cost["tokens"] == 24 * 250 * 4096
    assert cost["flops"] == pytest.approx(3 * 5.5e6 * cost["tokens"])
    assert cost["hours"] == pytest.approx(results["seconds_total"] / 3600)
    assert rows(results)["sparse"]["train_flops"] == pytest.approx(cost["flops"] / 24)
    assert "All together 24" in page.text


def test_curves_have_a_line_and_a_band_a_run(three: Found) -> None:
    _, page, _ = three
    drawn = [a["class"] for name, a in page.elements if name == "path" and a.get("class", "").startswith("band")]
    assert len(drawn) == 2 * (8 + 8 + 7) + 4 * 8  # three charts of two widths, four small ones
    assert "band: from the lowest to the highest" in page.text


def test_limits_and_headline_speak_of_seeds(three: Found) -> None:
    _, page, results = three
    assert re.search(r"95.% interval 0\.\d{3} to 0\.\d{3}, 3 seeds\)\.$", results["headline"])
    assert "3 seeds. A seed changes" in page.text and "One seed." not in page.text
    assert "Runs of one seed saw the same text in the same order and differ by one formula." in page.text
    assert "The best of many" in page.text


def test_the_terminal_tells_intervals_and_what_did_not_hold(three: Found, capsys: pytest.CaptureFixture[str]) -> None:
    out, _, results = three
    print_results(results, out / "report.html", Console(width=80))
    text = capsys.readouterr().out
    assert "claims: 1 not held, 2 undecided, 5 held, 1 not run" in text
    assert "not held: learnable < constant on validation/loss" in text
    assert text.rstrip().splitlines()[-1] == str(out / "report.html")
    assert all(len(line) <= 80 for line in text.splitlines()[:14])


def test_no_clear_winner_when_the_interval_holds_zero(tmp_path: Path) -> None:
    runs = [{"variant": "transformer", "gain": 0.0}, {"variant": "identity", "gain": 0.001}]
    _, results = report(write_suite(tmp_path, runs, seeds=(0, 1, 2), claims=[("identity", "transformer")]))
    assert results["headline"].startswith("No clear winner") and "holds zero" in results["headline"]
    assert results["claims"][0]["verdict"] == "undecided"


def test_a_seed_that_is_missing_on_one_side_is_left_out_of_the_comparison(tmp_path: Path) -> None:
    runs = [{"variant": "transformer", "gain": 0.0}, {"variant": "identity", "gain": 0.1, "skip": {2}}]
    page, results = report(write_suite(tmp_path, runs, seeds=(0, 1, 2), claims=[("identity", "transformer")]))
    row = rows(results)["identity"]
    assert row["state"] == "partial" and row["finished"] == 2 and set(row["difference"]["by_seed"]) == {"0", "1"}
    assert results["missing"] == ["identity (seed 2)"]
    assert results["headline"].startswith("So far, with 5 of 6 runs done: ")
    assert "2 of 3 seeds are done" in page.text


def test_a_suite_of_many_runs_colours_a_few(many: Found) -> None:
    _, page, results = many
    colours = slots(results["runs"], "transformer")
    assert sorted(slot for slot in colours.values() if slot != FAINT) == list(range(SLOTS))
    assert sum(slot == FAINT for slot in colours.values()) == 10
    best = min((r for r in results["runs"] if r["difference"]), key=lambda r: r["difference"]["mean"])
    assert colours[best["name"]] != FAINT and colours["layer_2"] != FAINT  # the lowest end, and the highest
    assert "10 other runs, grey" in page.text
    faint = [a for name, a in page.elements if name == "path" and a.get("class") == "line faint"]
    assert len(faint) == 6 * 10 + 4 * 10


def test_a_sweep_keeps_the_suites_order_and_other_runs_are_sorted(many: Found, three: Found) -> None:
    (_, page, swept), (_, _, plain) = many, three
    assert [r["name"] for r in order(swept["runs"], "transformer")][:3] == ["layer_2", "layer_3", "layer_4"]
    means = [r["difference"]["mean"] for r in order(plain["runs"], "transformer")]
    assert means == sorted(means)
    assert not is_sweep(plain["runs"]) and not is_sweep([])
    assert "In the suite's order." in page.text


def test_one_seed_decides_no_claim_and_says_which_way_it_points(many: Found) -> None:
    _, page, results = many
    assert results["verdicts"] == {"not held": 0, "undecided": 4, "held": 0, "not run": 0}
    assert [claim["points"] for claim in results["claims"]] == ["as claimed", "as claimed", "against", "as claimed"]
    assert f"points against; less than the {SEED_NOISE_NATS} nats that another seed may change" in page.text
    assert next(one for one in results["paper"] if one["run"] == "last_3")["agrees"] == "open"
    assert "points the same way" in page.text
    assert "no claim can be held or refuted" in page.text


def test_a_run_is_compared_with_the_one_that_shares_its_settings(paired: Found) -> None:
    _, page, results = paired
    found = rows(results)
    assert {name: row["against"] for name, row in found.items()} == {
        "transformer": "transformer",
        "identity": "transformer",
        "transformer_window": "transformer",
        "identity_window": "transformer_window",
        "transformer_large": "transformer",
        "identity_large": "transformer_large",
        "svformer_short": "transformer",
    }
    own, other = losses(found["identity_window"])[0], losses(found["transformer_window"])[0]
    assert found["identity_window"]["difference"]["mean"] == pytest.approx(own - other)
    assert found["svformer_short"]["difference"] is None  # fewer tokens
    assert results["headline"].startswith("identity_window ends")  # a larger model is no finding
    large = next(one for one in results["paper"] if one["run"] == "identity_large")
    assert large["paper_difference"] == pytest.approx(2.4692 - 2.5015)
    assert "against transformer_window" in page.text


def test_runs_of_other_versions_machines_or_unsaved_code_are_flagged(tmp_path: Path) -> None:
    runs = [
        {"variant": "transformer", "gain": 0.0},
        {"variant": "identity", "gain": 0.1, "torch": "2.11.0", "commit": "ab" * 20 + "-dirty"},
    ]
    page, _ = report(write_suite(tmp_path, runs))
    assert "The runs are of 2 different versions." in page.text
    assert "1 of 2 runs were trained with changes that no commit holds" in page.text
    assert "the versions of the software" in page.text
    assert "torch 2.11.0" in page.text and "abababababab-dirty (1 runs)" in page.text


def test_text_of_suites_and_tasks_cannot_become_markup(tmp_path: Path) -> None:
    evil = '"><script>alert(1)</script>'
    runs = [
        {"variant": "transformer", "gain": 0.0, "tasks": {evil: 0.5}},
        {"variant": "identity", "name": evil, "run_id": "evil", "gain": 0.1, "tasks": {evil: 0.6}},
    ]
    out = write_suite(
        tmp_path,
        runs,
        claims=[less(evil, "transformer", paper=evil)],
        title=evil,
        question=evil,
        notes=[evil],
        paper_setting=evil,
        paper=[{"run": "transformer", "values": {"loss": 1.0}, "source": evil}],
        command=evil,
    )
    page, _ = report(out)
    assert page.text.count("alert(1)") >= 10
    assert all("alert" not in str(attributes) or "onerror" not in attributes for _, attributes in page.elements)
    text = (out / "report.html").read_text(encoding="utf-8")
    assert "<script>alert" not in text


@pytest.mark.parametrize(
    "damage", [{"paper": [3, {"run": "identity"}]}, {"claims": ["x", {"left": 1}]}, {"notes": None}]
)
def test_a_damaged_description_loses_only_what_is_damaged(tmp_path: Path, damage: dict) -> None:
    runs = [{"variant": "transformer", "gain": 0.0}, {"variant": "identity", "gain": 0.1}]
    page, results = report(write_suite(tmp_path, runs, **damage))
    assert results["paper"] == [] and results["claims"] == []
    assert "identity" in page.text


def test_names_of_measures() -> None:
    assert [on_of(key) for key in ("loss", "wikipedia/perplexity", "tasks/average")] == [
        "validation/loss", "validation/wikipedia/perplexity", "tasks/average"
    ]  # fmt: skip
    assert [unit(on) for on in ("validation/loss", "validation/book/perplexity", "tasks/piqa")] == [
        "nats", "perplexity", "accuracy"
    ]  # fmt: skip
    assert what("validation/loss") == "validation loss" and what("validation/book/loss") == "loss on book"
    assert what("tasks/average") == "accuracy, mean of the tasks"


def test_results_are_json_without_nan(three: Found) -> None:
    out, _, _ = three
    json.loads((out / "results.json").read_text(), parse_constant=lambda name: pytest.fail(name))


def test_open_runs_are_named_with_the_seeds_that_are_open(tmp_path: Path) -> None:
    runs = [
        {"variant": "transformer", "gain": 0.0, "skip": {1, 2}},
        {"variant": "identity", "gain": 0.1, "skip": True},
    ]
    page, results = report(write_suite(tmp_path, runs, seeds=(0, 1, 2)))
    assert "1 of 6 runs are finished. Still open: transformer (seeds 1, 2), identity." in page.text
    assert results["evidence"] == "measured, one seed"
