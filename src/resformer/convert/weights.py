"""Weights on their way between a family of transformers and our host: the same names, other orders of rows.

Rotary positions turn pairs of channels. Our host pairs channel i of a head with channel i + D/2 ("half-split", as
Llama in transformers); some families pair neighbours, 2i with 2i + 1. Their queries and keys are reordered within each
head, which changes no dot product between them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.policy import LAMBDA_NAMES, TABLES_NAME
from ..errors import UserError
from ..models.configuration import ResFormerConfig
from ..models.modeling import ResFormerForCausalLM
from .families import Family
from .talk import quiet

TURNED = ("q_proj.weight", "q_proj.bias", "k_proj.weight", "k_proj.bias", "q_norm.weight", "k_norm.weight")
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def half_split(rows: Tensor, head_dim: int) -> Tensor:
    """Rows `[heads * D, ...]` of neighbouring pairs, reordered into halves of each head."""
    pairs = rows.unflatten(0, (-1, head_dim // 2, 2))
    return pairs.transpose(1, 2).reshape(rows.shape)


def interleaved(rows: Tensor, head_dim: int) -> Tensor:
    """`half_split` undone."""
    halves = rows.unflatten(0, (-1, 2, head_dim // 2))
    return halves.transpose(1, 2).reshape(rows.shape)


def to_ours(state: Mapping[str, Tensor], family: Family, head_dim: int) -> dict[str, Tensor]:
    """A state dict of the family under our conventions."""
    if not family.interleaved:
        return dict(state)
    return {name: half_split(x, head_dim) if name.endswith(TURNED) else x for name, x in state.items()}


def from_ours(state: Mapping[str, Tensor], family: Family, head_dim: int) -> dict[str, Tensor]:
    """The weights of our model under the family's conventions, without what value residual adds."""
    plain = {name: x for name, x in state.items() if not is_ours_alone(name)}
    if not family.interleaved:
        return plain
    return {name: interleaved(x, head_dim) if name.endswith(TURNED) else x for name, x in plain.items()}


def is_ours_alone(name: str) -> bool:
    """Whether a parameter belongs to value residual and to no plain Transformer."""
    return bool({*LAMBDA_NAMES, TABLES_NAME} & set(name.split(".")))


def build(config: ResFormerConfig, state: Mapping[str, Tensor]) -> ResFormerForCausalLM:
    """Our model with the weights of a plain Transformer; what value residual adds has its initial values.

    Rows and columns that the variant does not own are left out: W_v and W_k of layers that share, and of W_v the rows
    of heads that come from elsewhere (`skipv1`).

    Raises:
        UserError: weights that are missing, too many, or of another shape.
    """
    kept = dict(state)
    for row in config.plan():
        prefix = f"model.layers.{row.layer - 1}.self_attn."
        gone = [("v_proj.", row.owns_value), ("k_proj.", row.owns_key), ("k_norm.", row.owns_key)]
        gone += [("q_proj.", row.owns_query), ("q_norm.", row.owns_query)]
        dropped = tuple(prefix + part for part, owns in gone if not owns)
        kept = {name: x for name, x in kept.items() if not (dropped and name.startswith(dropped))}
        if row.value_share < 1:
            shape = config.shape()
            rows = round(row.value_share * shape.kv_heads) * shape.head_dim
            kept |= {name: x[:rows] for name, x in kept.items() if name.startswith(f"{prefix}v_proj.")}
    return load(ResFormerForCausalLM, config, kept)


def load(model_class: Any, config: Any, state: Mapping[str, Tensor]) -> Any:
    """A model of transformers, in evaluation mode, made of a config and weights and of nothing else.

    Raises:
        UserError: weights that do not fit the model to the last name, but for those of value residual.
    """
    if config.tie_word_embeddings:
        state = {name: x for name, x in state.items() if name != HEAD}
    dtype = next(x.dtype for name, x in state.items() if name == EMBEDDING)
    with torch.random.fork_rng(devices=[]), quiet():
        torch.manual_seed(0)  # some variants begin with random numbers
        model, info = model_class.from_pretrained(
            None,
            config=config,
            state_dict=dict(state),
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # `check_loading` names them
        )
    check_loading(info, new=is_ours_alone)
    model.config._name_or_path = ""  # transformers would have it say "None"
    return model.eval()


def full_precision(model: Any) -> Any:
    """The model with fp32 weights, in place; transformers' `float` does not touch models that it has unpacked."""
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    return model


def check_loading(info: Mapping[str, Any], *, new: Callable[[str], bool] = lambda name: False) -> None:
    """Refuse weights that do not fit a model, by name; those for which `new` is true may be missing.

    Raises:
        UserError: naming how many, and the first.
    """
    missing = [str(name) for name in info.get("missing_keys", ()) if not new(str(name))]
    problems = _said("are missing", missing)
    problems += _said("have no place in the model", [str(name) for name in info.get("unexpected_keys", ())])
    problems += _said("have another shape", [str(name) for name in info.get("mismatched_keys", ())])
    if problems:
        raise UserError(f"the weights do not fit the model that the configuration describes: {'; '.join(problems)}")


def _said(words: str, names: Sequence[str]) -> list[str]:
    return [f"{len(names)} {words} (first: {sorted(names)[0]})"] if names else []


def broken(model: torch.nn.Module) -> str | None:
    """Name of a parameter with a number that is not finite."""
    return next((name for name, x in model.named_parameters() if not bool(x.isfinite().all())), None)
