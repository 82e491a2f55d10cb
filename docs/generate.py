"""Writes docs/variants.md from the registry: `make docs`, or `python docs/generate.py [--check]`.

What is said about a variant comes from its class (equation, reference, when, uncertain, the options in its docstring),
numbers from the accounting and from benchmarks/results/variants.json. The generator lies here and not in the package,
since nothing that is installed needs it.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
import types
import typing
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "variants.md"
MEASURED = ROOT / "benchmarks" / "results" / "variants.json"
SIZES = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
}

INTRO = """\
# Variants

Written by `make docs` from the variants themselves: change a variant's file, not this page.

## How to read it
Layers n = 1..N count from 1, `H_{n-1}` is the input of layer n, `V_n = norm(H_{n-1}) W_n^V` its own value, `A_n` its
attention matrix, made from its own queries and keys, `U_n` what attention gives before the output projection. Values
are mixed per token and KV head **before** attention, before RoPE (which turns queries and keys only) and before the
cache. `V_1` is always raw: layer 1 is plain attention and is never mixed with itself. References: v1 is arXiv
2410.17897 of October 2024, v2 its second version, v5 the version of June 2025 that appeared at ACL 2025.

Every variant keeps one contract ([design.md](design.md)); `resformer check-variant NAME` shows that it does, for
your own as well ([CONTRIBUTING.md](../CONTRIBUTING.md)). "Neutral" options make a variant equal to `transformer` bit
for bit in fp32. Options are keys of the configuration and of the command line:

```sh
resformer train quick --data data/embedded --out runs/a --variant sparse --set model.variant_options.layers=last:2
resformer check-variant sparse --set layers=last:2
```

Options that many variants share:

- `source`: the layer that is read in place of layer 1, of which only later layers can be mixed; `"previous"` is the
  layer before.
- `layers`: which layers mix: `"all"` (all after the source), `"last:k"`, `"last_third"`, or a list of numbers.
- `granularity`: one weight per layer (`"scalar"`), per KV head (`"head"`) or per channel of the KV heads (`"channel"`).
- `tie`: two free weights (`"free"`), own = 1 - first (`"lerp"`) or own = 1 (`"own_one"`).

An option whose default is `null` takes it by being left out.
"""


def text() -> str:
    """The whole page."""
    from resformer.core import registry
    from resformer.models import ResFormerConfig
    from resformer.models.accounting import account

    measured = json.loads(MEASURED.read_text(encoding="utf-8")) if MEASURED.is_file() else {}
    base = account(ResFormerConfig(variant="transformer", **SIZES))
    facts = []
    for name in registry.names():
        config = ResFormerConfig(variant=name, **SIZES)
        costs = account(config)
        facts.append(
            {
                "name": name,
                "class": registry.get(name),
                "neutral": config.build_variant().neutral(config.shape()),
                "extra": costs.parameters - base.parameters,
                "share": (costs.parameters - base.parameters) / base.parameters,
                "kv": costs.kv_ratio,
                "time": measured.get("results", {}).get(name),
            }
        )
    parts = [INTRO, _table(facts, measured), *(_section(one) for one in facts)]
    return "\n".join(parts)


def _table(facts: list[dict[str, Any]], measured: dict[str, Any]) -> str:
    lines = [
        "## All of them",
        "Default options. Extra parameters against the Transformer and the cache's size relative to its are those of 8 "
        "layers x 256 with as many KV heads as query heads (8) and 4,096 tokens in the vocabulary.",
        _about(measured),
        "",
        "| variant | formula | extra parameters | KV cache | step time |",
        "|---|---|---:|---:|---:|",
    ]
    for one in facts:
        time = f"{one['time']['ratio']:.3f}" if one["time"] else "-"
        link = f"[`{one['name']}`](#{one['name']})"
        lines.append(f"| {link} | {_code(one['class'].equation)} | {one['extra']:+,} | {one['kv']:.4g} | {time} |")
    return "\n".join(_wrapped(line) for line in lines) + "\n"


def _about(measured: dict[str, Any]) -> str:
    if not measured:
        return "Step times are not measured yet (`make bench-variants`)."
    about, settings, shape = measured["about"], measured["settings"], measured["shape"]
    return (
        f"Step time relative to `transformer` as measured on {about['date']}: {about['processor']}, "
        f"{settings['threads']} thread, fp32, torch {about['torch']}, transformers {about['transformers']}, "
        f"{shape['num_hidden_layers']} layers x {shape['hidden_size']}, {shape['batch_size']} x "
        f"{shape['sequence_length']} tokens a step, {settings['rounds']} rounds "
        "([benchmarks](../benchmarks/README.md))."
    )


def _section(one: dict[str, Any]) -> str:
    cls = one["class"]
    lines = [f"## {one['name']}", *_paragraphs(_body(cls)), ""]
    lines.append(f"- Formula: {_code(cls.equation)}")
    lines.append(f"- Reference: {cls.reference}")
    if cls.when:
        lines.append(f"- When: {cls.when}")
    if cls.uncertain:
        lines.append(f"- Uncertain: {cls.uncertain}")
    lines.append(f"- Neutral: {_neutral(one)}")
    lines.append(f"- Costs: {_costs(one)}")
    rows = _option_rows(cls)
    if rows:
        lines += ["", "| option | takes | default | |", "|---|---|---|---|", *rows]
    return "\n".join(_wrapped(line) for line in lines) + "\n"


def _costs(one: dict[str, Any]) -> str:
    if not one["extra"]:
        parameters = "no extra parameters"
    else:
        size = f"{one['share']:+.1%}" if abs(one["share"]) >= 0.0005 else "under 0.1 %"
        parameters = f"{one['extra']:+,} parameters ({size.replace('%', ' %').replace('  ', ' ')})"
    found = one["time"]
    time = (
        f"step time {found['ratio']:.3f} (95 % interval {found['ratio_lower_95']:.3f} to {found['ratio_upper_95']:.3f})"
        if found
        else "step time not measured"
    )
    return f"{parameters}, KV cache {one['kv']:.4g}, {time}"


def _neutral(one: dict[str, Any]) -> str:
    if one["name"] == "transformer":
        return "it is the Transformer"
    if one["neutral"] is None:
        return "none"
    return ", ".join(f"`{k}={_shown(v)}`" for k, v in one["neutral"].items()) or "its defaults"


def option_texts(cls: type) -> dict[str, str]:
    """Option -> its line in the "Options:" section of the class docstring, or of a base class's.

    "source, layers: see `SourceForm`" leaves these to the base class.
    """
    found: dict[str, str] = {}
    for base in cls.__mro__:
        doc = inspect.cleandoc(base.__doc__ or "") if "__doc__" in vars(base) else ""
        _, marker, section = doc.partition("\nOptions:\n")
        if not marker:
            continue
        section = re.split(r"\n(?=\S)", section)[0]
        for item in re.split(r"\n(?= {4}\S)", "\n" + section):
            names, colon, said = " ".join(item.split()).partition(": ")
            for name in names.split(", ") if colon and not said.startswith("see `") else ():
                found.setdefault(name, said)
    return found


def _option_rows(cls: Any) -> list[str]:
    hints, said = typing.get_type_hints(cls), option_texts(cls)
    return [
        f"| `{name}` | {_takes(hints[name])} | `{_shown(default)}` | {said.get(name, '')} |"
        for name, default in cls.options().items()
    ]


def _takes(hint: Any) -> str:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        parts = [part for part in typing.get_args(hint) if part is not type(None)]
        return " or ".join([*map(_takes, parts), *(["null"] if len(parts) < len(typing.get_args(hint)) else [])])
    if origin is typing.Literal:
        return ", ".join(f"`{json.dumps(choice)}`" for choice in typing.get_args(hint))
    if origin is tuple:
        return "list of whole numbers" if typing.get_args(hint)[0] is int else "list of numbers"
    return {float: "number", int: "whole number", str: "text", bool: "true or false"}[hint]


def _shown(value: Any) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def _body(cls: Any) -> str:
    """The class docstring before its options."""
    return inspect.cleandoc(cls.__doc__ or "").partition("\nOptions:")[0].strip()


def _paragraphs(body: str) -> list[str]:
    lines: list[str] = []
    for paragraph in body.split("\n\n"):
        lines += ([""] if lines else []) + [" ".join(paragraph.split())]
    return lines


def _code(formula: str) -> str:
    return "`" + formula.replace("|", "\\|") + "`"


def _wrapped(line: str, width: int = 120) -> str:
    """A long line of prose over several; table rows and headings stay whole."""
    if line.startswith(("|", "#")) or len(line) <= width:
        return line
    indent = "  " if line.startswith("- ") else ""
    done, current = [], ""
    for word in line.split(" "):
        if current and len(current) + 1 + len(word) > width:
            done.append(current)
            current = indent + word
        else:
            current = f"{current} {word}" if current else word
    return "\n".join([*done, current])


def main(arguments: list[str]) -> int:
    """Write the page; with --check say whether it is what would be written."""
    page = text()
    if "--check" in arguments:
        same = TARGET.is_file() and TARGET.read_text(encoding="utf-8") == page
        print(f"{TARGET.name} is {'up to date' if same else 'not what `make docs` writes'}")
        return int(not same)
    TARGET.write_text(page, encoding="utf-8")
    print(f"written: {TARGET}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
