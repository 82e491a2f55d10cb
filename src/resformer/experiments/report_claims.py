"""The suite's claims with their verdicts, and the paper's numbers beside ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from resformer.experiments import statistics
from resformer.experiments.markup import finite
from resformer.experiments.report_rows import known, lookup, summary
from resformer.experiments.spec import LOSS, Claim, Less, NotLess

VERDICTS = ("not held", "undecided", "held", "not run")  # as they are shown: first what a reader must not miss


def unit(on: str) -> str:
    """In what a claim's measure is counted."""
    if on.startswith("tasks/"):
        return "accuracy"
    return {"loss": "nats", "bits_per_byte": "bits per byte"}.get(on.rsplit("/", 1)[-1], on.rsplit("/", 1)[-1])


def what(on: str) -> str:
    """A claim's measure in words."""
    kind, *path = on.split("/")
    if kind == "tasks":
        return "accuracy, mean of the tasks" if path == ["average"] else f"accuracy on {'/'.join(path)}"
    name = path[-1].replace("_", " ") if path else kind
    return f"validation {name}" if len(path) < 2 else f"{name} on {'/'.join(path[:-1])}"


def claims_of(suite: dict[str, Any]) -> list[Claim]:
    """The claims in a `suite.json`; an entry that is none is left out."""
    found: list[Claim] = []
    for one in suite.get("claims") or []:
        if not isinstance(one, dict) or not isinstance(one.get("left"), str) or not isinstance(one.get("right"), str):
            continue
        left, right, paper = one["left"], one["right"], str(one.get("paper") or "")
        on = str(one.get("on") or LOSS)
        if one.get("kind") == NotLess.kind:
            found.append(NotLess(left, right, on=on, margin=finite(one.get("margin")) or 0.0, paper=paper))
        else:
            found.append(Less(left, right, on=on, paper=paper))
    return found


def judged(suite: dict[str, Any], rows: Sequence[dict[str, Any]], *, full: bool = True) -> list[dict[str, Any]]:
    """Every claim with its measured difference and verdict, in the suite's order.

    Nothing is decided before all planned seeds of both runs are there and scored in the same way (`full`: on the whole
    split): who looks after every seed and stops at the first verdict decides false claims too, and the seeds that are
    missing may be those that diverged.
    """
    values, planned = lookup(rows), planned_seeds(suite)
    found = []
    for one in statistics.judge(claims_of(suite), values):
        sides = [(name, known(values(name, one.claim.on))) for name in (one.claim.left, one.claim.right)]
        verdict, reason = one.verdict, one.reason
        missing = [
            f"{name} lacks seed {', '.join(map(str, lacks))}"
            for name, seeds in dict(sides).items()
            if (lacks := [seed for seed in planned if seed not in seeds])
        ]
        if verdict != "not run" and (missing or not full):
            waits = "; ".join(missing) or "not every run is scored on the whole split"
            reason = f"{waits}, and a verdict waits for all" + (f"; so far {reason}" if reason else "")
            verdict = "undecided"
        found.append(
            {
                "kind": one.claim.kind,
                "statement": str(one.claim),
                "left": one.claim.left,
                "right": one.claim.right,
                "on": one.claim.on,
                "unit": unit(one.claim.on),
                "margin": one.claim.margin,
                "paper": one.claim.paper,
                "difference": summary(one.comparison),
                "p_adjusted": one.p_adjusted,
                "verdict": verdict,
                "reason": reason,
                "points": one.points,
            }
        )
    return found


def planned_seeds(suite: dict[str, Any]) -> list[int]:
    """The seeds that the suite was to be run with."""
    seeds = [seed for seed in suite.get("seeds") or () if isinstance(seed, int)]
    return seeds or sorted({int(run.get("seed") or 0) for run in suite["runs"]})


def counted(claims: Sequence[dict[str, Any]]) -> dict[str, int]:
    """How many claims have each verdict."""
    return {verdict: sum(claim["verdict"] == verdict for claim in claims) for verdict in VERDICTS}


def beside_paper(suite: dict[str, Any], rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The paper's values with ours, for the runs of this scale: one entry a reported value, ours None where it is not
    measured.

    Differences are to the run's counterpart (`report_rows.counterpart`), the paper's to what it reports of that one.
    `agrees`: "same sign", "other sign" or "open" (our interval holds zero, or there is none, as with one seed); None
    where there is nothing to compare.
    """
    rows_by_name = {found["name"]: found for found in rows}
    references = [
        one
        for one in suite.get("paper") or []
        if isinstance(one, dict) and one.get("run") in rows_by_name and isinstance(one.get("values"), dict)
    ]
    values = lookup(rows)
    found = []
    for one in references:
        against = rows_by_name[one["run"]]["against"]
        against = None if against == one["run"] else against
        for key, value in one["values"].items():
            paper, on = finite(value), on_of(key)
            if paper is None:
                continue
            left = known(values(one["run"], on))
            base = _reported(references, against, key, one.get("source"))
            difference = None if base is None else paper - base
            ours = None
            if against is not None:
                right = known(values(against, on))
                ours = summary(statistics.compare(left, right), right)
            found.append(
                {
                    "run": one["run"],
                    "against": against,
                    "source": str(one.get("source") or ""),
                    "on": on,
                    "paper": paper,
                    "paper_difference": difference,
                    "ours": sum(left.values()) / len(left) if left else None,
                    "difference": ours,
                    "agrees": _agrees(difference, ours),
                }
            )
    return found


def on_of(key: str) -> str:
    """A key of `Reference.values` ("loss", "wikipedia/perplexity", "tasks/average") as a claim would name it."""
    return key if key.startswith(("tasks/", "validation/")) else f"validation/{key}"


def _reported(references: Sequence[dict[str, Any]], run: str | None, key: str, source: object) -> float | None:
    """What the paper reports of a run: in the same source, else in any."""
    rows = [one for one in references if one["run"] == run]
    for one in sorted(rows, key=lambda one: one.get("source") != source):
        value = finite(one["values"].get(key))
        if value is not None:
            return value
    return None


def _agrees(paper: float | None, ours: dict[str, Any] | None) -> str | None:
    if paper is None or ours is None:
        return None
    low, high = ours["low"], ours["high"]
    if low is None or high is None or low <= 0 <= high:
        return "open"
    return "same sign" if (ours["mean"] < 0) == (paper < 0) else "other sign"
