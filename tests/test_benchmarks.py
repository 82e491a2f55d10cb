"""The benchmark's arithmetic, and that it runs; what it measures is for a quiet machine."""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def train_step() -> ModuleType:
    path = Path(__file__).parent.parent / "benchmarks" / "train_step.py"
    spec = importlib.util.spec_from_file_location("train_step", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_steady_ratio_is_found_though_the_machine_slows_down(train_step: ModuleType) -> None:
    now, rounds = [0.0], [0]

    def step(cost: float) -> None:
        rounds[0] += 1
        now[0] += cost * (1.0 if rounds[0] <= 12 else 3.0)  # rounds of two steps: the pairs stay whole

    found = train_step.compare(
        lambda: step(2.0), lambda: step(1.0), tokens=100, rounds=9, steps=1, warmup=1, clock=lambda: now[0], seed=0
    )
    assert found["ratio"] == found["ratio_lower_95"] == found["ratio_upper_95"] == pytest.approx(0.5)
    assert found["ours_tokens_per_second"] == pytest.approx(50.0)
    assert found["peer_tokens_per_second"] == pytest.approx(100.0)
    assert len(found["ratios"]) == 9


def test_rounds_count_and_warm_up_does_not(train_step: ModuleType) -> None:
    now, calls = [0.0], {"left": 0, "right": 0}

    def step(name: str) -> None:
        calls[name] += 1
        now[0] += 100.0 if calls[name] <= 3 else 1.0

    times = train_step.take_turns(
        lambda: step("left"), lambda: step("right"), rounds=4, steps=1, warmup=3, clock=lambda: now[0], seed=0
    )
    assert times == [(1.0, 1.0)] * 4
    assert calls == {"left": 7, "right": 7}


def test_the_fastest_step_of_a_round_counts(train_step: ModuleType) -> None:
    now, calls = [0.0], [0]

    def step() -> None:
        calls[0] += 1
        now[0] += 9.0 if calls[0] % 6 in (1, 2) else 1.0  # two of six steps are disturbed: never all three of a side

    times = train_step.take_turns(step, step, rounds=5, steps=3, warmup=0, clock=lambda: now[0], seed=0)
    assert times == [(1.0, 1.0)] * 5
    assert calls == [30]


def test_the_interval_holds_the_median_and_narrows_with_rounds(train_step: ModuleType) -> None:
    draw = random.Random(1)
    few, many = ([draw.gauss(1.0, 0.1) for _ in range(n)] for n in (10, 200))
    widths = []
    for ratios in (few, many):
        lower, upper = train_step.interval(ratios, seed=0)
        assert lower <= sorted(ratios)[len(ratios) // 2] <= upper
        widths.append(upper - lower)
    assert widths[1] < widths[0] / 2


def test_it_runs(train_step: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "step.json"
    code = train_step.main(
        layers=2,
        hidden_size=32,
        vocab_size=64,
        batch_size=2,
        sequence_length=16,
        rounds=3,
        warmup=1,
        json_file=target,
    )
    assert code == 0
    results = json.loads(target.read_text())["results"]
    assert [(r["ours"], r["peer"]) for r in results] == [(ours, peer) for ours, peer, _ in train_step.PAIRS]
    assert all(r["ratio"] > 0 and len(r["ratios"]) == 3 for r in results)
    assert capsys.readouterr().out.count("\n") == 6
