"""All checks in order, and what running them gives."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from resformer.core import registry
from resformer.evaluate.contract import caching, formula, gradient, life
from resformer.evaluate.contract.subject import HEADS, ContractError, NotApplicable, Subject

Check = Callable[[Subject], str]

CHECKS: tuple[Check, ...] = (
    formula.plan_is_valid,
    formula.builds_and_runs,
    formula.neutral_is_the_transformer,
    formula.one_layer_is_the_transformer,
    formula.reads_are_left_alone,
    formula.precision_is_kept,
    formula.low_precision_runs,
    gradient.every_parameter_gets_a_gradient,
    gradient.every_read_gets_a_gradient,
    gradient.checkpointing_changes_nothing,
    gradient.two_forwards_before_one_backward,
    gradient.nothing_is_kept_on_modules,
    caching.greedy_decoding,
    caching.padding_does_not_leak,
    caching.beam_search,
    caching.chunked_prefill,
    caching.cache_bytes_are_counted,
    life.lambdas_are_grouped,
    life.costs_are_counted,
    life.config_survives_json,
    life.initial_values_hold,
    life.saving_keeps_the_bits,
)
COMPILE_CHECKS: tuple[Check, ...] = (life.compiles_as_one_graph, life.blocks_share_graphs)


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one check said: "passed", "failed" or "skipped" (it says nothing about this variant)."""

    check: str
    result: str
    detail: str
    about: str
    seconds: float

    def asdict(self) -> dict[str, Any]:
        """As a plain dictionary for JSON."""
        return asdict(self)


def run(
    name: str,
    options: Mapping[str, Any] | None = None,
    *,
    layers: int = 4,
    compile: bool = False,
    heads: Mapping[str, int] = HEADS,
) -> Iterator[Result]:
    """Run every check on the variant `name`, with as many KV heads as query heads and with half of them.

    Args:
        name: a registered variant.
        options: its options; what is missing takes its default.
        layers: layers of the tiny models.
        compile: run the checks on `torch.compile` as well (some seconds).
        heads: forms of attention: label -> KV heads of 8.

    Raises:
        UserError: unknown name or options, before the first check.
    """
    registry.get(name)
    forms = {
        label: Subject(name=name, options=options or {}, kv_heads=kv_heads, layers=layers)
        for label, kv_heads in heads.items()
    }
    next(iter(forms.values())).config()  # refuses options that make no sense
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a model gains nothing by more, and on busy cores they wait for each other
    try:
        for check in CHECKS + (COMPILE_CHECKS if compile else ()):
            yield _run(check, forms)
    finally:
        torch.set_num_threads(threads)


def _run(check: Check, forms: Mapping[str, Subject]) -> Result:
    started, details, states = time.perf_counter(), {}, set()
    for label, subject in forms.items():
        try:
            state, detail = "passed", check(subject)
        except NotApplicable as reason:
            state, detail = "skipped", str(reason)
        except ContractError as reason:
            state, detail = "failed", str(reason)
        except Exception as error:  # a variant's own code may raise anything, and that is a result
            state, detail = "failed", " ".join(f"{type(error).__name__}: {error}".split())[:300]
        details[label] = detail
        states.add(state)
    if len(set(details.values())) == 1:
        text = next(iter(details.values()))
    else:
        text = "; ".join(f"{label}: {detail}" for label, detail in details.items())
    return Result(
        check=check.__name__,
        result=next(state for state in ("failed", "passed", "skipped") if state in states),
        detail=text,
        about=" ".join((check.__doc__ or "").split()),
        seconds=time.perf_counter() - started,
    )
