"""From a recipe, a file and flags to a `Config`: recipe < file < `--set` < flags. All problems are reported at once.

`None` is written "none" in files and flags, since TOML has no null; so a file with every key says everything.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from resformer.errors import UserError
from resformer.train.checks import cross_problems
from resformer.train.config import SECTIONS, Config, Key, keys

Tree = dict[str, dict[str, Any]]

# What other trainers call our keys; near spellings need no entry.
_SYNONYMS = {
    "learning_rate": "optim.lr",
    "max_lr": "optim.lr",
    "warmup": "optim.warmup_steps",
    "warmup_iters": "optim.warmup_steps",
    "num_warmup_steps": "optim.warmup_steps",
    "max_grad_norm": "optim.grad_clip",
    "gradient_clip": "optim.grad_clip",
    "clip": "optim.grad_clip",
    "wd": "optim.weight_decay",
    "betas": "optim.beta1",
    "adam_beta1": "optim.beta1",
    "adam_beta2": "optim.beta2",
    "adam_epsilon": "optim.eps",
    "max_steps": "train.steps",
    "num_steps": "train.steps",
    "max_iters": "train.steps",
    "epochs": "train.steps",
    "num_epochs": "train.steps",
    "global_batch_size": "train.batch_size",
    "per_device_train_batch_size": "train.micro_batch_size",
    "gradient_accumulation_steps": "train.micro_batch_size",
    "grad_accum": "train.micro_batch_size",
    "precision": "train.dtype",
    "gradient_checkpointing": "train.checkpointing",
    "activation_checkpointing": "train.checkpointing",
    "torch_compile": "train.compile",
    "eval_every": "train.validate_every",
    "eval_steps": "train.validate_every",
    "eval_interval": "train.validate_every",
    "save_every": "train.checkpoint_every",
    "save_steps": "train.checkpoint_every",
    "save_total_limit": "train.keep_last",
    "num_threads": "train.threads",
    "seq_len": "data.sequence_length",
    "seq_length": "data.sequence_length",
    "max_seq_len": "data.sequence_length",
    "block_size": "data.sequence_length",
    "context_length": "data.sequence_length",
    "data_dir": "data.dir",
    "path": "data.dir",
    "mixture": "data.weights",
    "n_layer": "model.num_hidden_layers",
    "num_layers": "model.num_hidden_layers",
    "layers": "model.num_hidden_layers",
    "n_head": "model.num_attention_heads",
    "n_heads": "model.num_attention_heads",
    "num_heads": "model.num_attention_heads",
    "n_kv_heads": "model.num_key_value_heads",
    "num_kv_heads": "model.num_key_value_heads",
    "n_embd": "model.hidden_size",
    "d_model": "model.hidden_size",
    "dim": "model.hidden_size",
    "d_ff": "model.intermediate_size",
    "ffn_size": "model.intermediate_size",
    "options": "model.variant_options",
    "attn_implementation": "model.attention",
    "use_qk_norm": "model.qk_norm",
    "qk_layernorm": "model.qk_norm",
    "window": "model.sliding_window",
    "window_size": "model.sliding_window",
    "n_experts": "model.num_experts",
    "num_local_experts": "model.num_experts",
    "top_k": "model.num_experts_per_tok",
    "layer_types": "model.sliding_layers",
    "activation": "model.hidden_act",
    "activation_function": "model.hidden_act",
    "norm_type": "model.norm",
    "position_embedding_type": "model.position_embedding",
    "bias": "model.attention_bias",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assignment:
    """One key that a file or flag sets.

    `label` names it in messages. `inside` is set for one entry of a table (`model.variant_options.first`).
    """

    label: str
    path: str
    value: Any
    inside: str | None = None


def configure(
    base: Config,
    *,
    file: Path | str | None = None,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    typed: Mapping[str, str] | None = None,
) -> Config:
    """Return `base` with the keys of a TOML file, of `section.key=value` texts and of flags put over it, in this order.

    Args:
        base: what a recipe returned.
        file: TOML with one table per section; a run's config.toml is one.
        overrides: as on the command line, `"optim.lr=1e-3"`; a table's entry is `"model.variant_options.first=2"`.
        flags: path -> value with Python types; None means "not given".
        typed: path -> how the user wrote a flag (`--steps`), for messages.

    Raises:
        UserError: one message with a line per problem: unknown keys (with the nearest valid one), wrong types, values
            out of range, and what must hold between keys.
    """
    problems: list[str] = []
    from_file = list(_from_file(Path(file), problems)) if file is not None else []
    from_command = [*_from_texts(overrides, problems), *_from_flags(flags or {}, typed or {}, problems)]
    tree, labels = to_tree(base), dict[str, str]()
    for layer in (from_file, from_command):
        _apply(layer, tree, labels)
    config, bad = _validated(base, tree, labels, problems)
    problems += cross_problems(config, skip=bad)
    if problems:
        raise UserError(_message(problems))
    return config


def edit(parent: Config, changes: Mapping[str, Any]) -> Config:
    """A child of a recipe: `edit(quick(), {"train.steps": 800, "optim.lr": 1e-3})`.

    Raises:
        UserError: as `configure`.
    """
    return configure(parent, flags=changes)


def to_tree(config: Config) -> Tree:
    """Section -> key -> value, every key included."""
    return {
        section: {name: _copied(getattr(getattr(config, section), name)) for name in _names(section)}
        for section in SECTIONS
    }


def to_toml(config: Config) -> str:
    """The whole configuration as TOML that `configure(file=...)` reads back to the same `Config`."""
    tree = {s: {k: "none" if v is None else v for k, v in table.items()} for s, table in to_tree(config).items()}
    head = "# Every key of this run. Again: resformer train RECIPE --config THIS_FILE --out NEW_DIR\n\n"
    return head + tomli_w.dumps(tree)


def from_toml(path: Path) -> Config:
    """Read a file that `to_toml` wrote.

    Raises:
        UserError: unreadable file, unknown keys, wrong types.
    """
    return configure(Config(), file=path)


def _names(section: str) -> list[str]:
    return [key.name for key in keys().values() if key.section == section]


def _copied(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else value


def _message(problems: Sequence[str]) -> str:
    if len(problems) == 1:
        return problems[0]
    return f"{len(problems)} problems in the configuration:\n" + "\n".join(f"  {problem}" for problem in problems)


def _from_file(path: Path, problems: list[str]) -> Iterator[Assignment]:
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--config {path}: cannot be read ({error.strerror}); expected a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(
            f"--config {path}: no valid TOML ({error}); texts need quotes, sections are [model] tables"
        ) from None
    for section, table in tree.items():
        if section in SECTIONS and isinstance(table, dict):
            for name, value in table.items():
                yield from _checked(f"{path}: {section}.{name}", f"{section}.{name}", value, problems)
        elif section in SECTIONS:
            problems.append(f"{path}: {section}: got {table!r}, expected a table [{section}]")
        else:
            wrong = [f"{section}.{name}" for name in table] if isinstance(table, dict) and table else [section]
            problems += [f"{path}: {name}: {_unknown(name)}" for name in wrong]


# section.table."a key of its own, as TOML quotes it"=value
_QUOTED = re.compile(r"""([\w.]+\.)(["'])(.+)\2\s*=(.*)""", re.DOTALL)


def _from_texts(texts: Sequence[str], problems: list[str]) -> Iterator[Assignment]:
    for text in texts:
        quoted = _QUOTED.fullmatch(text)
        path, equals, value = (quoted[1] + quoted[3], "=", quoted[4]) if quoted else text.partition("=")
        if equals:
            yield from _checked(f"--set {text}", path.strip(), value.strip(), problems, parse=True)
        else:
            problems.append(f"--set {text}: expected section.key=value")


def _from_flags(flags: Mapping[str, Any], typed: Mapping[str, str], problems: list[str]) -> Iterator[Assignment]:
    for path, value in flags.items():
        if value is not None:
            plain = str(value) if isinstance(value, Path) else value
            label = f"{typed[path]} {value} ({path})" if path in typed else f"{path}={value}"
            yield from _checked(label, path, plain, problems)


def _checked(label: str, path: str, value: Any, problems: list[str], *, parse: bool = False) -> Iterator[Assignment]:
    parts = path.split(".", 2)
    key = keys().get(".".join(parts[:2]))
    if key is None or (len(parts) > 2 and dict not in key.kinds):
        problems.append(f"{label}: {_unknown(path)}")
        return
    inside = parts[2] if len(parts) > 2 else None
    value = _parsed(value, key, inside) if parse else value
    if inside is None and key.optional and value == "none":
        value = None
    yield Assignment(label=label, path=key.path, value=value, inside=inside)


def _parsed(text: str, key: Key, inside: str | None) -> Any:
    """What a text of the command line means for this key: text stays text, the rest is read as TOML."""
    if inside is None and str in key.kinds and not (list in key.kinds and text.startswith("[")):
        return text
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        pass
    try:
        return float(text) if math.isfinite(float(text)) else text
    except ValueError:
        return text


def _apply(layer: Sequence[Assignment], tree: Tree, labels: dict[str, str]) -> None:
    variants = [item.value for item in layer if item.path == "model.variant"]
    if variants and variants[-1] != tree["model"]["variant"]:
        tree["model"]["variant_options"] = {}  # what the layers below said belongs to another variant
    for item in layer:
        section, name = item.path.split(".")
        labels[item.path] = item.label
        entries = {**(tree[section][name] or {}), item.inside: item.value} if item.inside is not None else item.value
        tree[section][name] = entries


def _validated(
    base: Config, tree: Tree, labels: Mapping[str, str], problems: list[str]
) -> tuple[Config, frozenset[str]]:
    """A Config of what is valid (the rest as in `base`), and the paths of what is not."""
    sections: dict[str, Any] = {}
    bad: set[str] = set()
    for section, cls in SECTIONS.items():
        try:
            sections[section] = cls(**tree[section])
        except ValidationError as error:
            for detail in error.errors():
                name, *entry = map(str, detail["loc"])
                path = f"{section}.{name}"
                if list in keys()[path].kinds:  # one complaint for each type that it could have been
                    if path in bad:
                        continue
                    entry, detail = [], {**detail, "input": tree[section][name]}
                bad.add(path)
                where = f" for {'.'.join(entry)}" if entry else ""
                expected = _expected(detail, keys()[path])
                problems.append(f"{labels.get(path, path)}: got {detail['input']!r}{where}, expected {expected}")
            kept = {name: value for name, value in tree[section].items() if f"{section}.{name}" not in bad}
            sections[section] = dataclasses.replace(getattr(base, section), **kept)
    return Config(**sections), frozenset(bad)


def _expected(detail: Any, key: Key) -> str:
    """What a validation error wanted, in plain words."""
    kind, context = detail["type"], detail.get("ctx", {})
    if list in key.kinds:
        return "all, none or a list of layer numbers"
    words = {
        "int_type": "a whole number",
        "float_type": "a number",
        "finite_number": "a finite number",
        "bool_type": "true or false",
        "string_type": "a text",
        "dict_type": "a table",
        "string_pattern_mismatch": "auto, cpu, mps, cuda or cuda:N",
        "literal_error": f"one of {context.get('expected', '')}".replace(" or ", ", "),
        "string_too_short": "some text",
        "greater_than": f"more than {_number(context.get('gt'))}",
        "greater_than_equal": f"at least {_number(context.get('ge'))}",
        "less_than": f"less than {_number(context.get('lt'))}",
        "less_than_equal": f"at most {_number(context.get('le'))}",
    }
    expected = words.get(kind, detail["msg"])
    return f"{expected} or none" if key.optional and kind.endswith("_type") else expected


def _number(bound: Any) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound or 0:g}"


def _unknown(path: str) -> str:
    near, section = nearest(path), path.split(".")[0]
    if near:
        return f"no such key; did you mean {near}?"
    if section in SECTIONS:
        return f"no such key; [{section}] has {', '.join(_names(section))}"
    return f"no such key; the sections are {', '.join(SECTIONS)}"


def nearest(path: str) -> str:
    """The valid key or section that a wrong path most likely meant, looked for in all sections; "" if none is near."""
    section, _, name = path.lower().replace("-", "_").rpartition(".")
    if not section and (near := difflib.get_close_matches(name, SECTIONS, n=1, cutoff=0.75)):
        return near[0]
    guess = section if section in SECTIONS else next(iter(difflib.get_close_matches(section, SECTIONS, n=1)), "")
    own = {name: f"{guess}.{name}" for name in _names(guess)}
    everywhere = {**_SYNONYMS, **{key.name: key.path for key in keys().values()}}
    for known in (own, everywhere):
        if name in known:
            return known[name]
    for known in (own, everywhere):
        if close := difflib.get_close_matches(name, known, n=1, cutoff=0.7):
            return known[close[0]]
    return ""
