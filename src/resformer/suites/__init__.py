"""The suites that come with the package: one file each with a `SUITE` object, found by name and imported by nothing.

Here is what several of them share, so that a run which two suites name is the same run and is trained once: `scales`,
the paper's tasks, and the options of Learnable-Plus, whose initial logits the paper does not give and which are
therefore written out wherever it is run.

Where a number of the paper comes from is said with the tag of its source: [v1] the paper's text of November 2024 (arXiv
v2), [sum] a published summary of the ACL text (v5), [2nd] third parties who had v5 before them. What none of them says
is not among the references.
"""

from __future__ import annotations

from collections.abc import Mapping

from resformer.experiments.spec import Reference, Scale

PAPER_TASKS = ("hellaswag", "openbookqa", "winogrande", "arc_challenge", "arc_easy", "piqa")
"""The tasks of the paper's zero-shot tables, by their names in lm-eval, in the paper's order."""

LINEAR: Mapping[str, object] = {"model.variant_options": {"logit_init": "linear"}}
ZEROS: Mapping[str, object] = {"model.variant_options": {"logit_init": "zeros"}}

SETTING_82M = "82M parameters, 20B tokens of SlimPajama; mean of the losses of its seven domains"
NOT_IN_PAPER = "not in the paper"
V1, V5, V5_2ND = "v1 table 5 [v1]", "v5, ablations [sum]", "v5, ablations [2nd]"
IDENTITY_82M = "2.712 against 2.739 at 82M (v1 table 5)"


def table(source: str, rows: Mapping[str, Mapping[str, float]]) -> tuple[Reference, ...]:
    """Rows of one of the paper's tables: our run -> measure (as claims name it; "loss" is "validation/loss") -> value;
    accuracies 0..1.
    """
    return tuple(Reference(run=run, values=values, source=source) for run, values in rows.items())


def scales(
    *,
    seeds: tuple[int, ...] = (0,),
    paper: str = "paper_82m",
    tasks: tuple[str, ...] = (),
    mini: Mapping[str, object] | None = None,
) -> dict[str, Scale]:
    """The three scales of a suite.

    Args:
        seeds: at mini; small has three seeds, the paper one, 42.
        paper: the recipe at the paper's scale.
        tasks: what is scored at small and at the paper's scale, where a model knows enough for it.
        mini: configuration keys that differ from the recipe at mini.
    """
    return {
        "mini": Scale(recipe="mini", seeds=seeds, overrides=mini or {}),
        "small": Scale(recipe="small", seeds=(0, 1, 2), inputs=(), tasks=tasks),
        "paper": Scale(recipe=paper, seeds=(42,), inputs=(), tasks=tasks, processes=8),
    }
