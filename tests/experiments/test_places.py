"""Pools that suites share, records that replace runs, and one job a run: with a stand-in for training."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from small_suite import recipe, request, small
from synthetic import DOMAINS, write_run

from resformer.errors import UserError
from resformer.experiments import launch
from resformer.experiments import suite as suites
from resformer.experiments.launch import Launch
from resformer.experiments.places import Places, deposit, is_locked, lock_of, lock_run, waiting_for
from resformer.experiments.runs import read_run, read_runs
from resformer.experiments.status import list_runs, suite_status

Commands = list[list[str]]


@pytest.fixture
def unreported(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replaces the report; returns the directories that would have got one."""
    reported: list[Path] = []
    monkeypatch.setattr(suites, "show_report", lambda out, *more, **named: reported.append(out))
    return reported


def run(suite, out: Path, **more) -> int:
    return suites.run_suite(request(suite, out, **more), load_recipe=recipe)


def test_suites_of_one_pool_train_a_shared_run_once(
    tmp_path: Path,
    stand_in: Commands,
    unreported: list[Path],
) -> None:
    assert run(small("transformer", "learnable"), tmp_path / "a", pool=tmp_path) == 0
    assert run(small("transformer", "svformer"), tmp_path / "b", pool=tmp_path) == 0
    assert [command[command.index("--out") + 1].rpartition("/")[2].split("-")[0] for command in stand_in] == [
        "transformer", "learnable", "svformer"
    ]  # fmt: skip
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "locks", "runs"]
    assert json.loads((tmp_path / "b" / "suite.json").read_text())["pool"] == ".."
    assert [one.trained for one in read_runs(tmp_path / "b")] == [True, True]
    assert unreported == [tmp_path / "a", tmp_path / "b"]
    moved = tmp_path.with_name("moved")
    tmp_path.rename(moved)
    assert [one.trained for one in read_runs(moved / "a")] == [True, True]
    moved.rename(tmp_path)


def test_a_record_stands_for_its_run_on_a_later_day(
    tmp_path: Path,
    stand_in: Commands,
    unreported: list[Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    suite, records = small("transformer", "learnable"), tmp_path / "records"
    assert run(suite, tmp_path / "monday", records=records) == 0
    kept = sorted(path.name for path in (records / "runs").iterdir())
    assert [name.split("-")[0] for name in kept] == ["learnable", "transformer"]
    files = {path.name for path in (records / "runs" / kept[0]).iterdir()}
    assert files == {
        "config.toml", "environment.json", "metrics.jsonl", "eval.json", "documents.json", "measures.jsonl",
        "samples.json", "record.json",
    }  # fmt: skip
    shutil.rmtree(tmp_path / "monday")
    stand_in.clear()
    bigger = small("transformer", "learnable", "svformer")
    assert run(bigger, tmp_path / "tuesday", records=records) == 0
    assert len(stand_in) == 1 and "svformer" in " ".join(stand_in[0])
    assert capsys.readouterr().out.count("already trained (40 steps), reused") == 2
    found = read_runs(tmp_path / "tuesday")
    assert [(one.recorded, one.complete) for one in found] == [(True, True), (True, True), (False, True)]
    assert [row["state"] for row in suite_status(tmp_path / "tuesday")] == ["finished"] * 3
    # The records tell the whole suite by themselves.
    assert unreported[-2:] == [records / "small", tmp_path / "tuesday"]
    assert all(one.recorded for one in read_runs(records / "small"))


@pytest.mark.parametrize("file", ["metrics.jsonl", "eval.json", "documents.json", "record.json"])
def test_a_damaged_record_is_not_taken_for_a_run(
    tmp_path: Path,
    stand_in: Commands,
    unreported: list[Path],
    file: str,
) -> None:
    suite, records = small("transformer"), tmp_path / "records"
    assert run(suite, tmp_path / "a", records=records) == 0
    (record,) = (records / "runs").iterdir()
    (record / file).write_text('{"step": 3}\n')
    if file == "record.json":
        (record / file).unlink()
    shutil.rmtree(tmp_path / "a")
    stand_in.clear()
    assert run(suite, tmp_path / "a", records=records) == 0
    assert len(stand_in) == 1
    assert read_run(tmp_path / "nowhere" / record.name, {}, records=records).complete  # and it is mended


@pytest.mark.parametrize("change", ["seed", "steps", "file"])
def test_a_record_of_another_run_is_not_taken_for_this_one(
    tmp_path: Path,
    stand_in: Commands,
    unreported: list[Path],
    capsys: pytest.CaptureFixture[str],
    change: str,
) -> None:
    suite, records = small("transformer"), tmp_path / "records"
    assert run(suite, tmp_path / "a", records=records) == 0
    (record,) = (records / "runs").iterdir()
    if change == "file":  # a number that somebody made better
        found = json.loads((record / "eval.json").read_text())
        (record / "eval.json").write_text(json.dumps(found | {"loss": 1.0}))
    else:  # whole in itself, but of other settings
        config = (record / "config.toml").read_text()
        new = config.replace("seed = 0", "seed = 1") if change == "seed" else config.replace("lr = 0.0006", "lr = 0.1")
        assert new != config
        (record / "config.toml").write_text(new)
        said = json.loads((record / "record.json").read_text())
        said["sha256"]["config.toml"] = hashlib.sha256(new.encode()).hexdigest()
        (record / "record.json").write_text(json.dumps(said))
    shutil.rmtree(tmp_path / "a")
    stand_in.clear()
    assert run(suite, tmp_path / "a", records=records) == 0
    assert len(stand_in) == 1
    assert "its record is not taken" in capsys.readouterr().out


def test_records_of_a_suite_are_not_replaced_by_less(
    tmp_path: Path, stand_in: Commands, unreported: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    suite, records = small("transformer", "learnable"), tmp_path / "records"
    assert run(suite, tmp_path / "a", records=records, seeds=(0, 1)) == 0
    before = (records / "small" / "suite.json").read_bytes()
    assert run(suite, tmp_path / "b", records=records, seeds=(0,)) == 0
    assert run(suite, tmp_path / "c", records=records, seeds=(0, 1), only=(1,)) == 0
    assert run(suite, tmp_path / "d", records=records, seeds=(0, 1), config_overrides=["optim.lr=1e-3"]) == 0
    assert (records / "small" / "suite.json").read_bytes() == before
    assert capsys.readouterr().out.count("and stays as it is") == 2
    assert run(suite, tmp_path / "e", records=records, seeds=(0, 1, 2)) == 0
    assert json.loads((records / "small" / "suite.json").read_text())["seeds"] == [0, 1, 2]


def test_one_job_a_run(
    tmp_path: Path, stand_in: Commands, unreported: list[Path], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr("resformer.experiments.status.resolve", lambda *a: suites.resolve(*a, load_recipe=recipe))
    suite = small("transformer", "learnable", "svformer")
    rows = list_runs(request(suite, tmp_path / "new", seeds=(0, 1)))
    assert not (tmp_path / "new").exists()  # a list writes nothing
    assert [(row["only"], row["name"], row["state"]) for row in rows][2:4] == [
        (3, "svformer (seed 0)", "waiting"), (4, "transformer (seed 1)", "waiting")
    ]  # fmt: skip
    assert run(suite, tmp_path, only=(3,), seeds=(0, 1)) == 0
    assert len(stand_in) == 1 and "svformer" in " ".join(stand_in[0]) and unreported == []
    with suites.locked(tmp_path, shared=True):  # another job of the array
        assert run(suite, tmp_path, only=(1, 2), seeds=(0, 1)) == 0
    assert [row["state"] for row in list_runs(request(suite, tmp_path, seeds=(0, 1)))] == ["finished"] * 3 + [
        "waiting"
    ] * 3
    with pytest.raises(UserError, match="--only 7: the suite has runs 1 to 6"):
        run(suite, tmp_path, only=(7,), seeds=(0, 1))


def test_a_run_that_somebody_else_trains_is_left_to_them(
    tmp_path: Path,
    stand_in: Commands,
    unreported: list[Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    suite = small("transformer", "learnable")
    assert run(suite, tmp_path / "a", pool=tmp_path) == 0
    learnable = next(path for path in (tmp_path / "runs").iterdir() if path.name.startswith("learnable"))
    shutil.rmtree(learnable)
    stand_in.clear()
    held = lock_run(tmp_path, learnable.name)
    assert held is not None and lock_run(tmp_path, learnable.name) is None
    assert is_locked(lock_of(tmp_path, learnable.name))
    assert run(suite, tmp_path / "b", pool=tmp_path) == 0
    said = capsys.readouterr().out
    assert "learnable: another process is training it" in said and stand_in == []
    assert "in progress elsewhere, not waited for: learnable" in said
    os.close(held)
    assert run(suite, tmp_path / "b", pool=tmp_path) == 0
    assert len(stand_in) == 1
    assert not is_locked(lock_of(tmp_path, learnable.name))


def test_a_killed_parent_leaves_the_lock_with_its_child(tmp_path: Path) -> None:
    held = lock_run(tmp_path, "a-0")
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(held,))
    os.close(held)
    assert lock_run(tmp_path, "a-0") is None
    child.communicate(b"\n")
    again = lock_run(tmp_path, "a-0")
    assert again is not None
    os.close(again)


def test_a_record_appears_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path, "a-0", "transformer", gain=0.0, steps=40)
    found = read_run(tmp_path / "runs" / "a-0", {"variant": "transformer"})

    def full(*paths: object) -> None:
        raise OSError("full")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="full"):
        patch.setattr(shutil, "copyfile", full)
        deposit(found, tmp_path / "records")
    assert list((tmp_path / "records" / "runs").iterdir()) == []
    assert deposit(found, tmp_path / "records") and not deposit(found, tmp_path / "records")
    with waiting_for(tmp_path / "x.lock"):
        pass


def test_the_command_to_go_on_names_all_that_was_given(tmp_path: Path) -> None:
    suite = small("transformer")
    asked = suites.Request(
        planned=suite.at(seeds=(0, 4)),
        places=Places.of("out dir", "pool", Path("corpus"), Path("records")),
        launch=Launch(jobs=3, processes=2, imports=(Path("mine.py"),), task_files=Path("tasks")),
        overrides=["train.steps=30"],
    )
    assert asked.command() == (
        "resformer suite run small --seeds 0 4 --out 'out dir' --pool pool --data corpus --records records "
        "--task-files tasks --jobs 3 --processes 2 --set train.steps=30 --import mine.py"
    )


def test_runs_share_devices_without_meeting_on_one() -> None:
    assert launch.slots(3, 1, []) == [{}] * 3
    assert launch.slots(2, 2, ["0", "1", "2", "3", "4"]) == [
        {"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "2,3"}
    ]  # fmt: skip
    assert len(launch.slots(8, 2, ["0", "1", "2", "3"])) == 2
    assert launch.slots(1, 4, ["0"]) == []


def test_a_run_of_several_processes_goes_through_torchrun(tmp_path: Path) -> None:
    places = Places.of(tmp_path)
    planned = small("transformer").at()
    found = read_run(places.run("transformer-0"), {})
    command = Launch(processes=8).train(planned, places, found)
    assert command[1:8] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "8", "-m", "resformer"]
    assert "--resume" not in command and "--overwrite" not in command
    found.path.mkdir(parents=True)
    assert Launch().train(planned, places, found)[-1] == "--overwrite"
    (found.path / "config.toml").write_text("")
    assert Launch().train(planned, places, found)[-1] == "--resume"


def test_domains_of_a_run_are_those_of_its_documents(tmp_path: Path) -> None:
    write_run(tmp_path, "a-0", "transformer", gain=0.0, steps=40)
    assert set(read_run(tmp_path / "runs" / "a-0", {}).documents["domains"]) == set(DOMAINS)
