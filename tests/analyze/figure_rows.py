"""Rows of measures and curves of runs, made up, with every figure that can be drawn from them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from resformer.analyze.axes import Drawing
from resformer.analyze.critical import CriticalPoint
from resformer.analyze.curve_figures import critical_points, loss_against, relative_losses, scaling
from resformer.analyze.curves import RunCurves
from resformer.analyze.figures import POSITION_FIGURES
from resformer.analyze.layer_figures import LAYER_FIGURES
from resformer.analyze.savings import savings

MODELS = (
    "transformer",
    "learnable",
    "_odd $name$",
    "runs/sparse",
    "neutreno",
    "learnable_plus",
    "meta-llama/Llama-3.1-8B-as-it-was-trained-with-a-very-long-name",
    "dense",
)


def rows(models: int, layers: int, length: int = 40) -> list[dict[str, Any]]:
    """Rows of every measure that is drawn."""
    found: list[dict[str, Any]] = []
    for i, model in enumerate(MODELS[:models]):

        def add(measure: str, layer: int, model: str = model, **values: Any) -> None:
            found.append({"model": model, "measure": measure, "layer": layer, "texts": 8, **values})

        for layer in range(layers + 1):
            for figure in LAYER_FIGURES:
                for measure, _ in figure.panels:
                    if layer or measure.startswith("hidden"):
                        value = (1 + i) * math.exp(layer / layers * 2) / 5
                        add(measure, layer, value=value, standard_error=0.01)
            for measure in ("lambda_first", "lambda_own"):
                if layer > 1:
                    value = (-1) ** i * layer / layers
                    add(measure, layer, value=value, standard_error=None)
            for measure, _, _ in POSITION_FIGURES:
                add(measure, layer, values=[9.0 + i, *[1.0 + i] * (length - 1)])
            for measure in ("value_spectrum", "hidden_spectrum"):
                add(measure, layer, values=[5.0, 1.0, 0.2, 0.0])
            if layer:
                near = [1 - abs(layer - n) / layers for n in range(1, layers + 1)]
                add("own_value_layer_similarity", layer, values=near)
            if layer > 1:
                add("read_weight_by_head", layer, values=[(-1) ** i * layer / layers, 0.5, 0.1, 0.0])
    return found


def run(index: int, steps: int = 400) -> RunCurves:
    """A run whose loss falls, by a little more the higher its number."""
    x = np.arange(1.0, steps + 1)
    loss = 3.0 + 4.0 * np.exp(-x / 60) - 0.02 * index * np.exp(-x / 200)
    train = {"step": x, "tokens": 4096 * x, "loss": loss, "lr": x * 0, "seconds": x * 0 + 0.5}
    late = x[49::50]
    validation = {"step": late, "train_tokens": 4096 * late, "loss": loss[49::50], "bits_per_byte": late * 0}
    lambdas = [{"step": steps, "layers": [2, 3], "first": [0.5, 1.5], "own": [0.5, 0.4]}]
    return RunCurves(
        name=MODELS[index],
        path=Path("runs"),
        train=train,
        validation=validation,
        lambdas=lambdas,
        gradient_norms={f"model.layers.0.self_attn.{name}.weight": 1 / x for name in ("v_proj", "o_proj")},
        flops_per_token=1.6e8,
        layers=4,
    )


def curve_drawings(count: int) -> Iterable[Drawing | None]:
    sizes, base = [81_901_056, 179_874_048, 467_921_920], [2.7389, 2.5015, 2.2806]
    better, worse = [2.7117, 2.4692, 2.2537], [2.77, 2.535, 2.315]
    yield scaling({"Transformer": (sizes, base), "ResFormer": (sizes, better)}, savings(sizes, better, sizes, base))
    yield scaling({"Transformer": (sizes, base), "SVFormer": (sizes, worse)}, savings(sizes, worse, sizes, base))
    point = CriticalPoint(step=5000, low=4000, high=6500, kind="crossed", confidence=0.95)
    later = CriticalPoint(step=30_000, low=20_000, high=math.inf, kind="extrapolated", confidence=0.95)
    never = CriticalPoint(step=math.inf, low=30_000, high=math.inf, kind="never", confidence=0.95)
    yield critical_points({"SVFormer": [(512, point), (2048, point), (64_000, later)], "half": [(512, never)]})
    yield from (loss_against([run(i) for i in range(count)], what) for what in ("tokens", "flops", "hours", "steps"))
    yield relative_losses([run(i) for i in range(count)])
