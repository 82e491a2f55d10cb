"""How strong a constant residual should be."""

from resformer.experiments.spec import Less, NotLess, RunSpec, Suite
from resformer.suites import SETTING_82M, V1, V5, scales, table

BEST = "2 is the best of 0.2, 0.5, 0.8, 1, 2, 5 at 82M (v1 figure 8)"

SUITE = Suite(
    name="constant_lambda",
    title="The strength of a constant residual",
    question="Which weight on V_1, the same in all layers beside the whole own value, gives the lowest loss?",
    scales=scales(),
    runs=(
        RunSpec(variant="transformer"),
        *(
            RunSpec(variant="constant", name=f"lambda_{first:g}", overrides={"model.variant_options": {"first": first}})
            for first in (0.2, 0.5, 0.8, 1.0, 2.0, 5.0)
        ),
    ),
    baseline="transformer",
    claims=(
        Less("lambda_2", "transformer", paper="2.700 against 2.739 at 82M (v5)"),
        Less("lambda_2", "lambda_0.2", paper=BEST),
        NotLess("lambda_0.5", "lambda_2", margin=0.02, paper=BEST),
        NotLess("lambda_0.8", "lambda_2", margin=0.02, paper=BEST),
        NotLess("lambda_1", "lambda_2", margin=0.02, paper=BEST),
        NotLess("lambda_5", "lambda_2", margin=0.02, paper=BEST),
    ),
    paper=(*table(V1, {"transformer": {"loss": 2.739}}), *table(V5, {"lambda_2": {"loss": 2.700}})),
    paper_setting=SETTING_82M,
    notes=(
        "The paper shows the six strengths as training curves (v1 figure 8) and gives a number for 2 alone.",
        "Of 2's neighbours it is claimed that they are not better by more than 0.02 nats: a sweep's optimum is flat.",
    ),
)
