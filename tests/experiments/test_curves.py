"""Curves with known answers."""

from __future__ import annotations

import numpy as np
import pytest

from resformer.experiments.curves import crossing, data_saved, moving_average, relative_loss, smoothing_window, thin


def test_moving_average_is_the_mean_of_full_windows() -> None:
    assert moving_average([1, 2, 3, 4, 8], 2).tolist() == [1.5, 2.5, 3.5, 6.0]
    assert moving_average([1, 2, 3], 1).tolist() == [1, 2, 3]
    assert moving_average([1, 2], 3).size == 0


@pytest.mark.parametrize(("steps", "window"), [(0, 1), (9, 1), (250, 25), (1000, 100), (10_000, 100)])
def test_the_window_shrinks_for_short_runs(steps: int, window: int) -> None:
    assert smoothing_window(steps) == window


def test_relative_loss_is_method_minus_baseline_at_equal_steps() -> None:
    steps, base = np.arange(1, 11), np.linspace(5, 4, 10)
    at, difference = relative_loss(steps, base - 0.25, steps, base, window=4)
    assert difference == pytest.approx(np.full(7, -0.25))
    assert at.tolist() == [2.5, 3.5, 4.5, 5.5, 6.5, 7.5, 8.5]  # the middle of each window


def test_relative_loss_uses_only_shared_steps() -> None:
    at, difference = relative_loss(
        [3, 4, 5, 6], [1.0, 1.0, 1.0, 9.0], [1, 2, 3, 4, 5], [7.0, 7.0, 2.0, 3.0, 4.0], window=1
    )
    assert at.tolist() == [3, 4, 5]
    assert difference.tolist() == [-1, -2, -3]
    assert relative_loss([1, 2], [1.0, 1.0], [3, 4], [1.0, 1.0], window=1)[0].size == 0


def test_crossing_interpolates_between_validations() -> None:
    tokens, loss = np.array([100.0, 200.0, 300.0]), np.array([4.0, 3.0, 2.0])
    assert crossing(tokens, loss, 2.5) == pytest.approx(250.0)
    assert crossing(tokens, loss, 3.0) == pytest.approx(200.0)
    assert crossing(tokens, loss, 1.0) is None
    assert crossing(tokens, loss, 5.0) is None


def test_crossing_is_where_the_curve_stays_below() -> None:
    tokens, loss = np.array([1.0, 2.0, 3.0, 4.0]), np.array([4.0, 2.9, 3.4, 2.6])
    assert crossing(tokens, loss, 3.0) == pytest.approx(3.5)


def test_data_saved_by_a_method_that_wins() -> None:
    saved = data_saved([100, 200, 300, 400], [5, 3, 2, 1], [100, 200, 300, 400], [6, 5, 4, 2.5])
    assert saved.tokens == pytest.approx(250)
    assert saved.share == pytest.approx(1 - 250 / 400)


def test_data_saved_is_negative_for_a_method_that_loses() -> None:
    saved = data_saved([100, 200, 300, 400], [6, 5, 4, 2.5], [100, 200, 300, 400], [5, 3, 2, 1])
    assert saved.tokens == pytest.approx(250)
    assert saved.share == pytest.approx(-(1 - 250 / 400))


def test_data_saved_is_zero_for_equal_curves() -> None:
    assert data_saved([1, 2], [3, 2], [1, 2], [4, 2]).share == 0.0


@pytest.mark.parametrize(
    ("own", "base", "reason"),
    [
        (([], []), ([1, 2], [3, 2]), "no validation"),
        (([1], [3]), ([1, 2], [3, 2]), "same number of tokens"),
        (([1, 2], [3, float("nan")]), ([1, 2], [3, 2]), "not finite"),
        (([1, 2], [1.5, 1]), ([1, 2], [3, 2]), "before the first validation"),
    ],
)
def test_data_saved_says_why_it_cannot_be_known(own: tuple, base: tuple, reason: str) -> None:
    saved = data_saved(*own, *base)
    assert saved.share is None
    assert reason in saved.reason


def test_thin_keeps_both_ends() -> None:
    x, y = thin(np.arange(1000), np.arange(1000) ** 2, most=50)
    assert len(x) == 50
    assert (x[0], x[-1], y[-1]) == (0, 999, 999**2)
    assert len(thin([1, 2], [3, 4])[0]) == 2
