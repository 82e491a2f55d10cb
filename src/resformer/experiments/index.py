"""One page over all suites that were run: what was asked, what held and what did not, and where each report is.

`index.html` for a browser and `index.md`, with the same table and each suite's figure, for a repository's pages.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from resformer.errors import UserError
from resformer.experiments.markup import Markup, breakable, join, signed, tag
from resformer.experiments.report import PICTURE_FILE, REPORT_FILE, RESULTS_FILE
from resformer.experiments.report_claims import VERDICTS, counted
from resformer.experiments.results import SCHEMA, interval
from resformer.experiments.runs import read_json
from resformer.experiments.sections import sub
from resformer.experiments.spec import Suite
from resformer.experiments.style import CSS
from resformer.train.files import write_atomic

INDEX_FILE, INDEX_TEXT_FILE = "index.html", "index.md"
_NOT_BELOW = {"runs", "data", "checkpoints", "model", "configs", "locks"}  # of a pool: large, and no reports in them
_LOOKS = {"held": "better", "not held": "worse"}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One suite: its results and where they are, relative to the index; both empty for one that was not run."""

    name: str
    title: str
    question: str
    results: dict[str, Any]
    where: str = ""
    report: bool = False
    picture: bool = False

    @property
    def verdicts(self) -> dict[str, int]:
        return counted(self.results.get("claims", []))

    @property
    def scale(self) -> str:
        return str(self.results.get("scale") or "")

    @property
    def seeds(self) -> int:
        return len(self.results.get("seeds", []))

    @property
    def state(self) -> str:
        """ "not run", how many runs are open, or "" when all are finished."""
        if not self.results:
            return "not run"
        missing, total = len(self.results.get("missing", [])), self.results.get("cost", {}).get("runs", 0)
        return f"{total - missing} of {total} runs finished" if missing else ""

    def link(self, file: str) -> str:
        return quote(f"{self.where}/{file}" if self.where != "." else file)


def write_index(directory: Path | str, suites: Mapping[str, Suite] | None = None) -> Path:
    """Write index.html and index.md over all suites with results below `directory`; return the path of index.html.

    Args:
        directory: where to look, and where the index goes.
        suites: all there are, in their order; those without results are listed as not run.

    Raises:
        UserError: no such directory, or results that this version did not write.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise UserError(f"{directory} is no directory; give the one that holds the suites' directories")
    entries = _entries(directory, suites or {})
    write_atomic(directory / INDEX_TEXT_FILE, text(entries))
    write_atomic(directory / INDEX_FILE, page(entries))
    return directory / INDEX_FILE


def _entries(directory: Path, suites: Mapping[str, Suite]) -> list[Entry]:
    found = []
    for place in _places(directory):
        results = read_json(place / RESULTS_FILE)
        if "suite" not in results:
            continue  # somebody else's file
        if results.get("schema") != SCHEMA:
            raise UserError(
                f"{place / RESULTS_FILE}: schema is {results.get('schema')!r}, expected {SCHEMA}; write it anew with "
                f"`resformer suite report NAME --out {place}`, or move it away"
            )
        found.append(
            Entry(
                name=str(results.get("suite")),
                title=str(results.get("title") or ""),
                question=str(results.get("question") or ""),
                results=results,
                where=place.relative_to(directory).as_posix(),
                report=(place / REPORT_FILE).is_file(),
                picture=(place / PICTURE_FILE).is_file(),
            )
        )
    have = {entry.name for entry in found}
    order = {name: i for i, name in enumerate(suites)}
    found += [
        Entry(name=name, title=suite.title, question=suite.question, results={})
        for name, suite in suites.items()
        if name not in have
    ]
    return sorted(found, key=lambda e: (not e.results, order.get(e.name, len(order)), e.name, e.where))


def _places(directory: Path) -> Iterator[Path]:
    """Directories with results, not looking into what suites keep beside them."""
    for place, below, files in os.walk(directory):
        below[:] = sorted(name for name in below if name not in _NOT_BELOW and not name.startswith("."))
        if RESULTS_FILE in files:
            yield Path(place)


def summary(entries: Sequence[Entry]) -> str:
    """All claims of all suites in one sentence."""
    run = [entry for entry in entries if entry.results]
    total = {verdict: sum(entry.verdicts[verdict] for entry in run) for verdict in VERDICTS}
    counts = ", ".join(f"{count} {verdict}" for verdict, count in total.items() if count)
    suites = f"{len(run)} of {len(entries)} suites have results"
    return f"{suites}; of their {sum(total.values())} claims: {counts}." if counts else f"{suites}."


_INTRO = (
    "Every claim was stated before its runs. Held and not held are decided by a paired test over seeds, corrected for "
    "the number of claims of the suite; undecided means that nothing was shown, which is all that one seed can do."
)


def page(entries: Sequence[Entry]) -> str:
    """index.html."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", "Results - resformer"),
        tag("style", Markup(CSS)),
    )
    columns = ("Suite", "Claims", "Result", "Scale", "Seeds", "Written")
    heads = [tag("th", name, scope="col", class_="left" if name in ("Claims", "Result") else None) for name in columns]
    table = tag(
        "table", tag("thead", tag("tr", *heads)), tag("tbody", *map(_row, entries)), class_="results index-table"
    )
    main = tag(
        "main",
        tag("p", "resformer", class_="eyebrow"),
        tag("h1", "What the paper's suites gave here"),
        tag("p", summary(entries), class_="question"),
        tag("p", _INTRO, class_="lead"),
        tag("div", table, class_="card scroll"),
    )
    return f"<!doctype html>\n{tag('html', head, tag('body', main), lang='en')}\n"


def _row(entry: Entry) -> Markup:
    name = tag("a", breakable(entry.name), href=entry.link(REPORT_FILE)) if entry.report else breakable(entry.name)
    chips = [
        tag("span", f"{count} {verdict}", class_=f"chip {_LOOKS.get(verdict, 'open')}")
        for verdict, count in entry.verdicts.items()
        if count
    ]
    result = entry.results.get("headline") or tag("span", "not run", class_="said")
    return tag(
        "tr",
        tag("th", name, sub(entry.question or entry.title), scope="row"),
        tag("td", *_spaced(chips), class_="left", data_label="Claims" if chips else None),
        tag("td", result, sub(entry.state) if entry.results and entry.state else None, class_="left"),
        tag("td", entry.scale, data_label="Scale" if entry.scale else None),
        tag("td", entry.seeds or "", data_label="Seeds" if entry.seeds else None),
        tag("td", entry.results.get("written") or "", data_label="Written" if entry.results else None),
    )


def _spaced(parts: Sequence[Markup]) -> list[Markup]:
    return [join(part, " ") for part in parts]


def text(entries: Sequence[Entry]) -> str:
    """index.md."""
    lines = ["# Results", "", summary(entries), "", _INTRO, "", "| suite | not held | undecided | held | not run | "
             "scale | seeds | result | written |", "|---|--:|--:|--:|--:|---|--:|---|---|"]  # fmt: skip
    for entry in entries:
        name = f"[{_plain(entry.name)}]({entry.link(REPORT_FILE)})" if entry.report else _plain(entry.name)
        counts = [str(entry.verdicts[verdict]) if entry.results else "" for verdict in VERDICTS]
        result = " ".join(filter(None, (str(entry.results.get("headline") or ""), entry.state)))
        told = [name, *counts, entry.scale, str(entry.seeds or ""), _plain(result), entry.results.get("written") or ""]
        lines.append(f"| {' | '.join(told)} |")
    for entry in entries:
        if entry.results:
            lines += _details(entry)
    return "\n".join(lines) + "\n"


def _details(entry: Entry) -> list[str]:
    """A suite's question, figure and claims; what did not hold first."""
    scale = f" at {entry.scale}" if entry.scale else ""
    lines = ["", f"## {_plain(entry.name + scale)}", ""]
    lines += [_plain(entry.question or entry.title), ""] if entry.question or entry.title else []
    if entry.picture:
        lines += [f"![{_plain(entry.name)}]({entry.link(PICTURE_FILE)})", ""]
    claims = sorted(entry.results.get("claims", []), key=lambda claim: VERDICTS.index(claim["verdict"]))
    if not claims:
        return lines[:-1]
    lines += ["| claim | on | difference | verdict | why | the paper |", "|---|---|---|---|---|---|"]
    for claim in claims:
        found = claim["difference"]
        value = ""
        if found:
            inside = interval(found)
            value = f"{signed(found['mean'])} {f'({inside})' if inside else ''}".strip()
        why = claim["reason"]
        if claim["verdict"] == "undecided" and claim["points"]:
            why += f"; points {claim['points']}"
        cells = (claim["statement"], claim["on"], value, claim["verdict"], why, claim["paper"])
        lines.append(f"| {' | '.join(map(_plain, cells))} |")
    return lines


def _plain(words: object) -> str:
    """Text in which nothing is markdown or HTML, on one line."""
    return re.sub(r"([\\`*_{}\[\]<>|#])", r"\\\1", " ".join(str(words).split()))
