"""The command that proposes a Sparse model from the lambdas of a learned one."""

from __future__ import annotations

import json as json_module
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resformer import lookup, tables
from resformer.errors import UserError

if TYPE_CHECKING:
    from resformer.analyze.proposals import Proposal


def analyze_lambdas(run: Path, /, *, json: bool = False, import_: tuple[Path, ...] = ()) -> None:
    """Propose layers and strength of a Sparse model from the lambdas that a short run has learned.

    Reads the history of lambdas in metrics.jsonl, or of an exported model its weights as they are. The layers are the
    fewest that hold 5/9 of all strength of V_1 above the weakest layer's; they take over the whole budget of V_1.
    docs/analysis.md gives the reasons, and what the words of confidence mean.

    Example: `resformer analyze-lambdas runs/learnable`

    Args:
        run: A run directory of learnable, learnable_plus or dense, or an exported directory of one.
        json: Print one JSON object instead of tables.
        import_: A Python file of yours that registers variants (@register_variant), run before anything is loaded; may
            be given several times.
    """
    from resformer.analyze.proposals import propose

    found = _History(run, import_)
    proposal = propose(found.rows, depth=found.depth, source=found.source, name=str(run))
    command = _command(run, found.recipe, proposal)
    if json:
        print(json_module.dumps({"run": str(run), "variant": found.variant, **proposal.asdict(), "command": command}))
    else:
        _show(run, found.variant, proposal, command)


class _History:
    """The lambdas of a run and what is known of its model."""

    def __init__(self, run: Path, imports: tuple[Path, ...]) -> None:
        self.rows: list[dict[str, Any]] = []
        self.depth: int | None = None
        self.source: Any = None
        self.variant, self.recipe = "", ""
        if (run / "metrics.jsonl").is_file():
            self.read(run)
        elif (run / "config.json").is_file():
            self.load(run, imports)
        else:
            raise UserError(f"{run}: is no run (metrics.jsonl) and no exported model (config.json); give one of these")

    def read(self, run: Path) -> None:
        """The rows of a run."""
        from resformer.analyze.curves import read_json, read_run

        curves = read_run(run)
        model = curves.config.get("model", {})
        self.rows, self.depth = [dict(row) for row in curves.lambdas], curves.layers
        self.variant = str(model.get("variant") or "")
        self.source = (model.get("variant_options") or {}).get("source")
        environment = read_json(run / "environment.json")
        words = environment.get("command") or []
        self.recipe = str(words[2]) if len(words) > 2 and words[1] == "train" else ""
        if not self.rows:
            raise UserError(
                f"{run}: its metrics hold no lambdas (variant {self.variant or 'unknown'}); give a run of learnable, "
                "learnable_plus or dense that was validated at least once"
            )
        groups = (environment.get("accounting") or {}).get("parameters_by_group") or {}
        if groups.get("lambdas") == 0:
            raise UserError(f"{run}: variant {self.variant} has fixed weights; give a run that learns them (learnable)")

    def load(self, run: Path, imports: tuple[Path, ...]) -> None:
        """The weights of an exported model, as one row."""
        lookup.import_variants(imports, using=(run,))
        lookup.quiet_libraries()
        from resformer.evaluate.loading import load_model
        from resformer.models.groups import group_of

        model, _ = load_model(str(run), "cpu")
        table = model.lambda_map() if hasattr(model, "lambda_map") else {}
        if not table:
            raise UserError(f"{run}: the model has no lambdas; give one of learnable, learnable_plus or dense")
        self.variant = str(getattr(model.config, "variant", ""))
        if not any(group_of(name, p) == "lambdas" for name, p in model.named_parameters()):
            raise UserError(
                f"{run}: variant {self.variant} has fixed weights; give a model that learns them (learnable)"
            )
        self.rows, self.depth = [{"step": 0, **table}], int(model.config.num_hidden_layers)
        self.source = (getattr(model.config, "variant_options", None) or {}).get("source")


def _command(run: Path, recipe: str, proposal: Proposal) -> str:
    """The line that trains the proposal as the run was trained."""
    options = [
        f"model.variant_options.{k}={v if isinstance(v, str) else json_module.dumps(v, separators=(',', ':'))}"
        for k, v in proposal.variant_options.items()
    ]
    words = ["resformer", "train", recipe or "RECIPE"]
    if (run / "config.toml").is_file():
        words += ["--config", str(run / "config.toml")]
    out = run.with_name(f"{run.resolve().name}-sparse")
    return shlex.join([*words, "--variant", "sparse", "--set", *options, "--out", str(out)])


def _show(run: Path, variant: str, proposal: Proposal, command: str) -> None:
    """Print a proposal: the layers, what is proposed, how sure it is, and how to train it."""
    columns = ["layer", "V_1", "own", "strength", "spread", "trend", "chosen in", "take"]
    rows = [
        (
            row.layer,
            row.first,
            row.own,
            row.strength,
            row.spread,
            row.trend,
            "-" if row.chosen is None else f"{100 * row.chosen:.0f} %",
            "yes" if row.layer in proposal.layers else " ",
        )
        for row in proposal.table
    ]
    first, last = proposal.steps
    tables.show(f"{run} ({variant}): lambdas of steps {first:,} to {last:,}, {proposal.rows} row(s)", columns, rows)
    print(f"proposed: variant sparse, variant_options {json_module.dumps(proposal.variant_options)}")
    print(f"  strength as learned in these layers, others mixing too: {proposal.first_learned:.2f}; the paper's: 5")
    said = {
        "stable": "stable: the rows agree on the layers and their strengths have settled",
        "moving": "moving: the rows agree on the layers, but strengths still move; train longer to be sure of `first`",
        "unclear": "unclear: the rows do not settle which layers; train longer, or compare with layers = last_third",
        "unknown": "unknown: too few rows to tell",
    }[proposal.confidence]
    print(f"  confidence {said}")
    if proposal.agreement is not None:
        rank = "" if proposal.rank_correlation is None else f"; rank correlation {proposal.rank_correlation:.2f}"
        print(f"  layers that single rows give: {100 * proposal.agreement:.0f} % overlap with these{rank}")
    for note in proposal.notes:
        print(f"  note: {note}")
    print(f"train it: {command}")
