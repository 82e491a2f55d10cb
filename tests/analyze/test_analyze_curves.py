"""Curves of runs: read whatever state they are in, smoothed as the paper does it, and where one overtakes another."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from resformer.analyze.critical import critical_point
from resformer.analyze.curves import (
    cumulative_lr,
    differences,
    learning_rates,
    moving_average,
    read_rows,
    read_run,
    relative_loss,
)
from resformer.errors import UserError
from resformer.train.schedule import lr_at


def train(step: int, loss: float, seconds: float = 0.5) -> dict[str, Any]:
    return {"split": "train", "step": step, "tokens": 64 * step, "loss": loss, "lr": 1e-3, "seconds": seconds}


def validation(step: int, loss: float, domain: str = "all") -> dict[str, Any]:
    return {"split": "validation", "domain": domain, "step": step, "loss": loss, "train_tokens": 64 * step}


def write(place: Path, rows: list[dict[str, Any]], *, torn: str = "", flops: int | None = 10) -> Path:
    place.mkdir(parents=True)
    (place / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + torn)
    if flops is not None:
        (place / "environment.json").write_text(json.dumps({"accounting": {"flops_per_token": flops}}))
    (place / "config.toml").write_text('[model]\nvariant = "learnable"\nnum_hidden_layers = 4\nvocab_size = "none"\n')
    return place


def test_a_run_reads_back_as_it_was_written(tmp_path: Path) -> None:
    lambdas = {"split": "lambdas", "step": 2, "layers": [2], "first": [0.5], "own": [0.4]}
    rows = [train(1, 4.0), train(2, 3.0), validation(2, 3.5, "web"), validation(2, 3.4), lambdas, train(3, 2.5)]
    run = read_run(write(tmp_path / "a", rows, torn='{"split": "train", "st'))
    assert run.train["step"].tolist() == [1, 2, 3] and run.train["loss"].tolist() == [4.0, 3.0, 2.5]
    assert run.validation["loss"].tolist() == [3.4] and list(run.lambdas) == [lambdas]
    assert (run.name, run.layers, run.flops_per_token) == ("a", 4, 10.0)
    assert run.config["model"]["vocab_size"] is None
    assert [v.tolist() for v in run.against("tokens")] == [[64, 128, 192], [4.0, 3.0, 2.5]]
    assert run.against("flops")[0].tolist() == [3 * 10 * 64, 3 * 10 * 128, 3 * 10 * 192]
    assert (run.against("hours")[0] * 3600).tolist() == pytest.approx([0.5, 1.0, 1.5])
    assert (run.against("hours", "validation")[0] * 3600).tolist() == pytest.approx([1.0])
    assert run.against("steps", "validation")[0].tolist() == [2]


def test_a_step_that_a_resume_did_again_counts_once(tmp_path: Path) -> None:
    rows = [train(1, 4.0), train(2, 9.0, 50.0), train(3, 9.0), validation(3, 9.0), train(2, 3.0), train(3, 2.5)]
    run = read_run(write(tmp_path / "a", [*rows, validation(3, 2.6)]))
    assert run.train["loss"].tolist() == [4.0, 3.0, 2.5] and run.validation["loss"].tolist() == [2.6]
    assert run.against("hours")[0][-1] * 3600 == pytest.approx(1.5)


def test_watched_gradients_are_columns(tmp_path: Path) -> None:
    rows = [train(1, 4.0), {**train(2, 3.0), "gradient_norms": {"b": 2.0, "a": 1.0}}]
    norms = read_run(write(tmp_path / "a", rows)).gradient_norms
    assert list(norms) == ["a", "b"] and math.isnan(norms["a"][0]) and norms["b"][1] == 2.0


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    empty = read_run(write(tmp_path / "empty", [], flops=None))
    for call, words in (
        (lambda: read_run(tmp_path / "none"), "holds no metrics.jsonl"),
        (lambda: read_run(tmp_path / "empty" / "metrics.jsonl"), "holds no metrics.jsonl"),
        (lambda: empty.against("tokens"), "no train losses"),
        (lambda: read_run(write(tmp_path / "b", [train(1, 2.0)], flops=None)).against("flops"), "no FLOPs"),
        (lambda: read_run(write(tmp_path / "c", [{**train(1, 2.0), "seconds": None}])).against("hours"), "no hours"),
    ):
        with pytest.raises(UserError, match=words) as caught:
            call()
        assert "\n" not in str(caught.value)
    broken = tmp_path / "broken.jsonl"
    broken.write_bytes(b'{"split": "train"}\nnonsense\n{"split": "train"}\n')
    with pytest.raises(UserError, match=r"broken\.jsonl:2"):
        read_rows(broken)
    broken.write_bytes(b'{"step": 1}\n{"step": 2}')  # whole, though the line's end is missing
    assert read_rows(broken) == [{"step": 1}, {"step": 2}]


def test_relative_loss_is_that_of_the_paper_s_script() -> None:
    generator = np.random.default_rng(0)
    steps = np.arange(1, 1001)
    own, base = generator.normal(size=1000), generator.normal(size=1000)
    x, y = relative_loss(steps, own, steps, base)
    kernel = np.ones(100) / 100
    np.testing.assert_allclose(y, np.convolve(own, kernel, "valid") - np.convolve(base, kernel, "valid"), atol=1e-12)
    assert len(x) == 901 and x[0] == pytest.approx(50.5) and x[-1] == pytest.approx(950.5)
    assert (
        len(relative_loss(np.arange(10_000), np.zeros(10_000), np.arange(10_000), np.zeros(10_000), window=10)[0])
        == 9991
    )


def test_runs_are_aligned_by_step_and_not_by_row() -> None:
    steps = np.arange(1, 401)
    loss = 5.0 - 0.005 * steps
    later = steps[50:]  # a run whose first rows are missing
    x, y = relative_loss(later, loss[50:] - 0.1, steps, loss, window=10)
    np.testing.assert_allclose(y, -0.1, atol=1e-12)
    assert x[0] == pytest.approx(51 + 4.5)
    every = steps[::4]
    np.testing.assert_allclose(relative_loss(every, loss[::4], steps, loss, window=10)[1], 0.0, atol=1e-12)
    shuffled = np.random.default_rng(0).permutation(400)
    np.testing.assert_allclose(relative_loss(steps[shuffled], loss[shuffled], steps, loss)[1], 0.0, atol=1e-12)


@pytest.mark.parametrize(
    ("own", "base", "window", "words"),
    [
        ([1, 2, 2], [1, 2, 3], 1, "method: a step is there twice"),
        ([1, 2, 3], [4, 5, 6], 1, "no step in common"),
        ([1, 2, 3], [1, 2, 3], 100, "got 100, but the runs have 3 steps"),
        ([1, 2, 3], [1, 2, 3], 0, "window: got 0"),
    ],
)
def test_mistakes_of_relative_loss(own: list[int], base: list[int], window: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        relative_loss(own, [1.0] * 3, base, [1.0] * 3, window=window)


def test_more_mistakes_of_curves() -> None:
    with pytest.raises(ValueError, match="one length"):
        differences([1, 2], [1.0], [1], [1.0])
    assert len(moving_average([1.0, 2.0], 3)) == 0
    with pytest.raises(ValueError, match="no finite number"):
        critical_point([1, 2], [math.nan, 1.0], [1, 2], [1.0, 1.0], window=1)
    with pytest.raises(ValueError, match="expected at least 3"):
        critical_point([1, 2], [0.0, 0.0], [1, 2], [1.0, 1.0], window=1)
    with pytest.raises(ValueError, match="finite numbers from 0"):
        cumulative_lr([1e-3, -1.0])


STEPS = np.arange(1, 10_001)


def test_a_crossing_is_where_the_smoothed_loss_turns_positive_for_good() -> None:
    relative = -0.3 * np.exp(-STEPS / 2000) + 0.02
    relative[100:900] = 0.5  # ahead of its time, and behind again after: it does not count
    found = critical_point(STEPS, 3.0 + relative, STEPS, np.full(10_000, 3.0))
    assert found.kind == "crossed" and found.step == pytest.approx(2000 * math.log(15), abs=5)
    assert found.low <= found.step <= found.high < found.step + 200


def test_what_has_not_turned_is_prolonged_and_says_so() -> None:
    short = STEPS[:3000]
    relative = -0.1 + 2e-5 * short
    found = critical_point(short, relative, short, np.zeros(3000))
    assert found.kind == "extrapolated" and found.step == pytest.approx(5000, abs=1)
    # The straight line goes through the last 1,000 smoothed points, as the paper's does.
    bent = np.where(short < 1500, -0.5, relative)
    assert critical_point(short, bent, short, np.zeros(3000)).step == pytest.approx(5000, abs=1)


def test_what_never_turns_and_what_never_was_ahead() -> None:
    falling = critical_point(STEPS, -1e-5 * STEPS, STEPS, np.zeros(10_000))
    assert falling.kind == "never" and falling.step == falling.high == math.inf
    behind = critical_point(STEPS, np.ones(10_000), STEPS, np.zeros(10_000))
    assert behind.kind == "behind" and behind.step == pytest.approx(50.5)


@pytest.mark.parametrize(("steps", "slope", "kind"), [(10_000, 1e-5, "crossed"), (4_000, 2e-5, "extrapolated")])
def test_the_interval_of_the_critical_point_holds(steps: int, slope: float, kind: str) -> None:
    x = np.arange(1, steps + 1)
    generator = np.random.default_rng(3)
    found = 0
    for _ in range(200):
        noise = generator.normal(0.0, 0.01, steps)
        point = critical_point(x, slope * (x - 5000) + noise, x, np.zeros(steps))
        assert point.kind == kind
        found += point.low <= 5000 <= point.high
    assert found / 200 >= 0.91


def test_the_paper_s_cumulative_learning_rates() -> None:
    for peak, total in ((1e-4, 0.549), (3e-4, 1.648), (6e-4, 3.296)):
        assert round(float(cumulative_lr(learning_rates(peak))[-1]), 3) == total
    assert round(float(cumulative_lr(learning_rates(6e-4, warmup_steps=1200))[-1]), 3) == 3.264


def test_learning_rates_are_those_of_training() -> None:
    rates = learning_rates(6e-4, steps=500, warmup_steps=20)
    ours = [lr_at(n, steps=500, lr=6e-4, start_lr=1e-7, warmup_steps=20) for n in range(1, 501)]
    np.testing.assert_allclose(rates, ours, rtol=1e-12)
    assert learning_rates(1.0, steps=4, warmup_steps=0)[-1] == pytest.approx(0.1)
