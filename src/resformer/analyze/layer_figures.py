"""Figures of what was measured: models overlaid, layers numbered from 1, the numbers beside each as CSV.

A measure of the embeddings (layer 0) is in the CSV and not drawn. Every function returns None where the rows hold
nothing to draw.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator
from numpy.typing import NDArray
from scipy import stats

from resformer.analyze import axes as style
from resformer.analyze.axes import Drawing, styled

Floats = NDArray[np.float64]
_SURE = 0.95  # of a mean over texts, that a band holds it
_MOST_BANDS = 3  # models; more bands would hide each other
_EACH, _BINS = 8, 34  # positions drawn one by one, and bins of the later ones


@dataclass(frozen=True, kw_only=True)
class ByLayer:
    """A figure of measures by layer. label: of the y axis; panels: (measure, what stands above its panel, if there are
    several); level: a dashed line, where equality is.
    """

    name: str
    label: str
    panels: tuple[tuple[str, str], ...]
    columns: int = 1
    log: bool = False
    level: float | None = None


_HEADS = (
    ("key_similarity_heads_averaged", "keys, heads averaged"),
    ("value_similarity_heads_averaged", "values, heads averaged"),
)
_TOPS = (("1", "top 1"), ("2", "top 2"), ("3", "top 3"), ("10", "top 10"), ("1_percent", "top 1 % of the text"))


def _both(measure: str) -> tuple[tuple[str, str], ...]:
    return (f"value_{measure}", "values"), (f"hidden_{measure}", "hidden states")


LAYER_FIGURES = (
    ByLayer(name="entropy", label="token importance entropy (nats)", panels=(("importance_entropy", ""),)),
    ByLayer(name="similarity_hidden", label="hidden-state similarity (cosine)", panels=(("hidden_similarity", ""),)),
    ByLayer(name="similarity_keys", label="key similarity (cosine)", panels=(("key_similarity", ""),)),
    ByLayer(name="similarity_values", label="value similarity (cosine)", panels=(("value_similarity", ""),)),
    ByLayer(name="similarity_heads_averaged", label="similarity (cosine)", panels=_HEADS),
    ByLayer(
        name="first_token_importance",
        label="first-token importance (share)",
        panels=(("first_token_importance", ""),),
    ),
    ByLayer(
        name="top_importance",
        label="importance (share)",
        panels=tuple((f"top_{top}_importance", said) for top, said in _TOPS),
        columns=2,
    ),
    ByLayer(
        name="first_token_norms", label="norm, first / others", panels=_both("first_token_ratio"), log=True, level=1.0
    ),
    ByLayer(name="largest_eigenvalue", label="largest eigenvalue", panels=_both("largest_eigenvalue"), log=True),
    ByLayer(name="effective_rank", label="effective rank (count)", panels=_both("effective_rank")),
    ByLayer(
        name="components",
        label="components (count)",
        panels=tuple(
            (measure, f"{said.split()[0]}, {percent} % of variance")
            for percent in (90, 99)
            for measure, said in _both(f"components_{percent}_percent")
        ),
        columns=2,
    ),
    ByLayer(
        name="read_value_share", label="read values in output (share)", panels=(("read_value_share", ""),), level=0.0
    ),
    ByLayer(
        name="cross_layer_cosine",
        label="cosine to eq. 2",
        panels=(
            ("cross_layer_cosine_eq4", "own attention for all layers (eq. 4)"),
            ("cross_layer_cosine_eq6", "identity for other layers (eq. 6)"),
        ),
    ),
    ByLayer(
        name="removal",
        label="loss increase (nats)",
        panels=(("loss_without_attention", "attention removed"), ("loss_without_mlp", "MLP removed")),
        level=0.0,
    ),
)


class Measured:
    """Rows of measures.jsonl by model and measure. models: in the order in which they come."""

    def __init__(self, rows: Iterable[Mapping[str, Any]]) -> None:
        self.rows = [dict(row) for row in rows]
        self.models = list(dict.fromkeys(str(row["model"]) for row in self.rows))
        self._found: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
        for row in self.rows:
            self._found.setdefault((str(row["model"]), str(row["measure"])), {})[int(row["layer"])] = row

    def by_layer(self, model: str, measure: str) -> tuple[Floats, Floats, Floats]:
        """(layers from 1, means, half widths of the interval of each mean by Student's t), the last NaN where there is
        none.
        """
        rows = self._found.get((model, measure), {})
        found = [(n, row["value"], _half_width(row)) for n, row in sorted(rows.items()) if n and "value" in row]
        table = np.array([[math.nan if x is None else float(x) for x in line] for line in found]).reshape(-1, 3)
        return table[:, 0], table[:, 1], table[:, 2]

    def vectors(self, model: str, measure: str) -> dict[int, Floats]:
        """Layer -> numbers by position or eigenvalue."""
        rows = self._found.get((model, measure), {})
        return {
            n: np.array([math.nan if x is None else float(x) for x in row["values"]])
            for n, row in sorted(rows.items())
            if "values" in row
        }

    def having(self, measure: str) -> list[str]:
        """The models that have a measure of some layer from 1."""
        return [model for model in self.models if any(n > 0 for n in self._found.get((model, measure), {}))]

    def scalar_table(self, measures: Sequence[str]) -> list[list[Any]]:
        """CSV rows (model, measure, layer, texts, value, standard error)."""
        keys = ("model", "measure", "layer", "texts", "value", "standard_error")
        return [[row.get(k) for k in keys] for row in self.rows if row["measure"] in measures and "value" in row]

    def vector_table(self, measure: str, layers: Sequence[int] | None = None, first: int = 1) -> list[list[Any]]:
        """CSV rows (model, measure, layer, index, value); the index counts from `first`."""
        return [
            [row["model"], measure, row["layer"], i, value]
            for row in self.rows
            if row["measure"] == measure and "values" in row and (layers is None or row["layer"] in layers)
            for i, value in enumerate(row["values"], start=first)
        ]


def _half_width(row: Mapping[str, Any]) -> float | None:
    error, texts = row.get("standard_error"), int(row.get("texts") or 0)
    return None if error is None or texts < 2 else float(error) * float(stats.t.ppf(0.5 + _SURE / 2, texts - 1))


@styled
def by_layer(data: Measured, what: ByLayer) -> Drawing | None:
    """Lines over the layers, one a model; a band is 95 % of the mean over texts, for up to three models."""
    there = [(measure, said) for measure, said in what.panels if data.having(measure)]
    if not there:
        return None
    shown = [m for m in data.models if any(m in data.having(measure) for measure, _ in there)]
    height = style.PANEL_HEIGHT if len(there) == 1 else 1.6 if what.columns == 1 else 1.4
    figure, axes = style.panels(len(there), columns=what.columns, height=height)
    most = 12 if what.columns == 1 else 6
    for i, (panel, (measure, said)) in enumerate(zip(axes, there, strict=True)):
        depth = 1
        for model in shown:
            layers, values, errors = data.by_layer(model, measure)
            if not len(layers):
                continue
            index = data.models.index(model)
            depth = max(depth, int(layers[-1]))
            panel.plot(layers, values, **style.look(index), markevery=_every(len(layers)))
            if len(shown) <= _MOST_BANDS and np.isfinite(errors).any():
                wide = np.nan_to_num(errors)
                style.band(panel, layers, values - wide, values + wide, index)
        if what.log:
            log_y(panel)
        if what.level is not None:
            panel.axhline(what.level, color="#777777", linewidth=0.7, linestyle=(0, (4, 3)), zorder=1)
        style.layer_axis(panel, depth, label=i >= len(there) - what.columns, most=most)
        if len(there) > 1:
            style.panel_name(panel, said, most=38 if what.columns == 1 else 24)
        if i % what.columns == 0:
            panel.set_ylabel(what.label)
    style.legend(figure, shown, looks=[style.look(data.models.index(m)) for m in shown], of=len(data.models))
    columns = ("model", "measure", "layer", "texts", "value", "standard_error")
    return Drawing(name=what.name, figure=figure, columns=columns, table=data.scalar_table([m for m, _ in there]))


def _every(points: int) -> int:
    return max(1, points // 16)


def log_y(axes: Axes) -> None:
    """A logarithmic y axis where all is positive and spans a factor of 5 or more; numbers are 1, 2, 5 times a power."""
    values = np.concatenate([np.asarray(line.get_ydata(), dtype=np.float64) for line in axes.lines] or [np.ones(1)])
    values = values[np.isfinite(values)]
    if not len(values) or values.min() <= 0 or values.max() < 5 * values.min():
        return
    axes.set_yscale("log")
    decades = math.log10(values.max() / values.min())
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if decades < 2.2 else (1.0,), numticks=9))
    style.amounts(axes, "y")


def chosen_layers(layers: Sequence[int], count: int = 4) -> list[int]:
    """At most `count` layers, evenly from the first to the last."""
    picked = np.linspace(0, len(layers) - 1, min(count, len(layers))).round().astype(int)
    return [layers[i] for i in dict.fromkeys(picked.tolist())]


def binned(values: Floats) -> tuple[Floats, Floats]:
    """(position from 1, value) for a logarithmic axis: the first positions one by one, later ones as means of bins that
    grow; the position of a bin is its geometric middle.
    """
    length = len(values)
    edges = list(range(1, min(_EACH, length) + 1))
    if length > _EACH:
        edges += sorted({round(x) for x in np.geomspace(_EACH + 1, length + 1, _BINS).tolist()})
    else:
        edges.append(length + 1)
    starts, ends = np.array(edges[:-1]), np.array(edges[1:])
    parts = [values[a - 1 : b - 1] for a, b in zip(starts, ends, strict=True)]
    means = [float(part[np.isfinite(part)].mean()) if np.isfinite(part).any() else math.nan for part in parts]
    return np.sqrt(starts * (ends - 1.0)), np.array(means)


@styled
def by_position(
    data: Measured, measure: str, name: str, label: str, *, layers: Sequence[int] | None = None
) -> Drawing | None:
    """A measure over the position in the text, a panel a layer (four of them unless `layers` says which)."""
    shown = data.having(measure)
    if not shown:
        return None
    depth = max(max(data.vectors(model, measure), default=1) for model in shown)
    picked = list(layers) if layers is not None else chosen_layers(range(1, depth + 1))
    columns = 2 if len(picked) > 1 else 1
    figure, axes = style.panels(len(picked), columns=columns, height=1.55 if columns == 2 else style.PANEL_HEIGHT)
    for i, (panel, layer) in enumerate(zip(axes, picked, strict=True)):
        longest = 2
        for model in shown:
            values = data.vectors(model, measure).get(layer)
            if values is None or not np.isfinite(values).any():
                continue
            longest = max(longest, len(values))
            x, y = binned(values)
            panel.plot(x, y, **style.look(data.models.index(model)), markevery=_every(len(x)), markersize=2.6)
        panel.set_xscale("log")
        panel.xaxis.set_major_locator(LogLocator(numticks=7))
        style.amounts(panel, "x")
        panel.set_xlim(0.8, longest * 1.3)
        log_y(panel)
        style.panel_name(panel, f"layer {layer}")
        if i >= len(picked) - columns:
            panel.set_xlabel("position (tokens)")
        if i % columns == 0:
            panel.set_ylabel(label)
    style.legend(figure, shown, looks=[style.look(data.models.index(m)) for m in shown], of=len(data.models))
    columns_of = ("model", "measure", "layer", "position", "value")
    return Drawing(name=name, figure=figure, columns=columns_of, table=data.vector_table(measure, picked))


@styled
def spectrum(data: Measured, measure: str, name: str, label: str, *, layer: int | None) -> Drawing | None:
    """Eigenvalues by their rank, of one layer (None: each model's last one), both axes logarithmic."""
    shown = data.having(measure)
    figure, (panel,) = style.panels(1)
    table: list[list[Any]] = []
    drawn = []
    for model in shown:
        vectors = data.vectors(model, measure)
        which = layer if layer is not None else max(vectors)
        if which not in vectors:
            continue
        values = vectors[which]
        # What is smaller is rounding.
        rank, positive = np.arange(1, len(values) + 1), values > values[0] * 1e-6
        if not positive.any():
            continue
        picks = [round(x) for x in np.geomspace(1, max(int(positive.sum()), 1), 9)]
        marks = sorted({p - 1 for p in picks})
        index = data.models.index(model)
        panel.plot(rank[positive], values[positive], **style.look(index), markevery=marks)
        drawn.append(model)
        table += [[model, measure, which, i, float(v)] for i, v in zip(rank.tolist(), values, strict=True)]
    if not drawn:
        return None
    panel.set_xscale("log")
    panel.xaxis.set_major_locator(LogLocator(numticks=7))
    style.amounts(panel, "x")
    log_y(panel)
    panel.set_xlabel("eigenvector (rank)")
    panel.set_ylabel(label)
    style.legend(figure, drawn, looks=[style.look(data.models.index(m)) for m in drawn], of=len(data.models))
    return Drawing(name=name, figure=figure, columns=("model", "measure", "layer", "rank", "value"), table=table)
