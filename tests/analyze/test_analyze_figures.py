"""Figures draw what the rows say, clip and cover nothing, and give the same bytes for the same numbers."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from figure_rows import MODELS, curve_drawings, rows, run
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.image import imread
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from resformer.analyze import axes as style
from resformer.analyze.axes import Drawing, amount, look, save, shorten, styled
from resformer.analyze.curve_figures import critical_points, loss_against, relative_losses
from resformer.analyze.curves import RunCurves
from resformer.analyze.figures import POSITION_FIGURES, draw_all, drawings
from resformer.analyze.layer_figures import (
    LAYER_FIGURES,
    Measured,
    binned,
    by_layer,
    by_position,
    chosen_layers,
    spectrum,
)
from resformer.analyze.maps import lambda_map, own_value_similarity


def texts(figure: Any) -> list[tuple[Text, Bbox]]:
    """Every visible text of a drawn figure and where it is, in pixels."""
    renderer = figure.canvas.get_renderer()
    unseen = {id(text) for axes in figure.axes for text in beyond(axes)}
    found = [t for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip("\u200b ")]
    return [(t, t.get_window_extent(renderer)) for t in found if id(t) not in unseen]


def beyond(axes: Axes) -> Iterable[Text]:
    """Labels of ticks outside the axis, which matplotlib keeps and does not draw."""
    for axis in (axes.xaxis, axes.yaxis):
        low, high = sorted(axis.get_view_interval())
        for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]:
            if not low - 1e-9 * abs(low) <= tick.get_loc() <= high + 1e-9 * abs(high):
                yield from (tick.label1, tick.label2)


@styled
def faults(drawing: Drawing) -> list[str]:
    """What a reader would see as a mistake: text outside the figure, text over text, a legend over axes, small type."""
    figure = drawing.figure
    figure.set_dpi(100)
    figure.canvas.draw()
    page, found = figure.bbox, []
    seen = texts(figure)
    for text, box in seen:
        if box.x0 < page.x0 - 0.5 or box.x1 > page.x1 + 0.5 or box.y0 < page.y0 - 0.5 or box.y1 > page.y1 + 0.5:
            found.append(f"outside: {text.get_text()!r} {box}")
        if text.get_fontsize() < 7:
            found.append(f"small: {text.get_text()!r} {text.get_fontsize()}")
    for (a, box_a), (b, box_b) in combinations(seen, 2):
        common = Bbox.intersection(box_a, box_b)
        if common is not None and common.width > 0.5 and common.height > 0.5:
            found.append(f"over each other: {a.get_text()!r} and {b.get_text()!r}")
    renderer = figure.canvas.get_renderer()
    for legend in figure.legends:
        box = legend.get_window_extent(renderer)
        for axes in figure.axes:
            if box.overlaps(axes.get_tightbbox(renderer)):
                found.append("the legend lies over axes")
    for axes in figure.axes:
        if not (axes.get_xlabel() or axes.get_ylabel() or axes.get_title(loc="left")):
            found.append("axes without any name")
    return found


@pytest.mark.parametrize(("models", "layers"), [(1, 4), (2, 12), (8, 32)])
def test_nothing_is_clipped_covered_or_too_small(models: int, layers: int) -> None:
    drawn = list(drawings(rows(models, layers), runs=[run(i) for i in range(models)]))
    assert len(drawn) >= len(LAYER_FIGURES) + len(POSITION_FIGURES) + 8
    wrong = {drawing.name: faults(drawing) for drawing in drawn}
    assert {name: found for name, found in wrong.items() if found} == {}
    for drawing in drawn:
        width, height = drawing.figure.get_size_inches()
        assert width == pytest.approx(style.WIDTH) and height < 9.5


@pytest.mark.parametrize("count", [2, 8])
def test_nor_in_figures_of_curves(count: int) -> None:
    for drawing in curve_drawings(count):
        assert drawing is not None and faults(drawing) == [], drawing.name


def test_models_differ_in_colour_and_in_marker_and_in_dashes() -> None:
    looks = [look(i) for i in range(8)]
    for kind in ("color", "marker", "linestyle"):
        assert len({str(one[kind]) for one in looks}) == 8, kind
    assert look(8) != look(0) and look(8)["color"] == look(0)["color"]


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_colours_are_dark_enough_on_white() -> None:
    for colour in style.COLOURS:
        assert 1.05 / (luminance(colour) + 0.05) >= 2.9, colour


def test_lines_are_the_rows_and_layers_count_from_one() -> None:
    figure = next(f for f in LAYER_FIGURES if f.name == "similarity_hidden")
    data = Measured(rows(2, 4))
    drawing = by_layer(data, figure)
    assert drawing is not None
    (axes,) = drawing.figure.axes
    first, second = axes.lines
    assert list(first.get_xdata()) == list(second.get_xdata()) == [1, 2, 3, 4]  # the embeddings are not drawn
    wanted = [r["value"] for r in data.rows if r["measure"] == "hidden_similarity" and r["model"] == MODELS[1]]
    assert list(second.get_ydata()) == wanted[1:]
    assert len(drawing.table) == 10 and drawing.table[0][2] == 0  # but they are in the table
    assert list(axes.get_xticks()) == [1, 2, 3, 4] and axes.get_title() == ""


def test_models_keep_their_colour_where_others_lack_a_measure() -> None:
    data = [r for r in rows(3, 4) if not (r["model"] == MODELS[0] and r["measure"] == "read_value_share")]
    drawing = by_layer(Measured(data), next(f for f in LAYER_FIGURES if f.name == "read_value_share"))
    assert drawing is not None
    lines = [line for line in drawing.figure.axes[0].lines if len(line.get_xdata()) == 4]
    assert [line.get_color() for line in lines] == [look(1)["color"], look(2)["color"]]
    assert [t.get_text().strip("\u200b") for t in drawing.figure.legends[0].get_texts()] == [
        MODELS[1],
        r"_odd \$name\$",
    ]


def test_values_that_are_missing_leave_a_gap() -> None:
    data = [row for row in rows(1, 4) if row["measure"] in ("hidden_similarity", "top_1_importance", "lambda_first")]
    for row in data:
        if row["layer"] == 2:
            row["value"] = row["standard_error"] = None
    for drawing in drawings(data):
        assert faults(drawing) == []


def test_vectors_that_are_missing_are_left_out() -> None:
    data = [row for row in rows(2, 2) if row["measure"] in ("value_norm", "value_spectrum")]
    for row in data:
        row["values"] = [None] * 20 if row["model"] == MODELS[0] else [2.0, None, 1.0, *[None] * 37]
    drawn = {drawing.name: drawing for drawing in drawings(data)}
    assert {*drawn} == {"value_norm_by_position", "value_spectrum"}
    assert all(faults(drawing) == [] for drawing in drawn.values())


def test_one_layer_and_twelve_models() -> None:
    many = [{**row, "model": f"{row['model']} {i}"} for row in rows(4, 1) for i in range(3)]
    for drawing in drawings(row for row in many if row["measure"] in ("hidden_similarity", "value_norm", "lambda_own")):
        assert faults(drawing) == [], drawing.name


def test_models_of_other_depth_and_length_share_axes() -> None:
    deep = [{**row, "model": "deep"} for row in rows(1, 12, length=300)]
    for drawing in drawings([*rows(2, 4), *deep]):
        assert faults(drawing) == [], drawing.name


def test_nothing_to_draw_is_no_mistake(tmp_path: Path) -> None:
    assert draw_all([], tmp_path) == []
    data = Measured([])
    assert all(by_layer(data, figure) is None for figure in LAYER_FIGURES)
    assert by_position(data, "value_norm", "x", "y") is None and spectrum(data, "a", "b", "c", layer=1) is None
    assert own_value_similarity(data) is None and lambda_map({}) is None
    assert relative_losses([run(0)]) is None and relative_losses([]) is None and critical_points({}) is None


def test_bins_of_positions_keep_the_first_tokens_and_the_mean() -> None:
    values = np.arange(1.0, 2049.0)
    x, y = binned(values)
    assert x[:8].tolist() == y[:8].tolist() == list(range(1, 9)) and len(x) < 50 and x[-1] < 2048
    assert (np.diff(x) > 0).all() and (y >= x - 1e-9).all()
    assert [v.tolist() for v in binned(np.array([3.0, 1.0]))] == [[1.0, 2.0], [3.0, 1.0]]
    assert chosen_layers(range(1, 33)) == [1, 11, 22, 32] and chosen_layers([5, 9]) == [5, 9]


def test_one_layer_can_be_asked_for() -> None:
    drawing = by_position(Measured(rows(2, 12)), "value_norm", "norms", "norm", layers=[7])
    assert drawing is not None and len(drawing.figure.axes) == 1 and {row[2] for row in drawing.table} == {7}


def test_savings_are_marked_at_the_baseline_s_losses() -> None:
    drawing = next(iter(curve_drawings(2)))
    assert drawing is not None
    said = [t.get_text() for t in drawing.figure.axes[0].texts]
    assert said == ["8.0 %*", "10.3 %", "11.7 %"]
    assert [row[-1] for row in drawing.table if row[0] == "saving"] == [True, False, False]


def test_a_run_without_times_or_flops_is_left_out() -> None:
    bare = RunCurves(name="bare", path=Path("bare"), train=run(0).train, validation=run(0).validation)
    assert loss_against([bare], "flops") is None
    drawing = loss_against([bare, run(1)], "flops")
    assert drawing is not None and {row[0] for row in drawing.table} == {MODELS[1]}


def test_training_losses_stand_in_for_too_few_validations() -> None:
    short = run(0)
    few = RunCurves(
        name="a", path=Path("a"), train=short.train, validation={k: v[:1] for k, v in short.validation.items()}
    )
    drawing = loss_against([few], "tokens")
    assert drawing is not None and drawing.figure.axes[0].get_ylabel().startswith("training loss")


def test_the_lambda_map_shows_layers_that_do_not_mix() -> None:
    drawing = lambda_map({"a": ([6, 7], [5.0, 5.0], [1.0, 1.0])}, {"a": 8})
    assert drawing is not None and faults(drawing) == []
    mesh = drawing.figure.axes[0].collections[0]
    grid = np.ma.getmaskarray(mesh.get_array()).reshape(2, 8)
    assert grid[0].tolist() == [True] * 5 + [False] * 2 + [True]


def test_files_are_png_at_300_dpi_pdf_and_csv(tmp_path: Path) -> None:
    paths = draw_all([row for row in rows(2, 4) if row["measure"] == "importance_entropy"], tmp_path / "figures")
    assert len(paths) == 3 and {p.suffix for p in paths} == {".png", ".pdf", ".csv"}
    assert sorted(p for p in (tmp_path / "figures").iterdir()) == sorted(paths)
    picture = imread(tmp_path / "figures" / "entropy.png")
    assert picture.shape[1] == 990
    assert (tmp_path / "figures" / "entropy.pdf").read_bytes().startswith(b"%PDF")
    with (tmp_path / "figures" / "entropy.csv").open(encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    assert {row["model"] for row in table} == {*MODELS[:2]} and float(table[0]["value"]) > 0


SCRIPT = """
import json, sys
from pathlib import Path
from resformer.analyze.figures import draw_all
draw_all(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
"""


def test_the_same_numbers_give_the_same_bytes(tmp_path: Path) -> None:
    keep = ("importance_entropy", "own_value_layer_similarity", "lambda_first", "lambda_own", "value_spectrum")
    data = [row for row in rows(2, 4) if row["measure"] in keep]
    (tmp_path / "rows.json").write_text(json.dumps(data))
    with rc_context({"font.size": 20, "axes.grid": False, "pdf.fonttype": 3}):  # what somebody set does not matter
        paths = draw_all(data, tmp_path / "a")
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "rows.json"), str(tmp_path / "b")]
    subprocess.run(command, check=True, env={"PYTHONHASHSEED": "7", "HOME": str(tmp_path), "TZ": "Asia/Tokyo"})
    for path in paths:
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name
        if path.suffix == ".pdf":
            assert b"CreationDate" not in path.read_bytes() and b"matplotlib" not in path.read_bytes().lower()


def test_files_are_replaced_as_a_whole(tmp_path: Path) -> None:
    drawing = by_layer(Measured(rows(1, 4)), LAYER_FIGURES[0])
    assert drawing is not None
    assert save(drawing, tmp_path) == save(drawing, tmp_path)
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (950, "950"),
        (999.9, "1k"),
        (12_000, "12k"),
        (4.68e8, "468M"),
        (2e9, "2B"),
        (0.25, "0.25"),
        (3e12, "3T"),
    ],
)
def test_amounts_are_short(value: float, text: str) -> None:
    assert amount(value) == text


def test_long_names_lose_their_middle() -> None:
    assert shorten("a" * 34) == "a" * 34
    short = shorten("head" + "x" * 60 + "tail")
    assert len(short) == 34 and short.startswith("head") and short.endswith("tail") and "\u2026" in short


def measures(drawn: Sequence[Drawing]) -> set[str]:
    return {d.name for d in drawn}


def test_lambdas_of_runs_fill_in_for_rows() -> None:
    data = [row for row in rows(2, 4) if not row["measure"].startswith("lambda")]
    assert "lambda_map" not in measures(list(drawings(data)))
    drawn = {d.name: d for d in drawings(data, runs=[run(1)])}
    assert [row[:3] for row in drawn["lambda_map"].table] == [[MODELS[1], 2, 0.5], [MODELS[1], 3, 1.5]]
