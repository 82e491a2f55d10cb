"""The suite behind `make compare`: does value residual pay within minutes on a CPU, on real text, against an honest
baseline?

All four models see the same tokens in the same order. SVFormer is here for its cache, not for its loss: the paper has
it behind the Transformer at equal data, so nothing is claimed about it. Variants have the library's default options.
"""

from resformer.experiments.spec import Less, RunSpec, Scale, Suite
from resformer.suites import SETTING_82M, V1, V5, V5_2ND, table

SUITE = Suite(
    name="quick",
    title="Transformer against value residual, minutes on a CPU",
    question="Does value residual lower the loss at equal tokens, within minutes?",
    scales={"quick": Scale(recipe="quick")},
    runs=tuple(RunSpec(variant=variant) for variant in ("transformer", "learnable", "learnable_plus", "svformer")),
    baseline="transformer",
    claims=(
        Less("learnable", "transformer", paper="2.705 against 2.739 at 82M (v5)"),
        Less("learnable_plus", "transformer", paper="2.681 against 2.739 at 82M (v5)"),
    ),
    paper=(
        *table(V1, {"transformer": {"loss": 2.739}}),
        *table(V5_2ND, {"learnable": {"loss": 2.705}}),
        *table(V5, {"learnable_plus": {"loss": 2.681}}),
    ),
    paper_setting=SETTING_82M,
)
