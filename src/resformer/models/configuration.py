"""The model's config: Llama's fields for sizes, plus the variant and its options."""

from __future__ import annotations

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers.models.llama.configuration_llama import LlamaConfig

from ..core.policy import Shape
from ..core.registry import Variant, build
from ..errors import UserError

REMOTE_CODE_FILE = "modeling_resformer"
ATTENTION_TYPE = "full_attention"


@strict
class ResFormerConfig(LlamaConfig):
    """Config of the host model.

    Sizes carry Llama's names (`hidden_size`, `num_hidden_layers`, `num_key_value_heads`, ...); the default values are
    those of the paper's 82M model.

    Args:
        variant: name of a registered variant, see `resformer.core.registry.names()`.
        variant_options: its options; what is missing takes the variant's default.
        variant_formula: written into config.json for readers: the equation with this model's layers and initial values.
            Ignored on load.

    Raises:
        UserError: unknown variant or option, sizes that do not divide.
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

    def __post_init__(self, **kwargs: Any) -> None:
        self.variant_options = {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in (self.variant_options or {}).items()
        }
        self._check_sizes()
        super().__post_init__(**kwargs)
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

    def _check_sizes(self) -> None:
        problems = [
            f"{name} is {getattr(self, name)}; expected at least 1"
            for name in (
                "vocab_size",
                "hidden_size",
                "intermediate_size",
                "num_hidden_layers",
                "num_attention_heads",
                "max_position_embeddings",
            )
            if getattr(self, name) < 1
        ]
        if not problems:
            heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
            if self.head_dim is None and self.hidden_size % heads:
                problems.append(
                    f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads {heads}; "
                    "change one, or set head_dim"
                )
            head_dim = self.head_dim if self.head_dim is not None else self.hidden_size // heads
            if head_dim < 2 or head_dim % 2:
                problems.append(f"head_dim is {head_dim}; rotary positions need an even number of at least 2")
            if kv_heads is not None and (kv_heads < 1 or heads % kv_heads):
                problems.append(
                    f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}; change one"
                )
        if problems:
            raise UserError("; ".join(problems))

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
        )

    def build_variant(self) -> Variant:
        """The variant with its options, checked against the sizes.

        Raises:
            UserError: unknown variant or option, or options that make no sense for these sizes.
        """
        return build(self.variant, self.variant_options, self.shape())
