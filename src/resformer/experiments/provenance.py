"""The part of the report that lets somebody else get the same numbers: configuration, versions, data, and the
command.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from resformer.experiments.markup import Markup, join, number, tag
from resformer.experiments.runs import Run


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def section(runs: list[Run], results: dict[str, Any]) -> Markup:
    known = [run for run in runs if run.config]
    environment = next((run.environment for run in known if run.environment), {})
    facts = [
        ("Reproduce", tag("code", results["command"]) if results["command"] else "not recorded"),
        ("One run alone", tag("code", f"resformer train {results['recipe']} --config RUN/config.toml --out NEW_DIR")),
        ("Data", f"fingerprint {str(results['data']['fingerprint'] or 'unknown')[:16]}"),
        ("Machine", _machine(environment)),
        ("Versions", _versions(environment)),
        ("Written", datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")),
    ]
    listed = tag("dl", *(join(tag("dt", key), tag("dd", value)) for key, value in facts), class_="facts")
    return tag(
        "section",
        tag("h2", "Configuration"),
        listed,
        _differences(known),
        _domains(environment),
        _manifest(results["data"]["manifest"]),
        *(tag("details", tag("summary", f"config.toml of {run.name}"), tag("pre", run.config_text)) for run in known),
        tag(
            "details",
            tag("summary", "Run directories"),
            tag("pre", "\n".join(f"runs/{run.id}  {run.state}" for run in runs)),
        ),
    )


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
    commit = environment.get("commit")
    named = [f"{name} {version}" for name, version in versions.items()]
    return ", ".join([*named, f"commit {commit}"] if isinstance(commit, str) else named)


def differing(runs: list[Run]) -> list[str]:
    """The configuration keys that are not equal in all runs."""
    flats = [flatten(run.config) for run in runs]
    every = dict.fromkeys(key for flat in flats for key in flat)
    return [key for key in every if len({repr(flat.get(key)) for flat in flats}) > 1]


def fairness(runs: list[Run]) -> str:
    """What the comparison holds fixed, as the configurations and data fingerprints of the runs say."""
    known = [run for run in runs if run.config]
    if not known:
        return "No run has started."
    keys = [key for key in differing(known) if not key.startswith("model.variant")]
    if len({_data(run.environment).get("fingerprint") for run in known}) > 1:
        keys.append("the data")
    if len({repr(run.environment.get("versions")) for run in known}) > 1:
        keys.append("the versions of the software")
    if not keys:
        return "All runs saw the same text in the same order from the same seed and differ by one formula."
    return f"Besides the variant, the runs differ in {', '.join(keys)}."


def _differences(runs: list[Run]) -> Markup | None:
    """The settings in which the runs differ, so that a reader sees at once that they differ in nothing else."""
    if len(runs) < 2:
        return None
    flats = [flatten(run.config) for run in runs]
    keys = differing(runs)
    head = tag("tr", tag("th", "setting", scope="col"), *(tag("th", run.name, scope="col") for run in runs))
    rows = [
        tag("tr", tag("th", tag("code", k), scope="row"), *(tag("td", _text(flat.get(k))) for flat in flats))
        for k in keys
    ]
    table = tag("div", tag("table", tag("thead", head), tag("tbody", *rows), class_="compact"), class_="scroll")
    return tag(
        "details",
        tag("summary", f"What differs between the runs ({len(keys)} of {len(flats[0])} settings)"),
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
