"""All figures that rows of measures and curves of runs allow, written into a directory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from resformer.analyze.axes import Drawing, save
from resformer.analyze.curve_figures import gradient_norms, loss_against, recovered, relative_losses
from resformer.analyze.curves import Against, RunCurves
from resformer.analyze.layer_figures import LAYER_FIGURES, Measured, by_layer, by_position, spectrum
from resformer.analyze.maps import gate_map, lambda_map, lambdas_of, own_value_similarity

POSITION_FIGURES = (
    ("value_norm", "value_norm_by_position", "value-state norm"),
    ("hidden_norm", "hidden_norm_by_position", "hidden-state norm"),
    ("importance", "importance_by_position", "importance (share)"),
)
SPECTRA: tuple[tuple[str, str, int | None], ...] = (
    ("value_spectrum", "values of layer 1: eigenvalue", 1),
    ("hidden_spectrum", "last hidden states: eigenvalue", None),
)
COSTS: tuple[Against, ...] = ("tokens", "flops", "hours")


def draw_all(
    rows: Iterable[Mapping[str, Any]],
    out: Path,
    *,
    runs: Sequence[RunCurves] = (),
    layers: Sequence[int] | None = None,
    baseline: str | None = None,
) -> list[Path]:
    """Draw what there is and write each figure as NAME.png, NAME.pdf and NAME.csv into `out`; return the paths.

    Args:
        rows: Rows of measures.jsonl. Models are told apart by colour and marker in the order in which they come.
        runs: Curves of runs (`read_run`), for losses; a run named as a model adds its lambdas where rows have none.
        layers: Which layers to draw by position; four, evenly from the first to the last, when not given.
        baseline: The run that relative losses are against; the first one when not given.
    """
    found = drawings(rows, runs=runs, layers=layers, baseline=baseline)
    return [path for drawing in found for path in save(drawing, out)]


def drawings(
    rows: Iterable[Mapping[str, Any]],
    *,
    runs: Sequence[RunCurves] = (),
    layers: Sequence[int] | None = None,
    baseline: str | None = None,
) -> Iterator[Drawing]:
    """The figures of `draw_all`, one after the other."""
    data = Measured(rows)
    for figure in LAYER_FIGURES:
        yield from _there(by_layer(data, figure))
    for measure, name, label in POSITION_FIGURES:
        yield from _there(by_position(data, measure, name, label, layers=layers))
    for measure, label, layer in SPECTRA:
        yield from _there(spectrum(data, measure, measure, label, layer=layer))
    yield from _there(own_value_similarity(data))
    maps, depths = lambdas_of(data), {run.name: run.layers for run in runs if run.layers}
    for run in runs:
        if run.lambdas and run.name not in maps:
            last = run.lambdas[-1]
            maps[run.name] = (last["layers"], last["first"], last["own"])
    yield from _there(lambda_map(maps, depths))
    yield from _there(gate_map(data))
    if runs:
        yield from _there(relative_losses(runs, baseline=baseline))
        yield from _there(gradient_norms(runs))
        yield from _there(recovered(runs))
        for what in COSTS:
            yield from _there(loss_against(runs, what))


def _there(drawing: Drawing | None) -> list[Drawing]:
    return [] if drawing is None else [drawing]
