"""Forms of the host block beside Llama's: what the config's fields may say, and what does not go together.

This module imports neither torch nor transformers, so that a training configuration can be checked without them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from ..core.plan import Plan
from ..errors import did_you_mean

CHOICES = {
    "position_embedding": ("rope", "learned"),
    "norm": ("rmsnorm", "layernorm"),
    "mlp": ("gated", "plain"),
}

# Fields of GPT-2's block, to be given with sizes: ResFormerConfig(**GPT2_FORM, hidden_size=768, ...).
GPT2_FORM: dict[str, Any] = {
    "position_embedding": "learned",
    "norm": "layernorm",
    "mlp": "plain",
    "hidden_act": "gelu_new",
    "attention_bias": True,
    "mlp_bias": True,
    "tie_word_embeddings": True,
}


def windowed_layers(window: int | None, layers: str | Sequence[int], total: int) -> tuple[int, ...]:
    """Resolve `sliding_layers` to layer numbers."""
    if window is None or layers == "none":
        return ()
    return tuple(range(1, total + 1)) if layers == "all" else tuple(sorted(int(n) for n in layers))


def form_problems(form: Any) -> list[str]:
    """What is wrong with the fields of a host form, one line each.

    Args:
        form: anything with these fields: a `ResFormerConfig`, or the section of a training configuration.
    """
    problems, layers, total = activation_problems(form.hidden_act), form.sliding_layers, form.num_hidden_layers
    if form.sliding_window is not None and form.sliding_window < 2:
        problems.append(f"sliding_window is {form.sliding_window}; expected at least 2 tokens, or none")
    if isinstance(layers, str):
        if layers not in ("all", "none"):
            problems.append(f"sliding_layers is {layers!r}; expected 'all', 'none' or a list of layer numbers")
    elif not isinstance(layers, Sequence):
        problems.append(f"sliding_layers is {layers!r}; expected 'all', 'none' or a list of layer numbers")
    elif any(isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= total for n in layers):
        problems.append(f"sliding_layers is {list(layers)}; the model has layers 1 to {total}")
    elif len(set(layers)) != len(layers):
        problems.append(f"sliding_layers is {list(layers)}; a layer is named twice")
    elif form.sliding_window is None:
        problems.append(f"sliding_layers is {list(layers)}, but sliding_window is not set; give its tokens")
    if form.num_experts < 0 or form.num_experts == 1:
        problems.append(f"num_experts is {form.num_experts}; expected at least 2, or 0 for a plain feed-forward layer")
    elif form.num_experts:
        if not 1 <= form.num_experts_per_tok <= form.num_experts:
            problems.append(
                f"num_experts_per_tok is {form.num_experts_per_tok}; expected 1 to num_experts, {form.num_experts}"
            )
        if form.mlp != "gated" or form.mlp_bias:
            problems.append(
                f"experts are gated feed-forward layers without biases, but mlp is {form.mlp!r} and mlp_bias "
                f"{form.mlp_bias}; set mlp to 'gated' and mlp_bias to false, or num_experts to 0"
            )
    return problems


# Fields of the model's config alone: converted models have them, training configurations do not.
HOST_CHOICES = {"qk_norm_over": ("head", "all"), "norm_placement": ("pre", "post")}


def host_problems(form: Any) -> list[str]:
    """What is wrong with the fields that only a `ResFormerConfig` has, one line each."""
    problems = [
        f"{name} is {got!r}{did_you_mean(str(got), valid)} (expected {' or '.join(valid)})"
        for name, valid in HOST_CHOICES.items()
        if (got := getattr(form, name)) not in valid
    ]
    layers, total = form.nope_layers or (), form.num_hidden_layers
    if any(isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= total for n in layers):
        problems.append(f"nope_layers is {list(layers)}; the model has layers 1 to {total}")
    elif layers and form.position_embedding != "rope":
        problems.append(
            f"nope_layers is {list(layers)}, but position_embedding is {form.position_embedding!r}, which turns no "
            "queries and keys; leave one of them out"
        )
    return problems


def check_positions(plan: Plan, nope_layers: Collection[int]) -> None:
    """Refuse layers that attend to stored keys of another layer where only one of the two is turned by positions.

    Raises:
        ValueError: naming two such layers.
    """
    for row in plan:
        for read in row.reads:
            stored_key = read.what == "key" and read.state == "stored"
            if stored_key and (row.layer in nope_layers) != (read.layer in nope_layers):
                raise ValueError(
                    f"layer {row.layer} attends to keys of layer {read.layer}, but only one of them is among "
                    "nope_layers; let both be, or none"
                )


def activation_problems(name: str) -> list[str]:
    """A line when transformers knows no activation of that name."""
    if name in ("silu", "gelu_new"):  # known without asking, which takes seconds the first time
        return []
    from transformers.activations import ACT2FN

    if name in ACT2FN:
        return []
    return [f"hidden_act is {name!r}{did_you_mean(name, ACT2FN) or '; expected an activation that transformers knows'}"]
