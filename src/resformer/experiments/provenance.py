"""The part of the report that lets somebody else get the same numbers: configuration, versions, data, and the
command.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from resformer.experiments.markup import Markup, join, number, tag
from resformer.experiments.runs import Run
from resformer.experiments.settings import without_effect

_MOST_OPEN = 6  # configuration files that are listed one by one


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as dotted keys; an empty one has none."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def section(runs: Sequence[Run], results: dict[str, Any]) -> Markup:
    known = [run for run in runs if run.config]
    firsts = list({run.name: run for run in reversed(known)}.values())[::-1]
    environments = [run.environment for run in known if run.environment]
    facts = [
        ("Reproduce", tag("code", results["command"]) if results["command"] else "not recorded"),
        ("One run alone", tag("code", f"resformer train {results['recipe']} --config RUN/config.toml --out NEW_DIR")),
        ("Data", f"fingerprint {str(results['data']['fingerprint'] or 'unknown')[:16]}"),
        ("Seeds", ", ".join(map(str, results["seeds"])) or "none"),
        ("Machine", _told(environments, _machine)),
        ("Versions", _told(environments, _versions)),
        ("Commit", _told(environments, _commit)),
        ("Written", results["written"]),
    ]
    kept = sum(run.recorded for run in runs)
    if kept:
        facts.append(("Records", f"{kept} of {len(runs)} runs are read from records: figures without their models"))
    listed = tag("dl", *(join(tag("dt", key), tag("dd", value)) for key, value in facts), class_="facts")
    return tag(
        "section",
        tag("h2", "Configuration"),
        _flags(environments),
        listed,
        _differences(firsts, known),
        _domains(environments[0] if environments else {}),
        _manifest(results["data"]["manifest"]),
        _files(firsts, len(results["seeds"])),
        tag("details", tag("summary", "Run directories"), tag("pre", "\n".join(map(_directory, runs)))),
    )


def _directory(run: Run) -> str:
    return f"runs/{run.id}  {run.name}, seed {run.seed}  {run.state}{' (record)' if run.recorded else ''}"


def _files(firsts: Sequence[Run], seeds: int) -> Markup:
    """Every configuration; of several seeds the first one's, as the others differ in `train.seed` alone."""
    each = [tag("details", tag("summary", f"config.toml of {run.name}"), tag("pre", run.config_text)) for run in firsts]
    if len(each) <= _MOST_OPEN:
        return join(*each)
    first = ", of the first seed" if seeds > 1 else ""
    return tag("details", tag("summary", f"config.toml of each of the {len(each)} runs{first}"), *each)


def _told(environments: Sequence[dict[str, Any]], what: Any) -> str:
    """What runs say of themselves: one text if they agree, else each with the number of runs that say it."""
    counts = Counter(what(environment) for environment in environments)
    if not counts:
        return "not recorded"
    if len(counts) == 1:
        return str(next(iter(counts)))
    return "; ".join(f"{text} ({count} runs)" for text, count in counts.most_common())


def _machine(environment: dict[str, Any]) -> str:
    templates = {
        "processor": "{}",
        "cpu_count": "{} CPUs",
        "device": "device {}",
        "threads": "threads {}",
        "platform": "{}",
    }
    found = [
        text.format(environment[key]) for key, text in templates.items() if isinstance(environment.get(key), str | int)
    ]
    return ", ".join(found) or "not recorded"


def _versions(environment: dict[str, Any]) -> str:
    versions = environment.get("versions")
    if not isinstance(versions, dict):
        return "not recorded"
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _commit(environment: dict[str, Any]) -> str:
    commit = environment.get("commit")
    if not isinstance(commit, str):
        return "not recorded"
    name, dash, dirty = commit.partition("-")
    return f"{name[:12]}{dash}{dirty}"


def _flags(environments: Sequence[dict[str, Any]]) -> Markup | None:
    """What a careful reader should know of how the numbers came about; None where there is nothing."""
    found = []
    for what, name in ((_versions, "versions"), (_machine, "machines"), (_commit, "commits")):
        kinds = {what(environment) for environment in environments}
        if len(kinds) > 1:
            found.append(f"The runs are of {len(kinds)} different {name}.")
    dirty = sum(_commit(environment).endswith("-dirty") for environment in environments)
    if dirty:
        found.append(
            f"{dirty} of {len(environments)} runs were trained with changes that no commit holds "
            "(-dirty): their code cannot be had again from the commit alone."
        )
    return tag("div", *(tag("p", text) for text in found), class_="notice", role="note") if found else None


def differing(runs: Sequence[Run]) -> list[str]:
    """The configuration keys that are not equal in all runs."""
    flats = [flatten(run.config) for run in runs]
    every = dict.fromkeys(key for flat in flats for key in flat)
    return [key for key in every if len({repr(flat.get(key)) for flat in flats}) > 1]


def fairness(runs: Sequence[Run]) -> str:
    """What the comparison holds fixed, as the configurations and data fingerprints of the runs say."""
    known = [run for run in runs if run.config]
    if not known:
        return "No run has started."
    names = {run.name for run in known}
    seeds = {run.seed for run in known}
    paired = len(seeds) > 1 and len({(run.name, run.seed) for run in known}) == len(names) * len(seeds)
    groups = [[run for run in known if run.seed == seed] for seed in sorted(seeds)] if paired else [known]
    every = dict.fromkeys(key for group in groups for key in differing(group))
    keys = [key for key in every if not key.startswith("model.variant") and not without_effect(key)]
    if len({_data(run.environment).get("fingerprint") for run in known}) > 1:
        keys.append("the data")
    if len({repr(run.environment.get("versions")) for run in known}) > 1:
        keys.append("the versions of the software")
    if keys:
        return f"Besides the variant, the runs differ in {', '.join(keys)}."
    if paired:
        return "Runs of one seed saw the same text in the same order and differ by one formula."
    return "All runs saw the same text in the same order from the same seed and differ by one formula."


def _differences(firsts: Sequence[Run], runs: Sequence[Run]) -> Markup | None:
    """The settings in which the runs differ, so that a reader sees at once that they differ in nothing else."""
    if len(firsts) < 2:
        return None
    keys = differing(firsts)
    seeds = {run.name: sorted({other.seed for other in runs if other.name == run.name}) for run in firsts}
    several = any(len(found) > 1 for found in seeds.values())
    columns = [*keys, *(["train.seed"] if several and "train.seed" not in keys else [])]
    head = tag("tr", tag("th", "run", scope="col"), *(tag("th", tag("code", key), scope="col") for key in columns))
    rows = []
    for run in firsts:
        flat = flatten(run.config) | ({"train.seed": ", ".join(map(str, seeds[run.name]))} if several else {})
        rows.append(tag("tr", tag("th", run.name, scope="row"), *(tag("td", _text(flat.get(key))) for key in columns)))
    table = tag("div", tag("table", tag("thead", head), tag("tbody", *rows), class_="compact"), class_="scroll")
    total = len(flatten(firsts[0].config))
    return tag(
        "details",
        tag("summary", f"What differs between the runs ({len(columns)} of {total} settings)"),
        table,
        open=True,
    )


def _data(environment: dict[str, Any]) -> dict[str, Any]:
    found = environment.get("data")
    return found if isinstance(found, dict) else {}


def _domains(environment: dict[str, Any]) -> Markup | None:
    """Domains with their weights and sizes, as the first run found them."""
    data = _data(environment)
    names = data.get("domains")
    if not isinstance(names, list):
        return None
    columns = {"weight": "weights", "training tokens": "train_tokens", "validation tokens": "validation_tokens"}
    tables = [found if isinstance(found := data.get(key), dict) else {} for key in columns.values()]
    head = tag("tr", *(tag("th", text, scope="col") for text in ("domain", *columns)))
    rows = [
        tag("tr", tag("th", name, scope="row"), *(tag("td", _count(table.get(name))) for table in tables))
        for name in map(str, names)
    ]
    table = tag("div", tag("table", tag("thead", head), tag("tbody", *rows), class_="compact"), class_="scroll")
    return tag("details", tag("summary", f"The corpus ({len(rows)} domains)"), table, open=True)


def _count(value: object) -> str:
    return number(value, 0) if isinstance(value, int) else number(value, 2)


def _text(value: Any) -> str:
    return "none" if value is None else str(value)


def _manifest(manifest: dict[str, Any]) -> Markup | None:
    """The sources of the text as a table where the manifest lists them, else the manifest itself, shortened."""
    if not manifest:
        return None
    inputs = manifest.get("inputs")
    lists = [found.get("sources") for found in inputs if isinstance(found, dict)] if isinstance(inputs, list) else []
    rows = [row for found in lists if isinstance(found, list) for row in found if isinstance(row, dict)]
    if rows:
        shown = _records(rows)
    else:
        shown = tag("pre", json.dumps(shortened(manifest), indent=2, ensure_ascii=False, default=str))
    return tag("details", tag("summary", "Where the text comes from (data/manifest.json)"), shown)


def _records(rows: list[dict[str, Any]]) -> Markup:
    """Records as a table, a column a field that is a number or a text; hashes by their first digits."""
    columns = list(dict.fromkeys(k for row in rows for k, value in row.items() if isinstance(value, str | int | float)))

    def cell(key: str, value: object) -> str:
        if key.startswith("sha"):
            return str(value)[:10]
        return number(value, 0) if isinstance(value, int) else "" if value is None else str(value)

    def side(key: str) -> str | None:
        return None if any(isinstance(row.get(key), int | float) for row in rows) else "left"

    head = tag("tr", *(tag("th", key, class_=side(key), scope="col") for key in columns))
    body = [tag("tr", *(tag("td", cell(key, row.get(key)), class_=side(key)) for key in columns)) for row in rows]
    return tag("div", tag("table", tag("thead", head), tag("tbody", *body), class_="compact"), class_="scroll")


def shortened(value: Any, most: int = 12) -> Any:
    """`value` with every list and mapping of more than `most` entries cut there, saying how many are left out."""
    if isinstance(value, dict):
        kept = {key: shortened(item, most) for key, item in list(value.items())[:most]}
        return kept | ({"...": f"{len(value) - most} more"} if len(value) > most else {})
    if isinstance(value, list):
        return [shortened(item, most) for item in value[:most]] + (
            [f"... {len(value) - most} more"] if len(value) > most else []
        )
    return value
