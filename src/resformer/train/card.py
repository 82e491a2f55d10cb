"""The model card: what the model is, how to load it, what it was trained on, how good it is, what it is not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from resformer.models import ResFormerConfig
from resformer.models.accounting import account
from resformer.train.config import Config
from resformer.train.recovery import recovery_of

_LOAD = """\
import resformer  # pip install resformer; makes the Auto classes know the architecture
from transformers import AutoModelForCausalLM, AutoTokenizer

path = "."  # this directory
tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path)
ids = tokenizer("The history of the", return_tensors="pt").input_ids
print(tokenizer.decode(model.generate(ids, max_new_tokens=40, do_sample=True)[0]))
"""


def model_card(
    config: Config,
    described: ResFormerConfig,
    facts: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    *,
    step: int,
    tokens: int,
) -> str:
    """Text of README.md for the export of step `step`, made of what the run recorded and nothing else."""
    costs = account(described)
    finished = step == config.train.steps
    length = f"{step:,} steps" if finished else f"{step:,} of {config.train.steps:,} steps (an intermediate checkpoint)"
    return f"""\
---
library_name: transformers
pipeline_tag: text-generation
tags:
- resformer
- value-residual
- {described.variant}
---

# {described.variant}, {costs.parameters:,} parameters

A decoder-only language model with value residual learning (arXiv 2410.17897), variant `{described.variant}`:
`{described.variant_formula}`.
{described.num_hidden_layers} layers x {described.hidden_size}, {described.num_attention_heads} heads,
{described.max_position_embeddings} positions, vocabulary {described.vocab_size:,}. Its KV cache takes
{costs.kv_ratio:.1%} of the bytes of a Transformer of the same shape.

## Load

```python
{_LOAD}```

## Training

{_start(config)}{length}, {tokens:,} tokens, {config.train.batch_size} x {config.data.sequence_length} tokens a step,
AdamW, seed {config.train.seed}, peak learning rate {config.optim.lr:g}, {config.train.dtype}.
Versions: {_versions(facts)}.

Data: {_data(facts, config)}.
Fingerprint of tokenizer and token shards: `{facts["data"]["fingerprint"]}`.

## Validation

{_table(rows, step)}{_recovered(rows, facts, step)}

## What this is not

{_limits(config, tokens, costs.parameters)}
"""


def _recovered(rows: Sequence[Mapping[str, Any]], facts: Mapping[str, Any], step: int) -> str:
    """What came back of what a conversion cost, in a run that knows its source."""
    found = recovery_of([row for row in rows if row["step"] <= step], facts.get("accounting", {}))
    return "" if found is None else f"\n\nAgainst the model that this one was made from: {found.line()}."


def _limits(config: Config, tokens: int, parameters: int) -> str:
    if config.model.from_init:
        return (
            "Trained on from another model, in a single run with one seed: what that model cannot do, and what its\n"
            "licence says, holds for this one too. It was measured on held-out text of this run's corpus only;\n"
            "whatever else the other model was good at (instructions, languages, code) may have been lost."
        )
    return (
        f"A base model from a single run with one seed{_small(tokens, parameters)}. It follows no instructions,\n"
        "was not filtered or aligned, repeats what its training text says, and was measured on held-out text of the\n"
        "same corpus only."
    )


def _start(config: Config) -> str:
    return "" if config.train.init_from is None else f"Started from the weights of `{config.train.init_from}`. "


def _versions(facts: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {number}" for name, number in facts.get("versions", {}).items())


def _data(facts: Mapping[str, Any], config: Config) -> str:
    weights = config.data.weights or facts["data"]["weights"]
    total = sum(weights.values())
    shares = ", ".join(f"{domain} {weight / total:.1%}" for domain, weight in weights.items())
    return f"{len(weights)} domains, shares of the training tokens: {shares}"


def _table(rows: Sequence[Mapping[str, Any]], step: int) -> str:
    found = [row for row in rows if row["split"] == "validation" and row["step"] == step]
    if not found:
        return f"Step {step} was not validated."
    lines = ["| domain | loss (nats/token) | bits per byte | tokens scored |", "|---|---|---|---|"]
    for row in found:
        name = "mean of domains" if row["domain"] == "all" else row["domain"]
        lines.append(f"| {name} | {row['loss']:.4f} | {row['bits_per_byte']:.4f} | {row['tokens']:,} |")
    return "\n".join(lines)


def _small(tokens: int, parameters: int) -> str:
    ratio = tokens / parameters
    return f", trained on {ratio:.1f} tokens per parameter, far from what it could hold" if ratio < 20 else ""
