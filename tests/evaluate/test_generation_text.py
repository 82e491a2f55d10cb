"""Texts as they come: stop texts, characters of several tokens, streaming, statistics, peak memory."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest
import torch
from generation_helpers import build_model, build_tokenizer, speak

from resformer.evaluate.generation import generate, generate_many
from resformer.evaluate.process_memory import PeakMemory
from resformer.evaluate.progress import Row, held_back


class Slips(io.StringIO):
    """Keeps what each write brought."""

    def __init__(self) -> None:
        super().__init__()
        self.slips: list[str] = []

    def write(self, text: str) -> int:
        self.slips.append(text)
        return super().write(text)


@pytest.fixture
def parrot() -> Any:
    model, tokenizer = build_model(), build_tokenizer()
    speak(model, tokenizer, "abcdefgh")
    return model, tokenizer


def test_a_stop_text_ends_before_itself_and_is_never_shown(parrot: Any) -> None:
    model, tokenizer = parrot
    sink = Slips()
    done = generate(model, tokenizer, "x", max_new_tokens=30, temperature=0.0, stop=["def", "cx"], stream_to=sink)
    assert (done.text, done.finish) == ("abc", "stop")
    assert sink.getvalue() == "abc"
    assert sink.slips == ["a", "b", "c"]  # the c waited until d showed that no "cx" had begun
    assert len(done.tokens) == 6


def test_what_only_might_have_been_a_stop_text_is_shown_after_all(parrot: Any) -> None:
    model, tokenizer = parrot
    sink = Slips()
    done = generate(model, tokenizer, "x", max_new_tokens=5, temperature=0.0, stop=["bcx", "efz"], stream_to=sink)
    assert (done.text, done.finish) == (sink.getvalue(), "length") == ("abcde", "length")
    assert sink.slips == ["a", "bcd", "e"]


def test_the_first_stop_text_counts_and_the_prompt_does_not(parrot: Any) -> None:
    model, tokenizer = parrot
    done = generate(model, tokenizer, "gha", max_new_tokens=20, temperature=0.0, stop=["ha", "fg", "efgh"])
    assert (done.text, done.finish) == ("bcde", "stop")


def test_rows_of_a_batch_end_alone(parrot: Any) -> None:
    model, tokenizer = parrot
    made = generate_many(model, tokenizer, ["xxxxb", "g"], max_new_tokens=7, temperature=0.0, stop=["ab"])
    assert [(one.text, one.finish, len(one.tokens)) for one in made] == [
        ("cdefgha", "length", 7),
        ("h", "stop", 3),
    ]


def test_the_end_of_text_token_is_no_text() -> None:
    model, tokenizer = build_model(), build_tokenizer()
    tokenizer.eos_token = "d"
    speak(model, tokenizer, "abcdefgh")
    sink = io.StringIO()
    done = generate(model, tokenizer, "x", max_new_tokens=9, temperature=0.0, stop=["cz"], stream_to=sink)
    assert (done.text, done.finish, sink.getvalue()) == ("abc", "end", "abc")
    assert done.tokens[-1] == tokenizer.eos_token_id


def test_the_models_own_ends_count_too(parrot: Any) -> None:
    model, tokenizer = parrot
    model.generation_config.eos_token_id = [256, tokenizer("c")["input_ids"][0]]
    done = generate(model, tokenizer, "x", max_new_tokens=9, temperature=0.0)
    assert (done.text, done.finish) == ("ab", "end")


@pytest.mark.parametrize("text", ["gr\u00fc\u00df dich \U0001f600!", "\u4f60\u597d a\u0301", "plain"])
def test_characters_of_several_tokens_come_whole(text: str) -> None:
    tokenizer, sink = build_tokenizer(), Slips()
    ids = tokenizer(text)["input_ids"]
    row = Row(tokenizer, tokenizer("so: ")["input_ids"], end_ids=frozenset(), stop=(), max_new_tokens=99, sink=sink)
    for token in ids:
        row.add(token)
    row.close()
    assert row.text == sink.getvalue() == text
    assert sink.slips == list(text)
    quiet = Row(tokenizer, [], end_ids=frozenset(), stop=(), max_new_tokens=99)
    for token in ids[:-1]:
        quiet.add(token)
    quiet.close()
    assert quiet.text == tokenizer.decode(ids[:-1])


@pytest.mark.parametrize(
    ("text", "stop", "held"),
    [("abc", ["cd"], 1), ("abc", ["bcd", "cx"], 2), ("abc", ["abc"], 0), ("aa", ["aab"], 2), ("", ["x"], 0)],
)
def test_held_back(text: str, stop: list[str], held: int) -> None:
    assert held_back(text, stop) == held


def test_interrupted_text_is_shown_as_far_as_it_went(parrot: Any) -> None:
    model, tokenizer = parrot
    inner, calls = model.forward, []

    def forward(*given: Any, **more: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return inner(*given, **more)

    model.forward = forward
    sink = io.StringIO()
    with pytest.raises(KeyboardInterrupt):
        generate(model, tokenizer, "x", max_new_tokens=9, temperature=0.0, stop=["cz"], stream_to=sink)
    assert sink.getvalue() == "abc"


def test_statistics_count_all_rows_of_a_batch() -> None:
    made = generate_many(
        build_model("svformer"),
        build_tokenizer(),
        ["abc", "a"],
        num_samples=2,
        max_new_tokens=5,
        temperature=0.0,
        warm_up=True,
        measure_memory=True,
    )
    cost = made[0].cost
    assert all(one.cost is cost for one in made)
    assert (cost.sequences, cost.prompt_tokens, cost.new_tokens) == (4, 3 + 3 + 1 + 1, 20)
    assert cost.cache_tokens == 3 + 4
    assert cost.cache_bytes == 4 * 7 * 5 * 2 * 8 * 4  # sequences, tokens, planes, KV heads, head dim, fp32
    assert cost.cache_bytes_per_token == 5 * 2 * 8 * 4
    assert cost.prefill_tokens_per_second == pytest.approx(8 / cost.prefill_seconds)
    assert cost.decode_tokens_per_second == pytest.approx(16 / cost.decode_seconds)
    assert cost.peak_memory is not None and cost.peak_memory.added_bytes >= 0


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's mark can be reset on Linux only")
def test_peak_memory_counts_what_came_and_went() -> None:
    torch.ones(96 * 2**20, dtype=torch.uint8)  # an earlier, higher mark
    watch = PeakMemory()
    assert watch.resettable
    assert watch.peak().added_bytes < 16 * 2**20
    torch.ones(64 * 2**20, dtype=torch.uint8)
    found = watch.peak()
    assert 56 * 2**20 < found.added_bytes < 96 * 2**20
    assert found.source == "resident memory"
