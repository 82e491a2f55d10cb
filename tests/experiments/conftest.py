"""Lets the tests here import their neighbours, and replaces training."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from small_suite import GAINS, HERE, STAND_IN

from resformer.experiments import suite as suites
from resformer.experiments.launch import Launch
from resformer.experiments.places import Places


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """Replaces corpus and training; returns the train commands that would have run."""
    asked = []
    real = Launch.train

    def train(self: Launch, planned, places: Places, run) -> list[str]:
        asked.append(real(self, planned, places, run))
        return [sys.executable, "-c", STAND_IN, str(HERE), str(run.path), run.variant, str(GAINS[run.variant])]

    monkeypatch.setattr(suites, "prepare", lambda planned, places: "f" * 64)
    monkeypatch.setattr("resformer.experiments.status.prepare", lambda planned, places: "f" * 64)
    monkeypatch.setattr(Launch, "train", train)
    monkeypatch.setattr(Launch, "finish", lambda self, planned, places, run: [sys.executable, "-c", "pass"])
    return asked
