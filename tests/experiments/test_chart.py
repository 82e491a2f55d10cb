"""The drawing: ticks, labels that do not overlap, and points that survive the trip into the page."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from resformer.experiments.axis import amounts, around_zero, decimals, spread, ticks, whole_ticks
from resformer.experiments.chart import FAINT, SLOTS, Chart, Series, dash, draw, figure, ink


def chart(**more) -> Chart:
    x = np.linspace(1e5, 1e6, 10)
    series = [Series(name="a", x=x, y=5 - x / 1e6, slot=0), Series(name='b"</script><b>', x=x, y=4.9 - x / 1e6, slot=5)]
    return Chart(
        **({"key": "k", "title": "T", "x_label": "x", "y_label": "y", "series": series, "markers": True} | more)
    )


@pytest.mark.parametrize(
    ("low", "high", "about", "wanted"),
    [
        (0, 1, 5, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (3.37, 4.21, 4, [3.5, 3.75, 4.0]),
        (-0.17, 0.01, 4, [-0.15, -0.1, -0.05, 0.0]),
        (2, 2, 5, [2]),
    ],
)
def test_ticks_are_round_and_inside(low: float, high: float, about: int, wanted: list[float]) -> None:
    assert ticks(low, high, about) == pytest.approx(wanted)


def test_tick_texts_share_one_unit() -> None:
    assert amounts([0, 250_000, 500_000], 1.02e6) == ["0", "0.25M", "0.50M"]
    assert amounts([0, 200, 400], 500) == ["0", "200", "400"]
    assert decimals([-0.05, 0.0, 0.1], signed=True) == ["\u22120.05", "0.00", "+0.10"]
    assert decimals([1.0, 2.0], least=1) == ["1.0", "2.0"]


def test_layers_have_whole_ticks() -> None:
    assert whole_ticks(0.5, 8.5, 8) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert whole_ticks(0.5, 24.5, 8) == [1, 4, 7, 10, 13, 16, 19, 22]


def test_an_axis_around_zero_cuts_what_is_far_wider_than_the_differences() -> None:
    at = around_zero([-0.1, -0.02], [-0.12, 0.3, -5.0])
    assert at is not None and at.low == pytest.approx(-0.25, abs=0.03) and at.high == pytest.approx(0.25, abs=0.03)
    assert at.at(-5.0) == 0.0 and at.at(0.0) == pytest.approx(50)
    assert around_zero([]) is None
    assert around_zero([0.0]) is not None  # nothing but zero has a width all the same


def test_end_labels_keep_their_distance_and_order() -> None:
    placed = spread([100, 101, 102, 40], 15, 0, 110)
    assert placed[3] == 40
    assert sorted(placed) == [placed[3], placed[0], placed[1], placed[2]]
    assert min(np.diff(sorted(placed))) >= 15
    assert max(placed) <= 110


@pytest.mark.parametrize("narrow", [True, False])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"size": "hero", "top": 4.2},
        {"size": "small", "x_unit": "layer", "y_label": ""},
        {"signed": True, "include_zero": True},
        {"level": (4.0, "level")},
    ],
)
def test_a_chart_is_well_formed_and_inside_its_box(narrow: bool, more: dict) -> None:
    tree = ET.fromstring(draw(chart(**more), narrow=narrow))
    width, height = map(float, tree.attrib["viewBox"].split()[2:])
    for text in tree.iter("text"):
        assert 0 <= float(text.attrib["x"]) <= width
        assert 0 <= float(text.attrib["y"]) <= height
    lines = [p for p in tree.iter("path") if p.attrib["class"].startswith("line")]
    assert len(lines) == 2
    assert [line.attrib.get("stroke-dasharray") for line in lines] == [None, "7 4"]  # the baseline last


def test_the_points_cannot_leave_their_script_element() -> None:
    text = figure(chart(), "caption")
    payload = re.search(r'<script type="application/json">(.*?)</script>', text, re.S)
    assert payload is not None
    data = json.loads(payload[1])
    assert data["series"][1]["name"] == 'b"</script><b>'
    assert data["series"][0]["y"][-1] == 4.0


def test_nothing_to_draw_is_said() -> None:
    assert "Nothing to draw yet" in figure(chart(series=[]), "")
    flat = Series(name="one", x=np.array([1.0]), y=np.array([3.0]), slot=0)
    ET.fromstring(draw(chart(series=[flat]), narrow=False))


def test_unknown_values_are_gaps() -> None:
    series = [Series(name="a", x=np.array([1.0, 2.0, 3.0]), y=np.array([2.0, np.nan, 1.0]), slot=0)]
    assert "nan" not in draw(chart(series=series), narrow=False)
    assert "null" in figure(chart(series=series), "")


def test_no_other_series_has_the_baselines_look() -> None:
    assert [dash(slot) for slot in range(SLOTS)] == ["7 4"] + [None] * (SLOTS - 1)
    assert len({ink(slot) for slot in (*range(SLOTS), FAINT)}) == SLOTS + 1


def test_background_series_are_drawn_first_and_have_no_label_and_no_points() -> None:
    x = np.array([1.0, 2.0])
    series = [Series(name=name, x=x, y=x, slot=slot) for name, slot in (("base", 0), ("one", 1), ("grey", FAINT))]
    tree = ET.fromstring(draw(chart(series=series), narrow=False))
    drawn = [p.attrib["class"] for p in tree.iter("path") if p.attrib["class"].startswith("line")]
    assert drawn == ["line faint", "line s1", "line s0"]
    assert "grey" not in [text.text for text in tree.iter("text")]
    assert '"grey"' not in figure(chart(series=series), "").split("<script")[1]


def test_a_band_goes_up_along_the_low_edge_and_back_along_the_high_one() -> None:
    x = np.array([0.0, 1.0])
    series = [Series(name="a", x=x, y=x + 1, low=x + 0.5, high=x + 1.5, slot=1)]
    tree = ET.fromstring(draw(chart(series=series, x_end=1.0), narrow=False))
    band = next(p for p in tree.iter("path") if p.attrib["class"] == "band s1")
    points = [tuple(map(float, pair.split(","))) for pair in band.attrib["d"].strip("MZ").split("L")]
    assert len(points) == 4 and points[0][0] == points[3][0] and points[1][0] == points[2][0]
    assert points[0][1] > points[3][1]  # below, on a screen
