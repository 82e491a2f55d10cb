"""Lets the tests here import their neighbours, and replaces training."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from small_suite import FINGERPRINT, GAINS, HERE, STAND_IN

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
        config = places.out / "configs" / f"{run.id}.toml"
        words = [str(HERE), str(run.path), run.variant, str(GAINS[run.variant]), str(config)]
        return [sys.executable, "-c", STAND_IN, *words]

    monkeypatch.setattr(suites, "prepare", lambda planned, places: FINGERPRINT)
    monkeypatch.setattr("resformer.experiments.status.known_fingerprint", lambda places: FINGERPRINT)
    monkeypatch.setattr(Launch, "train", train)
    monkeypatch.setattr(Launch, "finish", lambda self, planned, places, run: [sys.executable, "-c", "pass"])
    return asked
