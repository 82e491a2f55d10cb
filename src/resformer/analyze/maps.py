"""Heat maps: layers against layers, and the weights on V_1 and on the own value by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, Normalize, TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator

from resformer.analyze import axes as style
from resformer.analyze.axes import Drawing, styled
from resformer.analyze.layer_figures import Floats, Measured


def scale(values: Floats) -> tuple[Colormap, Normalize]:
    """Colours that stay apart without red and green: from 0 or the least to the most, or both ways from 0."""
    known = values[np.isfinite(values)]
    low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 1.0)
    if low < 0:
        most = max(-low, high) or 1.0
        colours: Colormap = colormaps["PuOr_r"]
        norm: Normalize = TwoSlopeNorm(vcenter=0.0, vmin=-most, vmax=most)
    else:
        colours, norm = colormaps["viridis"], Normalize(0.0, high or 1.0)
    return colours.with_extremes(bad="#d9dce1"), norm


def _room_for_bar(figure: Figure) -> None:
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + 0.6)


def _bar(figure: Figure, axes: Sequence[Axes], colours: Colormap, norm: Normalize, label: str) -> None:
    share = 0.09 / (figure.get_size_inches()[1] - 0.6)  # as high in a small figure as in a large one
    bar = figure.colorbar(
        ScalarMappable(norm, colours), ax=list(axes), location="bottom", fraction=share, aspect=28, pad=0.02
    )
    bar.set_label(label)
    bar.outline.set_linewidth(0.5)
    bar.ax.grid(False)


@styled
def own_value_similarity(data: Measured, measure: str = "own_value_layer_similarity") -> Drawing | None:
    """Similarity of what layers compute as values themselves, layer by layer, a panel a model."""
    shown = data.having(measure)
    if not shown:
        return None
    matrices = {}
    for model in shown:
        vectors = data.vectors(model, measure)
        layers = list(vectors)
        if all(len(v) == len(layers) for v in vectors.values()):
            matrices[model] = (layers, np.stack([vectors[n] for n in layers]))
    if not matrices:
        return None
    colours, norm = scale(np.concatenate([m.ravel() for _, m in matrices.values()]))
    columns = min(2, len(matrices))
    figure, axes = style.panels(len(matrices), columns=columns, height=2.6 if columns == 1 else 1.75)
    _room_for_bar(figure)
    table: list[list[Any]] = []
    for i, (panel, (model, (layers, matrix))) in enumerate(zip(axes, matrices.items(), strict=True)):
        at = np.append(np.array(layers) - 0.5, layers[-1] + 0.5)
        panel.pcolormesh(at, at, np.ma.masked_invalid(matrix), cmap=colours, norm=norm, rasterized=True)
        panel.grid(False)
        style.layer_axis(panel, layers[-1], label=i >= len(matrices) - columns, most=4)
        panel.yaxis.set_major_locator(FixedLocator(panel.get_xticks().tolist()))
        panel.set_xlim(layers[0] - 0.5, layers[-1] + 0.5)
        panel.set_ylim(layers[-1] + 0.5, layers[0] - 0.5)
        if i % columns == 0:
            panel.set_ylabel("layer")
        style.panel_name(panel, model)
        table += [[model, a, b, float(matrix[j, k])] for j, a in enumerate(layers) for k, b in enumerate(layers)]
    _bar(figure, axes, colours, norm, "similarity of own values (cosine)")
    columns_of = ("model", "layer", "other_layer", "value")
    return Drawing(name="own_value_similarity", figure=figure, columns=columns_of, table=table)


@styled
def gate_map(data: Measured, measure: str = "read_weight_by_head") -> Drawing | None:
    """The mean weight of V_1 in each KV head of each layer, a panel a model: of gates what they open to."""
    tables = {model: data.vectors(model, measure) for model in data.having(measure)}
    if not tables:
        return None
    colours, norm = scale(np.concatenate([v for table in tables.values() for v in table.values()]))
    figure, axes = style.panels(len(tables), height=0.9)
    _room_for_bar(figure)
    rows: list[list[Any]] = []
    for i, (panel, (model, table)) in enumerate(zip(axes, tables.items(), strict=True)):
        depth, heads = max(table), max(map(len, table.values()))
        grid = np.full((heads, depth), np.nan)
        for layer, weights in table.items():
            grid[: len(weights), layer - 1] = weights
            rows += [[model, layer, head, float(w)] for head, w in enumerate(weights, start=1)]
        at = np.arange(depth + 1) + 0.5
        edges = np.arange(heads + 1) + 0.5
        panel.pcolormesh(at, edges, np.ma.masked_invalid(grid), cmap=colours, norm=norm, rasterized=True)
        panel.grid(False)
        style.layer_axis(panel, depth, label=i == len(tables) - 1)
        panel.set_xlim(0.5, depth + 0.5)
        panel.set_ylim(heads + 0.5, 0.5)
        panel.yaxis.set_major_locator(FixedLocator(sorted({1, heads})))
        panel.set_ylabel("KV head")
        if len(tables) > 1:
            style.panel_name(panel, model, most=44)
    _bar(figure, axes, colours, norm, "mean weight of $V_1$")
    return Drawing(name="gate_map", figure=figure, columns=("model", "layer", "kv_head", "weight"), table=rows)


def lambdas_of(data: Measured) -> dict[str, tuple[list[int], list[float], list[float]]]:
    """Model -> (layers, weight on V_1, weight on the own value), from the measures lambda_first and lambda_own."""
    found = {}
    for model in data.having("lambda_first"):
        layers, first, _ = data.by_layer(model, "lambda_first")
        own = dict(zip(*(x.tolist() for x in data.by_layer(model, "lambda_own")[:2]), strict=True))
        found[model] = ([int(n) for n in layers], first.tolist(), [own.get(n, float("nan")) for n in layers.tolist()])
    return found


@styled
def lambda_map(
    maps: Mapping[str, tuple[Sequence[int], Sequence[float], Sequence[float]]], depths: Mapping[str, int] | None = None
) -> Drawing | None:
    """The weights on V_1 and on the own value by layer (v5), a panel a model; layers that do not mix are grey.

    maps: model -> (layers, first, own); depths: model -> its number of layers, the last mixing one when not given.
    """
    maps = {model: table for model, table in maps.items() if len(table[0])}
    if not maps:
        return None
    colours, norm = scale(np.concatenate([np.array([*first, *own]) for _, first, own in maps.values()]))
    figure, axes = style.panels(len(maps), height=0.72)
    _room_for_bar(figure)
    rows: list[list[Any]] = []
    for i, (panel, (model, (layers, first, own))) in enumerate(zip(axes, maps.items(), strict=True)):
        depth = max(max(layers), (depths or {}).get(model, 0))
        grid = np.full((2, depth), np.nan)
        for n, a, b in zip(layers, first, own, strict=True):
            grid[0, n - 1], grid[1, n - 1] = a, b
            rows.append([model, n, a, b])
        at = np.arange(depth + 1) + 0.5
        panel.pcolormesh(at, [-0.5, 0.5, 1.5], np.ma.masked_invalid(grid), cmap=colours, norm=norm, rasterized=True)
        panel.grid(False)
        style.layer_axis(panel, depth, label=i == len(maps) - 1)
        panel.set_xlim(0.5, depth + 0.5)
        panel.set_ylim(1.5, -0.5)
        panel.set_yticks([0, 1], ["$V_1$", "own"])
        if len(maps) > 1:
            style.panel_name(panel, model, most=44)
    _bar(figure, axes, colours, norm, "weight")
    return Drawing(name="lambda_map", figure=figure, columns=("model", "layer", "first", "own"), table=rows)
