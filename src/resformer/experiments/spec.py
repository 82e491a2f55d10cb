"""What a suite is, as data: which runs, against which baseline, and what is claimed about them.

A suite is one `Suite` object in a file of its own. It holds no code that runs and nothing that depends on a machine, so
that the same suite gives the same run ids everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from resformer.errors import UserError, did_you_mean

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """One training run: a variant, what differs from the recipe, and the seed.

    `overrides` maps dotted configuration keys to values ("optim.lr": 1e-3; "model.variant_options": {"logit_init":
    "zeros"}). `name` is how claims and the report call the run; it defaults to the variant.
    """

    variant: str
    overrides: Mapping[str, object] = field(default_factory=dict)
    seed: int = 0
    name: str = ""

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", self.variant)
        if not _NAME.fullmatch(self.name):
            raise UserError(
                f"run name {self.name!r}: expected letters, digits, '_', '-' or '.', as it becomes a directory name"
            )


@dataclass(frozen=True)
class Less:
    """The claim that run `left` ends with a lower value of `on` than run `right`."""

    left: str
    right: str
    on: str = "validation/loss"

    def __str__(self) -> str:
        return f"{self.left} < {self.right}"


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Runs of one recipe that differ in what `runs` says and in nothing else: same data, same order.

    `baseline` names the run that all others are compared with. `inputs` and `prepare_options` go to
    `resformer.data.prepare`. `prompt` and `sample_tokens` say which text each trained model continues for the report,
    always with the same sampling seed.
    """

    name: str
    recipe: str
    runs: tuple[RunSpec, ...]
    baseline: str
    claims: tuple[Less, ...] = ()
    title: str = ""
    inputs: tuple[str, ...] = ("embedded",)
    prepare_options: Mapping[str, object] = field(default_factory=dict)
    prompt: str = "The history of the"
    sample_tokens: int = 120
    sample_seed: int = 0

    def __post_init__(self) -> None:
        names = [run.name for run in self.runs]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise UserError(
                f"suite {self.name!r}: run name {repeated[0]!r} is used twice; give one of the runs another `name`"
            )
        for role, name in [("baseline", self.baseline)] + [
            ("claim", n) for c in self.claims for n in (c.left, c.right)
        ]:
            if name not in names:
                raise UserError(
                    f"suite {self.name!r}: {role} names the run {name!r}, which is not in it{did_you_mean(name, names)}"
                )
