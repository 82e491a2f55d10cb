"""The plug-in for vLLM without vLLM: layouts, refusals, and our model against a small engine that pages as vLLM does.

The engine's attention splits slots as vLLM's FlashAttention does, so that form is held here; vLLM itself is in
`test_vllm.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from resformer import ResFormerConfig, ResFormerForCausalLM
from resformer.core import registry
from resformer.core.plan import planes
from resformer.core.policy import Policy
from resformer.core.variants.svformer import SVFormer
from resformer.errors import UserError
from resformer.serving.layout import layout
from resformer.serving.vllm_slots import Pair

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
}
REFUSED = {"attention_residual", "cross_attention", "skipv1"}
SHAPES: dict[str, dict[str, Any]] = {
    "svformer, two sources": {"anchors": [1, 3]},
    "svformer, last third": {"layers": "last_third", "gamma": True},
    "svformer, keys in groups": {"key_group": 2},
    "cla, keys": {"share": "k", "group": 3},
    "cla, values": {"share": "v"},
    "cla, queries": {"share": "q"},
    "value_embeddings, token and table": {"style": "modded_nanogpt"},
}
FORMS: dict[str, dict[str, Any]] = {
    "as GPT-2": {
        **{"position_embedding": "learned", "norm": "layernorm", "mlp": "plain", "hidden_act": "gelu_new"},
        **{"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    },
    "as OLMo2": {"norm_placement": "post", "qk_norm": True, "qk_norm_over": "all"},
    "experts": {"num_experts": 4},
    "some layers without positions": {"nope_layers": [2, 3], "first_block_residual": False},
    "a window": {"sliding_window": 5},
}
BLOCK, BLOCKS = 4, 16


def config(name: str, **changes: Any) -> ResFormerConfig:
    return ResFormerConfig(variant=name.split(",")[0], variant_options=SHAPES.get(name), **{**SIZES, **changes})


# --- layouts and refusals ---


@pytest.mark.parametrize("name", [*registry.names(), *SHAPES])
def test_a_layout_holds_the_planes_that_the_plan_stores(name: str) -> None:
    made = config(name)
    if made.variant in REFUSED:
        with pytest.raises(
            UserError, match=rf"variant '{made.variant}' cannot be served.* layer 2.*Use model.generate"
        ):
            layout(made)
        return
    found = layout(made)
    assert len(found.planes) == sum(planes(made.plan()))
    assert all((keys, "key") in found.planes and (values, "value") in found.planes for keys, values in found.places)
    assert found.paired == (made.variant != "svformer" and name not in ("cla, keys", "cla, values"))


def test_svformer_has_one_plane_of_values_and_reads_it_in_every_layer() -> None:
    found = layout(config("svformer"))
    assert found.places == ((1, 1), (2, 1), (3, 1), (4, 1), (5, 1))
    assert found.planes == ((1, "key"), (1, "value"), (2, "key"), (3, "key"), (4, "key"), (5, "key"))


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (
            lambda: config("svformer", sliding_window=4, sliding_layers=[2]),
            "layer 2 sees 4 tokens and layer 1 all, but",
        ),
        (
            lambda: config("cla", sliding_window=4, sliding_layers=[1]),
            "layer 2 sees all tokens and layer 1 4, but their pages come and go together; let all layers slide or none",
        ),
        (
            lambda: config("learnable", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
            "rope_type 'dynamic' turns all requests of a batch",
        ),
    ],
)
def test_what_pages_cannot_serve_is_refused_by_name(made: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        layout(made())


def test_windows_that_pages_can_serve() -> None:
    assert layout(config("learnable", sliding_window=4, sliding_layers=[2])).windows == (None, 4, None, None, None)
    assert layout(config("svformer", sliding_window=4)).windows == (4,) * 5


def test_a_users_variant_that_changes_stored_values_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Scaled(Policy):
        def mix(self, own: Any, reads: Any, hidden: Any, coefficients: Any) -> Tensor:
            return 2.0 * reads[0]

    class Changing(SVFormer):
        def policy(self, row: Any, shape: Any) -> Policy | None:
            return Scaled() if row.mixes else None

    monkeypatch.setattr(registry, "_registered", {n: registry.get(n) for n in registry.names()})
    registry.register_variant("changing")(Changing)
    with pytest.raises(UserError, match=r"layer 2\.\.5 changes the values that it reads from the slot of layer 1"):
        layout(config("changing"))


# --- two planes in place of one slot ---


def test_two_planes_are_split_as_a_slot_is() -> None:
    slot = torch.arange(2.0 * 3 * 4 * 10).view(2, 3, 4, 10)  # blocks, KV heads, tokens, keys and values
    pair = Pair(slot[..., :5], slot[..., 5:])
    for ours, theirs in zip(pair.transpose(1, 2).split(5, dim=-1), slot.transpose(1, 2).split(5, dim=-1), strict=True):
        assert torch.equal(ours, theirs)
    assert pair.view((2, 3, 8, -1)).chunk(2, dim=2) == (pair.keys, pair.values)
    assert pair.size() == (2, 3, 4, 5)
    with pytest.raises(AttributeError):
        pair.unbind(0)  # type: ignore[attr-defined]


# --- our model in a small engine ---


@dataclass(frozen=True, kw_only=True)
class Request:
    """A part of a text in a step: its tokens are rows `start` to `end` of the step, `length` are known after it."""

    start: int
    end: int
    length: int
    blocks: list[int]


class Kernel:
    def __init__(self, head_size: int, scale: float, window: int | None) -> None:
        self.head_size, self.scale, self.window = head_size, scale, window

    def do_kv_cache_update(self, layer: Any, key: Tensor, value: Tensor, kv_cache: Any, slots: Tensor) -> None:
        keys, values = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        keys[slots // BLOCK, slots % BLOCK], values[slots // BLOCK, slots % BLOCK] = key, value

    def forward(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Any, step: list[Request], output: Tensor
    ) -> None:
        keys, values = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        for part in step:
            q = query[part.start : part.end].transpose(0, 1)
            k, v = (x[part.blocks].flatten(0, 1)[: part.length].transpose(0, 1) for x in (keys, values))
            ages = torch.arange(part.length - q.shape[1], part.length)[:, None] - torch.arange(part.length)
            mask = (ages >= 0) & (ages < (self.window or part.length))
            out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale, enable_gqa=True)
            output[part.start : part.end] = out.transpose(0, 1)


class FakeAttention(nn.Module):
    """What we use of `vllm.model_executor.layers.attention.Attention`."""

    known: ClassVar[dict[str, FakeAttention]] = {}
    step: ClassVar[list[Request] | None] = None
    slots: ClassVar[Tensor | None] = None

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        *,
        num_kv_heads: int,
        cache_config: Any,
        per_layer_sliding_window: int | None,
        prefix: str,
        kv_sharing_target_layer_name: str | None = None,
        head_size_v: int | None = None,
    ) -> None:
        super().__init__()
        assert prefix not in self.known
        self.known[prefix], self.layer_name, self.target = self, prefix, kv_sharing_target_layer_name
        self.impl = Kernel(head_size, scale, per_layer_sliding_window)
        width = head_size + (head_size if head_size_v is None else head_size_v)
        shared = self.known[self.target].kv_cache if self.target else None
        self.kv_cache = torch.full((BLOCKS, num_kv_heads, BLOCK, width), torch.nan) if shared is None else shared
        self.attn_backend = SimpleNamespace(get_name=lambda: "FLASH_ATTN")

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (x.view(len(x), -1, self.impl.head_size) for x in (query, key, value))
        out = torch.zeros_like(query)
        if self.step is not None:
            if self.target is None:
                self.impl.do_kv_cache_update(self, key, value, self.kv_cache, self.slots)
            self.impl.forward(self, query, key, value, self.kv_cache, self.step, output=out)
        return out.flatten(1)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """What the plug-in imports, and what it registers."""

    def module(name: str, **content: Any) -> None:
        made = ModuleType(name)
        vars(made).update(content)
        monkeypatch.setitem(sys.modules, name, made)

    def context(name: str) -> tuple[Any, ...]:
        layer = FakeAttention.known[name]
        return FakeAttention.step, layer, layer.kv_cache, FakeAttention.slots

    registered = SimpleNamespace(models={}, checks={})
    module(
        "vllm",
        __version__="0.32.0",
        ModelRegistry=SimpleNamespace(register_model=lambda name, path: registered.models.update({name: path})),
    )
    module("vllm.platforms", current_platform=SimpleNamespace(is_cpu=lambda: False))
    module("vllm.model_executor")
    module("vllm.model_executor.layers")
    module("vllm.model_executor.layers.attention", Attention=FakeAttention)
    module("vllm.model_executor.layers.attention.attention", get_attention_context=context)
    module("vllm.model_executor.models", config=SimpleNamespace(MODELS_CONFIG_MAP=registered.checks))
    monkeypatch.setattr(FakeAttention, "known", {})
    monkeypatch.setattr(FakeAttention, "step", None)
    yield registered


def engine(made: ResFormerConfig, **changes: Any) -> SimpleNamespace:
    given: dict[str, Any] = {
        "model_config": SimpleNamespace(hf_config=made, quantization=changes.pop("quantization", None)),
        "parallel_config": SimpleNamespace(tensor_parallel_size=changes.pop("tensor_parallel_size", 1)),
        "cache_config": SimpleNamespace(cache_dtype=changes.pop("cache_dtype", "auto")),
        "lora_config": None,
    }
    return SimpleNamespace(**{**given, **changes})


def model(made: ResFormerConfig) -> ResFormerForCausalLM:
    torch.manual_seed(0)
    built = ResFormerForCausalLM(made).eval()
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.mul_(4.0 if parameter.dim() > 1 else 1.0)  # near-uniform attention would forgive much
    return built


def serve(served: Any, texts: list[Tensor], steps: list[list[tuple[int, int]]]) -> list[Tensor]:
    """Logits `[T, V]` of each text, read in steps of (text, tokens); blocks are handed out as they are needed."""
    free, tables, done = list(range(BLOCKS))[::-1], [[] for _ in texts], [0 for _ in texts]
    logits: list[list[Tensor]] = [[] for _ in texts]
    for step in steps:
        parts, rows = [], []
        for n, new in step:
            while len(tables[n]) * BLOCK < done[n] + new:
                tables[n].append(free.pop())
            rows += [(n, position) for position in range(done[n], done[n] + new)]
            done[n] += new
            parts.append(Request(start=len(rows) - new, end=len(rows), length=done[n], blocks=tables[n]))
        FakeAttention.step = parts
        FakeAttention.slots = torch.tensor([tables[n][p // BLOCK] * BLOCK + p % BLOCK for n, p in rows])
        ids = torch.stack([texts[n][p] for n, p in rows])
        with torch.inference_mode():
            out = served.compute_logits(served(ids, torch.tensor([p for _, p in rows])))
        for part, (n, _) in zip(parts, step, strict=True):
            logits[n].append(out[part.start : part.end])
    return [torch.cat(parts) for parts in logits]


@pytest.mark.parametrize(
    ("name", "form"),
    [
        *[(name, "") for name in [*registry.names(), *SHAPES] if name not in REFUSED],
        *[(name, form) for name in ("learnable", "svformer") for form in FORMS],
    ],
)
def test_logits_of_pieces_in_shared_batches_are_those_of_the_whole_text(
    name: str, form: str, vllm: SimpleNamespace
) -> None:
    from resformer.serving.vllm_model import ServedResFormer

    made = config(name, **FORMS.get(form, {}))
    ours = model(made)
    served = ServedResFormer(vllm_config=engine(made))
    weights = ours.state_dict()
    assert served.load_weights(weights.items()) == {n for n, _ in served.named_parameters()}
    assert served(torch.tensor([1, 2]), torch.tensor([0, 1])).shape == (2, 32)  # before there is a cache
    texts = [torch.randint(61, (n,), generator=torch.Generator().manual_seed(n)) for n in (11, 6, 1)]
    got = serve(served, texts, [[(0, 5)], [(1, 3), (0, 4)], [(0, 1), (2, 1), (1, 1)], [(1, 2), (0, 1)]])
    for text, logits in zip(texts, got, strict=True):
        with torch.inference_mode():
            torch.testing.assert_close(logits, ours(text[None]).logits[0], rtol=1e-4, atol=1e-4)


def test_weights_that_do_not_fit_are_named(vllm: SimpleNamespace) -> None:
    from resformer.serving.vllm_model import ServedResFormer

    served = ServedResFormer(vllm_config=engine(config("learnable")))
    weights = model(config("svformer")).state_dict()
    weights["model.norm.weight"] = torch.ones(3)
    with pytest.raises(UserError, match=r"'model.norm.weight' is \[3\]; the model needs \[32\].*it lacks .*v_proj"):
        served.load_weights(weights.items())


def test_what_vllm_is_asked_for_beyond_us_is_refused_by_name(vllm: SimpleNamespace) -> None:
    from resformer.serving.vllm_checks import check, check_backend

    with pytest.raises(UserError, match=r"tensor_parallel_size is 2.*quantization is 'fp8'.*enable_lora is set"):
        check(engine(config("learnable"), tensor_parallel_size=2, quantization="fp8", lora_config=object()))
    check(engine(config("learnable"), cache_dtype="fp8"))
    with pytest.raises(UserError, match=r"kv_cache_dtype is 'fp8', and shared values.*kv_transfer_config is set"):
        check(engine(config("svformer"), cache_dtype="fp8", kv_transfer_config=object()))
    with pytest.raises(UserError, match=r"'FLASHINFER' cannot read; choose another with .*FLASH_ATTN"):
        check_backend("FLASHINFER")
    with pytest.raises(UserError, match="expected a ResFormerConfig"):
        check(engine(SimpleNamespace()))  # type: ignore[arg-type]


def test_register_adds_names_and_imports_no_model(vllm: SimpleNamespace) -> None:
    from resformer.serving.vllm_plugin import EarlyCheck, register

    register()
    register()  # vLLM calls it in every process, and may call it twice
    assert vllm.models == {"ResFormerForCausalLM": "resformer.serving.vllm_model:ServedResFormer"}
    assert vllm.checks == {"ResFormerForCausalLM": EarlyCheck}
    with pytest.raises(UserError, match="'skipv1' cannot be served"):
        EarlyCheck.verify_and_update_config(engine(config("skipv1")))
