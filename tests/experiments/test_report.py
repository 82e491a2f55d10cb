"""The report on synthetic suites: right numbers, honest words, nothing that can be injected, whole at any time."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console
from synthetic import loss_at, quick, write_suite

from resformer.errors import UserError
from resformer.experiments.report import write_report
from resformer.experiments.results import SEED_NOISE_NATS
from resformer.experiments.terminal import print_results

VOID = {"meta", "br", "col", "link", "img", "input", "hr", "wbr"}


class Page(HTMLParser):
    """Checks nesting, and collects elements, attributes and text outside scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        assert self.open == [], f"never closed: {self.open}"

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((name, dict(attributes)))
        if name not in VOID:
            self.open.append(name)

    def handle_endtag(self, name: str) -> None:
        assert self.open and self.open[-1] == name, f"</{name}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self.open):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def report(out: Path) -> tuple[Page, dict]:
    path = write_report(out)
    assert path == out / "report.html"
    return Page(path.read_text(encoding="utf-8")), json.loads((out / "results.json").read_text())


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
    assert rows["learnable_plus"]["difference"]["nats"] == pytest.approx(-gain)
    assert rows["learnable_plus"]["difference_by_domain"]["book"] == pytest.approx(-gain)
    assert rows["svformer"]["kv_ratio"] == 0.5625
    assert rows["learnable"]["parameters_difference"] == 14
    assert rows["learnable"]["tokens_per_second"] == pytest.approx(4200, rel=0.05)
    assert rows["transformer"]["data_saved"] is None
    assert f"{rows['svformer']['validation']['loss']:.3f}" in page.text
    assert results["headline"] in page.text


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
    assert [claim["verdict"] for claim in results["claims"]] == ["held", "held"]
    assert {claim["evidence"] for claim in results["claims"]} == {"measured, one seed"}
    assert "learnable_plus < transformer" in page.text


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
        attributes["class"] for name, attributes in page.elements if name == "svg" and attributes.get("role") == "img"
    ]
    assert sorted(drawings) == ["narrow"] * 3 + ["wide"] * 3
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
    assert len([name for name, _ in page.elements if name == "script"]) == 4  # the points of three charts, and ours
    assert not any(key.startswith("on") for _, attributes in page.elements for key in attributes)


def test_nothing_wins(tmp_path: Path) -> None:
    runs = [{"variant": "transformer", "gain": 0.1}, {"variant": "learnable", "gain": 0.0}]
    page, results = report(write_suite(tmp_path, runs, claims=[("learnable", "transformer")]))
    assert results["headline"].startswith("Nothing beats the transformer here")
    assert results["runs"][1]["data_saved"]["share"] < 0
    assert results["claims"][0]["verdict"] == "not held"
    assert "0 of 1" in page.text


@pytest.mark.parametrize("gain", [0.8 * SEED_NOISE_NATS, -0.8 * SEED_NOISE_NATS])
def test_a_difference_within_seed_noise_decides_nothing(tmp_path: Path, gain: float) -> None:
    runs = [{"variant": "transformer", "gain": 0.1}, {"variant": "learnable", "gain": 0.1 + gain}]
    _, results = report(write_suite(tmp_path, runs, claims=[("learnable", "transformer")]))
    assert results["headline"].startswith("No clear winner")
    assert results["claims"][0]["verdict"] == "undecided"


def test_a_report_of_one_run_of_four_says_what_is_missing(tmp_path: Path) -> None:
    runs = [
        {"variant": "transformer", "gain": 0.0},
        {"variant": "learnable", "gain": 0.1, "until": 120},
        {"variant": "learnable_plus", "gain": 0.1, "skip": True},
        {"variant": "svformer", "gain": 0.1, "skip": True},
    ]
    page, results = report(write_suite(tmp_path, runs, claims=[("learnable", "transformer")]))
    assert results["missing"] == ["learnable", "learnable_plus", "svformer"]
    assert results["claims"][0]["verdict"] == "not run"
    assert "1 of 4 runs are finished" in page.text
    assert "at step 120 of 250" in page.text
    assert "No comparison yet" in page.text
    assert results["runs"][1]["difference"] is None


def test_a_headline_before_all_runs_are_done_says_so(tmp_path: Path) -> None:
    runs = [
        {"variant": "transformer", "gain": 0.0},
        {"variant": "learnable", "gain": 0.1},
        {"variant": "svformer", "gain": 0.1, "until": 20},
    ]
    _, results = report(write_suite(tmp_path, runs))
    assert results["headline"].startswith("So far, with 2 of 3 runs done: learnable ends")


def test_a_report_without_the_baseline_compares_nothing(tmp_path: Path) -> None:
    runs = [{"variant": "transformer", "gain": 0.0, "until": 30}, {"variant": "learnable", "gain": 0.1}]
    page, results = report(write_suite(tmp_path, runs))
    assert results["headline"] == "No comparison yet: the baseline transformer has not finished."
    assert results["runs"][1]["difference"] is None and results["runs"][1]["validation"]
    assert "Training loss minus" in page.text


def test_a_report_before_any_step(tmp_path: Path) -> None:
    runs = [{"variant": "transformer", "gain": 0.0, "skip": True}, {"variant": "learnable", "gain": 0.1, "skip": True}]
    page, results = report(write_suite(tmp_path, runs))
    assert results["runs"][0]["state"] == "missing"
    assert page.text.count("Nothing to draw yet") == 3


def test_torn_and_damaged_files_do_not_stop_a_report(tmp_path: Path) -> None:
    out = quick(tmp_path)
    runs = {path.name.split("-")[0]: path for path in (out / "runs").iterdir()}
    with (runs["learnable"] / "metrics.jsonl").open("a") as file:
        file.write('{"split": "train", "step": 251, "lo')
    (runs["learnable_plus"] / "samples.json").write_text("{torn")
    (runs["learnable_plus"] / "environment.json").write_text("[]")
    (runs["svformer"] / "config.toml").write_bytes(b"\xff\xfe")
    (runs["transformer"] / "eval.json").unlink()
    _, results = report(out)
    rows = {row["name"]: row for row in results["runs"]}
    assert rows["learnable"]["step"] == 250
    assert rows["learnable_plus"]["sample"] is None and rows["learnable_plus"]["parameters"] is None
    assert not rows["learnable"]["validation"]["full"]  # one run lacks the full validation, so all show the loop's


def test_a_step_that_was_run_twice_counts_once(tmp_path: Path) -> None:
    out = write_suite(tmp_path, [{"variant": "transformer", "gain": 0.0, "until": 40}])
    path = next((out / "runs").iterdir()) / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines + lines[-15:]))
    _, results = report(out)
    assert results["runs"][0]["step"] == 40


def test_runs_that_differ_in_more_than_the_variant_are_named(tmp_path: Path) -> None:
    runs = [
        {"variant": "transformer", "gain": 0.0, "until": 40},
        {"variant": "learnable", "gain": 0.1, "seed": 1, "until": 40},
    ]
    page, _ = report(write_suite(tmp_path, runs))
    assert "Besides the variant, the runs differ in train.seed." in page.text


def test_a_directory_without_a_suite_is_a_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no suite in"):
        write_report(tmp_path)


def test_the_terminal_ends_with_the_path(finished: tuple[Path, Page, dict], capsys: pytest.CaptureFixture[str]) -> None:
    out, _, results = finished
    print_results(results, out / "report.html", Console(width=80))
    lines = capsys.readouterr().out.rstrip().splitlines()
    assert lines[-1] == str(out / "report.html")
    table = next(line for line in lines if line.startswith(" learnable_plus") or line.startswith("learnable_plus"))
    assert re.findall(r"[\u22120-9.,]+\d\S*", table)[:2] == ["3.648", "\u22120.170"]
    assert all(len(line) <= 80 for line in lines[:8])
