"""Running a suite: what is trained, reused, resumed, reported; with a stand-in for training, and once for real."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from small_suite import recipe, request, run_suite, small

from resformer.errors import RunError, UserError
from resformer.experiments import suite as suites
from resformer.experiments.finish import finish
from resformer.experiments.launch import Launch
from resformer.experiments.places import is_locked, locked
from resformer.experiments.runs import read_run
from resformer.experiments.status import suite_status


def test_a_suite_is_trained_once_and_reused_after(
    tmp_path: Path, stand_in: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    suite = small("transformer", "learnable", "svformer")
    assert run_suite(suite, tmp_path, jobs=2, load_recipe=recipe) == 0
    first = capsys.readouterr().out
    assert first.rstrip().splitlines()[-1] == str(tmp_path / "report.html")
    assert "learnable ends 0." in first
    assert len(stand_in) == 3
    names = sorted(path.name.split("-")[0] for path in (tmp_path / "runs").iterdir())
    assert names == ["learnable", "svformer", "transformer"]
    described = json.loads((tmp_path / "suite.json").read_text())
    assert {run["id"] for run in described["runs"]} == {path.name for path in (tmp_path / "runs").iterdir()}
    for run in described["runs"]:
        assert (tmp_path / "runs" / run["id"] / "run.log").read_text().startswith("$ ")
        assert f'variant = "{run["variant"]}"' in (tmp_path / "configs" / f"{run['id']}.toml").read_text()

    assert run_suite(suite, tmp_path, jobs=2, load_recipe=recipe) == 0
    second = capsys.readouterr().out
    assert len(stand_in) == 3
    assert second.count("already trained (40 steps), reused") == 3
    assert second.rstrip().splitlines()[-1] == str(tmp_path / "report.html")

    rows = suite_status(tmp_path)
    assert [row["state"] for row in rows] == ["finished"] * 3
    assert "40/40" in capsys.readouterr().out


def test_a_failed_run_stops_nobody_and_is_shown(
    tmp_path: Path, stand_in: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_suite(small("transformer", "sparse", "learnable"), tmp_path, jobs=1, load_recipe=recipe) == 1
    said = capsys.readouterr().out
    assert "sparse failed with exit code 1" in said
    assert "RunFailure: loss is nan at step 3" in said
    assert said.rstrip().splitlines()[-1] == str(tmp_path / "report.html")
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["missing"] == ["sparse"]
    assert [row["state"] for row in suite_status(tmp_path)] == ["finished", "failed", "finished"]
    page = (tmp_path / "report.html").read_text()
    assert "Failed: sparse, at step 0. " in page and "RunFailure: loss is nan at step 3" in page
    # One seed decides nothing, but says which way it points.
    assert (results["claims"][0]["verdict"], results["claims"][0]["points"]) == ("undecided", "as claimed")


def test_what_is_left_of_a_run_decides_how_it_goes_on(tmp_path: Path, stand_in: list[list[str]]) -> None:
    suite = small("transformer", "learnable", "svformer")
    assert run_suite(suite, tmp_path, load_recipe=recipe) == 0
    assert not any({"--resume", "--overwrite"} & set(command) for command in stand_in)
    runs = {path.name.split("-")[0]: path for path in (tmp_path / "runs").iterdir()}
    shutil.rmtree(runs["transformer"])
    runs["transformer"].mkdir(parents=True)
    (runs["transformer"] / "config.toml").write_text("")
    shutil.rmtree(runs["learnable"])
    runs["learnable"].mkdir()
    (runs["svformer"] / "samples.json").unlink()
    asked = request(suite, tmp_path)
    described = suites.describe(
        asked, suites.resolve(asked.planned, asked.places.data, load_recipe=recipe), "ab12" * 16
    )
    stand_in.clear()
    todo, _, _ = suites._plan(asked, described["runs"], suites.Console(quiet=True))
    assert [len(job.commands) for job in todo] == [2, 2, 1]  # svformer is trained and only lacks its sample
    assert "--resume" in stand_in[0] and "--overwrite" in stand_in[1]
    assert stand_in[0][1:5] == ["-m", "resformer", "train", "r"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stop_says_how_to_go_on(
    tmp_path: Path, stand_in: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    number: int, code: int,
) -> None:  # fmt: skip
    monkeypatch.setattr(suites, "run_jobs", lambda jobs, **more: number)
    overrides = ["train.steps=30"]
    assert run_suite(small("transformer"), tmp_path, jobs=3, config_overrides=overrides, load_recipe=recipe) == code
    said = capsys.readouterr().out
    again = f"resformer suite run small --out {tmp_path} --jobs 3 --set train.steps=30"
    assert f"go on with the same command: {again}" in said
    assert not (tmp_path / "report.html").exists()


def test_two_processes_do_not_train_in_one_directory(tmp_path: Path, stand_in: list[list[str]]) -> None:
    with locked(tmp_path) as descriptor:
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(descriptor,))
        assert is_locked(tmp_path)
        with pytest.raises(UserError, match="another process is training"):
            run_suite(small("transformer"), tmp_path, load_recipe=recipe)
    assert is_locked(tmp_path)  # the child outlives its parent and keeps the directory
    child.communicate(b"\n")
    assert not is_locked(tmp_path)


def test_mistakes_are_found_before_anything_is_written(tmp_path: Path, stand_in: list[list[str]]) -> None:
    for more, match in [({"jobs": 0}, "jobs is 0"), ({"config_overrides": ["optim.lrr=1"]}, r"did you mean optim\.lr")]:
        with pytest.raises(UserError, match=match):
            run_suite(small("transformer"), tmp_path / "new", load_recipe=recipe, **more)
    assert not (tmp_path / "new").exists()
    with pytest.raises(UserError, match="no suite in"):
        suite_status(tmp_path)


def test_only_a_trained_run_is_finished(tmp_path: Path) -> None:
    from synthetic import write_run

    run = write_run(tmp_path, "a-0", "transformer", gain=0.0, until=30)
    with pytest.raises(UserError, match="has 30 of 250 steps"):
        finish(run, tmp_path / "data", prompt="x", max_new_tokens=3, seed=0)


@pytest.mark.parametrize("damage", [None, "{torn", '{"step": 40, "loss": 6.5}'])
def test_a_lost_score_is_noticed_and_made_again(
    tmp_path: Path, stand_in: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    damage: str | None,
) -> None:  # fmt: skip
    suite = small("transformer", "learnable")
    assert run_suite(suite, tmp_path, load_recipe=recipe) == 0
    file = next((tmp_path / "runs").glob("learnable-*")) / "eval.json"
    whole = file.read_text()
    if damage is None:
        file.unlink()
    else:
        file.write_text(damage)
    rows = suite_status(tmp_path)
    assert [row["state"] for row in rows] == ["finished", "trained, not scored"]
    assert "go on with" in capsys.readouterr().out
    score = [sys.executable, "-c", f"open({str(file)!r}, 'w').write({whole!r})"]
    monkeypatch.setattr(Launch, "finish", lambda self, planned, places, run: score)
    stand_in.clear()
    assert run_suite(suite, tmp_path, load_recipe=recipe) == 0
    said = capsys.readouterr().out
    assert stand_in == []  # nothing is trained again
    assert f"learnable: trained, scored again: {file} is {'missing' if damage is None else 'damaged'}" in said
    assert json.loads((tmp_path / "results.json").read_text())["complete"]
    assert [row["state"] for row in suite_status(tmp_path)] == ["finished", "finished"]


def test_finish_scores_again_what_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from synthetic import DOMAINS, write_run

    from resformer.experiments import finish as finishing

    run = write_run(tmp_path, "a-0", "transformer", gain=0.0)
    (run / "eval.json").write_text("{torn")
    (run / "samples.json").write_text("[]")
    monkeypatch.setattr("resformer.evaluate.loading.load_model", lambda *more: (None, None))
    monkeypatch.setattr("resformer.data.open_dataset", lambda *a, **k: SimpleNamespace(fingerprint="ab12" * 16))
    monkeypatch.setattr(finishing, "continue_prompt", lambda *a, **k: {"prompt": "x", "text": "y"})
    monkeypatch.setattr(finishing, "measure", lambda *a: [{"measure": "importance_entropy", "layer": 1, "value": 1.0}])
    scores = {"loss": 4.0, "bits_per_byte": 1.5, "domains": {d: {"loss": 4.0, "bits_per_byte": 1.5} for d in DOMAINS}}
    documents = {d: {"nll": [4.0], "tokens": [1]} for d in DOMAINS}
    monkeypatch.setattr("resformer.evaluate.documents.evaluate_documents", lambda *a, **k: (scores, documents))
    finish(run, tmp_path / "data", prompt="x", max_new_tokens=3, seed=0)
    found = read_run(run, {})
    assert found.complete and found.documents["domains"] == documents


def test_a_place_where_something_else_is_stays_as_it_is(tmp_path: Path, stand_in: list[list[str]]) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match=f"--out {tmp_path / 'file'}: is a file"):
        run_suite(small("transformer"), tmp_path / "file", load_recipe=recipe)
    (tmp_path / "suite.json").write_text('{"name": "concert"}')
    with pytest.raises(UserError, match=r"suite\.json: not written by `resformer suite run`"):
        run_suite(small("transformer"), tmp_path, load_recipe=recipe)
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"file": "x", "suite.json": '{"name": "concert"}'}


def test_a_full_disk_is_one_line_with_the_place(
    tmp_path: Path, stand_in: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(suites, "write_json", full)
    with pytest.raises(RunError, match=f"^{tmp_path}: No space left on device; free some space or take another --out"):
        run_suite(small("transformer"), tmp_path, load_recipe=recipe)


@pytest.mark.slow
def test_a_real_suite_end_to_end(tmp_path: Path) -> None:
    """Corpus, two real runs of the tiny recipe, one of them stopped and resumed, and the report."""
    text = tmp_path / "text"
    text.mkdir()
    for i in range(60):
        (text / f"{i}.txt").write_text(f"Document {i}. " + " ".join(f"word{(i * j) % 97} and" for j in range(400)))
    program = f"""
import sys
from resformer.experiments.spec import *
from resformer.experiments.suite import Request, run_suite
from resformer.experiments.launch import Launch
from resformer.experiments.places import Places
scale = Scale(recipe="tiny", inputs=({str(text)!r},), prepare_options={{"vocab_size": 300}})
suite = Suite(name="t", title="", scales={{"tiny": scale}}, baseline="transformer", sample_tokens=8,
              runs=tuple(RunSpec(variant=v) for v in ("transformer", "learnable")))
sys.exit(run_suite(Request(planned=suite.at(), places=Places.of({str(tmp_path / "out")!r}), launch=Launch(),
                           overrides=["train.steps=400", "train.checkpoint_every=50"])))
"""
    first = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    from test_jobs import wait_for

    wait_for(lambda: any((tmp_path / "out" / "runs").glob("*/checkpoints/latest")), seconds=240)
    first.send_signal(signal.SIGTERM)
    said, _ = first.communicate(timeout=120)
    assert first.returncode == 143, said
    assert "go on with the same command" in said
    second = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=400)
    assert second.returncode == 0, second.stdout + second.stderr
    assert "resumed" in second.stdout
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["complete"]
    for row in results["runs"]:
        assert row["validation"]["full"] and row["validation"]["loss"] < 5.7  # ln 300: better than knowing nothing
        assert row["parameters"] and row["kv_bytes_per_token"] and row["sample"]["prompt"] == "The history of the"
    assert results["runs"][1]["lambdas"]["layers"] == [2]
