"""The page over all suites: what was run, what held, and links that lead to it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pages import Page
from synthetic import quick, sparse_layers, write_suite

from resformer.errors import UserError
from resformer.experiments.index import write_index
from resformer.experiments.report import write_report
from resformer.experiments.spec import RunSpec, Scale, Suite


def suite(name: str) -> Suite:
    return Suite(
        name=name,
        title=f"title of {name}",
        question=f"question of {name}?",
        scales={"mini": Scale(recipe="mini")},
        runs=(RunSpec(variant="transformer"),),
        baseline="transformer",
    )


@pytest.fixture(scope="module")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Page, str]:
    top = tmp_path_factory.mktemp("results")
    write_report(quick(top / "quick"))
    write_report(sparse_layers(top / "deep" / "sparse layers"))
    (top / "runs" / "x").mkdir(parents=True)
    (top / "runs" / "x" / "results.json").write_text("{}")
    (top / "other").mkdir()
    (top / "other" / "results.json").write_text('{"tokens_per_second": 3}')
    path = write_index(top, {name: suite(name) for name in ("where", "sparse_layers", "quick")})
    assert path == top / "index.html"
    return top, Page(path.read_text(encoding="utf-8")), (top / "index.md").read_text(encoding="utf-8")


def test_every_suite_has_a_row_with_verdicts_and_a_link_that_leads_somewhere(indexed: tuple[Path, Page, str]) -> None:
    top, page, _ = indexed
    links = [attributes["href"] for name, attributes in page.elements if name == "a"]
    assert links == ["deep/sparse%20layers/report.html", "quick/report.html"]
    assert (top / "deep" / "sparse layers" / "report.html").is_file()
    assert "2 of 3 suites have results; of their 6 claims: 6 undecided." in page.text
    assert page.text.index("sparse_ layers") < page.text.index("quick") < page.text.index("where")
    assert "not run" in page.text and "question of where?" in page.text
    assert "learnable_plus ends 0.170 nats" in page.text


def test_the_page_loads_nothing(indexed: tuple[Path, Page, str]) -> None:
    _, page, _ = indexed
    assert not {"link", "img", "script", "iframe"} & {name for name, _ in page.elements}


def test_the_text_has_the_same_table_and_the_figures(indexed: tuple[Path, Page, str]) -> None:
    top, _, text = indexed
    rows = [line for line in text.splitlines() if line.startswith("| [") or line.startswith("| where")]
    assert len(rows) == 3 and all(row.count(" | ") == 8 for row in rows)
    assert "![quick](quick/report.png)" in text
    claim = next(line for line in text.splitlines() if line.startswith(r"| learnable \< transformer"))
    assert claim.split(" | ")[1:4] == ["validation/loss", "\u22120.126", "undecided"]
    assert str(top) not in text


def test_what_is_not_finished_is_said(tmp_path: Path) -> None:
    runs = [{"variant": "transformer", "gain": 0.0}, {"variant": "identity", "gain": 0.1, "until": 20}]
    write_report(write_suite(tmp_path / "a", runs))
    page = Page(write_index(tmp_path).read_text(encoding="utf-8"))
    assert "1 of 2 runs finished" in page.text


def test_text_cannot_become_markup(tmp_path: Path) -> None:
    evil = "<img src=x onerror=alert(1)>|"
    write_report(write_suite(tmp_path / "a", [{"variant": "transformer", "gain": 0.0}], question=evil, name=evil))
    page = Page(write_index(tmp_path).read_text(encoding="utf-8"))
    assert "img" not in {name for name, _ in page.elements}
    assert "<img" not in (tmp_path / "index.md").read_text().replace(r"\<img", "")


def test_an_empty_directory_gives_an_empty_index(tmp_path: Path) -> None:
    page = Page(write_index(tmp_path, {"where": suite("where")}).read_text(encoding="utf-8"))
    assert "0 of 1 suites have results." in page.text


def test_mistakes_are_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no directory"):
        write_index(tmp_path / "absent")
    (tmp_path / "results.json").write_text(json.dumps({"schema": 1, "suite": "quick"}))
    with pytest.raises(UserError, match=r"schema is 1, expected 2; write it anew with `resformer suite report"):
        write_index(tmp_path)
