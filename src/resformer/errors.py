"""What a user's mistake looks like: one line that names the key or file and the way out.

The command line turns a `UserError` into exit code 2 without a traceback; every other exception is a failure at run
time (exit code 1). This module imports nothing of the package, so every layer may raise it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake that the user can mend. The message says what was got, what was expected and what to change."""


class RunError(RuntimeError):
    """A failure at run time that is no surprise to us: its text says all there is to say (exit code 1)."""


def did_you_mean(name: str, valid: Iterable[str], *, likeness: float = 0.5) -> str:
    """Return "; did you mean 'x'?" for the valid name nearest to `name`, or "" when none is near.

    `likeness` is how much of two names must be common (difflib's ratio, 0 to 1).
    """
    near = difflib.get_close_matches(name, list(valid), n=1, cutoff=likeness)
    return f"; did you mean '{near[0]}'?" if near else ""
