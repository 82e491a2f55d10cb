"""What a suite would take, against arithmetic by hand."""

from __future__ import annotations

import dataclasses
import io
import shlex
from pathlib import Path

import pytest
from rich.console import Console

from resformer import cli, shell
from resformer.errors import UserError
from resformer.experiments.budget import Budget, Named, RunBudget, budget, launch_lines, print_budget
from resformer.experiments.settings import resolve
from resformer.experiments.spec import Planned, RunSpec, Scale, Suite
from resformer.lookup import suites
from resformer.train.build import model_config
from resformer.train.config import Config, DataConfig, ModelConfig, TrainConfig
from resformer.train.configure import edit
from resformer.train.estimate import estimate_memory
from resformer.train.usage import A100, H100_SXM

# Two layers, no tricks: numbers that fit on paper.
PLAIN = Config(
    model=ModelConfig(
        variant="transformer", hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2
    ),
    data=DataConfig(sequence_length=16),
    train=TrainConfig(steps=10, batch_size=8, checkpoint_every=4, validate_every=5),
)
PARAMETERS = 100 * 8 * 2 + 2 * (4 * 8 * 8 + 3 * 8 * 12) + 5 * 8  # embedding and head, blocks, norms
FORWARD = 2 * (2 * (4 * 8 * 8 + 3 * 8 * 12) + 100 * 8 + 2 * 2 * 8 * 16)  # products: blocks, head, scores over 16 tokens


def plan(*, inputs: tuple[str, ...] = (), processes: int = 1, **prepare: object) -> Planned:
    scale = Scale(recipe="r", inputs=inputs, processes=processes, prepare_options=prepare)
    suite = Suite(
        name="s", title="t", scales={"big": scale}, runs=(RunSpec(variant="transformer"),), baseline="transformer"
    )
    return suite.at("big")


def one(config: Config = PLAIN, *, processes: int = 1, vocab_size: int | None = 100) -> RunBudget:
    (found,) = budget(plan(), [("run", 0, config)], processes=processes, vocab_size=vocab_size).runs
    return found


def configs(name: str, scale: str) -> tuple[Planned, list[Named]]:
    planned = suites()[name].at(scale)
    return planned, [(found.spec.name, found.seed, found.config) for found in resolve(planned, "data")]


def test_parameters_tokens_and_arithmetic() -> None:
    found = one()
    assert found.parameters == PARAMETERS
    assert found.tokens == 10 * 8 * 16
    assert found.flops == 3 * FORWARD * 10 * 8 * 16
    hours = {"A100": found.flops / (0.4 * A100) / 3600, "H100 or H200": found.flops / (0.4 * H100_SXM) / 3600}
    assert found.gpu_hours == pytest.approx(hours)


@pytest.mark.parametrize(
    ("changes", "checkpoints"),
    [
        ({}, 3),  # after steps 4, 8 and 10: the two kept and the one that is written
        ({"train.keep_last": 1}, 2),
        ({"train.checkpoint_every": 10}, 1),
        ({"train.checkpoint_every": 1, "train.keep_every": 5}, 5),  # 5 and 10 for good
    ],
)
def test_disk(changes: dict[str, object], checkpoints: int) -> None:
    rows = 10 + 10 * 2  # training, and two validations
    assert one(edit(PLAIN, changes)).disk == PARAMETERS * (12 * checkpoints + 4) + 300 * rows


def test_disk_is_that_of_a_real_run(tmp_path: Path) -> None:
    """A checkpoint has twelve bytes a parameter and some for names; an export four."""
    from resformer.data import prepare
    from resformer.train.loop import train

    text = tmp_path / "a.jsonl"
    text.write_text("".join(f'{{"text": "line {i} of a text, {i * i}, that nobody reads"}}\n' for i in range(2000)))
    prepare([text], tmp_path / "data", vocab_size=300, progress=False)
    wide = edit(PLAIN, {"model.hidden_size": 64, "train.steps": 2, "train.checkpoint_every": 1, "train.threads": 1,
                        "optim.warmup_steps": 1, "data.dir": str(tmp_path / "data")})  # fmt: skip
    train(wide, tmp_path / "run")
    size = {path: path.stat().st_size for path in (tmp_path / "run").rglob("*.safetensors")}
    told = one(wide, vocab_size=300)
    exported = sum(n for path, n in size.items() if path.parent.name == "model")
    assert exported / (4 * told.parameters) == pytest.approx(1, abs=0.05)
    assert sum(size.values()) - exported == pytest.approx(2 * 12 * told.parameters, rel=0.1)


def test_memory_is_the_estimate_of_one_process() -> None:
    described = model_config(PLAIN, vocab_size=100)
    alone = estimate_memory(PLAIN, described)
    assert one().memory == alone.total
    # Four processes: a quarter of the states, and two sequences of the batch of eight.
    quarter = estimate_memory(edit(PLAIN, {"train.micro_batch_size": 2, "parallel.shard": 4}), described)
    assert one(processes=4).memory == quarter.total
    assert quarter.states == 16 * PARAMETERS // 4 == alone.states // 4
    # Two copies of two processes each share by two.
    two = estimate_memory(edit(PLAIN, {"train.micro_batch_size": 2, "parallel.shard": 2}), described)
    assert one(edit(PLAIN, {"parallel.replicate": 2}), processes=4).memory == two.total
    ddp = edit(PLAIN, {"parallel.shard": 1, "parallel.replicate": 4})
    assert one(ddp, processes=4).memory == two.total + 16 * PARAMETERS // 2


def test_a_batch_that_processes_cannot_share_is_refused() -> None:
    with pytest.raises(UserError, match=r"train\.batch_size 8 cannot be shared by 3 processes"):
        one(processes=3)


def test_the_vocabulary_is_that_of_the_corpus_the_configuration_or_what_is_to_be_expected() -> None:
    def head(planned: Planned, config: Config = PLAIN, **given: int) -> int:
        blocks_and_norms = PARAMETERS - 1600
        return (budget(planned, [("run", 0, config)], **given).runs[0].parameters - blocks_and_norms) // 16

    assert head(plan()) == 50_277
    assert head(plan(inputs=("embedded",))) == 4096
    assert head(plan(inputs=("embedded",), vocab_size=512)) == 512
    assert head(plan(), vocab_size=100) == 100
    assert head(plan(), edit(PLAIN, {"model.vocab_size": 128}), vocab_size=100) == 128


def test_totals_are_sums_over_runs_and_seeds() -> None:
    named = [("a", 0, PLAIN), ("a", 1, edit(PLAIN, {"train.seed": 1})), ("b", 0, edit(PLAIN, {"train.steps": 20}))]
    found = budget(plan(), named, vocab_size=100)
    assert [(run.name, run.seed) for run in found.runs] == [("a", 0), ("a", 1), ("b", 0)]
    single = one()
    assert found.tokens == 4 * single.tokens and found.flops == 4 * single.flops
    assert found.gpu_hours["A100"] == pytest.approx(4 * single.gpu_hours["A100"])
    assert found.memory == single.memory
    assert found.disk == sum(run.disk for run in found.runs) > 3 * single.disk


def first(name: str, scale: str) -> Budget:
    """The budget of a suite's first run, the Transformer, alone: counting what a model saves takes a second each."""
    planned, named = configs(name, scale)
    return budget(planned, named[:1])


def test_variants_at_small_are_a_day_of_an_a100_for_each_seed() -> None:
    found = first("variants", "small")
    weights = 8 * (4 * 512**2 + 3 * 512 * 1792) + 50_277 * 512 + 8 * 2 * 512 * 2048
    assert found.flops == 3 * 2 * weights * 4000 * 256 * 2048
    assert found.gpu_hours["A100"] == pytest.approx(2.04, abs=0.01)
    assert 20 < len(suites()["variants"].runs) * found.gpu_hours["A100"] < 26
    assert found.memory < 80e9 and found.processes == 1


def test_the_papers_468m_fits_eight_gpus() -> None:
    found = first("variants", "paper")
    weights = 24 * (4 * 1024**2 + 3 * 1024 * 3584) + 50_277 * 1024 + 24 * 2 * 1024 * 2048
    assert found.flops == 3 * 2 * weights * 10_000 * 2**21
    assert found.tokens == 10_000 * 2**21
    assert found.processes == 8 and found.memory < 80e9
    assert found.disk == pytest.approx(467_921_920 * (3 * 12 + 4), rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in suites() if name != "quick"])
@pytest.mark.parametrize("scale", ["small", "paper"])
def test_every_run_fits_a_gpu_of_80_gb(name: str, scale: str) -> None:
    planned, named = configs(name, scale)
    assert max(run.memory for run in budget(planned, named).runs) < 80e9


def made(*, processes: int, own_data: bool = False, memory: int = 10**9, hours: float = 100.0) -> Budget:
    run = RunBudget(
        name="a",
        seed=0,
        parameters=10**6,
        tokens=10**9,
        flops=hours * 3600 * 0.4 * A100,
        gpu_hours={"A100": hours, "H100 or H200": hours / 3},
        memory=memory,
        disk=10**9,
    )
    runs = (run, dataclasses.replace(run, seed=1), dataclasses.replace(run, name="b"))
    return Budget(suite="where", scale="paper", processes=processes, own_data=own_data, runs=runs)


def test_lines_that_start_it() -> None:
    (_, node), (_, array) = launch_lines(made(processes=8), data="d a", out="o/where")
    assert node == "resformer suite run where --scale paper --data 'd a' --out o/where --pool o --processes 8 --jobs 1"
    assert array == ("sbatch --array=1-3 --gpus-per-node=8 docs/slurm/suite.sbatch where paper 'd a' o/where --pool o")
    (_, node), (_, array) = launch_lines(made(processes=1), out="o", pool="o", more=["--seeds", "0", "1"])
    assert node.endswith("--data DIR --out o --processes 1 --jobs 8 --seeds 0 1")
    assert array.endswith("--gpus-per-node=1 docs/slurm/suite.sbatch where paper DIR o --seeds 0 1")
    ((_, line),) = launch_lines(made(processes=1, own_data=True))
    assert line == "resformer suite run where --scale paper --out runs/paper/where --pool runs/paper --jobs 2"
    ((_, other),) = launch_lines(made(processes=1, own_data=True), data="mine", out="o", pool="o")
    assert other == "resformer suite run where --scale paper --data mine --out o --jobs 2"
    for command in (node, line, other):
        words = shlex.split(command)[3:]
        shell.parse(cli.COMMANDS["suite run"], words, program="resformer suite run")


def printed(found: Budget) -> str:
    out = io.StringIO()
    print_budget(found, console=Console(file=out, width=140, soft_wrap=True))
    return out.getvalue()


def test_what_is_printed() -> None:
    text = printed(made(processes=8, memory=90 * 10**9))
    assert "suite where at scale paper: 3 runs, 2 seeds" in text
    assert "a x 2" in text and "1.00M" in text
    assert "on 8 A100: 37.5 h" in text and "8 for each run" in text
    assert "over 80 GB: a, b; a smaller train.micro_batch_size" in text
    assert "resformer suite run where" in text and "sbatch --array=1-3" in text
    small = printed(made(processes=1, own_data=True, hours=0.001))
    assert "on one CPU core" in small and "over 80 GB" not in small and "sbatch" not in small
    assert "300.0 h" in printed(made(processes=1)) or "12.5 days" in printed(made(processes=1, hours=800))
