"""What `--dry-run` foretells, against what a step takes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from resformer.models.accounting import account
from resformer.recipes import recipe
from resformer.train.build import model_config
from resformer.train.configure import edit
from resformer.train.estimate import estimate_memory, time_line

MEASURE = """
import sys, torch
from resformer.parallel import Layout, Ranks, parallelize
from resformer.recipes import recipe
from resformer.train.build import build_model, model_config
from resformer.train.configure import edit
from resformer.train.estimate import estimate_memory
from resformer.train.loss import accumulate
from resformer.train.optim import build_optimizers

torch.set_num_threads(1)
wide = {"model.hidden_size": 256, "model.intermediate_size": 704, "model.num_hidden_layers": 4}
long = {"data.sequence_length": 256, "train.batch_size": 8, "train.checkpointing": sys.argv[1] == "checkpointing"}
config = edit(recipe("quick"), {**wide, **long})
described = model_config(config, vocab_size=2048)
estimate = estimate_memory(config, described)
model = build_model(config, described, torch.device("cpu"))
parallelize(model, Ranks(), Layout(), checkpointing=config.train.checkpointing)
(optimizer,) = build_optimizers(model, config.optim)

def resident(word):
    line = next(x for x in open("/proc/self/status") if x.startswith(word))
    return int(line.split()[1]) * 1024

def step(tokens):
    accumulate(model, tokens, micro_batch_size=len(tokens))
    optimizer.step()
    optimizer.zero_grad()

step(torch.randint(0, 2048, (1, 9)))  # what a process loads once
states = 3 * 4 * sum(p.numel() for p in model.parameters())  # weights and moments are there, gradients are not
before = resident("VmRSS") - states
open("/proc/self/clear_refs", "w").write("5")
step(torch.randint(0, 2048, (8, 257)))
print(estimate.total, resident("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads the peak of memory as Linux has it")
@pytest.mark.parametrize("how", [pytest.param("plain", marks=pytest.mark.slow), "checkpointing"])
def test_memory_is_what_a_step_takes(how: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}  # so that freed is free
    done = subprocess.run([sys.executable, "-c", MEASURE, how], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    foretold, measured = map(int, done.stdout.split())
    assert abs(foretold / measured - 1) < 0.12, (foretold, measured)


FORMS = [{"model.position_embedding": "learned"}, {"model.sliding_window": 8}, {"model.num_experts": 4}]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: next(iter(form)))
def test_every_host_form_is_counted(form: dict[str, object], dtype: str) -> None:
    """Tensors without data have no numbers that code could look at."""
    config = edit(recipe("tiny"), {**form, "train.dtype": dtype})
    found = estimate_memory(config, model_config(config, vocab_size=300))
    again = edit(config, {"train.batch_size": 16})
    assert found.states == 16 * account(model_config(config, vocab_size=300)).parameters
    more = estimate_memory(again, model_config(again, vocab_size=300)).activations
    assert 1.5 * found.activations < more <= 2 * found.activations  # angles and masks do not grow with the batch


def test_time_at_a_share_of_the_peak() -> None:
    assert time_line(0.4 * 312e12 * 86_400 * 10).startswith(
        "time on one device at 40% of its bf16 peak: A100 (312 TFLOP/s) 10.0 days"
    )
    assert "989 TFLOP/s) 1.0 s" in time_line(0.4 * 989e12)
