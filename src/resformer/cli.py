"""The command line: which commands there are. What one does is in `commands/`.

Nothing heavy is imported before a command runs, so `resformer --help` stays fast. What an exit code means, and how an
error becomes one line, is in `shell.py`; what is printed as a table, in `tables.py`.
"""

from __future__ import annotations

import sys

from resformer import shell
from resformer.commands.analysis import analyze
from resformer.commands.convert import convert
from resformer.commands.corpus import data_inspect, data_prepare
from resformer.commands.generate import generate
from resformer.commands.lambdas import analyze_lambdas
from resformer.commands.models import evaluate
from resformer.commands.recovery import recovery
from resformer.commands.runs import export, train, watch
from resformer.commands.suites import suite_index, suite_list, suite_report, suite_run, suite_status
from resformer.commands.variants import check_variant, plan

COMMANDS: dict[str, shell.Command] = {
    "plan": plan,
    "check-variant": check_variant,
    "data prepare": data_prepare,
    "data inspect": data_inspect,
    "train": train,
    "export": export,
    "watch": watch,
    "eval": evaluate,
    "generate": generate,
    "analyze": analyze,
    "analyze-lambdas": analyze_lambdas,
    "convert": convert,
    "recovery": recovery,
    "suite list": suite_list,
    "suite run": suite_run,
    "suite status": suite_status,
    "suite report": suite_report,
    "suite index": suite_index,
}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line (sys.argv by default) and return the exit code; see `resformer.shell` for the codes."""
    from resformer import __version__

    return shell.run(
        COMMANDS,
        sys.argv[1:] if arguments is None else arguments,
        program="resformer",
        about="Value residual learning (ResFormer, SVFormer): train it, compare it, look at it.",
        version=__version__,
    )
