"""The benchmark's arithmetic, and that it runs; what it measures is for a quiet machine."""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path
from types import ModuleType

import pytest

from resformer.core.registry import names
from resformer.errors import UserError

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def load(name: str) -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        spec = importlib.util.spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def train_step() -> ModuleType:
    return load("train_step")


@pytest.fixture(scope="module")
def variants() -> ModuleType:
    return load("variants")


@pytest.fixture(scope="module")
def turns(train_step: ModuleType) -> ModuleType:
    return train_step.turns


def test_a_steady_ratio_is_found_though_the_machine_slows_down(train_step: ModuleType) -> None:
    now, rounds = [0.0], [0]

    def step(cost: float) -> None:
        rounds[0] += 1
        now[0] += cost * (1.0 if rounds[0] <= 12 else 3.0)  # rounds of two steps: the pairs stay whole

    found = train_step.compare(
        lambda: step(2.0), lambda: step(1.0), tokens=100, rounds=9, steps=1, warmup=1, clock=lambda: now[0], seed=0
    )
    assert found["ratio"] == found["ratio_lower_95"] == found["ratio_upper_95"] == pytest.approx(0.5)
    assert found["ours_tokens_per_second"] == pytest.approx(50.0)
    assert found["peer_tokens_per_second"] == pytest.approx(100.0)
    assert len(found["ratios"]) == 9


def test_rounds_count_and_warm_up_does_not(turns: ModuleType) -> None:
    now, calls = [0.0], {"left": 0, "right": 0}

    def step(name: str) -> None:
        calls[name] += 1
        now[0] += 100.0 if calls[name] <= 3 else 1.0

    times = turns.take_turns(
        lambda: step("left"), lambda: step("right"), rounds=4, steps=1, warmup=3, clock=lambda: now[0], seed=0
    )
    assert times == [(1.0, 1.0)] * 4
    assert calls == {"left": 7, "right": 7}


def test_the_fastest_step_of_a_round_counts(turns: ModuleType) -> None:
    now, calls = [0.0], [0]

    def step() -> None:
        calls[0] += 1
        now[0] += 9.0 if calls[0] % 6 in (1, 2) else 1.0  # two of six steps are disturbed: never all three of a side

    times = turns.take_turns(step, step, rounds=5, steps=3, warmup=0, clock=lambda: now[0], seed=0)
    assert times == [(1.0, 1.0)] * 5
    assert calls == [30]


def test_the_interval_holds_the_median_and_narrows_with_rounds(turns: ModuleType) -> None:
    draw = random.Random(1)
    few, many = ([draw.gauss(1.0, 0.1) for _ in range(n)] for n in (10, 200))
    widths = []
    for ratios in (few, many):
        lower, upper = turns.interval(ratios, seed=0)
        assert lower <= sorted(ratios)[len(ratios) // 2] <= upper
        widths.append(upper - lower)
    assert widths[1] < widths[0] / 2


def test_it_runs(train_step: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "step.json"
    code = train_step.main(
        layers=2,
        hidden_size=32,
        vocab_size=64,
        batch_size=2,
        sequence_length=16,
        rounds=3,
        warmup=1,
        json_file=target,
    )
    assert code == 0
    results = json.loads(target.read_text())["results"]
    assert [(r["ours"], r["peer"]) for r in results] == [(ours, peer) for ours, peer, _ in train_step.PAIRS]
    assert all(r["ratio"] > 0 and len(r["ratios"]) == 3 for r in results)
    assert capsys.readouterr().out.count("\n") == 6


def test_chosen_pairs_keep_their_bounds(train_step: ModuleType) -> None:
    assert train_step.chosen_pairs(()) == train_step.PAIRS
    chosen = train_step.chosen_pairs(("learnable:transformer", "gated:llama"))
    assert chosen == [("learnable", "transformer", 0.96), ("gated", "llama", None)]


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ("learnable", "expected OURS:PEER"),
        ("gatd:transformer", "did you mean 'gated'"),
        ("gated:lama", "did you mean 'llama'"),
        ("gated:gated", "with itself"),
    ],
)
def test_wrong_pairs_are_refused(train_step: ModuleType, pair: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        train_step.chosen_pairs((pair,))


def test_chosen_pairs_run(train_step: ModuleType, tmp_path: Path) -> None:
    target = tmp_path / "step.json"
    sizes = {"layers": 2, "hidden_size": 32, "heads": 2, "vocab_size": 64, "batch_size": 1, "sequence_length": 8}
    assert (
        train_step.main(pairs=("skipv1:transformer",), **sizes, rounds=2, warmup=0, json_file=target, strict=True) == 0
    )
    (result,) = json.loads(target.read_text())["results"]
    assert (result["ours"], result["peer"], result["must_be"]) == ("skipv1", "transformer", None)


def test_a_round_divides_by_the_neighbours(turns: ModuleType) -> None:
    """The machine slows down steadily; each variant's time over its two neighbours stays what it is."""
    now, taken = [0.0], [0]

    def step(cost: float) -> None:
        taken[0] += 1
        now[0] += cost * (1.0 + 0.01 * taken[0])

    others = {"twice": lambda: step(2.0), "same": lambda: step(1.0), "half": lambda: step(0.5)}
    done: list[int] = []
    times = turns.go_round(
        lambda: step(1.0), others, rounds=5, warmup=2, clock=lambda: now[0], seed=0, after_round=done.append
    )
    assert done == [1, 2, 3, 4, 5, 6, 7]
    for name, want in (("twice", 2.0), ("same", 1.0), ("half", 0.5)):
        assert [own / base for own, base in times[name]] == pytest.approx([want] * 5)
    assert taken[0] == 7 * (3 + 4)  # in a round: each of three, and the base before, between and after them


def test_variants_benchmark_runs_over_all_of_them(
    variants: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "results" / "variants.json"
    sizes = {"layers": 2, "hidden_size": 32, "heads": 2, "vocab_size": 64, "batch_size": 1, "sequence_length": 8}
    assert variants.main(**sizes, rounds=2, warmup=0, json_file=target) == 0
    found = json.loads(target.read_text())
    assert sorted(found["results"]) == sorted(names())
    assert found["results"]["attention_residual"]["attention"] == "eager"
    assert all(r["ratio"] > 0 for r in found["results"].values())
    assert {"date", "processor", "torch", "transformers"} <= found["about"].keys()
    out = capsys.readouterr().out
    assert all(f"\n{name} " in out for name in names())


def test_only_chosen_variants(variants: ModuleType) -> None:
    assert variants.chosen_variants("gated, learnable,gated,transformer") == ["gated", "learnable"]
    with pytest.raises(UserError, match="did you mean 'gated'"):
        variants.chosen_variants("gatd")


def test_decoding_is_compared_from_one_context(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "decode.json"
    shape = {"layers": 4, "hidden_size": 32, "vocab_size": 64}
    assert (
        load("decode").main(
            **shape,
            contexts=(24,),
            new_tokens=3,
            rounds=2,
            calls=1,
            pairs=("svformer:llama",),
            budget_mb=0,
            json_file=target,
            plot_file=tmp_path / "decode.png",
        )
        == 0
    )
    (measured,) = json.loads(target.read_text())["contexts"]
    models = measured["models"]
    assert list(models) == ["llama", "svformer"] and (tmp_path / "decode.png").stat().st_size > 1000
    assert models["llama"]["cache_bytes_per_token"] == 4 * 2 * 32 * 4  # layers, keys and values, width, fp32
    assert models["svformer"]["cache_bytes_per_token"] == (4 + 1) * 32 * 4
    assert len(measured["ratios"]["svformer:llama"]["ratios"]) == 2
    assert capsys.readouterr().out.count("\n") == 5


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is limited and read as Linux has it")
@pytest.mark.slow
def test_a_smaller_cache_holds_more_tokens_in_the_same_memory() -> None:
    decode = load("decode")
    shape = {"layers": 8, "hidden_size": 128, "vocab_size": 64, "sequence_length": 2**16}
    shape = decode.turns.sizes(**shape, heads=None, intermediate_size=None)
    held = decode.capacities(("transformer", "svformer"), shape, 24, 1)
    assert held["svformer"] > 1.3 * held["transformer"] > 0


def test_generation_is_compared_with_transformers_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generate, target = load("generate"), tmp_path / "generate.json"
    shape = {"layers": 2, "hidden_size": 32, "vocab_size": 64, "prompt_tokens": 4, "new_tokens": 3}
    assert generate.main(models=("svformer", "llama"), **shape, compile=False, rounds=2, json_file=target) == 0
    results = json.loads(target.read_text())["results"]
    assert [one["model"] for one in results] == ["svformer", "llama"]
    assert all(one["ratio"] > 0 and len(one["ratios"]) == 2 for one in results)
    assert capsys.readouterr().out.count("\n") == 5
    with pytest.raises(UserError, match="did you mean 'svformer'"):
        generate.main(models=("svforme",), **shape, compile=False)
