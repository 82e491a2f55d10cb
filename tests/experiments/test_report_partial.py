"""The report on suites that are missing parts, damaged or half done: whole at any time."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from pages import report
from rich.console import Console
from synthetic import quick, write_suite

from resformer.errors import RunError, UserError
from resformer.experiments.report import write_report
from resformer.experiments.status import suite_status
from resformer.experiments.suite import show_report
from resformer.experiments.terminal import print_results


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


@pytest.mark.parametrize(
    "damage",
    [
        None,
        "{torn",
        {"loss": float("nan")},
        {"step": 249},
        {"domains": {}},
        {"domains": {"github": {"loss": 1.0, "bits_per_byte": 1.0}}},
        {"data_fingerprint": "cd" * 32},
    ],
)
def test_two_kinds_of_loss_are_never_mixed_and_never_changed_silently(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: object
) -> None:
    out = quick(tmp_path)
    file = next((out / "runs").glob("svformer-*")) / "eval.json"
    if damage is None:
        file.unlink()
    elif isinstance(damage, dict):
        file.write_text(json.dumps(json.loads(file.read_text()) | damage))
    else:
        file.write_text(str(damage))
    page, results = report(out)
    assert results["unscored"] == ["svformer"] and not results["complete"]
    assert not any(row["validation"]["full"] for row in results["runs"])
    assert results["headline"].startswith("By the training loop's own validation: ")
    note = "No readable score on the whole validation split (eval.json) of svformer: all losses here, of every run"
    assert (
        note in page.text and "trained, not scored" in page.text and "the whole validation split, as" not in page.text
    )
    capsys.readouterr()
    print_results(results, out / "report.html", Console(width=400))
    assert note in capsys.readouterr().out


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda suite: suite["runs"][1].pop("id"), r"suite\.json: runs\[1\]\.id is missing, expected a text"),
        (lambda suite: suite["runs"][0].update(id=3), r"runs\[0\]\.id is 3, expected a text"),
        (lambda suite: suite["runs"][0].update(id="../x"), r"runs\[0\]\.id is '\.\./x', expected a plain name"),
        (lambda suite: suite["runs"][0].update(seed="a"), r"runs\[0\]\.seed is 'a', expected a whole number"),
        (lambda suite: suite["runs"][0].update(steps="a"), r"runs\[0\]\.steps is 'a', expected a whole number"),
        (lambda suite: suite["runs"].append("x"), r"runs\[4\] is 'x', expected an object"),
        (lambda suite: suite.pop("baseline"), r"suite\.json: baseline is missing"),
    ],
)
def test_a_damaged_suite_file_is_one_line(tmp_path: Path, edit: Callable[[dict], object], message: str) -> None:
    out = quick(tmp_path)
    suite = json.loads((out / "suite.json").read_text())
    edit(suite)
    (out / "suite.json").write_text(json.dumps(suite))
    for command in (write_report, suite_status):
        with pytest.raises(UserError, match=message):
            command(out)


def test_a_full_disk_is_one_line_and_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = quick(tmp_path)

    def full(self: object, file: Path, **more: object) -> None:
        Path(file).write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", full)
    with pytest.raises(RunError, match=f"^{out}: No space left on device; free some space"):
        show_report(out)
    assert not [path.name for path in out.iterdir() if path.name.startswith((".report", "report"))]


def test_a_step_that_was_run_twice_counts_once(tmp_path: Path) -> None:
    out = write_suite(tmp_path, [{"variant": "transformer", "gain": 0.0, "until": 40}])
    path = next((out / "runs").iterdir()) / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines + lines[-15:]))
    _, results = report(out)
    assert results["runs"][0]["step"] == 40


def test_a_directory_without_a_suite_is_a_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no suite in"):
        write_report(tmp_path)


def test_no_verdict_before_all_planned_seeds_are_there(tmp_path: Path) -> None:
    """With three seeds planned and two done a claim waits, however small its p: looks accumulate, and seeds that are
    missing may be those that diverged.
    """
    import json

    from synthetic import variants

    from resformer.experiments.report import write_report

    out = variants(tmp_path)
    write_report(out)
    whole = json.loads((out / "results.json").read_text())
    decided = [claim for claim in whole["claims"] if claim["verdict"] in ("held", "not held")]
    assert decided
    suite = json.loads((out / "suite.json").read_text())
    (out / "suite.json").write_text(json.dumps(suite | {"seeds": [*whole["seeds"], 99]}))
    write_report(out)
    again = json.loads((out / "results.json").read_text())["claims"]
    later = {(claim["statement"], claim["on"]): claim for claim in again}
    for claim in decided:
        waiting = later[claim["statement"], claim["on"]]
        assert waiting["verdict"] == "undecided" and waiting["difference"] == claim["difference"]
        assert "lacks seed 99" in waiting["reason"] and "waits for all" in waiting["reason"]


def test_differences_of_exactly_zero_have_an_axis() -> None:
    from resformer.experiments.axis import around_zero

    found = around_zero([0.0, 0.0])
    assert found is not None and 0.0 < found.at(0.0) < 100.0
