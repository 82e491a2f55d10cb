"""The drawing: ticks, labels that do not overlap, and points that survive the trip into the page."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from resformer.experiments.chart import SLOTS, Chart, Series, dash, draw, figure, paint, spread, tick_text, ticks


def chart(**more) -> Chart:
    x = np.linspace(1e5, 1e6, 10)
    series = [Series(name="a", x=x, y=5 - x / 1e6, slot=0), Series(name='b"</script><b>', x=x, y=4.9 - x / 1e6, slot=9)]
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
    assert tick_text([0, 250_000, 500_000], 1.02e6) == ["0", "0.25M", "0.50M"]
    assert tick_text([0, 200, 400], 500) == ["0", "200", "400"]


def test_end_labels_keep_their_distance_and_order() -> None:
    placed = spread([100, 101, 102, 40], 15, 0, 110)
    assert placed[3] == 40
    assert sorted(placed) == [placed[3], placed[0], placed[1], placed[2]]
    assert min(np.diff(sorted(placed))) >= 15
    assert max(placed) <= 110


@pytest.mark.parametrize("narrow", [True, False])
@pytest.mark.parametrize(
    "more", [{}, {"hero": True, "top": 4.2}, {"signed": True, "include_zero": True}, {"level": (4.0, "level")}]
)
def test_a_chart_is_well_formed_and_inside_its_box(narrow: bool, more: dict) -> None:
    tree = ET.fromstring(draw(chart(**more), narrow=narrow))
    width, height = map(float, tree.attrib["viewBox"].split()[2:])
    for text in tree.iter("text"):
        assert 0 <= float(text.attrib["x"]) <= width
        assert 0 <= float(text.attrib["y"]) <= height
    lines = [p for p in tree.iter("path") if p.attrib["class"].startswith("line")]
    assert len(lines) == 2
    assert [line.attrib.get("stroke-dasharray") for line in lines] == [
        "2 3",
        "7 4",
    ]  # dotted once colours repeat; the baseline last


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


def test_no_other_series_has_the_baselines_colour() -> None:
    assert [slot for slot in range(40) if paint(slot) == 0] == [0]
    looks = [(paint(slot), dash(slot)) for slot in range(2 * SLOTS - 1)]
    assert len(set(looks)) == len(looks)
