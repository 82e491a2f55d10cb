"""The benchmark's arithmetic, and that it runs; what it measures is for a quiet machine."""

from __future__ import annotations

import importlib.util
import json
import random
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

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


def test_documents_scored_by_several_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoTokenizer

    from resformer import ResFormerConfig, ResFormerForCausalLM
    from resformer.data import prepare

    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"number {n} " * (1 + n % 5)}) + "\n" for n in range(60)))
    data = prepare([str(text)], tmp_path / "data", vocab_size=280, validation_share=0.3, progress=False)
    for name, seed in (("a", 0), ("b", 1)):
        torch.manual_seed(seed)
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = ResFormerConfig(vocab_size=280, max_position_embeddings=64, eos_token_id=0, **sizes)
        ResFormerForCausalLM(config).save_pretrained(tmp_path / name)
        AutoTokenizer.from_pretrained(data).save_pretrained(tmp_path / name)
    uptrain, found = load("uptrain"), tmp_path / "found.json"
    models = tuple(f"{name}={tmp_path / place}" for name, place in (("one", "a"), ("two", "b"), ("same", "a")))
    assert uptrain.main(models, data=data, tokens=16, json_file=found) == 0
    results = json.loads(found.read_text())["models"]
    assert results["same"]["against"] == {"model": "one", "difference": 0.0, "low": 0.0, "high": 0.0}
    against = results["two"]["against"]
    assert against["difference"] == pytest.approx(results["two"]["loss"] - results["one"]["loss"])
    assert against["low"] < against["difference"] < against["high"]
    assert results["one"]["tokens"] <= 16 * results["one"]["documents"]
    assert uptrain.main(("nameless",), data=data) == 2 and "expected NAME=MODEL" in capsys.readouterr().err


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


SMALL = {"layers": 2, "hidden_size": 32, "heads": 2, "intermediate_size": 48, "vocab_size": 512}


@pytest.fixture
def small_shape(train_step: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Both shapes of the comparison made tiny."""
    step_peers = train_step.step_peers
    shape = step_peers.Shape(**SMALL, batch_size=2, sequence_length=16)
    monkeypatch.setattr(step_peers, "SHAPES", {"cpu": shape, "82m": shape})
    return shape


def test_peers_get_the_same_batch_and_the_missing_ones_are_named(
    train_step: ModuleType,
    small_shape: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("accelerate")
    for module in ("litgpt", "x_transformers"):
        monkeypatch.setitem(sys.modules, module, None)
    target = tmp_path / "peers.json"
    models = ("transformer", "learnable", "hf-trainer", "litgpt", "x-transformers")
    assert train_step.step_peers.main(models=models, rounds=3, warmup=0, json_file=target) == 0
    found = json.loads(target.read_text())
    assert list(found["results"]) == ["transformer", "learnable", "hf-trainer"]
    assert found["results"]["transformer"]["base_is_faster_by"]["ratio"] == 1.0
    assert all(result["tokens_per_second"] > 0 and result["mfu"] > 0 for result in found["results"].values())
    said = capsys.readouterr()
    left_out = [line for line in said.err.splitlines() if "left out" in line]
    assert [line.split(":")[0] for line in left_out] == ["litgpt", "x-transformers"]
    assert all("pip install" in line for line in left_out)
    assert "is" in found["verdict"] and "hf-trainer" in found["verdict"]


def test_our_step_and_the_trainers_learn_alike(train_step: ModuleType, small_shape: Any) -> None:
    """Equal weights, batch, optimizer and clipping: the loss stays the same over steps."""
    pytest.importorskip("accelerate")
    peers, turns = train_step.step_peers.peers, train_step.turns
    tokens = turns.tokens(vocab_size=512, batch_size=2, sequence_length=16, seed=0)
    ours, theirs = (peers.build(name, small_shape, tokens) for name in ("transformer", "hf-trainer"))
    theirs.model.load_state_dict(ours.model.state_dict())
    losses = [(ours.step(), theirs.step()) for _ in range(4)]
    assert losses[-1][0] < losses[0][0]
    assert all(left == pytest.approx(right, rel=1e-4) for left, right in losses)


@pytest.mark.parametrize(("fastest", "lower", "reached"), [(1.3, 1.25, True), (1.3, 1.1, False), (0.9, 0.8, False)])
def test_the_fastest_other_library_counts(train_step: ModuleType, fastest: float, lower: float, reached: bool) -> None:
    def result(ratio: float, low: float) -> dict[str, Any]:
        return {"base_is_faster_by": {"ratio": ratio, "ratio_lower_95": low, "ratio_upper_95": ratio + 0.1}}

    results = {
        "transformer+compile": result(1.0, 1.0),
        "learnable": result(0.5, 0.4),  # ours as well: no rival
        "litgpt": result(1.9, 1.8),
        "hf-trainer+compile": result(fastest, lower),
    }
    found, said = train_step.step_peers.judge(results, "transformer+compile")
    assert found is reached
    assert "hf-trainer+compile" in said and ("reaches" if reached else "MISSES") in said


def test_peers_are_known_by_name(train_step: ModuleType) -> None:
    check = train_step.step_peers.peers.check_name
    check("litgpt+compile")
    check("dense+compile")
    with pytest.raises(UserError, match="did you mean 'litgpt'"):
        check("litgtp+compile")


def test_peak_memory_is_that_of_the_tensors(turns: ModuleType) -> None:
    kept = torch.zeros(1000)

    def work() -> None:
        first = torch.zeros(250_000)  # 1 MB
        second = first + 1
        del first
        second.add_(1).sum()
        kept.add_(1)

    assert turns.peak_allocated(work) == pytest.approx(2e6, rel=0.01)


def test_the_loss_takes_less_memory_than_whole_logits(
    train_step: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "litgpt", None)
    target = tmp_path / "memory.json"
    sizes = {"vocab_size": 2000, "hidden_size": 16, "batch_size": 4, "sequence_length": 1024}
    assert train_step.step_memory.main(**sizes, repeats=1, json_file=target, strict=True) == 0
    results = json.loads(target.read_text())["results"]
    assert list(results) == ["ours", "hf-trainer", "plain"]
    assert results["plain"]["peak_bytes"] > 2 * 4 * 4096 * 2000 > 2 * results["ours"]["peak_bytes"]
    assert len({round(result["loss"], 4) for result in results.values()}) == 1


def test_the_grid_measures_each_shape_once(
    train_step: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = train_step.step_grid
    small = grid.Shape(**SMALL, batch_size=2, sequence_length=16)
    shapes = {"a": small, "b": grid.replace(small, layers=4), "again": small}
    monkeypatch.setattr(grid, "grid", lambda: shapes)
    target = tmp_path / "grid.json"
    assert grid.main(model="transformer", rounds=1, warmup=0, json_file=target) == 0
    results = json.loads(target.read_text())["results"]
    assert results["again"] == results["a"]
    head = 3 * 2 * 32 * 32 * 512  # 3 passes, 2 a multiply-add, 32 tokens
    assert results["b"]["flops"] - head == 2 * (results["a"]["flops"] - head)


def test_the_grid_changes_one_size_at_a_time(train_step: ModuleType) -> None:
    base = train_step.step_peers.SHAPES["cpu"]
    shapes = train_step.step_grid.grid()
    assert {shape.tokens for shape in shapes.values()} == {base.tokens}
    assert sum(shape == base for shape in shapes.values()) == 3
    assert {shape.hidden_size // shape.heads for shape in shapes.values()} == {32}


def test_the_loops_share_is_what_is_not_the_models(
    train_step: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop that sleeps 20 ms a step has an overhead of at least that."""
    from resformer.train import fit

    loop, target = train_step.step_loop, tmp_path / "loop.json"
    shape = loop.Shape(**SMALL, batch_size=2, sequence_length=16)
    real = fit.set_learning_rate

    def slow(*args: Any, **kwargs: Any) -> float:
        time.sleep(0.02)
        return real(*args, **kwargs)

    monkeypatch.setattr(fit, "set_learning_rate", slow)
    assert loop.main(sizes=shape, steps=4, warmup=1, compile=False, json_file=target, strict=True) == 1
    results = json.loads(target.read_text())["results"]
    assert len(results["whole_seconds"]) == len(results["bare_seconds"]) == 4
    # The share is of each step by itself: of the longest one it is 20 ms or more, whatever else the machine does.
    assert 0.02 / max(results["whole_seconds"]) <= results["outside"]["ratio"] < 1
