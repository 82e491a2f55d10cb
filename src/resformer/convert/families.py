"""Families of models that our host can be, exactly: which of their fields become which of ours, and which must say
something for that.

Every field of a family's configuration is carried over, has one value that is supported, or is known to change nothing;
whatever else a configuration says stops the conversion and is named. Weights have the same names on both sides.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import UserError, did_you_mean

ALIKE = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps"),
    *("pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings", "use_cache"),
)
"""Fields that have the same name and meaning in every family, and in our config."""

DERIVED = ("head_dim", "rope_parameters", "attention_dropout")
"""Fields that are carried over by a rule, in every family."""

# What says nothing about what a model computes: where it came from, how it is stored, what others noted.
META = (
    *("transformers_version", "architectures", "output_hidden_states", "output_attentions", "return_dict", "dtype"),
    *("torch_dtype", "chunk_size_feed_forward", "is_encoder_decoder", "id2label", "label2id", "problem_type"),
    *("num_labels", "pretraining_tp", "name_or_path", "auto_map", "custom_pipelines", "unk_token_id", "sep_token_id"),
    *("cls_token_id", "mask_token_id", "model_type", "model_max_length", "transformers.js_config", "is_llama_config"),
    *("use_bfloat16", "torchscript", "tokenizer_class", "prefix", "task_specific_params", "finetuning_task"),
    *("unsloth_fixed", "unsloth_version", "neftune_noise_alpha", "base_model_tp_plan", "base_model_pp_plan"),
)

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
ROPE_KEYS = (
    *("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "attention_factor"),
    *("beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim", "low_freq_factor", "high_freq_factor"),
    *("short_factor", "long_factor", "partial_rotary_factor"),
)
LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, kw_only=True)
class Family:
    """One `model_type` of transformers.

    Attributes:
        title: what people call it.
        renamed: its field -> ours, for fields that not all families have.
        form: fields of ours that the family implies.
        only: its field -> the values that are supported, for what the host cannot do otherwise.
        rules: fields that `derive` reads.
        derive: more fields of ours from its config; raises UserError by name.
        undo: `derive` the other way: fields of its config from ours.
        interleaved: rotary pairs are neighbours, (x0, x1), (x2, x3) ..., not halves of the head.
    """

    title: str
    renamed: Mapping[str, str] = field(default_factory=dict)
    form: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    rules: tuple[str, ...] = ()
    derive: Callable[[Any], dict[str, Any]] = lambda config: {}
    undo: Callable[[Any], dict[str, Any]] = lambda config: {}
    interleaved: bool = False

    @property
    def known(self) -> frozenset[str]:
        """Every field of a config that is accounted for."""
        return frozenset((*ALIKE, *DERIVED, *META, *self.renamed, *self.only, *self.rules))


def _all_slide(config: Any) -> dict[str, Any]:
    """Mistral: every layer slides, or none."""
    return {} if config.sliding_window is None else {"sliding_window": config.sliding_window}


def _undo_all_slide(config: Any) -> dict[str, Any]:
    if config.sliding_window is not None and config.sliding_layers != "all":
        raise UserError(f"sliding_layers is {config.sliding_layers}, but all layers of a Mistral slide, or none")
    return {"sliding_window": config.sliding_window}


def _some_slide(config: Any) -> dict[str, Any]:
    """Qwen, SmolLM3, Ministral: `layer_types` says which layers slide."""
    types = list(config.layer_types)
    strange = sorted({str(kind) for kind in types} - set(LAYER_TYPES))
    if strange:
        raise UserError(f"layer_types has {', '.join(strange)}; supported are {' and '.join(LAYER_TYPES)}")
    sliding = [number for number, kind in enumerate(types, start=1) if kind == "sliding_attention"]
    if not sliding:
        return {}
    if config.sliding_window is None:
        raise UserError("layer_types names sliding layers, but sliding_window is not set")
    layers = "all" if len(sliding) == len(types) else sliding
    return {"sliding_window": config.sliding_window, "sliding_layers": layers}


def _layer_types(config: Any) -> list[str]:
    windowed = config.windowed_layers()
    return [LAYER_TYPES[number in windowed] for number in range(1, config.num_hidden_layers + 1)]


def _undo_some_slide(config: Any) -> dict[str, Any]:
    window = {"sliding_window": config.sliding_window} if config.windowed_layers() else {}
    return {**window, "layer_types": _layer_types(config)}


def _undo_qwen(config: Any) -> dict[str, Any]:
    # Without use_sliding_window the window is dropped, whatever layer_types say.
    flag = {"use_sliding_window": True} if config.windowed_layers() else {}
    return {**_undo_some_slide(config), **flag}


def _smollm3(config: Any) -> dict[str, Any]:
    flags = config.no_rope_layers[: config.num_hidden_layers]
    nope = [number for number, turns in enumerate(flags, start=1) if not turns]
    slides = _some_slide(config)
    if slides and not config.use_sliding_window:
        raise UserError("use_sliding_window is False, but layer_types names sliding layers; set it to true")
    return {**slides, "nope_layers": nope or None}


def _undo_smollm3(config: Any) -> dict[str, Any]:
    nope = config.nope_layers or ()
    return {
        **_undo_qwen(config),
        "no_rope_layers": [int(number not in nope) for number in range(1, config.num_hidden_layers + 1)],
    }


BIASES = {"attention_bias": "attention_bias", "mlp_bias": "mlp_bias"}
NO_BIASES = {"attention_bias": (False, None), "mlp_bias": (False, None)}
QWEN_BIASES = {"attention_bias": True, "attention_out_bias": False}
QWEN_RULES = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")
POST_NORM = {"norm_placement": "post", "qk_norm": True, "qk_norm_over": "all"}

FAMILIES: dict[str, Family] = {
    "llama": Family(title="Llama", renamed=BIASES, only={"sliding_window": (None,)}),
    "mistral": Family(
        title="Mistral", only=NO_BIASES, rules=("sliding_window",), derive=_all_slide, undo=_undo_all_slide
    ),
    "ministral": Family(
        title="Ministral",
        only=NO_BIASES,
        rules=("sliding_window", "layer_types"),
        derive=_some_slide,
        undo=_undo_some_slide,
    ),
    "qwen2": Family(
        title="Qwen2",
        form=QWEN_BIASES,
        only={"mlp_bias": (False, None)},
        rules=QWEN_RULES,
        derive=_some_slide,
        undo=_undo_qwen,
    ),
    "qwen3": Family(
        title="Qwen3",
        renamed={"attention_bias": "attention_bias"},
        form={"qk_norm": True},
        only={"mlp_bias": (False, None)},
        rules=QWEN_RULES,
        derive=_some_slide,
        undo=_undo_qwen,
    ),
    "olmo2": Family(
        title="OLMo2",
        renamed={"attention_bias": "attention_bias"},
        form=POST_NORM,
        only={"clip_qkv": (None,), "mlp_bias": (False, None)},
    ),
    "smollm3": Family(
        title="SmolLM3",
        renamed=BIASES,
        rules=("no_rope_layers", "no_rope_layer_interval", *QWEN_RULES),
        derive=_smollm3,
        undo=_undo_smollm3,
    ),
    "arcee": Family(title="Arcee", renamed=BIASES, form={"mlp": "plain"}),
    "seed_oss": Family(
        title="Seed-OSS",
        renamed={**BIASES, "attention_out_bias": "attention_out_bias"},
        only={"residual_dropout": (0, 0.0, None)},
    ),
    "helium": Family(title="Helium", renamed=BIASES, form={"attention_out_bias": False}, interleaved=True),
    "ernie4_5": Family(
        title="ERNIE 4.5",
        rules=("use_bias",),
        derive=lambda config: {"attention_bias": bool(config.use_bias), "mlp_bias": bool(config.use_bias)},
        undo=lambda config: {"use_bias": config.attention_bias},
        interleaved=True,
    ),
}


def find(model_type: str) -> Family:
    """The family of that `model_type`.

    Raises:
        UserError: none of ours.
    """
    if model_type not in FAMILIES:
        raise UserError(
            f"model_type is {model_type!r}{did_you_mean(model_type, FAMILIES, likeness=0.8)}; supported are "
            f"{', '.join(FAMILIES)}, and models of this library"
        )
    return FAMILIES[model_type]


def our_fields(config: Any, *, ignored: Collection[str] = ()) -> dict[str, Any]:
    """The fields of ours that describe the same model as a config of transformers.

    Args:
        config: of one of the families.
        ignored: fields that the user says have nothing to do with the architecture.

    Raises:
        UserError: one that names every field that cannot be carried over.
    """
    family = find(config.model_type)
    problems = [*_strange_fields(config, family, ignored), *_rope_problems(config)]
    if getattr(config, "is_heterogeneous", False):
        problems.append("per_layer_config: all layers of the host model have the same sizes")
    if problems:
        raise UserError(f"{family.title} model: {'; '.join(problems)}")
    found = {name: getattr(config, name) for name in ALIKE if hasattr(config, name)}
    heads = config.num_attention_heads
    found["num_key_value_heads"] = found.get("num_key_value_heads") or heads
    found["head_dim"] = getattr(config, "head_dim", None) or config.hidden_size // heads
    found["rope_parameters"] = {key: value for key, value in dict(config.rope_parameters).items() if value is not None}
    found["attention_dropout"] = getattr(config, "attention_dropout", None) or 0.0
    found |= {ours: bool(getattr(config, theirs)) for theirs, ours in family.renamed.items()}
    try:
        return {**found, **family.form, **family.derive(config)}
    except UserError as error:
        raise UserError(f"{family.title} model: {error}") from None


def _strange_fields(config: Any, family: Family, ignored: Collection[str]) -> list[str]:
    """What the config says that the table does not account for, one line each."""
    declared = {item.name: item for item in dataclasses.fields(config)}
    problems = []
    for name, value in vars(config).items():
        if name in family.only and name not in ignored:
            if value not in family.only[name]:
                supported = " or ".join(dict.fromkeys(map(str, family.only[name])))
                problems.append(f"{name} is {value!r}, which the host model cannot do (supported: {supported})")
        elif name in family.known or name in ignored or name.startswith("_") or value is None:
            continue
        elif name == "quantization_config":
            if _of(value, "quant_method") != "gguf":  # which transformers has unpacked by now
                problems.append("quantization_config: quantised weights cannot be converted; take the full ones")
        elif name in declared:
            if value != _default(declared[name]):
                problems.append(f"{name} is {value!r}, a field of {type(config).__name__} that is not known here")
        elif value is not False:
            problems.append(
                f"{name} is {value!r}, which is not known here; if it has nothing to do with what the model computes, "
                f"pass --ignore-field {name}"
            )
    return problems


def _of(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else getattr(value, key, None)


def _default(item: dataclasses.Field) -> Any:
    if item.default is not dataclasses.MISSING:
        return item.default
    return item.default_factory() if item.default_factory is not dataclasses.MISSING else None


def _rope_problems(config: Any) -> list[str]:
    rope = config.rope_parameters
    if not isinstance(rope, dict) or "rope_type" not in rope:
        return [f"rope_parameters is {rope!r}; supported is one kind of rotary positions for all layers"]
    problems = [
        f"rope_parameters.{key} is {value!r}, which is not known here"
        for key, value in rope.items()
        if key not in ROPE_KEYS and value is not None
    ]
    if rope["rope_type"] not in ROPE_TYPES:
        problems.append(
            f"rope_parameters.rope_type is {rope['rope_type']!r}; supported are {', '.join(map(repr, ROPE_TYPES))}"
        )
    if rope.get("partial_rotary_factor") not in (None, 1, 1.0):
        problems.append(
            f"rope_parameters.partial_rotary_factor is {rope['partial_rotary_factor']}, but the host model turns whole "
            "heads"
        )
    return problems
