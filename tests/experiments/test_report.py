"""The report on synthetic suites: right numbers, honest words, nothing that can be injected."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pages import Page, report
from rich.console import Console
from synthetic import loss_at, quick, write_suite

from resformer.experiments.report import write_report
from resformer.experiments.results import SEED_NOISE_NATS
from resformer.experiments.terminal import print_results, results_table


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Page, dict]:
    out = quick(tmp_path_factory.mktemp("quick"))
    return (out, *report(out))


def test_the_numbers_are_those_of_the_runs(finished: tuple[Path, Page, dict]) -> None:
    _, page, results = finished
    rows = {row["name"]: row for row in results["runs"]}
    assert results["complete"] and results["missing"] == []
    assert rows["transformer"]["validation"]["loss"] == pytest.approx(loss_at(250, 0.0) + 0.06)
    gain = loss_at(250, 0.0) - loss_at(250, 0.173)
    assert rows["learnable_plus"]["difference"]["mean"] == pytest.approx(-gain)
    assert rows["learnable_plus"]["difference_by_domain"]["book"]["mean"] == pytest.approx(-gain)
    assert rows["svformer"]["kv_ratio"] == 0.5625
    assert rows["learnable"]["parameters_difference"] == 14
    assert rows["learnable"]["tokens_per_second"] == pytest.approx(4200, rel=0.05)
    assert rows["transformer"]["data_saved"] is None
    assert f"{rows['svformer']['validation']['loss']:.3f}" in page.text
    assert " ".join(results["headline"].split()) in page.text


def test_data_saved_is_where_the_loops_curve_crosses(finished: tuple[Path, Page, dict]) -> None:
    _, _, results = finished
    saved = next(row["data_saved"] for row in results["runs"] if row["name"] == "learnable_plus")
    step = saved["tokens"] / 4096
    assert loss_at(step, 0.173) == pytest.approx(
        loss_at(250, 0.0), abs=0.02
    )  # linear between validations 25 steps apart
    assert saved["share"] == pytest.approx(1 - step / 250)


def test_claims_come_out_as_measured_with_one_seed(finished: tuple[Path, Page, dict]) -> None:
    _, page, results = finished
    assert [claim["verdict"] for claim in results["claims"]] == ["undecided", "undecided"]
    assert [claim["points"] for claim in results["claims"]] == ["as claimed", "as claimed"]
    assert results["verdicts"] == {"not held": 0, "undecided": 2, "held": 0, "not run": 0}
    assert results["evidence"] == "measured, one seed"
    assert "learnable_ plus ends below transformer" in page.text
    assert f"times the {SEED_NOISE_NATS} nats that another seed may change" in page.text
    assert "2 undecided" in page.text and "2.739" not in page.text  # nothing of the paper where the suite says nothing


def test_the_page_loads_nothing(finished: tuple[Path, Page, dict]) -> None:
    out, page, _ = finished
    for name, attributes in page.elements:
        assert name not in {"link", "img", "iframe", "object", "embed", "base"}
        assert not {"src", "href", "srcset", "data"} & set(attributes), (name, attributes)
        assert not any(key.startswith("on") for key in attributes)
    text = (out / "report.html").read_text(encoding="utf-8")
    assert "@import" not in text
    assert set(re.findall(r"url\((?!#clip-)[^)]*\)", text)) == set()
    assert re.findall(r"https?://", text) == []


def test_phone_desktop_dark_and_print_are_provided_for(finished: tuple[Path, Page, dict]) -> None:
    out, page, _ = finished
    text = (out / "report.html").read_text(encoding="utf-8")
    assert "prefers-color-scheme: dark" in text and "@media print" in text
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in page.elements
    drawings = [
        attributes.get("class", "small")
        for name, attributes in page.elements
        if name == "svg" and attributes.get("role") == "img"
    ]
    assert sorted(drawings) == ["narrow"] * 3 + ["small"] * 4 + ["wide"] * 3
    cells = [attributes for name, attributes in page.elements if name == "td" and "data-label" in attributes]
    assert len(cells) == 4 * 6  # what a phone shows instead of the table's head


def test_lambda_maps_number_layers_from_one(finished: tuple[Path, Page, dict]) -> None:
    _, page, _ = finished
    titles = [attributes["title"] for name, attributes in page.elements if name == "td" and "title" in attributes]
    assert titles.count("layer 1 is not mixed") == 4  # two coefficients, two models that mix
    assert sum(title.startswith("layer 8, first value") for title in titles) == 2


def test_the_picture_is_a_png(finished: tuple[Path, Page, dict]) -> None:
    out, _, _ = finished
    assert (out / "report.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_text_from_runs_cannot_become_markup(tmp_path: Path) -> None:
    evil = '"><script>alert(1)</script><img src=x onerror=alert(2)>'
    runs = [
        {"name": "transformer", "variant": "transformer", "gain": 0.0},
        {"name": evil, "run_id": "evil-0", "variant": evil, "gain": 0.1, "sample": f"</blockquote>{evil}"},
    ]
    page, results = report(write_suite(tmp_path, runs, claims=[(evil, "transformer")]))
    assert results["runs"][1]["name"] == evil
    assert evil in page.text
    assert [name for name, _ in page.elements if name == "img"] == []
    assert len([name for name, _ in page.elements if name == "script"]) == 8  # the points of seven charts, and ours
    assert not any(key.startswith("on") for _, attributes in page.elements for key in attributes)


def test_nothing_wins(tmp_path: Path) -> None:
    runs = [{"variant": "transformer", "gain": 0.1}, {"variant": "learnable", "gain": 0.0}]
    page, results = report(write_suite(tmp_path, runs, claims=[("learnable", "transformer")]))
    assert results["headline"].startswith("Nothing beats the transformer here")
    assert results["runs"][1]["data_saved"]["share"] < 0
    assert results["claims"][0]["verdict"] == "undecided" and results["claims"][0]["points"] == "against"
    assert "0 of 1" in page.text


@pytest.mark.parametrize("gain", [0.8 * SEED_NOISE_NATS, -0.8 * SEED_NOISE_NATS])
def test_a_difference_within_seed_noise_decides_nothing(tmp_path: Path, gain: float) -> None:
    runs = [{"variant": "transformer", "gain": 0.1}, {"variant": "learnable", "gain": 0.1 + gain}]
    _, results = report(write_suite(tmp_path, runs, claims=[("learnable", "transformer")]))
    assert results["headline"].startswith("No clear winner")
    assert results["claims"][0]["verdict"] == "undecided"


def test_a_run_above_the_baseline_needs_more_and_saves_nothing(tmp_path: Path) -> None:
    runs = [{"variant": "transformer", "gain": 0.1}, {"variant": "learnable", "gain": 0.0}]
    page, results = report(write_suite(tmp_path, runs))
    saved, total = results["runs"][1]["data_saved"], results["runs"][1]["train_tokens"]
    assert saved["share"] == pytest.approx(saved["tokens"] / total - 1)
    more = f"{100 * (total / saved['tokens'] - 1):.0f}"
    assert f"needs {more} % more" in page.text
    assert "the transformer has this run's final loss after" in page.text
    assert "crossing" not in page.text
    assert "one that ends above never has it, and needs more tokens than the transformer" in page.text
    table = results_table(results)
    assert list(table.columns[4].cells) == ["", f"+{more}\u202f%"]


def test_new_variants_are_shown_as_what_they_are(tmp_path: Path) -> None:
    runs = [
        {"variant": "transformer", "gain": 0.0},
        {"variant": "rwkv", "gain": 0.1},
        {"variant": "cla", "gain": 0.05, "kv_ratio": 0.75},
        {"variant": "value_embeddings", "gain": 0.2, "tables": 1_048_576},
    ]
    page, results = report(write_suite(tmp_path, runs))
    rows = {row["name"]: row for row in results["runs"]}
    assert [row["lambdas"] for row in rows.values()] == [None] * 4
    assert "What each layer mixes" not in page.text
    assert "75.0 %" in page.text and "1,048,576 in token tables" in page.text
    assert rows["value_embeddings"]["token_tables"] == 1_048_576 and rows["cla"]["token_tables"] is None
    assert all(row["formula"] for row in rows.values())


def test_the_title_of_the_page_is_short(finished: tuple[Path, Page, dict]) -> None:
    out, _, _ = finished
    text = (out / "report.html").read_text(encoding="utf-8")
    assert re.findall(r"<title>(.*?)</title>", text)[0] == "quick at mini - resformer"


def test_no_cell_of_the_lambda_maps_has_a_colour_of_one_scheme(finished: tuple[Path, Page, dict]) -> None:
    _, page, _ = finished
    cells = [a for name, a in page.elements if name == "td" and "layer" in (a.get("title") or "") and "style" in a]
    assert cells and all(
        re.fullmatch(r"background:rgba\(var\(--heat(-negative)?\),[01]\.\d\d\)", a["style"]) for a in cells
    )
    assert {a.get("class") for a in cells} == {None, "middle", "full"}


def test_the_baseline_is_drawn_last_and_dashed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    drawn: list[tuple[str, object]] = []

    def plot(self: object, x: object, y: object, **more: object) -> list[object]:
        drawn.append((str(more["label"]), more["linestyle"]))
        return []

    monkeypatch.setattr("matplotlib.axes.Axes.plot", plot)
    write_report(quick(tmp_path))
    assert [name for name, _ in drawn[:4]] == ["learnable", "learnable_plus", "svformer", "transformer"]
    assert [style == "-" for _, style in drawn[:4]] == [True, True, True, False]


def test_runs_that_differ_in_more_than_the_variant_are_named(tmp_path: Path) -> None:
    runs = [
        {"variant": "transformer", "gain": 0.0, "until": 40},
        {"variant": "learnable", "gain": 0.1, "seed": 1, "until": 40},
    ]
    page, _ = report(write_suite(tmp_path, runs))
    assert "Besides the variant, the runs differ in train.seed." in page.text


def test_the_terminal_ends_with_the_path(finished: tuple[Path, Page, dict], capsys: pytest.CaptureFixture[str]) -> None:
    out, _, results = finished
    print_results(results, out / "report.html", Console(width=80))
    lines = capsys.readouterr().out.rstrip().splitlines()
    assert lines[-1] == str(out / "report.html")
    table = next(line for line in lines if line.startswith(" learnable_plus") or line.startswith("learnable_plus"))
    assert re.findall(r"[\u22120-9.,]+\d\S*", table)[:2] == ["3.648", "\u22120.170"]
    assert all(len(line) <= 80 for line in lines[:8])
