"""Why the first layer's value, and not a later one's."""

from resformer.experiments.spec import Less, NotLess, RunSpec, Suite
from resformer.suites import IDENTITY_82M, SETTING_82M, V1, scales, table

SOURCES = {"v2": 2, "v3": 3, "previous": "previous"}
CUT = {"model.first_block_residual": False}


def options(**found: object) -> dict[str, object]:
    return {"model.variant_options": found}


ONLY_FIRST = "the first value alone wins over the adjacent one and over all earlier ones (v1, training curves)"

SUITE = Suite(
    name="source",
    title="Which layer's value is worth a shortcut",
    question="Is V_1 special, and is it so because the hidden residual around block 1 already carries H_1's values?",
    scales=scales(),
    runs=(
        RunSpec(variant="transformer"),
        RunSpec(variant="identity"),
        *(RunSpec(variant="identity", name=name, overrides=options(source=s)) for name, s in SOURCES.items()),
        RunSpec(variant="dense", name="all_previous", overrides=options(mode="mean")),
        RunSpec(variant="transformer", name="cut_transformer", overrides=CUT),
        RunSpec(variant="identity", name="cut_v1", overrides=CUT),
        *(
            RunSpec(variant="identity", name=f"cut_{name}", overrides={**CUT, **options(source=s)})
            for name, s in SOURCES.items()
        ),
    ),
    baseline="transformer",
    claims=(
        Less("identity", "transformer", paper=IDENTITY_82M),
        NotLess("v2", "transformer", margin=0.02, paper="no gain from V_2 (v5; no numbers known)"),
        NotLess("v3", "transformer", margin=0.02, paper="no gain from V_3 (v5; no numbers known)"),
        Less("identity", "previous", paper=ONLY_FIRST),
        Less("identity", "all_previous", paper=ONLY_FIRST),
        Less("cut_v2", "cut_transformer", paper="without the residual H_0 -> H_1 shortcuts of V_2 help (v5)"),
    ),
    paper=table(V1, {"transformer": {"loss": 2.739}, "identity": {"loss": 2.712}}),
    paper_setting=SETTING_82M,
    notes=(
        "All shortcuts are 0.5 V_source + 0.5 V_n in the layers after the source, so later sources serve fewer layers.",
        "all_previous is the fixed form of v1's eq. 5: the mean of the values of all layers up to the own one.",
        "In the runs cut_* block 1 does not add its input to what attention returns, so that H_1 = f_1(H_0): the "
        "paper's control for why V_1 and not V_2. cut_v1, cut_v3 and cut_previous have no word of the paper beside "
        "them.",
    ),
)
