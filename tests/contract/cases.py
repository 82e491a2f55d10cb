"""Tiny models for the contract, and the option sets that go through it besides every variant's defaults."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from resformer import ResFormerConfig, ResFormerForCausalLM
from resformer.core.registry import names

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
ADDED = {"value_residual", "value_coefficients", "value_tables", "depth_average"}  # modules that a variant may add
# Whether transformers can crop a cache in which a slot was never filled (docs/footguns.md).
CROPS_EMPTY_SLOTS = "is_initialized" in DynamicLayer.crop.__code__.co_names


@dataclass(frozen=True)
class Case:
    """A variant, its options, and the number of KV heads (of 4 query heads)."""

    variant: str
    options: dict[str, Any] = field(default_factory=dict)
    kv_heads: int = 2

    def __str__(self) -> str:
        words = [f"{key}={_short(value)}" for key, value in self.options.items()]
        return "-".join([self.variant, *words, "mha" if self.kv_heads == 4 else "gqa"])

    def config(self, **changes: Any) -> ResFormerConfig:
        sizes = {**SIZES, "num_key_value_heads": self.kv_heads, **changes}
        return ResFormerConfig(variant=self.variant, variant_options=self.options, **sizes)

    def make(self, seed: int = 0, **changes: Any) -> ResFormerForCausalLM:
        return make(self.variant, self.kv_heads, seed, variant_options=self.options, **changes)


def _short(value: Any) -> str:
    return f"{len(value)}values" if isinstance(value, list) and len(value) > 3 else str(value).replace(" ", "")


def make(variant: str, kv_heads: int = 4, seed: int = 0, **changes) -> ResFormerForCausalLM:
    """A tiny model in evaluation mode whose lambdas, gates and tables are moved off their initial values, so that they
    matter.
    """
    torch.manual_seed(seed)
    config = ResFormerConfig(variant=variant, **{**SIZES, "num_key_value_heads": kv_heads, **changes})
    model = ResFormerForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ADDED & set(name.split(".")):
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
            else:
                parameter.mul_(4.0 if parameter.dim() > 1 else 1.0)  # init 0.02 gives near-uniform attention: too easy
    return model


def ids(rows: int = 2, length: int = 12, seed: int = 5) -> torch.Tensor:
    return torch.randint(1, SIZES["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(seed))


def _numbers(count: int, start: float) -> list[float]:
    """`count` different weights."""
    return [round(start + 0.1 * i, 3) for i in range(count)]


def _fixed_forms() -> list[Case]:
    """Constants: granularity and tie of every form, `source` and `layers` once each."""
    cases = []
    for name in ("identity", "constant", "sparse"):
        cases += [
            Case(name, {"granularity": "head", "first": _numbers(2, 0.3)}),
            Case(name, {"granularity": "channel", "first": _numbers(16, -0.4), "own": _numbers(16, 0.2)}),
            Case(name, {"granularity": "head", "first": _numbers(2, 0.3), "tie": "lerp"}),
            Case(name, {"first": 0.3, "tie": "lerp"}),
            Case(name, {"first": 0.3, "tie": "own_one"}),
        ]
    return [
        *cases,
        Case("identity", {"source": 2}),
        Case("identity", {"source": "previous"}),
        Case("identity", {"layers": "last:2"}),
        Case("constant", {"layers": [2, 4]}),
        Case("constant", {"source": 3, "layers": "last_third"}),
        Case("sparse", {"layers": "last_third"}),
        Case("sparse", {"source": "previous", "layers": [3, 5]}),
    ]


def _learned_forms() -> list[Case]:
    cases = []
    for name in ("learnable", "learnable_plus", "dense"):
        cases += [
            Case(name, {"granularity": "head"}),
            Case(name, {"granularity": "channel"}),
            Case(name, {"tie": "lerp"}),
            Case(name, {"tie": "own_one"}),
            Case(name, {"granularity": "head", "tie": "lerp"}),
            Case(name, {"granularity": "channel", "tie": "own_one"}),
            Case(name, {"source": 2}),
            Case(name, {"layers": "last:2"}),
        ]
    return [
        *cases,
        Case("learnable", {"source": "previous"}),
        Case("learnable", {"layers": [3, 5], "init_first": 0.1, "init_own": 0.8}),
        Case("learnable_plus", {"logit_init": "zeros"}),
        Case("learnable_plus", {"scale_init": 3.0, "source": "previous", "layers": "last_third"}),
        Case("dense", {"mode": "mean"}),
        Case("dense", {"mode": "mean", "source": 2, "layers": [3, 5]}),
        Case("dense", {"source": 2, "layers": [4], "init_first": 0.2, "init_own": 0.7}),
        Case("gated", {"activation": "relu"}),
        Case("gated", {"activation": "sigmoid"}),
        Case("gated", {"source": 2}),
        Case("gated", {"source": "previous", "layers": "last:2"}),
        Case("rwkv", {"rank": 3}),
        Case("rwkv", {"rank": 8, "source": "previous", "layers": [2, 5]}),
    ]


def _sharing_forms() -> list[Case]:
    return [
        Case("svformer", {"anchors": [1, 3]}),
        Case("svformer", {"anchors": [1, 3, 5]}),
        Case("svformer", {"gamma": True}),
        Case("svformer", {"layers": "last:2", "gamma": True}),
        Case("svformer", {"layers": [2, 4], "anchors": [1, 3]}),
        Case("svformer", {"key_group": 2}),
        Case("svformer", {"key_group": 3, "anchors": [1, 4], "gamma": True}, 4),
        Case("svformer", {"key_group": 2, "layers": "last_third"}),
        Case("svformer", {"key_group": 5}),
        *(Case("cla", {"share": share}) for share in ("k", "v", "q")),
        *(Case("cla", {"group": 5, "share": share}) for share in ("kv", "k", "v", "q")),
        Case("cla", {"group": 3}),
        Case("cla", {"group": 3, "share": "v"}, 4),
        Case("skipv1", {"share": 0.25}, 4),
        Case("skipv1", {"share": 0.75}, 4),
        Case("skipv1", {"source": 2}),
        Case("skipv1", {"layers": [3, 5], "share": 0.75}, 4),
        Case("cross_attention", {"source": 2}),
        Case("cross_attention", {"source": "previous"}),
        Case("cross_attention", {"layers": "last:2"}, 4),
    ]


def _other_forms() -> list[Case]:
    cases = []
    for name in ("query_residual", "key_residual", "attention_residual"):
        cases += [
            Case(name, {"first": 0.3, "own": 0.8}),
            Case(name, {"source": 2}),
            Case(name, {"source": "previous", "layers": "last_third"}),
        ]
    return [
        *cases,
        Case("hidden_residual", {"first": 0.2, "own": 0.9}),
        Case("hidden_residual", {"layers": [2, 4]}),
        Case("hidden_residual", {"layers": "last:2"}),
        Case("denseformer", {"dilation": 2}),
        Case("denseformer", {"dilation": 3}),
        Case("denseformer", {"period": 2}),
        Case("denseformer", {"dilation": 2, "period": 2}),
        Case("neutreno", {"strength": 0.6}),
        Case("neutreno", {"source": 2}),
        Case("neutreno", {"source": "previous", "layers": "last:2"}),
        Case("neutreno_resformer", {"strength": 0.4, "first": 0.3, "own": 0.7}),
        Case("neutreno_resformer", {"source": "previous", "layers": [3, 4]}),
        Case("value_embeddings", {"tied": True}),
        Case("value_embeddings", {"style": "modded_nanogpt"}),
        Case("value_embeddings", {"style": "modded_nanogpt", "tied": True, "layers": "ends:1"}, 4),
        Case("value_embeddings", {"layers": "all", "tied": True}),
        Case("value_embeddings", {"layers": "last:2"}),
        Case("value_embeddings", {"layers": [1, 4], "tied": True}),
    ]


def _touches_cache(case: Case) -> bool:
    """The plan stores something else than each layer's own keys and (mixed) values, or reads what is stored."""
    config = case.config()
    rows = config.plan()
    return any(
        not row.owns_key or row.stores != "mixed" or any(read.state == "stored" for read in row.reads) for row in rows
    )


DEFAULTS = [Case(name, {}, kv_heads) for name in names() for kv_heads in (4, 2)]
OPTIONS = [*_fixed_forms(), *_learned_forms(), *_sharing_forms(), *_other_forms()]
CACHED = [*DEFAULTS, *filter(_touches_cache, OPTIONS)]

# Option sets whose parameters differ from the defaults' in number, size or start.
PARAMETERS = [
    *(case for case in DEFAULTS if case.kv_heads == 2),
    *(case for case in OPTIONS if case.options.get("granularity") == "channel" and "tie" not in case.options),
    Case("svformer", {"layers": "last:2", "gamma": True}),
    Case("svformer", {"key_group": 2, "layers": "last_third"}),
    Case("cla", {"share": "q"}),
    Case("cla", {"group": 3}),
    Case("denseformer", {"dilation": 2, "period": 2}),
    Case("gated", {"activation": "relu"}),
    Case("gated", {"activation": "sigmoid"}),
    Case("value_embeddings", {"layers": "all", "tied": True}),
    Case("value_embeddings", {"style": "modded_nanogpt"}),
]
