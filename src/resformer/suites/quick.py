"""The suite behind `make compare`: does value residual pay within minutes on a CPU, on real text, against an honest
baseline?

All four models see the same tokens in the same order. SVFormer is here for its cache, not for its loss: the paper has
it behind the Transformer at equal data, so nothing is claimed about it.
"""

from resformer.experiments.spec import Less, RunSpec, Suite

SUITE = Suite(
    name="quick",
    title="Transformer against value residual, minutes on a CPU",
    recipe="quick",
    runs=tuple(RunSpec(variant=variant) for variant in ("transformer", "learnable", "learnable_plus", "svformer")),
    baseline="transformer",
    claims=(Less("learnable", "transformer"), Less("learnable_plus", "transformer")),
)
