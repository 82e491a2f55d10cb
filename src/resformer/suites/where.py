"""Why values: the same residual on queries, keys, attention weights and hidden states, and what it approximates."""

from resformer.experiments.spec import Less, NotLess, RunSpec, Suite
from resformer.suites import IDENTITY_82M, SETTING_82M, V1, V5, scales, table

# All attention weights exist in memory: fewer sequences at a time.
EAGER = {name: {"train.micro_batch_size": 16} for name in ("small", "paper")}

SUITE = Suite(
    name="where",
    title="What the residual from the first layer may go to",
    question="Does a residual from the first layer help on queries, keys, attention weights or hidden states as well?",
    scales=scales(),
    runs=(
        RunSpec(variant="transformer"),
        RunSpec(variant="identity"),
        RunSpec(variant="query_residual"),
        RunSpec(variant="key_residual"),
        RunSpec(variant="attention_residual", scaled=EAGER),
        RunSpec(variant="hidden_residual"),
        RunSpec(variant="identity_mapping"),
        RunSpec(variant="cross_attention"),
    ),
    baseline="transformer",
    claims=(
        Less("identity", "transformer", paper=IDENTITY_82M),
        NotLess("query_residual", "transformer", margin=0.02, paper="2.742 against 2.739 at 82M (v5)"),
        NotLess("key_residual", "transformer", margin=0.02, paper="2.746 against 2.739 at 82M (v5)"),
        Less("transformer", "attention_residual", paper="2.739 against 2.757 at 82M (v5)"),
        Less("transformer", "hidden_residual", paper="2.739 against 2.781 at 82M (v5)"),
        Less("identity", "identity_mapping", paper="eq. 6, values past attention, is bad (v1, training curves)"),
        Less("identity", "cross_attention", paper="eq. 2 is slightly worse at the end (v1, training curves)"),
    ),
    paper=(
        *table(V1, {"transformer": {"loss": 2.739}, "identity": {"loss": 2.712}}),
        *table(
            V5,
            {
                "query_residual": {"loss": 2.742},
                "key_residual": {"loss": 2.746},
                "attention_residual": {"loss": 2.757},
                "hidden_residual": {"loss": 2.781},
            },
        ),
    ),
    paper_setting=SETTING_82M,
    notes=(
        "The paper does not say where exactly the residuals on queries, keys, attention weights and hidden states "
        "enter; here each is 0.5 of the first layer's and 0.5 of the own, before positions, after the softmax, and on "
        "the residual stream.",
        "identity_mapping (v1 eq. 6) and cross_attention (v1 eq. 2) are the controls of v1's motive: values past "
        "attention, and the attention over two layers that ResFormer approximates.",
        "What is worse by less than 0.02 nats in the paper is claimed as no gain of 0.02 or more.",
    ),
)
