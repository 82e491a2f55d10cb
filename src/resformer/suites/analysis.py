"""The models whose insides the paper shows."""

from resformer.experiments.spec import RunSpec, Suite
from resformer.suites import LINEAR, scales

SUITE = Suite(
    name="analysis",
    title="Attention, values and hidden states of trained models",
    question="Does value residual spread attention, keep values from draining, and keep tokens apart?",
    scales=scales(paper="paper_468m"),
    runs=(
        RunSpec(variant="transformer"),
        RunSpec(variant="identity"),
        RunSpec(variant="learnable"),
        RunSpec(variant="learnable_plus", overrides=LINEAR),
        RunSpec(variant="neutreno"),
        RunSpec(variant="svformer"),
        RunSpec(variant="cross_attention"),
    ),
    baseline="transformer",
    notes=(
        "Nothing is claimed about losses here; what is to be seen is in the measurements of the trained models: "
        "entropy of token importance (v1 eq. 11), importance, values and hidden states of the first token (v1 figures "
        "2 and 19 to 21), similarity of tokens (v1 eq. 13), spectra of values (v1 eq. 12, figure 12), learned lambdas "
        "(v5).",
        "In v1 low entropy is concentrated attention, as its figures and code have it; a sentence below eq. 11 says "
        "the opposite, and an author says that the middle of figure 1 contains errors.",
        "A sink needs training: how far it has come at mini is part of the result.",
    ),
)
