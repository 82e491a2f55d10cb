"""What a run is, as data: frozen sections of typed keys.

A key's path is `section.name` (`optim.lr`). The same names stand in TOML files, in `--set section.key=value` and in
these classes; how files and flags become a `Config` is in `configure.py`, what must hold between keys in `checks.py`.
Types are strict: 1 is fine for a number, 1.5 is no whole number, "0.1" is no number. No torch is imported here.

Units: lengths are tokens, batches are sequences, learning rates are per optimizer step, shares are 0..1.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)

# Upper bounds are far over what anybody trains: they refuse a slip of the finger before it eats the machine's memory.
Count = Annotated[int, Field(ge=1, le=10**15)]
Whole = Annotated[int, Field(ge=0, le=10**15)]
Layers = Annotated[int, Field(ge=1, le=1024)]
Small = Annotated[int, Field(ge=1, le=2**16)]
Width = Annotated[int, Field(ge=1, le=2**20)]
Length = Annotated[int, Field(ge=1, le=2**31 - 1)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Text = Annotated[str, Field(min_length=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class ModelConfig:
    """The model: Llama's names for sizes, plus the variant."""

    variant: str = "learnable"
    """Name of a registered variant."""
    variant_options: dict[str, Any] = Field(default_factory=dict)
    """The variant's options; what is missing takes the variant's default."""
    vocab_size: Length | None = None
    """Rows of embedding and head; none = the vocabulary of the data, more = padded."""
    hidden_size: Width = 512
    """Width of the residual stream, channels."""
    intermediate_size: Annotated[int, Field(ge=1, le=2**24)] = 1792
    """Width of the feed-forward layers, channels."""
    num_hidden_layers: Layers = 8
    """Blocks."""
    num_attention_heads: Small = 8
    """Query heads."""
    num_key_value_heads: Small | None = None
    """Key/value heads; none = as many as query heads."""
    head_dim: Small | None = None
    """Channels per head; none = hidden_size / num_attention_heads."""
    max_position_embeddings: Length | None = None
    """Longest sequence, tokens; none = data.sequence_length."""
    rms_norm_eps: Positive = 1e-5
    """Added to the mean square in RMSNorm."""
    rope_theta: Positive = 10000.0
    """Base of the rotary frequencies."""
    first_block_residual: bool = True
    """Block 1 adds its input to what attention returns; false is the control for "why V_1 and not V_2"."""
    qk_norm: bool = False
    """RMSNorm over the head dimension of queries and keys, before positions, as in Qwen3."""
    position_embedding: Literal["rope", "learned"] = "rope"
    """Rotary positions, or a trained vector for each of max_position_embeddings positions."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """Norm of hidden states; LayerNorm has a bias."""
    layer_norm_eps: Positive = 1e-5
    """Added to the variance in LayerNorm."""
    mlp: Literal["gated", "plain"] = "gated"
    """down(act(gate(x)) * up(x)), or down(act(up(x))) as in GPT-2."""
    hidden_act: str = "silu"
    """Activation of the feed-forward layers, by its name in transformers."""
    sliding_window: Annotated[int, Field(ge=2, lt=2**31)] | None = None
    """Tokens that a query of a sliding layer sees, itself included; none = no windows."""
    sliding_layers: Literal["all", "none"] | list[int] = "all"
    """Which layers slide, where sliding_window is set: all, none or a list of numbers from 1."""
    num_experts: Annotated[int, Field(ge=0, le=2**16)] = 0
    """Feed-forward layers to choose from in every block; 0 = one that all tokens take."""
    num_experts_per_tok: Small = 2
    """Experts that each token takes."""
    router_aux_loss_coef: NotNegative = 0.01
    """Weight of the load-balancing loss of experts; its gradient is added, the loss in metrics.jsonl is without it."""
    attention_bias: bool = False
    """Biases in the attention projections."""
    mlp_bias: bool = False
    """Biases in the feed-forward layers."""
    tie_word_embeddings: bool = False
    """One matrix for embedding and head."""
    initializer_range: Positive = 0.02
    """Standard deviation of the initial weights."""
    attention: Literal["auto", "sdpa", "eager"] = "auto"
    """Attention implementation; auto = sdpa, unless the variant needs attention weights (eager)."""
    from_init: bool = False
    """The model is the one of train.init_from, whole: sizes, variant, options, and what has no key here. The other keys
    of this section, but for attention, are then filled in from there."""
    config_json: Text | None = None
    """Filled in by from_init: the config.json of that model, so that the run needs it no more."""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class DataConfig:
    """What is read."""

    dir: Text | None = None
    """Directory that `resformer data prepare` wrote."""
    sequence_length: Length = 2048
    """Tokens per sequence."""
    weights: dict[str, NotNegative] | None = None
    """Mixture weights by domain, any scale; none = the corpus's own."""
    packing: Literal["chunks", "best_fit"] = "chunks"
    """What a sequence is: a chunk of the text, or whole documents packed together and filled up (best fit)."""
    document_mask: bool = False
    """Keep the documents of a sequence apart: positions restart, nothing attends or predicts across a boundary."""
    max_epochs: Positive | None = None
    """Refuse a run that would go through a domain more often; none = repeat domains as often as the mixture asks."""
    verify: Literal["full", "sample", "none"] = "sample"
    """How many bytes of the shards are checked against their checksums at the start."""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class TrainConfig:
    """The run: length, batch, numerics, what is written when."""

    steps: Count = 10_000
    """Optimizer steps."""
    batch_size: Length = 1024
    """Sequences per optimizer step (the global batch)."""
    micro_batch_size: Length | None = None
    """Sequences per forward pass, a divisor of batch_size; none = batch_size."""
    seed: Seed = 0
    """Seed of the initial weights and of the order of the data."""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$")] = "auto"
    """auto (cuda, else mps, else cpu), cpu, mps, cuda or cuda:N."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the forward pass; weights and optimizer are fp32 in either case."""
    compile: bool = False
    """Compile every block with torch.compile."""
    checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    validate_every: Count = 500
    """Optimizer steps between validations; the last step is always validated."""
    validation_tokens: Count | None = None
    """Tokens scored per domain in each validation, the same ones every time; none = all there are."""
    checkpoint_every: Count = 500
    """Optimizer steps between checkpoints; the last step always leaves one."""
    keep_last: Count = 2
    """Checkpoints kept."""
    keep_every: Count | None = None
    """Checkpoints of steps that this number divides are kept for good as well; none = no others."""
    async_save: bool = False
    """Write checkpoints while training goes on; costs the memory of one copy of weights and optimizer on the CPU."""
    skip_limit: Whole = 0
    """Steps of the run that may be left out because loss or gradient is not finite, or a spike. One more that is not
    finite ends the run, one more spike is kept."""
    spike_factor: Annotated[float, Field(gt=1)] | None = None
    """A gradient norm over this multiple of its running mean is a spike: reported, and left out if skip_limit allows;
    none = none is."""
    init_from: Text | None = None
    """Run directory, exported model or hub name whose weights the run starts with; none = random ones."""
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """CPU threads of one process; none = PyTorch's choice."""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class OptimConfig:
    """AdamW, linear warm-up, then a schedule down."""

    lr: Positive = 6e-4
    """Peak learning rate."""
    start_lr: NotNegative = 0.0
    """Learning rate from which the warm-up rises (its value at step 0)."""
    warmup_steps: Whole = 120
    """Steps of linear warm-up; more than train.steps is shortened to a tenth of them."""
    min_lr_ratio: Share = 0.1
    """Learning rate at the last step as a share of lr."""
    schedule: Literal["cosine", "linear", "wsd"] = "cosine"
    """How the learning rate falls after the warm-up; wsd = it stays, and falls in a straight line at the end."""
    decay_share: Share = 0.2
    """Share of all steps in which the rate of schedule wsd falls."""
    weight_decay: NotNegative = 0.1
    """Decoupled weight decay of matrices; norms, biases and lambdas have none."""
    beta1: BelowOne = 0.9
    """Decay of the mean of gradients."""
    beta2: BelowOne = 0.95
    """Decay of the mean of squared gradients."""
    eps: Positive = 1e-8
    """Added to the root of the mean of squared gradients."""
    grad_clip: NotNegative = 1.0
    """Largest norm of the global gradient; 0 = no clipping."""
    matrices: Literal["adamw", "muon"] = "adamw"
    """Optimizer of the two-dimensional weights inside the blocks; everything else has AdamW. Muon takes the same
    learning rate: its updates are scaled to AdamW's size."""
    muon_momentum: BelowOne = 0.95
    """Momentum of Muon (Nesterov)."""
    muon_lr_scale: NotNegative = 1.0
    """Learning rate of Muon as a multiple of lr."""
    lambda_lr_scale: NotNegative = 1.0
    """Learning rate of lambdas, gates and logits as a multiple of lr; 0 freezes them."""
    lr_scale: dict[str, NotNegative] = Field(default_factory=dict)
    """Multiples of the learning rate by parameter name, with * for anything: {"model.layers.0.*" = 2.0}; 0 freezes."""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class ParallelConfig:
    """Processes, as torchrun starts them: shard x replicate of them."""

    shard: Small | None = None
    """Processes that share one copy of weights, gradients and optimizer (FSDP); none = all that replicate leaves."""
    replicate: Small = 1
    """Copies of the weights: with shard = 1 every process has its own (DDP), with both above 1 it is HSDP."""
    timeout_seconds: Annotated[float, Field(gt=0, le=10_000_000)] = 600.0
    """How long a process waits for the others before it gives up."""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class UptrainConfig:
    """Training a converted model on: what it has to come back to, and how it gets there."""

    source: Text | None = None
    """The model that it was made from: a directory, run or hub name, any causal LM with the same vocabulary. It and the
    model as it starts are scored before the first step, so that the run can say what came back."""
    kl: Share = 0.0
    """Distillation: share of KL(source || model) per token in the objective, the rest is cross-entropy; 0 = none."""
    temperature: Positive = 1.0
    """Both distributions of the KL are softened by it, and the KL is multiplied by its square."""
    morph_steps: Whole = 0
    """Steps over which the mixing layers of `learnable` go from their own values to those of layer 1, in a straight
    line; the result can become an `svformer`. 0 = they are trained, or frozen, as the rest says."""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class TrackConfig:
    """What is shown while it runs."""

    log_every_seconds: Positive = 10.0
    """Seconds between progress lines when the output is no terminal."""
    peak_flops: Positive | None = None
    """FLOP/s that one device can do, for the MFU; none = as known for some GPUs, and no MFU on others."""
    gradient_norms: list[Text] = Field(default_factory=list)
    """Parameters whose gradient's norm is in each row of metrics.jsonl: whole names, or patterns with * and ?."""
    tensorboard: bool = False
    """Also write TensorBoard event files, into the run directory."""
    wandb: Text | None = None
    """Project of Weights & Biases to log to as well; none = do not."""
    trackio: Text | None = None
    """Project of trackio to log to as well; none = do not."""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Config:
    """One run."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    optim: OptimConfig = Field(default_factory=OptimConfig)
    uptrain: UptrainConfig = Field(default_factory=UptrainConfig)
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    track: TrackConfig = Field(default_factory=TrackConfig)

    @property
    def micro_batch_size(self) -> int:
        """Sequences per forward pass."""
        return self.train.micro_batch_size or self.train.batch_size

    @property
    def max_position_embeddings(self) -> int:
        """Longest sequence of the model, tokens."""
        return self.model.max_position_embeddings or self.data.sequence_length


@dataclasses.dataclass(frozen=True, kw_only=True)
class Key:
    """One configuration key: where it stands, what it takes, what it means."""

    section: str
    name: str
    hint: Any
    doc: str

    @property
    def path(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def optional(self) -> bool:
        """Whether "none" is a value."""
        return type(None) in typing.get_args(self.hint)

    @property
    def kinds(self) -> tuple[Any, ...]:
        """The plain types that the key takes: int, float, bool, str, dict."""
        union = typing.get_origin(self.hint) in (typing.Union, types.UnionType)
        parts = typing.get_args(self.hint) if union else (self.hint,)
        origins = (typing.get_origin(part) or part for part in parts if part is not type(None))
        return tuple(str if origin is Literal else origin for origin in origins)


SECTIONS: Mapping[str, type] = {
    "model": ModelConfig,
    "data": DataConfig,
    "train": TrainConfig,
    "optim": OptimConfig,
    "uptrain": UptrainConfig,
    "parallel": ParallelConfig,
    "track": TrackConfig,
}


@functools.cache
def keys() -> dict[str, Key]:
    """Every configuration key by its path, in the order of the classes above."""
    found = {}
    for section, cls in SECTIONS.items():
        hints = typing.get_type_hints(cls)
        for item in dataclasses.fields(cls):
            doc = cls.__pydantic_fields__[item.name].description or ""  # type: ignore[attr-defined]
            key = Key(section=section, name=item.name, hint=hints[item.name], doc=doc)
            found[key.path] = key
    return found
