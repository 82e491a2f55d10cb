"""The model card of a converted model."""

from __future__ import annotations

from collections.abc import Mapping

from ..models.configuration import ResFormerConfig
from .start import shares

_LOAD = """\
import resformer  # pip install resformer; makes the Auto classes know the architecture
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(".")  # this directory
"""


def card(
    config: ResFormerConfig,
    source: str,
    *,
    exact: bool,
    why: str,
    differences: Mapping[int, float],
    losses: Mapping[str, float],
) -> str:
    """Text of README.md: what the model was made of, and how far it is from it."""
    gaps = ", ".join(f"{gap:.2g} at position {at}" for at, gap in differences.items())
    if exact:
        said = f"It starts as its source: largest difference of a logit in fp32 {gaps}."
    else:
        said = f"It does not compute what its source does ({why}): largest difference of a logit in fp32 {gaps}."
        said += " It needs training before it is of use."
    if losses:
        said += f"\nLoss on held-out calibration text, nats per token: {', '.join(_loss(losses))}."
    if not shares(config.plan()):
        said += "\n\nThe way back, while the variant is neutral: `resformer convert DIR --to-hf --out OTHER`."
    return f"""\
---
library_name: transformers
pipeline_tag: text-generation
tags:
- resformer
- value-residual
- {config.variant}
---

# {source}, converted to `{config.variant}`

`{config.variant_formula}`

{said}

```python
{_LOAD}```

Licence and limits are those of the source.
"""


def _loss(losses: Mapping[str, float]) -> list[str]:
    words = {"source": "source", "naive": "with the source's weights", "fitted": "with fitted weights"}
    return [f"{value:.3f} ({words[name]})" for name, value in losses.items()]
