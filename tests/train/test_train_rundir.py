"""Where a run may start, and what is removed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from train_helpers import WEIGHTS, crash_after, in_child, wait_for_step

from resformer.errors import UserError
from resformer.train import checkpoint, loop, rundir
from resformer.train.config import Config
from resformer.train.configure import edit
from resformer.train.failure import RunFailure
from resformer.train.files import write_atomic
from resformer.train.loop import train
from resformer.train.metrics import MetricsLog, read_rows


def content(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}


def test_an_existing_run_is_refused(config: Config, whole_run: Path) -> None:
    before = content(whole_run)
    with pytest.raises(UserError) as caught:
        train(config, whole_run)
    assert str(caught.value) == (
        f"--out {whole_run} holds a run already (last checkpoint: step 20); pass --resume, --overwrite or another --out"
    )
    assert content(whole_run) == before


def test_a_half_checkpoint_alone_is_a_run_too(config: Config, tmp_path: Path) -> None:
    half = tmp_path / "checkpoints" / ".tmp-abc12_xy" / WEIGHTS
    half.parent.mkdir(parents=True)
    half.write_bytes(b"half")
    with pytest.raises(UserError, match="holds a run already; pass --resume, --overwrite"):
        train(config, tmp_path)
    assert half.exists()


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    "foreign",
    [
        "notes.txt",
        "model/notes.txt",
        "checkpoints/step-00000020/notes.txt",
        "sub/a/b",
        "model/sub/mine.safetensors",
        "model/adapter_model.safetensors",
        "checkpoints/step-best-backup/model.safetensors",
        "checkpoints/.tmp-mine/model.safetensors",
        ".model-mine/notes.txt",
        ".config.toml.backup",
        "tokenizer/tokenizer-of-mine.json",
    ],
)
def test_files_of_others_are_never_mixed_with_a_run(
    config: Config, whole_run: Path, tmp_path: Path, overwrite: bool, foreign: str
) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole_run, out)
    (out / foreign).parent.mkdir(parents=True, exist_ok=True)
    (out / foreign).write_text("mine")
    before = content(out)
    with pytest.raises(UserError, match=f"holds files that are no run's \\({foreign}\\); choose another directory"):
        train(config, out, overwrite=overwrite)
    assert content(out) == before


@pytest.mark.parametrize("place", ["emptynotes", "model/empty", "checkpoints/step-mine"])
def test_an_empty_directory_of_others_is_kept(config: Config, whole_run: Path, tmp_path: Path, place: str) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole_run, out)
    (out / place).mkdir()
    with pytest.raises(UserError, match=rf"holds files that are no run's \({place}\)"):
        train(config, out, overwrite=True)
    assert (out / place).is_dir()


def test_what_a_killed_save_or_export_left_is_a_runs_own(config: Config, whole_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole_run, out)
    left = (
        "checkpoints/.tmp-a1b2c3_4",
        ".model-a1b2c3_4",
        ".tmp-old-a1b2c3_4/model",
        "checkpoints/.tmp-old-a1b2c3_4/step-00000020",
    )
    for place in left:
        (out / place).mkdir(parents=True)
        (out / place / (WEIGHTS if "checkpoints" in place else "model.safetensors")).write_bytes(b"half")
    (out / ".config.toml.a1b2c3_4").write_text("half")
    train(edit(config, {"train.steps": 1}), out, overwrite=True)
    assert not list(out.rglob("*a1b2c3_4*"))


def test_cleaning_up_leaves_directories_of_others(tmp_path: Path) -> None:
    for name in (".tmp-a1b2c3_4", ".tmp-mine"):
        (tmp_path / name).mkdir()
    checkpoint.clean(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".tmp-mine"]


def test_the_old_run_goes_only_when_the_new_one_can_start(
    config: Config, whole_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data, model and optimizer are ready and the first batch is read before anything is removed."""
    out = tmp_path / "run"
    shutil.copytree(whole_run, out)
    before = content(out)

    def unreadable(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    for name in ("open_data", "build_model", "build_optimizers"):
        with monkeypatch.context() as patch, pytest.raises(OSError):
            patch.setattr(loop, name, unreadable)
            train(config, out, overwrite=True)
        assert content(out) == before, name
    opened = loop.open_data

    class Unreadable:
        batch = unreadable

    monkeypatch.setattr(loop, "open_data", lambda config, **how: (opened(config, **how)[0], Unreadable()))
    with pytest.raises(OSError):
        train(config, out, overwrite=True)
    assert content(out) == before


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_run_that_another_process_started_since_the_first_look(
    config: Config, whole_run: Path, tmp_path: Path, overwrite: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both passed the first check; the second to take the lock writes nothing, also after the first has ended."""
    out, real = tmp_path / "run", loop.build_optimizers
    held = []

    def meanwhile(*args: object) -> object:
        if not held:
            shutil.copytree(whole_run, out)
            held.append(MetricsLog(out / "metrics.jsonl"))
            held.append(content(out))
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(loop, "build_optimizers", meanwhile)
    with pytest.raises(UserError, match="is being written by another process"):
        train(config, out, overwrite=overwrite)
    held[0].close()
    assert content(out) == held[1]
    shutil.rmtree(out)
    held.clear()
    monkeypatch.setattr(loop, "build_optimizers", lambda *args: (meanwhile(*args), held[0].close())[0])
    if not overwrite:
        with pytest.raises(UserError, match="holds a run already"):
            train(config, out)
        assert content(out) == held[1]


def test_the_lock_is_kept_while_an_old_run_is_removed(
    config: Config, whole_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, real = tmp_path / "run", rundir.clear
    shutil.copytree(whole_run, out)
    refused = []

    def clearing(place: Path) -> None:
        real(place)
        with pytest.raises(UserError, match="is being written by another process"):
            MetricsLog(place / "metrics.jsonl")
        refused.append(place)

    monkeypatch.setattr(rundir, "clear", clearing)
    train(edit(config, {"train.steps": 1}), out, overwrite=True)
    assert refused == [out]


def test_a_lock_that_was_never_used_is_no_run(config: Config, tmp_path: Path) -> None:
    MetricsLog(tmp_path / "metrics.jsonl").close()
    train(edit(config, {"train.steps": 1}), tmp_path)
    assert checkpoint.steps(tmp_path / "checkpoints") == [1]


def test_a_line_of_metrics_that_is_no_row_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nnonsense\n')
    with pytest.raises(UserError, match=r"metrics.jsonl:2 is no JSON object"):
        read_rows(tmp_path / "metrics.jsonl")


def test_a_file_in_the_way(config: Config, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    with pytest.raises(UserError, match="is a file; expected a directory"):
        train(config, tmp_path / "run", overwrite=True)


def test_overwrite_starts_anew_and_keeps_logs(config: Config, whole_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole_run, out)
    (out / "run.log").write_text("mine")
    (out / "eval.json").write_text("{}")
    train(edit(config, {"train.steps": 2}), out, overwrite=True)
    assert (out / "run.log").read_text() == "mine"
    assert not (out / "eval.json").exists()
    assert checkpoint.steps(out / "checkpoints") == [2]
    assert {row["step"] for row in read_rows(out / "metrics.jsonl")} == {1, 2}


def test_a_mistake_with_overwrite_removes_nothing(config: Config, whole_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole_run, out)
    before = content(out)
    with pytest.raises(UserError, match="fewer than one batch"):
        train(edit(config, {"train.batch_size": 100_000}), out, overwrite=True)
    assert content(out) == before


def test_an_empty_directory_or_one_with_a_log_is_fine(config: Config, tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text("started")
    train(edit(config, {"train.steps": 1}), tmp_path)
    assert (tmp_path / "model" / "model.safetensors").exists()


def test_two_processes_in_one_directory(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    crash_after(config, out, 6, monkeypatch)

    def slow() -> None:
        import time

        real = loop.Reporter.step
        monkeypatch.setattr(loop.Reporter, "step", lambda *a, **k: (real(*a, **k), time.sleep(0.3)))
        train(config, out, resume=True)

    child = in_child(slow)
    try:
        wait_for_step(out, 8)
        with pytest.raises(UserError, match="is being written by another process"):
            train(config, out, resume=True)
    finally:
        child.kill()
        child.join(60)


def test_only_the_last_checkpoints_are_kept(config: Config, tmp_path: Path) -> None:
    train(edit(config, {"train.checkpoint_every": 3, "train.keep_last": 3}), tmp_path / "run")
    assert checkpoint.steps(tmp_path / "run" / "checkpoints") == [15, 18, 20]


def test_what_a_run_writes_is_known_as_its_own(whole_run: Path) -> None:
    assert [path for path, own in rundir._files(whole_run) if not own] == []


def test_metrics_log(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.write({"step": 1}, {"step": 2})
        size = log.sync()
        log.write({"step": 3})
        with pytest.raises(RunFailure, match=r"metrics.jsonl could not be written: .*JSON"):
            log.write({"step": 4}, {"loss": float("nan")})
        assert log.cut(size)
        assert read_rows(path) == [{"step": 1}, {"step": 2}]
        assert not log.cut(size + 5)
        assert log.cut(size)
        with open(path, "a") as file:
            file.write('{"st')
        assert read_rows(path) == [{"step": 1}, {"step": 2}]
        assert not log.cut(size + 4)
        assert path.read_text().endswith("}\n")
    with MetricsLog(path) as log:
        log.write({"step": 3})
    assert [row["step"] for row in read_rows(path)] == [1, 2, 3]


def test_a_file_that_cannot_be_written_is_named_by_its_own_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        write_atomic(tmp_path / "missing" / "a.json", "{}")
    assert caught.value.filename == str(tmp_path / "missing" / "a.json")
