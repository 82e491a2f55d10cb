"""Trackers say what metrics.jsonl says, once, and never end a run."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
from train_helpers import crash_after

from resformer import UserError
from resformer.train import track
from resformer.train.config import Config
from resformer.train.configure import edit
from resformer.train.loop import train
from resformer.train.metrics import read_rows


def recorded(out: Path) -> dict[str, dict[int, float]]:
    """Name -> step -> value of everything in the metrics."""
    found: dict[str, dict[int, float]] = {}
    for row in read_rows(out / "metrics.jsonl"):
        for name, value in track.scalars(row):
            found.setdefault(name, {})[row["step"]] = value
    return found


def test_tensorboard_has_every_row_once_also_after_a_crash(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    out, tracked = tmp_path / "run", edit(config, {"track.tensorboard": True, "train.steps": 10})
    crash_after(tracked, out, 8, monkeypatch)  # steps 6 to 8 are in the events and not in the checkpoint
    train(tracked, out, resume=True)
    seen = events.EventAccumulator(str(out / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    want = recorded(out)
    assert set(seen.Tags()["scalars"]) == set(want) and len(want["train/loss"]) == 10
    assert any(name.startswith("validation/all/") for name in want) and "lambdas/first/02" in want
    for name, values in want.items():
        assert {event.step: event.value for event in seen.Scalars(name)} == pytest.approx(values)
    train(config, tmp_path / "run", overwrite=True)  # its files are a run's, and go with it
    assert not (out / "tensorboard").exists()


class Service(types.ModuleType):
    """What Weights & Biases and trackio have in common."""

    def __init__(self, name: str, fails_at: int | None = None) -> None:
        super().__init__(name)
        self.calls: list[tuple[str, Any]] = []
        self.fails_at = fails_at

    def init(self, **given: Any) -> None:
        self.calls.append(("init", given))

    def log(self, scalars: dict[str, float], *, step: int) -> None:
        if step == self.fails_at:
            raise ConnectionError("the service is away")
        self.calls.append(("log", (step, scalars)))

    def finish(self) -> None:
        self.calls.append(("finish", None))


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_services_get_the_same(name: str, config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(name)
    monkeypatch.setitem(__import__("sys").modules, name, service)
    monkeypatch.setattr(track, "check_trackers", lambda config: None)
    monkeypatch.setattr("resformer.train.loop.check_trackers", lambda config: None)
    train(edit(config, {f"track.{name}": "values", "train.steps": 10}), tmp_path / "run")
    (first, given), *logged, last = service.calls
    assert first == "init" and last == ("finish", None)
    assert given["project"] == "values" and given["name"] == "run" and given["config"]["train"]["steps"] == 10
    found: dict[str, dict[int, float]] = {}
    for _, (step, scalars) in logged:
        for key, value in scalars.items():
            found.setdefault(key, {})[step] = value
    assert found == recorded(tmp_path / "run")
    assert [step for _, (step, _) in logged] == sorted(step for _, (step, _) in logged)


def test_a_service_that_fails_is_dropped_and_the_run_goes_on(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    service = Service("wandb", fails_at=3)
    monkeypatch.setitem(__import__("sys").modules, "wandb", service)
    monkeypatch.setattr("resformer.train.loop.check_trackers", lambda config: None)
    train(edit(config, {"track.wandb": "values", "train.steps": 10}), tmp_path / "run")
    shown = capsys.readouterr()
    assert (shown.out + shown.err).count("wandb failed and is left out from here on: the service is away") == 1
    assert len(recorded(tmp_path / "run")["train/loss"]) == 10 and service.calls[-1][0] == "log"


def test_a_missing_package_is_named_before_anything_is_written(config: Config, tmp_path: Path) -> None:
    if track.importlib.util.find_spec("trackio") is not None:
        pytest.skip("trackio is installed")
    with pytest.raises(UserError, match=r"track\.trackio needs the package trackio; .*resformer\[trackio\]"):
        train(edit(config, {"track.trackio": "values"}), tmp_path / "run")
    assert not (tmp_path / "run").exists()
