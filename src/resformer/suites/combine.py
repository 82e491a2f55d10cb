"""Value residual together with other things: a second correction, gates, tables, windows, experts, GPT-2's block."""

from resformer.experiments.spec import Less, RunSpec, Suite
from resformer.suites import IDENTITY_82M, NOT_IN_PAPER, SETTING_82M, V1, scales, table


def scaled(mini: dict[str, object], larger: dict[str, object]) -> dict[str, dict[str, object]]:
    return {"mini": mini, "small": larger, "paper": larger}


# A quarter of the sequence.
WINDOW = scaled({"model.sliding_window": 64}, {"model.sliding_window": 512})
# Two of four experts of half the width: as many active parameters as one feed-forward layer.
EXPERTS: dict[str, object] = {"model.num_experts": 4, "model.num_experts_per_tok": 2}
EXPERT_WIDTH = scaled({"model.intermediate_size": 176}, {"model.intermediate_size": 896})
# With the head not tied to the embeddings: so 82M's shape gives the 78M that the paper says its GPT-2 has.
GPT2: dict[str, object] = {
    "model.position_embedding": "learned",
    "model.norm": "layernorm",
    "model.mlp": "plain",
    "model.hidden_act": "gelu_new",
    "model.attention_bias": True,
    "model.mlp_bias": True,
}
GPT2_WIDTH = scaled({"model.intermediate_size": 512}, {"model.intermediate_size": 2048})

SUITE = Suite(
    name="combine",
    title="Value residual combined with other parts of a model",
    question="Does value residual still help beside other corrections, in windows, with experts, in GPT-2's block?",
    scales=scales(),
    runs=(
        RunSpec(variant="transformer"),
        RunSpec(variant="identity"),
        RunSpec(variant="neutreno"),
        RunSpec(variant="neutreno_resformer"),
        RunSpec(variant="gated", overrides={"model.variant_options": {"activation": "tanh"}}),
        RunSpec(variant="value_embeddings"),
        RunSpec(variant="transformer", name="transformer_window", scaled=WINDOW),
        RunSpec(variant="identity", name="identity_window", scaled=WINDOW),
        RunSpec(variant="transformer", name="transformer_experts", overrides=EXPERTS, scaled=EXPERT_WIDTH),
        RunSpec(variant="identity", name="identity_experts", overrides=EXPERTS, scaled=EXPERT_WIDTH),
        RunSpec(variant="transformer", name="transformer_gpt2", overrides=GPT2, scaled=GPT2_WIDTH),
        RunSpec(variant="identity", name="identity_gpt2", overrides=GPT2, scaled=GPT2_WIDTH),
        RunSpec(variant="svformer", name="svformer_gpt2", overrides=GPT2, scaled=GPT2_WIDTH, scales=("small", "paper")),
    ),
    baseline="transformer",
    claims=(
        Less("identity", "transformer", paper=IDENTITY_82M),
        Less("neutreno_resformer", "identity", paper="a further gain (v1 figure 7)"),
        Less("neutreno_resformer", "neutreno", paper="lower than either alone (v1 figure 7)"),
        Less("gated", "transformer", paper=NOT_IN_PAPER),
        Less("value_embeddings", "transformer", paper=NOT_IN_PAPER),
        Less("identity_window", "transformer_window", paper=NOT_IN_PAPER),
        Less("identity_experts", "transformer_experts", paper=NOT_IN_PAPER),
        Less(
            "identity_gpt2", "transformer_gpt2", paper=f"{NOT_IN_PAPER}; it has SVFormer in a GPT-2 of 78M (figure 15)"
        ),
    ),
    paper=table(V1, {"transformer": {"loss": 2.739}, "identity": {"loss": 2.712}}),
    paper_setting=SETTING_82M,
    notes=(
        "Each pair is to be compared within itself: windows, experts and GPT-2's block change the Transformer as well.",
        "value_embeddings adds tables of one row a token, so that parameters grow by half at mini and more than double "
        "at 82M; its arithmetic hardly grows.",
        "gated is SATFormer's idea with a tanh that starts as the Transformer; SATFormer itself measured relu.",
        "neutreno_resformer has the official code's values (0.5 and 0.5, correction 0.2); the paper gives no number.",
        "svformer_gpt2 stands for v1 figure 15, which compares SVFormer in a Llama and in a GPT-2.",
    ),
)
