"""The open point of Learnable-ResFormer-Plus: how its logits start."""

from resformer.experiments.spec import Less, RunSpec, Suite
from resformer.suites import LINEAR, NOT_IN_PAPER, SETTING_82M, V1, ZEROS, scales, table

SUITE = Suite(
    name="logit_init",
    title="Learnable-Plus with initial logits linear in depth, or zero",
    question="Which start of Learnable-Plus's logits, which the paper does not give, ends at the lower loss?",
    scales=scales(seeds=(0, 1, 2)),
    runs=(
        RunSpec(variant="transformer"),
        RunSpec(variant="learnable_plus", name="linear", overrides=LINEAR),
        RunSpec(variant="learnable_plus", name="zeros", overrides=ZEROS),
    ),
    baseline="transformer",
    claims=(
        Less("zeros", "linear", paper=f"{NOT_IN_PAPER}; a trial of ours beforehand had 3.459 against 3.488 (one seed)"),
    ),
    paper=table(V1, {"transformer": {"loss": 2.739}}),
    paper_setting=SETTING_82M,
    notes=(
        "The claim's direction is not the paper's. It is what a trial of one seed on other text showed "
        "beforehand (800 steps of 16 x 256 on a model of this size).",
        "Known of the paper's form: strength of layer n is scale x softmax(logits)_n, scale from the number of layers, "
        "own weights from 0.5. Linear logits start near the hand-found sparse optimum (5.06 on the last of 8 layers), "
        "zeros with 8/7 on each. At 24 layers linear ones put 15.2 on the last.",
        "The softmax covers the mixing layers 2 to N; whether the paper's covers layer 1 is not known.",
    ),
)
