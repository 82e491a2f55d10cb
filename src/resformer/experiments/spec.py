"""What a suite is, as data: which runs at which scale, against which baseline, what is claimed about them, and what the
paper reports.

A suite is one `Suite` object in a file of its own. It holds no code that runs and nothing that depends on a machine, so
that the same suite gives the same run ids everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from resformer.errors import UserError, did_you_mean

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_TAKEN = ("data", "runs", "locks", "configs")  # directories of a pool
_MEASURE = re.compile(r"validation/(.+/)?(loss|bits_per_byte|perplexity)|tasks/.+")
LOSS = "validation/loss"


def _check_seeds(seeds: tuple[int, ...], what: str) -> None:
    if not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0:
        raise UserError(f"{what} are {', '.join(map(str, seeds)) or 'none'}; name each once, from 0")


def _check_claim(claim: Claim, suite: str) -> None:
    if not _MEASURE.fullmatch(claim.on):
        raise UserError(
            f"suite {suite!r}: claim {claim} is on {claim.on!r}; expected validation/loss, validation/DOMAIN/loss, "
            "validation/DOMAIN/perplexity, tasks/average or tasks/TASK"
        )
    if not 0 <= claim.margin < float("inf"):
        raise UserError(f"suite {suite!r}: the margin of claim {claim} is {claim.margin}; expected 0 or more")


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """One training run apart from its seed: a variant, and what differs from the recipe.

    `overrides` maps dotted configuration keys to values ("optim.lr": 1e-3; "model.variant_options": {"logit_init":
    "zeros"}), `scaled` further ones by scale. `name` is how claims and the report call the run; it defaults to the
    variant. `scales` are the only ones at which it is run; empty: all.
    """

    variant: str
    overrides: Mapping[str, object] = field(default_factory=dict)
    scaled: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    scales: tuple[str, ...] = ()
    name: str = ""

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", self.variant)
        if not _NAME.fullmatch(self.name):
            raise UserError(
                f"run name {self.name!r}: expected letters, digits, '_', '-' or '.', as it becomes a directory name"
            )


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How large a suite is run.

    Attributes:
        recipe: the training configuration that all runs share.
        seeds: of initial weights and data order; runs are compared seed by seed.
        overrides: configuration keys that differ from the recipe in every run.
        inputs: what `resformer data prepare` gets; empty: the user brings a prepared corpus.
        prepare_options: more of what it gets.
        tasks: lm-eval tasks to score trained models on.
        processes: devices that one run is meant for.
    """

    recipe: str
    seeds: tuple[int, ...] = (0,)
    overrides: Mapping[str, object] = field(default_factory=dict)
    inputs: tuple[str, ...] = ("embedded",)
    prepare_options: Mapping[str, object] = field(default_factory=dict)
    tasks: tuple[str, ...] = ()
    processes: int = 1


@dataclass(frozen=True)
class Less:
    """The claim that run `left` ends with a lower value of `on` than run `right`. `paper` says what the paper found."""

    left: str
    right: str
    on: str = LOSS
    paper: str = field(default="", kw_only=True)

    kind: ClassVar[str] = "less"
    margin: ClassVar[float] = 0.0

    def __str__(self) -> str:
        return f"{self.left} < {self.right}"


@dataclass(frozen=True)
class NotLess:
    """The claim that run `left` does not end below run `right`, or by no more than `margin` (in the unit of `on`):
    what is smaller than that is no gain worth the name. That a difference was not found does not show it; an interval
    that excludes -margin does.
    """

    left: str
    right: str
    on: str = LOSS
    margin: float = field(default=0.0, kw_only=True)
    paper: str = field(default="", kw_only=True)

    kind: ClassVar[str] = "not_less"

    def __str__(self) -> str:
        return f"{self.left} not < {self.right}"


Claim = Less | NotLess


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A row of the paper's table, under the name of our run. `source` is paper version and table or figure."""

    run: str
    values: Mapping[str, float]
    source: str


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Runs of one recipe that differ in what `runs` says and in nothing else: same data, same order.

    `baseline` names the run that all others are compared with. `scales` are by name; the first is the usual one.
    `paper` and `paper_setting` are what the paper measured and on what; `notes` are what a reader must know about how
    the suite differs from it. `prompt` and `sample_tokens` say which text each trained model continues for the report,
    always with the same sampling seed.
    """

    name: str
    title: str
    scales: Mapping[str, Scale]
    runs: tuple[RunSpec, ...]
    baseline: str
    question: str = ""
    claims: tuple[Claim, ...] = ()
    paper: tuple[Reference, ...] = ()
    paper_setting: str = ""
    notes: tuple[str, ...] = ()
    prompt: str = "The history of the"
    sample_tokens: int = 120
    sample_seed: int = 0

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or self.name in _TAKEN:
            raise UserError(
                f"suite name {self.name!r}: expected letters, digits, '_', '-' or '.', as it becomes a directory "
                f"name, and none of {', '.join(_TAKEN)}"
            )
        if not self.scales:
            raise UserError(f"suite {self.name!r}: scales is empty; give it one, such as Scale(recipe='mini')")
        names = [run.name for run in self.runs]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise UserError(
                f"suite {self.name!r}: run name {repeated[0]!r} is used twice; give one of the runs another `name`"
            )
        mentioned = [("baseline", self.baseline)]
        mentioned += [("claim", name) for claim in self.claims for name in (claim.left, claim.right)]
        mentioned += [("paper", row.run) for row in self.paper]
        for role, name in mentioned:
            if name not in names:
                raise UserError(
                    f"suite {self.name!r}: {role} names the run {name!r}, which is not in it{did_you_mean(name, names)}"
                )
        for claim in self.claims:
            _check_claim(claim, self.name)
        for scale in (scale for run in self.runs for scale in (*run.scales, *run.scaled)):
            self.check_scale(scale)
        for scale, found in self.scales.items():
            _check_seeds(found.seeds, f"suite {self.name!r}: seeds of scale {scale!r}")

    def check_scale(self, scale: str) -> None:
        """UserError unless the suite has that scale."""
        if scale not in self.scales:
            raise UserError(
                f"suite {self.name!r} has no scale {scale!r}{did_you_mean(scale, self.scales)} "
                f"(its scales: {', '.join(self.scales)})"
            )

    def at(self, scale: str = "", seeds: Sequence[int] = ()) -> Planned:
        """The suite at a scale (the first one when not given), with the scale's seeds or others."""
        scale = scale or next(iter(self.scales))
        self.check_scale(scale)
        chosen = self.scales[scale]
        if seeds:
            _check_seeds(tuple(seeds), "--seeds")
            chosen = replace(chosen, seeds=tuple(seeds))
        runs = tuple(run for run in self.runs if not run.scales or scale in run.scales)
        present = {run.name for run in runs}
        claims = tuple(claim for claim in self.claims if {claim.left, claim.right} <= present)
        return Planned(suite=self, scale_name=scale, scale=chosen, runs=runs, claims=claims)


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A suite at one scale: its runs there, and the claims about them."""

    suite: Suite
    scale_name: str
    scale: Scale
    runs: tuple[RunSpec, ...]
    claims: tuple[Claim, ...]

    def overrides(self, run: RunSpec) -> dict[str, object]:
        """What is a run's own, at this scale, on top of recipe and scale."""
        return {**run.overrides, **run.scaled.get(self.scale_name, {})}
