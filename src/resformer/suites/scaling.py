"""How much smaller a model, or how much less data, value residual needs for the Transformer's loss."""

from resformer.experiments.spec import Less, RunSpec, Suite
from resformer.suites import IDENTITY_82M, LINEAR, NOT_IN_PAPER, V1, scales, table


def size(hidden: int, inner: int, heads: int, *, layers: int = 8, micro: int = 0) -> dict[str, object]:
    """The shape of a model; `micro`: sequences in a forward pass, where it is not the recipe's."""
    shape: dict[str, object] = {
        "model.hidden_size": hidden,
        "model.intermediate_size": inner,
        "model.num_attention_heads": heads,
        "model.num_hidden_layers": layers,
    }
    return shape | ({"train.micro_batch_size": micro} if micro else {})


# Sizes beside the recipe's own, the largest last: at mini and small by width at 8 layers, the recipe's width of a head
# and of the feed-forward layer in proportion; at the paper's scale its own (v1 table 4).
SIZES = {
    "mini": {"w64": size(64, 176, 2), "w96": size(96, 264, 3), "w192": size(192, 528, 6)},
    "small": {"w256": size(256, 896, 4), "w384": size(384, 1344, 6), "w768": size(768, 2688, 12)},
    "paper": {"180m": size(768, 2688, 12, layers=12), "468m": size(1024, 3584, 16, layers=24, micro=16)},
}
# Shorter schedules of the largest size: (steps, steps of warm-up), in proportion to the recipe's.
SHORTER = {
    "mini": ((125, 30), (175, 42)),
    "small": ((1000, 50), (2000, 100)),
    "paper": ((2500, 30), (5000, 60)),
}
VARIANTS: dict[str, dict[str, object]] = {"transformer": {}, "identity": {}, "learnable_plus": dict(LINEAR)}
DOMAINS = ("commoncrawl", "c4", "github", "stackexchange", "wikipedia", "book", "arxiv")
LOSSES = {
    ("identity", "180m"): "2.469 against 2.502 (v1 table 5)",
    ("identity", "468m"): "2.254 against 2.281 (v1 table 5)",
}


def other_sizes(variant: str) -> tuple[RunSpec, ...]:
    found = []
    for scale, sizes in SIZES.items():
        for name, shape in sizes.items():
            found.append(
                RunSpec(
                    variant=variant,
                    name=f"{variant}_{name}",
                    overrides={**VARIANTS.get(variant, {}), **shape},
                    scales=(scale,),
                )
            )
    return tuple(found)


def shorter(variant: str) -> tuple[RunSpec, ...]:
    found = []
    for scale, schedules in SHORTER.items():
        name, shape = list(SIZES[scale].items())[-1]
        for steps, warmup in schedules:
            schedule = {"train.steps": steps, "optim.warmup_steps": warmup}
            found.append(
                RunSpec(
                    variant=variant,
                    name=f"{variant}_{name}_{steps}",
                    overrides={**VARIANTS[variant], **shape, **schedule},
                    scales=(scale,),
                )
            )
    return tuple(found)


def losses(*domains: float, mean: float) -> dict[str, float]:
    by_domain = {f"validation/{name}/loss": loss for name, loss in zip(DOMAINS, domains, strict=True)}
    return {"loss": mean, **by_domain}


SUITE = Suite(
    name="scaling",
    title="Loss over parameters and over training tokens",
    question="How many parameters, and how many tokens, does value residual save at the Transformer's loss?",
    scales=scales(),
    runs=(
        *(RunSpec(variant=variant, overrides=given) for variant, given in VARIANTS.items()),
        *(run for variant in VARIANTS for run in other_sizes(variant)),
        *(run for variant in VARIANTS for run in shorter(variant)),
        RunSpec(variant="svformer", scales=("paper",)),
        *(run for run in other_sizes("svformer") if run.scales == ("paper",)),
    ),
    baseline="transformer",
    claims=(
        Less("identity", "transformer", paper=IDENTITY_82M),
        Less("learnable_plus", "transformer", paper="2.681 against 2.739 at 82M (v5)"),
        *(
            Less(f"{variant}_{name}", f"transformer_{name}", paper=LOSSES.get((variant, name), "size not in the paper"))
            for sizes in SIZES.values()
            for name in sizes
            for variant in ("identity", "learnable_plus")
            if (variant, name) not in {("learnable_plus", "180m"), ("learnable_plus", "468m")}
        ),
        Less("learnable_plus_180m", "transformer_180m", paper="no loss known"),
        Less(
            "learnable_plus_468m", "transformer_468m", paper="no loss known; Wikipedia's perplexity 23.2 against 24.8"
        ),
        *(
            Less(
                f"{variant}_{list(SIZES[scale])[-1]}_{steps}",
                f"transformer_{list(SIZES[scale])[-1]}_{steps}",
                paper=NOT_IN_PAPER,
            )
            for scale, schedules in SHORTER.items()
            for steps, _ in schedules
            for variant in ("identity", "learnable_plus")
        ),
    ),
    paper=table(
        V1,
        {
            "transformer": losses(3.3595, 3.5388, 1.4247, 2.3872, 2.9047, 3.3797, 2.1779, mean=2.7389),
            "transformer_180m": losses(3.0961, 3.2834, 1.2451, 2.1651, 2.5897, 3.1309, 2.0001, mean=2.5015),
            "transformer_468m": losses(2.8514, 3.0430, 1.0908, 1.9628, 2.2821, 2.8979, 1.8362, mean=2.2806),
            "identity": losses(3.3362, 3.5191, 1.3941, 2.3592, 2.8646, 3.3572, 2.1518, mean=2.7117),
            "identity_180m": losses(3.0631, 3.2504, 1.2200, 2.1350, 2.5435, 3.0994, 1.9732, mean=2.4692),
            "identity_468m": losses(2.8214, 3.0115, 1.0730, 1.9388, 2.2477, 2.8696, 1.8142, mean=2.2537),
        },
    ),
    paper_setting="20B tokens of SlimPajama; 82M, 180M and 468M parameters; loss is the mean of seven domains",
    notes=(
        "What is saved, of parameters over all sizes and of tokens over the schedules of the largest size, is read off "
        "straight lines between the method's points in ln(loss) over ln(size); the curves are fits of power laws.",
        "The paper says 10.4 % fewer parameters and 13.6 % fewer tokens in v2, 13.3 % and 15.4 % in v4, 16.11 % and "
        "20.3 % in v5, with a fit that it does not give, and v5 without naming the variant. From its table 5 straight "
        "lines give 8.0 % (extrapolated), 10.3 % and 11.7 % for identity at the three sizes.",
        "Here every number of tokens is a schedule of its own that ends with a low learning rate. The paper reads one "
        "run of 468M every 2 billion tokens (v1 figure 6); that is the validation curve of the longest run here.",
        "The learning rate is the same at all sizes, as in the paper.",
        "The paper's 320M (v1 figure 6) and 1.6B models are left out: their shapes are not known.",
    ),
)
