"""Continuous batching: the tokens of `generate`, from a paged cache as small as the plan says."""

from __future__ import annotations

import functools
import gc
import logging
import sys
from collections.abc import Iterator

import pytest
import torch
from form_models import SIZES, make
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from resformer import ResFormerForCausalLM
from resformer.core.plan import kv_ratio
from resformer.core.registry import names
from resformer.errors import UserError
from resformer.models.accounting import kv_bytes

paged = pytest.importorskip("resformer.models.paged", reason="this transformers has no allocators for paged caches")
PAGE = 4
# What a plan may do with slots: nothing, keys only, values only, some of the heads, two sets of keys.
SHAPES = {
    "svformer": {},
    "svformer, two sources": {"anchors": [1, 3]},
    "svformer, keys in groups": {"key_group": 2},
    "cla": {"share": "kv"},
    "cla, keys": {"share": "k", "group": 3},
    "cla, values": {"share": "v"},
    "skipv1": {"share": 0.5},
    "cross_attention": {},
}


@pytest.fixture(scope="module", autouse=True)
def small_heap() -> Iterator[None]:
    """A manager that stops collects garbage twice, which takes most of a second over all that torch has made."""
    logger = logging.getLogger("ContinuousBatchingLogger")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    logger.setLevel(level)


@functools.cache
def shaped(name: str, kv_heads: int) -> ResFormerForCausalLM:
    return make(name.split(",")[0], variant_options=SHAPES.get(name), num_key_value_heads=kv_heads)


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, SIZES["vocab_size"], (n,), generator=generator).tolist() for n in lengths]


def settings(**changes) -> GenerationConfig:
    return GenerationConfig(
        **{"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": -1, **changes}
    )


def batching(**changes) -> ContinuousBatchingConfig:
    """Eight tokens a step, so that long prompts are read in pieces; 52 tokens of memory, so that requests wait."""
    return ContinuousBatchingConfig(**{"page_size": PAGE, "num_blocks": 13, "max_batch_tokens": 8, **changes})


def one_by_one(model, texts: list[list[int]], config: GenerationConfig) -> list[list[int]]:
    got = [model.generate(torch.tensor([text]), generation_config=config)[0, len(text) :].tolist() for text in texts]
    return [
        tokens[: tokens.index(config.eos_token_id) + 1] if config.eos_token_id in tokens else tokens for tokens in got
    ]


def batched(model, texts: list[list[int]], config: GenerationConfig, **changes) -> list[list[int]]:
    results = model.generate_batch(texts, config, batching(**changes)).values()
    assert not [result.error for result in results if result.error]
    return [result.generated_tokens for result in results]


def cache_of(model, **changes):
    """The cache that a manager of the model makes."""
    manager = model.init_continuous_batching(settings(), batching(**changes))
    manager.warmup()
    manager.destroy()
    return manager.batch_processor.cache


TEXTS = prompts(3, 9, 17, 1)
# Every shape, with the numbers of heads spread over them: what a page holds follows from both.
SHAPED = [
    ("svformer", 1),
    ("svformer", 4),
    ("svformer, two sources", 2),
    ("svformer, keys in groups", 4),
    ("cla", 1),
    ("cla, keys", 4),
    ("cla, values", 1),
    ("skipv1", 2),
    ("skipv1", 4),
    ("cross_attention", 2),
]
OTHERS = ("learnable", "attention_residual", "value_embeddings")
STOCK = [name for name in names() if name not in SHAPES]  # plans for which transformers' own allocators are right
ALL = [
    *SHAPED,
    *[pytest.param(name, 2, marks=[] if name in OTHERS else pytest.mark.slow) for name in STOCK],
]


@pytest.mark.parametrize(("name", "kv_heads"), ALL)
def test_tokens_are_those_of_generate(name, kv_heads):
    model, config = shaped(name, kv_heads), settings()
    assert batched(model, TEXTS, config) == one_by_one(model, TEXTS, config)


@pytest.mark.parametrize(
    ("name", "window"),
    [("svformer", "all"), ("constant", [1, 3]), ("cla", [3, 4]), ("cross_attention", "all"), ("transformer", [2, 5])],
)
def test_windows_that_slots_have_as_well(name, window):
    """Windows of 5 tokens, over texts of up to 22: the ring of pages is overwritten."""
    model, config = make(name, sliding_window=5, sliding_layers=window), settings()
    assert batched(model, TEXTS, config, num_blocks=40) == one_by_one(model, TEXTS, config)


@pytest.mark.parametrize("name", ["svformer", "skipv1"])
def test_attention_by_matrices(name):
    model, config = make(name), settings()
    model.set_attn_implementation("eager")
    assert batched(model, TEXTS, config) == one_by_one(model, TEXTS, config)
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("changes", [{"position_embedding": "learned"}, {"num_experts": 4}])
def test_other_forms(changes):
    model, config = make("svformer", **changes), settings()
    assert batched(model, TEXTS, config) == one_by_one(model, TEXTS, config)


def test_requests_end_at_different_times():
    model = shaped("svformer", 2)
    free = one_by_one(model, TEXTS, settings())
    config = settings(eos_token_id=free[2][2])
    want = one_by_one(model, TEXTS, config)
    assert len({len(tokens) for tokens in want}) > 1
    assert batched(model, TEXTS, config) == want


@pytest.mark.parametrize("name", ["svformer", "skipv1", "transformer"])
def test_forks_copy_the_cache(name):
    """Of 6 prompt tokens one page of 4 is shared and one is copied."""
    model, texts = shaped(name, 2), prompts(6, 7)
    want = one_by_one(model, texts, settings())
    config = settings()
    config.num_return_sequences = 3  # the constructor wants sampling with it
    got = batched(model, texts, config, num_blocks=40)
    assert got == [want[0]] * 3 + [want[1]] * 3


@pytest.mark.parametrize("name", ["svformer", "skipv1"])
def test_a_prefix_is_computed_once(name):
    model, (text,) = shaped(name, 2), prompts(14)
    longer = text + prompts(3, seed=1)[0]
    with model.continuous_batching_context_manager(
        settings(), continuous_batching_config=batching(num_blocks=40)
    ) as manager:
        manager.add_request(text, request_id="first")
        first = manager.get_result("first", timeout=20)
        cache, matched = manager.batch_processor.cache, []
        search = cache.search_prefix_match
        cache.search_prefix_match = lambda *args: matched.append(search(*args)) or matched[-1]
        manager.add_request(longer, request_id="second")
        second = manager.get_result("second", timeout=20)
    assert matched == [12]  # three whole pages
    assert [first.generated_tokens, second.generated_tokens] == one_by_one(model, [text, longer], settings())


@pytest.mark.parametrize(("name", "kv_heads"), SHAPED)
def test_the_cache_is_as_small_as_the_plan(name, kv_heads):
    """Bytes of the cache tensor by the tokens that it really takes, every one of them with room of its own."""
    model = shaped(name, kv_heads)
    cache, full = (cache_of(m, num_blocks=210) for m in (model, shaped("transformer", kv_heads)))
    (allocator,) = cache.cache_allocators.values()
    while cache.pool.num_free_sectors:
        cache.pool.allocate_sector(allocator.index)
    tokens = cache.pool.count_free_blocks(allocator.index) * PAGE
    allocator.allocate_cache_to_request("all", 0, tokens)
    place = torch.tensor(allocator.get_write_indices("all", 0, tokens))
    assert cache.token_capacity == tokens == len(place.unique())

    bytes_per_token = (cache.cache_tensor.numel() - 2 * cache.bytes_per_sector) / tokens
    assert bytes_per_token == cache.bytes_per_token == kv_bytes(model.config, 1, dtype_bytes=4)
    ratio = kv_ratio(model.model.plan)
    assert bytes_per_token == pytest.approx(ratio * full.bytes_per_token)
    sector_tokens = cache.bytes_per_sector / cache.bytes_per_token
    assert full.token_capacity / ratio <= tokens < full.token_capacity / ratio + sector_tokens

    shape, states = model.config.shape(), {}
    for layer, pair in paged.page_heads(model.model.plan, shape, allocator.layer_indices).items():
        states[layer] = [torch.randn(tokens, heads, shape.head_dim) for heads in pair]
        allocator.update(*states[layer], layer, place[:0], place)
    nowhere = torch.tensor([allocator.write_trash_index])
    for layer, pair in states.items():
        back = allocator.update(*(state[:1] for state in pair), layer, place, nowhere)
        assert all(torch.equal(*both) for both in zip(back, pair, strict=True) if both[1].numel())


def test_half_the_cache_of_svformer_with_six_layers():
    small, full = (cache_of(make(name, num_hidden_layers=6), num_blocks=84) for name in ("svformer", "transformer"))
    assert (
        small.cache_tensor.numel() - 2 * small.bytes_per_sector == full.cache_tensor.numel() - 2 * full.bytes_per_sector
    )
    assert small.bytes_per_token / full.bytes_per_token == 7 / 12
    assert (small.token_capacity, full.token_capacity) == (576, 336)


def test_nothing_changes_for_other_models():
    from transformers.generation.continuous_batching import cache, continuous_api, initialization

    before = [vars(module).copy() for module in (cache, continuous_api, initialization)]
    create = continuous_api.ContinuousBatchingManager._create_batch_processor
    ours = shaped("svformer", 2).init_continuous_batching(settings(), batching())
    sizes = {name: value for name, value in SIZES.items() if name != "pad_token_id"}
    theirs = LlamaForCausalLM(LlamaConfig(**sizes)).eval().init_continuous_batching(settings(), batching())
    for manager in (ours, theirs):
        manager.warmup()
        manager.destroy()
    (mine,), (stock,) = (manager.batch_processor.cache.cache_allocators.values() for manager in (ours, theirs))
    assert type(mine) is paged.PlannedAllocator
    assert type(stock) is cache.FullAttentionCacheAllocator
    assert type(theirs.batch_processor.cache) is cache.PagedAttentionCache
    assert before == [vars(module) for module in (cache, continuous_api, initialization)]
    assert continuous_api.ContinuousBatchingManager._create_batch_processor is create
    # Where the plan stores everything, ours are the stock ones as well, with the kernels that read pages themselves.
    assert type(*cache_of(shaped("learnable", 2)).cache_allocators.values()) is cache.FullAttentionCacheAllocator


def test_layers_without_a_slot_get_the_lengths_too(monkeypatch):
    """Kernels for packed requests want the lengths of what a layer attends to; the cache says them to layers that
    store something.
    """
    model, seen = shaped("cla", 2), []
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def spy(module, *args, cu_seq_lens_k=None, max_length_k=None, **kwargs):
        if cu_seq_lens_k is not None:
            seen.append((module.layer_idx, type(cu_seq_lens_k), type(max_length_k)))
        return sdpa(module, *args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", spy)
    batched(model, TEXTS, settings())
    assert set(seen) == {(layer, torch.Tensor, int) for layer in range(SIZES["num_hidden_layers"])}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "svformer",
            {"sliding_window": 5, "sliding_layers": [1, 3]},
            "layer 1 has a window of 5, but attends to a slot",
        ),
        (
            "svformer",
            {"sliding_window": 5, "sliding_layers": [2, 4]},
            "layer 2 reads slots that slide and slots that do",
        ),
        (
            "learnable",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "'dynamic' turns",
        ),
    ],
)
def test_what_cannot_be_packed_is_refused(name, changes, message):
    with pytest.raises(UserError, match=message) as error:
        make(name, **changes).generate_batch(TEXTS, settings(), batching())
    assert "use model.generate" in str(error.value)


def test_settings_that_cannot_be_had_are_refused():
    with pytest.raises(UserError, match="num_beams is 3, but continuous batching has no beam search"):
        shaped("svformer", 2).generate_batch(TEXTS, settings(num_beams=3), batching())
    learned = make("svformer", position_embedding="learned")
    with pytest.raises(UserError, match="max_new_tokens 49 needs 65 positions, but the model has learned 64"):
        learned.generate_batch(TEXTS, settings(max_new_tokens=49), batching())


def test_a_transformers_that_works_differently_is_refused(monkeypatch):
    with pytest.raises(UserError, match=r"not what resformer knows \(.* does not use PagedAttentionCache\)"):
        paged.with_globals(lambda self: None, PagedAttentionCache=object)
    monkeypatch.setitem(sys.modules, "resformer.models.paged", None)
    with pytest.raises(UserError, match=r"is not what resformer knows .* use model.generate"):
        shaped("svformer", 2).generate_batch(TEXTS, settings(), batching())
