"""All measurements of one forward pass, layer by layer; nothing larger than one layer is kept.

Shapes: B texts, T tokens, K eigenvalues, N layers. A measure is `[B]`, or `[B, T]` by position, or `[B, K]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from resformer import measures
from resformer.analyze.capture import Layer, blocks_of, captured, hidden_states
from resformer.analyze.removal import removal
from resformer.core.policy import Policy

GROUPS = ("attention", "values", "keys", "hidden", "spectra", "own_values", "removal", "cross_layer")
DEFAULT_GROUPS = GROUPS[:-1]
TOPS: tuple[tuple[str, int | float], ...] = (("1", 1), ("2", 2), ("3", 3), ("10", 10), ("1_percent", 0.01))
_OWN_POSITIONS = 256  # of a text, whose own values are kept for all layers

Found = dict[tuple[str, int], Tensor]
"""(measure, layer) -> numbers by text. Layers count from 1; 0 are the embeddings, or the model as a whole."""


@dataclass(frozen=True, kw_only=True)
class Read:
    """What a layer reads: `part` `[B, S, H_kv, D]` of its mixed value, and the `value` read, if it is a single one."""

    part: Tensor
    value: Tensor | None


class Probe:
    """Measures a model. `groups` of `GROUPS`; the model's weights and mode are left as they are."""

    def __init__(self, model: Any, groups: Sequence[str] = DEFAULT_GROUPS) -> None:
        unknown = [group for group in groups if group not in GROUPS]
        if unknown:
            raise ValueError(f"groups: got {unknown[0]!r}, expected some of {', '.join(GROUPS)}")
        self.model, self.groups = model, tuple(groups)

    def __call__(self, tokens_BT: Tensor, mask_BT: Tensor | None = None) -> Found:
        """Every measure of texts `[B, T]` on the model's device; `mask_BT` is True where there is a token."""
        found: Found = {}
        mask = None if mask_BT is None else mask_BT.bool()
        own: dict[int, Tensor] = {}
        read: dict[int, Read] = {}
        kept: list[Layer] = []
        last = len(blocks_of(self.model))

        def see(layer: Layer) -> None:
            self.attention(layer, mask, found)
            self.values(layer, mask, found, read.pop(id(layer.module), None))
            if "cross_layer" in self.groups and layer.key.shape[2] == tokens_BT.shape[1]:
                kept.append(layer)
                self.cross_layer(kept, mask, found)

        def hidden(layer: int, states: Tensor) -> None:
            if "spectra" in self.groups and layer <= last:
                self.spectra("hidden", layer, states, mask, found, centred=True)
            if "hidden" in self.groups and layer <= last:
                self.states("hidden", layer, states, mask, found)
            elif "hidden" in self.groups:
                found["normed_hidden_similarity", last] = measures.token_similarity(states, mask)

        inputs = {"input_ids": tokens_BT}
        if mask_BT is not None:
            inputs["attention_mask"] = mask_BT.long()
        with (
            captured(self.model) as look,
            hidden_states(self.model, hidden),
            own_values(self.model, own if "own_values" in self.groups else None),
            read_values(self.model, read if "values" in self.groups else None),
        ):
            look(see, **inputs)
        if "removal" in self.groups and mask is None:
            found |= removal(self.model, tokens_BT)
        if len(own) > 1:
            stacked = torch.stack([own[layer] for layer in sorted(own)])
            picked = None if mask is None else mask[:, places(mask.shape[1])]
            similarity = measures.layer_similarity(stacked, picked)
            for row, layer in enumerate(sorted(own)):
                found["own_value_layer_similarity", layer] = similarity[:, row]
        if "values" in self.groups:
            found |= lambdas(self.model, len(tokens_BT))
        return {key: value.detach().cpu() for key, value in found.items()}

    def attention(self, layer: Layer, mask: Tensor | None, found: Found) -> None:
        """How the attention is spread."""
        if "attention" not in self.groups:
            return
        received = layer.received if mask is None else layer.received * mask
        importance = received / received.sum(dim=1, keepdim=True)
        n = layer.layer
        found["importance", n] = importance
        found["importance_entropy", n] = measures.importance_entropy(importance)
        found["first_token_importance", n] = measures.first_token_share(importance, mask)
        for name, top in TOPS:
            found[f"top_{name}_importance", n] = measures.top_share(importance, top, mask)

    def values(self, layer: Layer, mask: Tensor | None, found: Found, read: Read | None) -> None:
        """Values and keys as attention uses them, and what the values of other layers add to the output."""
        length = layer.query.shape[2]
        value = layer.value[:, :, :length].transpose(1, 2)
        if "spectra" in self.groups:
            self.spectra("value", layer.layer, value, mask, found, centred=False)
        if "values" in self.groups:
            self.states("value", layer.layer, value, mask, found)
            if read is not None:
                whole = layer.output(layer.value)
                part = layer.output(read.part.transpose(1, 2))
                found["read_value_share", layer.layer] = measures.contribution(part, whole, mask)
                if read.value is not None:
                    found["read_weight_by_head", layer.layer] = measures.weight_by_head(read.part, read.value, mask)
        if "keys" in self.groups:
            key = layer.key[:, :, :length].transpose(1, 2)
            found["key_similarity", layer.layer] = measures.token_similarity(key, mask)
            found["key_similarity_heads_averaged", layer.layer] = measures.token_similarity(key, mask, "averaged")

    def states(self, kind: str, layer: int, states: Tensor, mask: Tensor | None, found: Found) -> None:
        """Similarity and norms by position of states `[B, T, D]` or `[B, T, H, D]`."""
        found[f"{kind}_similarity", layer] = measures.token_similarity(states, mask)
        if states.dim() == 4:
            found[f"{kind}_similarity_heads_averaged", layer] = measures.token_similarity(states, mask, "averaged")
        norms = measures.state_norms(states)
        found[f"{kind}_norm", layer] = norms if mask is None else norms * mask
        found[f"{kind}_first_token_ratio", layer] = measures.first_token_ratio(norms, mask)

    def spectra(
        self, kind: str, layer: int, states: Tensor, mask: Tensor | None, found: Found, *, centred: bool
    ) -> None:
        """Eigenvalues of states, and what is read off them."""
        eigenvalues = measures.spectrum(states, mask, centred=centred)
        found[f"{kind}_spectrum", layer] = eigenvalues
        found[f"{kind}_largest_eigenvalue", layer] = eigenvalues[:, 0]
        found[f"{kind}_effective_rank", layer] = measures.effective_rank(eigenvalues)
        for percent in (90, 99):
            count = measures.components_for(eigenvalues, percent / 100)
            found[f"{kind}_components_{percent}_percent", layer] = count.double()

    def cross_layer(self, kept: list[Layer], mask: Tensor | None, found: Found) -> None:
        """How close attention with one layer's weights, and the identity mapping, come to attention to the keys and
        values of all layers up to this one (paper, fig. 4).
        """
        layer = kept[-1]
        if len(kept) < 2:
            return
        groups = layer.query.shape[1] // layer.key.shape[1]
        outputs: dict[str, list[Tensor]] = {"all": [], "eq4": [], "eq6": []}
        for h in range(layer.query.shape[1]):
            keys = [one.key[:, h // groups] for one in kept]
            values = [one.value[:, h // groups] for one in kept]
            # With the layer's own window, cap and sink, one softmax over the keys of all layers.
            scores = [layer.scores(h, key) for key in keys]
            length = keys[0].shape[1]
            sink = [scores[-1][..., length:]]
            joint = torch.cat([one[..., :length] for one in scores] + sink, dim=-1).float().softmax(dim=-1)
            weights = layer.weights(h)
            outputs["all"].append(joint[..., : len(keys) * length].to(layer.query.dtype) @ torch.cat(values, dim=1))
            outputs["eq4"].append(measures.shared_attention(weights, values))
            outputs["eq6"].append(measures.identity_mapping(weights, values[-1], values[:-1]))
        joined = {name: torch.cat(parts, dim=-1) for name, parts in outputs.items()}
        for name in ("eq4", "eq6"):
            found[f"cross_layer_cosine_{name}", layer.layer] = measures.cosine(joined[name], joined["all"], mask)


def lambdas(model: Any, texts: int) -> Found:
    """Weights on V_1 and on the own value by layer, of models of ours that have such; the same for each text."""
    table = model.lambda_map() if hasattr(model, "lambda_map") else {}
    return {
        (f"lambda_{kind}", layer): torch.full((texts,), float(value), dtype=torch.float64)
        for kind in ("first", "own")
        for layer, value in zip(table.get("layers", []), table.get(kind, []), strict=True)
        if isinstance(value, int | float)
    }


def places(length: int) -> Tensor:
    """Positions, evenly spread, at most `_OWN_POSITIONS`."""
    return torch.linspace(0, length - 1, min(length, _OWN_POSITIONS)).round().long()


@contextmanager
def own_values(model: Any, kept: dict[int, Tensor] | None) -> Iterator[None]:
    """Put into `kept` (layer -> `[B, P, D]`) the values that layers compute themselves, before any mixing, at some
    positions. Layers without a `v_proj` are passed over.
    """
    handles: list[Any] = []
    if kept is not None:
        by_layer = {_layer_of(name): m for name, m in model.named_modules() if name.split(".")[-1] == "v_proj"}

        def keep(layer: int) -> Callable[..., None]:
            def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
                kept[layer] = output[:, places(output.shape[1]).to(output.device)].detach()

            return hook

        widths = {m.weight.shape[0] for m in by_layer.values() if hasattr(m, "weight")}
        if len(widths) == 1:
            handles = [module.register_forward_hook(keep(layer)) for layer, module in by_layer.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _layer_of(name: str) -> int:
    """The layer, from 1, in a module's name."""
    return next(int(part) for part in name.split(".") if part.isdigit()) + 1


@contextmanager
def read_values(model: Any, kept: dict[int, Read] | None) -> Iterator[None]:
    """Put into `kept` (by id of the attention module) what the values of other layers add to the values of one: the
    mixture minus what it is where the others are 0. Only layers of ours have such.
    """
    wrapped: list[Any] = []

    def wrap(attention: Any) -> None:
        policy, mix = attention.value_residual, attention.value_residual.mix

        def mix_and_keep(own: Any, values: Sequence[Tensor], hidden: Tensor, coefficients: Any) -> Tensor:
            mixed = mix(own, values, hidden, coefficients)
            without = mix(own, [torch.zeros_like(value) for value in values], hidden, coefficients)
            assert kept is not None
            if policy.corrects and torch.equal(mixed, without):
                return mixed  # what is read is used after attention
            # One layer's value that is read by as many heads has a weight in each of them.
            single = values[0] if len(values) == 1 and values[0].shape == mixed.shape else None
            kept[id(attention)] = Read(part=mixed - without, value=single)
            return mixed

        policy.mix = mix_and_keep
        wrapped.append(policy)

    if kept is not None:
        for module in model.modules():
            row = getattr(module, "row", None)
            if row is None or row.extends or not any(kind == "value" for kind, _ in module.read_kinds):
                continue
            # The base form mixes nothing where a layer has a value of its own: what it reads is used after attention.
            if type(module.value_residual).mix is not Policy.mix or not row.owns_value:
                wrap(module)
    try:
        yield
    finally:
        for policy in wrapped:
            del policy.mix
