"""Loss by domain: against plain arithmetic, and independent of how it is cut."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from resformer import ResFormerConfig, ResFormerForCausalLM
from resformer.errors import UserError
from resformer.evaluate.loss import Interrupted, evaluate, scored
from resformer.evaluate.windows import slide
from resformer.parallel.ranks import Ranks

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
    "initializer_range": 0.3,
}
LENGTHS = {"a": 40 * 12 + 5, "b": 7}


@dataclass(frozen=True)
class Window:
    tokens: np.ndarray
    mask: np.ndarray


class Corpus:
    """Stands in for a prepared corpus: 40 windows and a bit in one domain, less than one in the other."""

    vocab_size = 61
    domains = ("a", "b")

    def validation(self, domain: str, *, sequence_length: int, max_tokens: int | None = None) -> Iterator[Window]:
        draw = np.random.default_rng(len(domain) + ord(domain))
        count = min(LENGTHS[domain], max_tokens or LENGTHS[domain])
        for start in range(0, count, sequence_length):
            tokens = draw.integers(0, 61, sequence_length + 1)
            yield Window(tokens, np.arange(sequence_length) < count - start)

    def validation_bytes(self, domain: str, *, sequence_length: int, max_tokens: int | None = None) -> int:
        return 3 * min(LENGTHS[domain], max_tokens or LENGTHS[domain])


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES))  # type: ignore[arg-type]


def ours() -> ResFormerForCausalLM:
    torch.manual_seed(0)
    return ResFormerForCausalLM(ResFormerConfig(variant="svformer", **SIZES))  # type: ignore[arg-type]


def reference(model: torch.nn.Module, domain: str) -> tuple[float, int]:
    """Window by window, token by token, in float64."""
    model = model.double().eval()
    total, count = 0.0, 0
    for window in Corpus().validation(domain, sequence_length=12):
        length = int(window.mask.sum())
        ids = torch.from_numpy(window.tokens[: length + 1])[None]
        with torch.no_grad():
            logp = model(input_ids=ids[:, :-1], use_cache=False).logits[0].log_softmax(-1)
        total -= sum(logp[t, ids[0, t + 1]].item() for t in range(length))
        count += length
    return total, count


@pytest.mark.parametrize("make", [llama, ours])
@pytest.mark.parametrize("batch_size", [1, 3, 8, 100])
def test_any_batch_size_gives_the_same_numbers(make: type, batch_size: int) -> None:
    found = evaluate(make(), Corpus(), sequence_length=12, batch_size=batch_size)
    totals = {domain: reference(make(), domain) for domain in "ab"}
    for domain, (nll, count) in totals.items():
        assert found["domains"][domain]["tokens"] == count == LENGTHS[domain]
        assert found["domains"][domain]["loss"] == pytest.approx(nll / count, abs=1e-5)
        assert found["domains"][domain]["bits_per_byte"] == pytest.approx(nll / math.log(2) / (3 * count), abs=1e-5)
    means = [nll / count for nll, count in totals.values()]
    assert found["loss"] == pytest.approx(sum(means) / 2, abs=1e-5)
    assert found["bits_per_byte"] == pytest.approx(sum(means) / 2 / math.log(2) / 3, abs=1e-5)
    weighted = sum(nll for nll, _ in totals.values()) / sum(count for _, count in totals.values())
    assert found["loss_token_weighted"] == pytest.approx(weighted, abs=1e-5)
    assert abs(found["loss_token_weighted"] - found["loss"]) > 1e-3


def test_padding_does_not_count_whatever_is_in_it() -> None:
    class Other(Corpus):
        def validation(self, domain: str, *, sequence_length: int, max_tokens: int | None = None) -> Iterator[Window]:
            for window in super().validation(domain, sequence_length=sequence_length, max_tokens=max_tokens):
                tokens = window.tokens.copy()
                tokens[1:][~window.mask] = 5
                yield Window(tokens, window.mask)

    one = evaluate(llama(), Corpus(), sequence_length=12, batch_size=4)
    assert evaluate(llama(), Other(), sequence_length=12, batch_size=4) == one


def test_max_tokens_and_the_models_mode() -> None:
    model = llama().train()
    found = evaluate(model, Corpus(), sequence_length=12, batch_size=4, max_tokens=30)
    assert {d["tokens"] for d in found["domains"].values()} == {30, 7}
    assert model.training
    assert all(p.grad is None for p in model.parameters())


def test_a_stop_between_batches() -> None:
    model, asked = llama().train(), []

    def stop() -> bool:
        asked.append(1)
        return len(asked) > 2

    with pytest.raises(Interrupted):
        evaluate(model, Corpus(), sequence_length=12, batch_size=4, stop=stop)
    assert len(asked) == 3
    assert model.training


@pytest.mark.parametrize("name", ["sequence_length", "batch_size", "max_tokens"])
def test_a_number_below_1_is_named(name: str) -> None:
    numbers = {"sequence_length": 12, "batch_size": 4, name: 0}
    with pytest.raises(UserError, match=f"^{name} is 0, expected 1 or more$"):
        evaluate(llama(), Corpus(), **numbers)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(UserError, match="the model knows 61 tokens, the corpus has 100"):
        evaluate(llama(), type("Big", (Corpus,), {"vocab_size": 100})(), sequence_length=12, batch_size=4)
    with pytest.raises(UserError, match="sequence length 17 is over the model's 16 positions"):
        evaluate(llama(), Corpus(), sequence_length=17, batch_size=4)
    with pytest.raises(UserError, match="domain 'a' has no validation text"):
        evaluate(
            llama(),
            type("No", (Corpus,), {"validation": lambda *_, **__: iter(())})(),
            sequence_length=12,
            batch_size=4,
        )


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_processes_run_as_many_forward_passes_on_the_same_batches(size: int) -> None:
    """Five windows of different lengths at batch size 2: none waits for another, each window is scored once."""
    windows = [window for n in range(5) for window in slide([np.arange(3 + n)], first=1, length=12, item=n)]
    found: list[list[tuple[int, float]]] = []
    calls: list[int] = []
    for rank in range(size):
        model, seen = llama(), []
        model.register_forward_hook(lambda *_, seen=seen: seen.append(1))
        rows: list[tuple[int, float]] = []
        for batch, losses_BT, mask_BT in scored(
            model, windows, batch_size=2, device=torch.device("cpu"), ranks=Ranks(rank=rank, size=size)
        ):
            assert losses_BT.shape == mask_BT.shape == (len(batch), max(len(window.mask) for window in batch))
            rows += [(one.item, float(loss)) for one, loss in zip(batch, losses_BT.sum(dim=1), strict=True)]
        found.append(rows)
        calls.append(len(seen))
    assert len(set(calls)) == 1 and calls[0] == math.ceil(3 / size)
    alone = [
        (one.item, float(losses.sum()))
        for batch, losses, _ in scored(llama(), windows, batch_size=1, device=torch.device("cpu"))
        for one in batch
    ]
    together = sorted(pair for rows in found for pair in rows)
    assert [item for item, _ in together] == [item for item, _ in alone] == list(range(5))
    assert [loss for _, loss in together] == pytest.approx([loss for _, loss in alone], abs=1e-4)
