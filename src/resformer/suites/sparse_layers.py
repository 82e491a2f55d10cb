"""Where a strong residual belongs: one layer, the last k layers, and how strong."""

from resformer.experiments.spec import Less, RunSpec, Suite
from resformer.suites import SETTING_82M, V1, V5, V5_2ND, scales, table


def options(**found: object) -> dict[str, object]:
    return {"model.variant_options": found}


SINGLE = "of single layers 7 of 8 is best (v5; no numbers known)"
LAST = "adding layers from the last on, 6 to 8 are best, and from layer 5 on it gets worse (v5; no numbers known)"

SUITE = Suite(
    name="sparse_layers",
    title="Which layers a sparse residual takes, and how strong",
    question="Which of 8 layers profit from V_1, alone and together, and how strong should it be?",
    scales=scales(),
    runs=(
        RunSpec(variant="transformer"),
        *(RunSpec(variant="sparse", name=f"layer_{n}", overrides=options(layers=[n])) for n in range(2, 9)),
        RunSpec(variant="sparse", name="last_2", overrides=options(layers="last:2")),
        RunSpec(variant="sparse", name="last_3"),
        *(RunSpec(variant="sparse", name=f"last_{k}", overrides=options(layers=f"last:{k}")) for k in (4, 5, 6)),
        RunSpec(variant="constant", name="last_7", overrides=options(first=5.0)),
        *(RunSpec(variant="sparse", name=f"strength_{s:g}", overrides=options(first=s)) for s in (1.0, 2.0, 10.0)),
    ),
    baseline="transformer",
    claims=(
        Less("last_3", "transformer", paper="2.687 against 2.739 at 82M (v5)"),
        Less("layer_7", "layer_2", paper=SINGLE),
        Less("layer_7", "layer_6", paper=SINGLE),
        Less("layer_7", "layer_8", paper=SINGLE),
        Less("last_3", "layer_8", paper=LAST),
        Less("last_3", "last_2", paper=LAST),
        Less("last_3", "last_4", paper=LAST),
        Less("last_3", "last_7", paper="2.687 against 2.709 for all layers, strength not given (v5)"),
        Less("last_3", "strength_1", paper="5 is the strength that the paper took for layers 6 to 8 (v5)"),
        Less("last_3", "strength_10", paper="5 is the strength that the paper took for layers 6 to 8 (v5)"),
    ),
    paper=(
        *table(V1, {"transformer": {"loss": 2.739}}),
        *table(V5, {"last_3": {"loss": 2.687}}),
        *table(f"{V5_2ND}; which strength is not said", {"last_7": {"loss": 2.709}}),
    ),
    paper_setting=SETTING_82M,
    notes=(
        "Strength is 5 where the name says nothing else, as in the paper's best setting (last_3: layers 6 to 8); the "
        "own value keeps weight 1 by analogy with the constant form.",
        "layer_8 is the last layer alone (k = 1); last_7 is all layers that can mix, which is the constant form with "
        "strength 5, and is run as that.",
        "What the paper tried beside strength 5 is not known; 1, 2 and 10 are this suite's choice.",
        "For models of other depths than 8 the paper's layers are not known.",
    ),
)
