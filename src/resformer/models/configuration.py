"""The model's config: Llama's fields for sizes, plus the variant and its options."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers.models.llama.configuration_llama import LlamaConfig

from ..core.plan import Plan, with_windows
from ..core.policy import Shape
from ..core.registry import Variant, build, get
from ..errors import UserError, did_you_mean
from .forms import CHOICES, check_positions, form_problems, host_problems, windowed_layers

MISSPELT = 0.85  # likeness from which a name is taken for a slip of a field's
REMOTE_CODE_FILE = "modeling_resformer"
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
FLAGS = ("first_block_residual", "qk_norm", "attention_bias", "mlp_bias", "tie_word_embeddings")
AMOUNTS = ("attention_dropout", "rms_norm_eps", "layer_norm_eps", "router_aux_loss_coef", "initializer_range")
# Plans by what they follow from: `generate` asks for one in every step, to make masks ahead of a static cache.
_plans: dict[tuple[Any, ...], Plan] = {}


@strict
class ResFormerConfig(LlamaConfig):
    """Config of the host model.

    Sizes carry Llama's names (`hidden_size`, `num_hidden_layers`, `num_key_value_heads`, ...); the default values are
    those of the paper's 82M model. With the defaults of what follows `variant_formula` the host is Llama's block;
    `forms.GPT2_FORM` has the fields of GPT-2's.

    Args:
        variant: name of a registered variant, see `resformer.core.registry.names()`.
        variant_options: its options; what is missing takes the variant's default.
        variant_formula: written into config.json for readers: the equation with this model's layers and initial values.
            Ignored on load.
        first_block_residual: block 1 adds its input to what attention returns; without it H_1 = f_1(H_0), the paper's
            control for "why V_1 and not V_2" (see `DecoderLayer`).
        attention_out_bias: o_proj has a bias; None for as `attention_bias` says. Qwen2 has biases on q, k, v alone.
        qk_norm: RMSNorm of queries and keys, before positions.
        qk_norm_over: what that norm runs over: "head", each head by itself (Qwen3), or "all" heads at once (OLMo2).
        nope_layers: numbers of layers from 1 whose queries and keys are not turned by positions (SmolLM3).
        norm_placement: "pre", x + f(norm(x)), or "post", x + norm(f(x)) (OLMo2); f is attention, then the MLP.
        position_embedding: "rope", or "learned": a trained vector for each of `max_position_embeddings` positions.
        norm: "rmsnorm" (with `rms_norm_eps`) or "layernorm" (with a bias and `layer_norm_eps`).
        layer_norm_eps: added to the variance in LayerNorm.
        mlp: "gated", down(act(gate(x)) * up(x)), or "plain", down(act(up(x))); `hidden_act` is the activation.
        sliding_window: tokens that a query of a sliding layer sees, itself included; None for no windows.
        sliding_layers: "all", "none", or a list of layer numbers from 1; without `sliding_window` none slides.
            `layer_types` follows from these and from the plan: what each layer's cache slot keeps.
        num_experts: feed-forward layers to choose from in every block, 0 for one that all tokens take.
        num_experts_per_tok: how many of them each token takes.
        router_aux_loss_coef: weight of the load-balancing loss in the training loss.
        converted_from: of a converted model: the config of the model that it was made of, for the way back.

    Raises:
        UserError: unknown variant or option, sizes that do not divide, forms that do not go together.
    """

    model_type = "resformer"

    vocab_size: int = 50277
    hidden_size: int = 512
    intermediate_size: int = 1792
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    rms_norm_eps: float = 1e-5
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 0
    variant: str = "learnable"
    variant_options: dict[str, Any] | None = None
    variant_formula: str | None = None
    first_block_residual: bool = True
    attention_out_bias: bool | None = None
    qk_norm: bool = False
    qk_norm_over: str = "head"
    nope_layers: list[int] | tuple[int, ...] | None = None
    norm_placement: str = "pre"
    position_embedding: str = "rope"
    norm: str = "rmsnorm"
    layer_norm_eps: float = 1e-5
    mlp: str = "gated"
    sliding_window: int | None = None
    sliding_layers: str | list[int] | tuple[int, ...] = "all"
    num_experts: int = 0
    num_experts_per_tok: int = 2
    router_aux_loss_coef: float = 0.01
    converted_from: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self._check_names(kwargs)
        self.variant_options = {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in (self.variant_options or {}).items()
        }
        if isinstance(self.sliding_layers, tuple):
            self.sliding_layers = list(self.sliding_layers)
        if isinstance(self.nope_layers, tuple):
            self.nope_layers = list(self.nope_layers)
        self._check_sizes()
        given_types = kwargs.pop("layer_types", None)
        super().__post_init__(**kwargs)
        self._derive_layer_types(given_types)
        if self.nope_layers:
            self.plan()  # which refuses keys that are shared between layers with and without positions
        self.variant_formula = self.build_variant().formula(self.shape())
        # `trust_remote_code` users without the package are told to install it; see
        # `ResFormerPreTrainedModel.save_pretrained`.
        self.auto_map = {
            auto: f"{REMOTE_CODE_FILE}.{name}"
            for auto, name in (
                ("AutoConfig", "ResFormerConfig"),
                ("AutoModel", "ResFormerModel"),
                ("AutoModelForCausalLM", "ResFormerForCausalLM"),
            )
        }

    def _check_names(self, extra: dict[str, Any]) -> None:
        """Refuse a misspelt field. transformers keeps whatever it does not know, and configs of others carry much of
        that; so only names that are nearly those of a field are refused.
        """
        valid = [field.name for field in fields(self)]
        guesses = {name: did_you_mean(name, valid, likeness=MISSPELT) for name in extra}
        problems = [f"unknown field {name!r}{guess}" for name, guess in guesses.items() if guess]
        if self.variant_options is not None and not isinstance(self.variant_options, dict):
            problems.append(f"variant_options is {self.variant_options!r}; expected a dictionary, option -> value")
        if problems:
            raise UserError("; ".join(problems))

    def _check_sizes(self) -> None:
        problems = [
            f"{name} is {value!r}; expected a whole number of at least 1"
            for name in SIZES
            if type(value := getattr(self, name)) is not int or value < 1
        ]
        problems += [
            f"{name} is {value!r}; expected true or false"
            for name in FLAGS
            if type(value := getattr(self, name)) is not bool
        ]
        problems += [
            f"{name} is {value!r}; expected a number of at least 0"
            for name in AMOUNTS
            if isinstance(value := getattr(self, name), bool) or not isinstance(value, int | float) or not value >= 0
        ]
        for name, valid in CHOICES.items():
            got = getattr(self, name)
            if got not in valid:
                problems.append(f"{name} is {got!r}{did_you_mean(got, valid)} (expected {' or '.join(valid)})")
        problems = problems or [*self._head_problems(), *form_problems(self), *host_problems(self)]
        if problems:
            raise UserError("; ".join(problems))

    def _head_problems(self) -> list[str]:
        problems = []
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if self.head_dim is None and self.hidden_size % heads:
            problems.append(
                f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads {heads}; "
                "change one, or set head_dim"
            )
        head_dim = self.head_dim if self.head_dim is not None else self.hidden_size // heads
        if self.position_embedding == "rope" and (head_dim < 2 or head_dim % 2):
            problems.append(f"head_dim is {head_dim}; rotary positions need an even number of at least 2")
        if head_dim < 1:
            problems.append(f"head_dim is {head_dim}; expected at least 1")
        if kv_heads is not None and (kv_heads < 1 or heads % kv_heads):
            problems.append(
                f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}; change one"
            )
        return problems

    def _derive_layer_types(self, given: list[str] | None) -> None:
        """Say what each layer's cache slot keeps, in transformers' words: a slot that a layer without a window reads is
        a full one although its own layer slides.
        """
        if self.sliding_window is not None:  # without layer_types transformers would let every slot slide
            self.layer_types = ["sliding_attention" if row.slot_window else "full_attention" for row in self.plan()]
        elif given is not None and "sliding_attention" in given:
            raise UserError(
                "layer_types names sliding layers, but it follows from other fields; set sliding_window (tokens) and "
                "sliding_layers ('all' or a list of layer numbers from 1)"
            )

    def validate_architecture(self) -> None:
        """Do nothing: `__post_init__` checks sizes, with messages of ours; head_dim need not be hidden_size / heads."""

    @classmethod
    def register_for_auto_class(cls, auto_class: str | type = "AutoConfig") -> None:
        """Do nothing: exports carry a file that imports the installed package, never a copy of this one."""

    def rope(self) -> dict[str, Any]:
        """`rope_parameters` as a dictionary; transformers fills it in when the config is made."""
        assert self.rope_parameters is not None
        return dict(self.rope_parameters)

    def shape(self) -> Shape:
        """The sizes that a variant's formula may need."""
        return Shape(
            layers=self.num_hidden_layers,
            hidden_size=self.hidden_size,
            heads=self.num_attention_heads,
            kv_heads=self.num_key_value_heads or self.num_attention_heads,
            head_dim=self.head_dim or self.hidden_size // self.num_attention_heads,
            vocab_size=self.vocab_size,
        )

    def windowed_layers(self) -> tuple[int, ...]:
        """Numbers of the layers with sliding-window attention."""
        return windowed_layers(self.sliding_window, self.sliding_layers, self.num_hidden_layers)

    def build_variant(self) -> Variant:
        """The variant with its options, checked against the sizes.

        Raises:
            UserError: unknown variant or option, or options that make no sense for these sizes.
        """
        return build(self.variant, self.variant_options, self.shape())

    def plan(self) -> Plan:
        """The variant's plan for this model, with the windows of its layers and cache slots.

        Raises:
            UserError: as `build_variant`, or windows that the variant cannot have.
        """
        of = (
            get(self.variant),
            repr(self.variant_options),
            self.shape(),
            self.sliding_window,
            repr(self.sliding_layers),
            repr(self.nope_layers),
        )
        if of not in _plans:
            plan = self.build_variant().plan(self.shape())
            try:
                check_positions(plan, self.nope_layers or ())
                _plans[of] = with_windows(plan, self.sliding_window, self.windowed_layers())
            except ValueError as error:
                raise UserError(
                    f"variant {self.variant!r} with sliding_layers {self.sliding_layers!r} and nope_layers "
                    f"{self.nope_layers!r}: {error}"
                ) from None
        return _plans[of]
