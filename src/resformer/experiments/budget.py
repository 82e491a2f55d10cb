"""What a suite would take, before anything is trained: GPU hours, memory, disk, and the lines that start it.

FLOPs are three forward passes of `accounting` (recomputation not counted), hours those at a share of a GPU's bf16 peak
(`train.estimate.MFU`), bytes decimal.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from resformer.experiments.spec import Planned
from resformer.models.accounting import account
from resformer.train.build import model_config
from resformer.train.config import Config
from resformer.train.configure import to_toml
from resformer.train.estimate import DEVICE_BYTES, MFU, PEAKS, estimate_memory
from resformer.train.setup import micro_batch_size

PAPER_VOCABULARY, OWN_VOCABULARY = 50_277, 4096  # of the paper's tokenizer, and of one that `data prepare` trains
NODE_DEVICES = 8  # of the machine that the first launch line is for
PLACEHOLDER = "DIR"  # for a corpus that nobody named
CPU_CORE = 60e9  # FLOP/s that a core did on the runs of `mini`, for suites that a CPU can run
CPU_HOURS = 1.0  # GPU hours below which a suite is one of these
CHECKPOINT_BYTES = 12  # for each parameter: the weight and two moments of AdamW in fp32; gradients are not written
EXPORT_BYTES = 4
ROW_BYTES = 300  # a row of metrics.jsonl, rounded up; lambdas make rows of validations longer
VALIDATION_ROWS = 10  # seven domains, their mean, lambdas

Named = tuple[str, int, Config]
"""Name and seed of a run, and its configuration."""


@dataclass(frozen=True, kw_only=True)
class RunBudget:
    """One run.

    Attributes:
        parameters: all of them, also experts that a token does not choose.
        tokens: of training.
        flops: floating-point operations of training.
        gpu_hours: GPU -> hours on one such GPU, at the usual share of its peak. Several take a share of them each.
        memory: bytes at the peak of a training step, of each process.
        disk: bytes of checkpoints (with the one that is being written), export and metrics.
    """

    name: str
    seed: int
    parameters: int
    tokens: int
    flops: float
    gpu_hours: Mapping[str, float]
    memory: int
    disk: int


@dataclass(frozen=True, kw_only=True)
class Budget:
    """A suite at a scale; totals are sums over runs, `memory` is the largest run's. `own_data`: the user brings no
    corpus.
    """

    suite: str
    scale: str
    processes: int
    own_data: bool
    runs: tuple[RunBudget, ...]

    @property
    def tokens(self) -> int:
        return sum(run.tokens for run in self.runs)

    @property
    def flops(self) -> float:
        return sum(run.flops for run in self.runs)

    @property
    def gpu_hours(self) -> dict[str, float]:
        return {gpu: sum(run.gpu_hours[gpu] for run in self.runs) for gpu in PEAKS}

    @property
    def memory(self) -> int:
        return max(run.memory for run in self.runs)

    @property
    def disk(self) -> int:
        return sum(run.disk for run in self.runs)


def budget(
    planned: Planned, configs: Iterable[Named], *, processes: int | None = None, vocab_size: int | None = None
) -> Budget:
    """What the runs of a suite would take.

    Args:
        planned: the suite at its scale.
        configs: its runs, in the order in which they are numbered.
        processes: GPUs of one run; the scale's when not given.
        vocab_size: of the corpus, where a configuration does not name one. When there is no corpus yet, that of the
            tokenizer which the suite would train, or, where the user brings the corpus, the paper's.

    Raises:
        UserError: a batch that the processes cannot share, or a model whose sizes make no sense.
    """
    scale = planned.scale
    processes = scale.processes if processes is None else processes
    if vocab_size is None:
        trained = scale.prepare_options.get("vocab_size", OWN_VOCABULARY)
        assert isinstance(trained, int)
        vocab_size = trained if scale.inputs else PAPER_VOCABULARY
    found: dict[str, RunBudget] = {}  # seeds differ in nothing that costs
    runs = []
    for name, seed, config in configs:
        alike = to_toml(replace(config, train=replace(config.train, seed=0)))
        if alike not in found:
            found[alike] = _one(name, seed, config, processes, vocab_size)
        runs.append(replace(found[alike], name=name, seed=seed))
    return Budget(
        suite=planned.suite.name,
        scale=planned.scale_name,
        processes=processes,
        own_data=bool(scale.inputs),
        runs=tuple(runs),
    )


def _one(name: str, seed: int, config: Config, processes: int, vocab_size: int) -> RunBudget:
    shard = config.parallel.shard or max(1, processes // config.parallel.replicate)
    shared = replace(
        config,
        train=replace(config.train, micro_batch_size=micro_batch_size(config, processes)),
        parallel=replace(config.parallel, shard=shard),
    )
    described = model_config(shared, vocab_size=vocab_size)
    costs = account(described, sequence_length=config.data.sequence_length)
    tokens = config.train.steps * config.train.batch_size * config.data.sequence_length
    flops = 3.0 * costs.flops_per_token * tokens
    return RunBudget(
        name=name,
        seed=seed,
        parameters=costs.parameters,
        tokens=tokens,
        flops=flops,
        gpu_hours={gpu: flops / (MFU * peak) / 3600 for gpu, peak in PEAKS.items()},
        memory=estimate_memory(shared, described).total,
        disk=_disk(config, costs.parameters),
    )


def _disk(config: Config, parameters: int) -> int:
    train = config.train
    saves = -(-train.steps // train.checkpoint_every)
    kept_for_good = train.steps // train.keep_every if train.keep_every else 0
    checkpoints = min(saves, train.keep_last + kept_for_good + 1)
    validations = -(-train.steps // train.validate_every)
    rows = train.steps + VALIDATION_ROWS * validations
    return parameters * (CHECKPOINT_BYTES * checkpoints + EXPORT_BYTES) + ROW_BYTES * rows


def launch_lines(
    found: Budget,
    *,
    typed: str = "",
    data: Path | str = PLACEHOLDER,
    out: Path | str | None = None,
    pool: Path | str | None = None,
    more: Sequence[str] = (),
) -> list[tuple[str, str]]:
    """What to type, with a word on what for: on one machine with 8 GPUs, and, one job a run, under Slurm.

    Args:
        found: the suite's budget.
        typed: how the user named the suite, where that is not its name.
        data: the prepared corpus; suites that bring their own need none.
        out: the suite's directory, runs/SCALE/NAME when not given.
        pool: where its runs lie, beside those of other suites; the directory above `out` when not given.
        more: further words of `resformer suite run` that the runs depend on, such as --seeds.
    """
    out = Path("runs") / found.scale / found.suite if out is None else Path(out)
    pool = out.parent if pool is None else Path(pool)
    name = typed or found.suite
    own = ["resformer", "suite", "run", name, "--scale", found.scale]
    places = ["--out", str(out), *(["--pool", str(pool)] if pool != out else [])]
    if found.own_data:
        named = [] if str(data) == PLACEHOLDER else ["--data", str(data)]
        return [("two runs at a time on a CPU", shlex.join([*own, *named, *places, "--jobs", "2", *more]))]
    node = ["--data", str(data), *places, "--processes", str(found.processes)]
    node += ["--jobs", str(max(1, NODE_DEVICES // found.processes)), *more]
    array = ["sbatch", f"--array=1-{len(found.runs)}", f"--gpus-per-node={found.processes}", "docs/slurm/suite.sbatch"]
    array += [name, found.scale, str(data), str(out), *places[2:], *more]
    return [
        (f"on one machine with {NODE_DEVICES} GPUs", shlex.join([*own, *node])),
        ("under Slurm, a job a run", shlex.join(array)),
    ]


def print_budget(
    found: Budget,
    *,
    typed: str = "",
    data: Path | str = PLACEHOLDER,
    out: Path | str | None = None,
    pool: Path | str | None = None,
    more: Sequence[str] = (),
    console: Console | None = None,
) -> None:
    """The runs as a table, totals, and how to start them; for the arguments see `launch_lines`."""
    console = console or Console(highlight=False, soft_wrap=True)
    seeds = len({run.seed for run in found.runs})
    title = f"suite {found.suite} at scale {found.scale}: {len(found.runs)} runs"
    console.print(_table(found, f"{title}, {seeds} seeds" if seeds > 1 else title))
    each = f", {found.processes} for each run" if found.processes > 1 else ""
    lines = [
        f"hours of one GPU at {MFU:.0%} of its bf16 peak{each}; scoring and analysing the models is not counted",
        *(f"on 8 {gpu}: {_duration(total / NODE_DEVICES)}" for gpu, total in found.gpu_hours.items()),
        "memory of each process, as eager code would take it; disk for checkpoints, exports and metrics of all runs",
    ]
    if max(found.gpu_hours.values()) < CPU_HOURS:
        hours = _duration(found.flops / CPU_CORE / 3600)
        lines[1:-1] = [f"on one CPU core that does {CPU_CORE / 1e9:.0f} GFLOP/s: {hours}"]
    over = [run.name for run in found.runs if run.memory > DEVICE_BYTES]
    if over:
        names = ", ".join(dict.fromkeys(over))
        lines.append(f"over 80 GB: {names}; a smaller train.micro_batch_size or train.checkpointing=true needs less")
    for line in lines:
        console.print(Text(line))
    for what, line in launch_lines(found, typed=typed, data=data, out=out, pool=pool, more=more):
        console.print(Text(f"\n{what}:\n  {line}"))


def _table(found: Budget, title: str) -> Table:
    table = Table(
        title=Text(title), title_justify="left", title_style="", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1)
    )
    table.add_column("run", overflow="fold", min_width=16)
    hours = [f"h, {gpu.partition(' or ')[0]}" for gpu in PEAKS]
    for column in ("params", "tokens", "FLOPs", *hours, "memory", "disk"):
        table.add_column(column, justify="right", no_wrap=True)
    names: dict[str, list[RunBudget]] = {}
    for run in found.runs:
        names.setdefault(run.name, []).append(run)
    for name, runs in names.items():
        label = name if len(runs) == 1 else f"{name} x {len(runs)}"
        table.add_row(label, _count(runs[0].parameters), *_cells(runs))
    table.add_section()
    table.add_row("all", "", *_cells(found.runs))
    return table


def _cells(runs: Sequence[RunBudget]) -> list[str]:
    """Sums over runs, but for memory, which is the largest."""
    hours = [f"{sum(run.gpu_hours[gpu] for run in runs):,.1f}" for gpu in PEAKS]
    return [
        _count(sum(run.tokens for run in runs)),
        f"{sum(run.flops for run in runs):.1e}".replace("e+", "e"),
        *hours,
        _bytes(max(run.memory for run in runs)),
        _bytes(sum(run.disk for run in runs)),
    ]


def _count(number: float) -> str:
    if number >= 1e9:
        return f"{number / 1e9:,.1f}B"
    return f"{number / 1e6:,.0f}M" if number >= 1e8 else f"{number / 1e6:,.2f}M"


def _bytes(number: int) -> str:
    for power, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if number >= power:
            return f"{number / power:,.1f} {unit}"
    return f"{number / 1e3:,.0f} kB"


def _duration(hours: float) -> str:
    if hours < 1:
        return f"{60 * hours:,.0f} min"
    return f"{hours:,.1f} h" if hours < 48 else f"{hours / 24:,.1f} days"
