"""Whether a model that was written computes what it should: logits at some positions, from files, in another process.

`python -m resformer.convert.check DIRECTORY PROBE OUTPUT` loads the directory with the Auto classes and writes the
logits for the token ids in PROBE, once for the whole sequence and once in two parts through a cache.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..errors import RunError
from ..models.compat import CACHE

POSITIONS = (0, 20, 200)
TOLERANCE = 1e-5
"""Of logits in fp32, relative to the largest one where that is over 1."""
ROWS = 2
_MARGIN = 24  # tokens beyond a window, or beyond the positions from which scaled rotary ones change
_LONGEST = 2048


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Token ids `[ROWS, T]`, the positions whose logits are compared, and what so short a sequence cannot show."""

    ids: Tensor
    positions: tuple[int, ...]
    unseen: tuple[str, ...]


def probe_for(config: Any) -> Probe:
    """Random token ids, long enough to show windows and scaled positions where these begin within 2,048 tokens.

    Args:
        config: of our model.
    """
    length, limit = POSITIONS[-1] + 1, config.max_position_embeddings
    wanted: dict[str, int] = {}
    if config.windowed_layers():
        wanted[f"windows of {config.sliding_window} tokens"] = config.sliding_window
    rope = config.rope() if config.position_embedding == "rope" else {}
    if rope.get("rope_type") == "dynamic":
        wanted[f"rotary positions from {limit} on"] = limit
        limit = limit + _MARGIN
    elif rope.get("rope_type") == "longrope":
        wanted["long rotary factors"] = int(rope["original_max_position_embeddings"])
    fits = {words: at + _MARGIN for words, at in wanted.items() if at + _MARGIN <= min(limit, _LONGEST)}
    length = min(max(length, *fits.values(), 0), limit)
    ids = torch.randint(0, config.vocab_size, (ROWS, length), generator=torch.Generator().manual_seed(0))
    positions = sorted({at for at in POSITIONS if at < length} | {length - 1})
    return Probe(ids=ids, positions=tuple(positions), unseen=tuple(words for words in wanted if words not in fits))


@torch.no_grad()
def logits(model: Any, ids: Tensor, positions: Sequence[int]) -> Tensor:
    """Logits `[2, ROWS, positions, V]` of a causal LM of transformers in fp32: of the whole sequence at once, and in
    two parts, the second through the cache of the first.

    The two need not be equal: rotary positions that scale with the length turn the keys of a cache only once.
    """
    whole = model(input_ids=ids, use_cache=False, logits_to_keep=torch.tensor(positions)).logits
    cut = min(POSITIONS[1] + 1, ids.shape[1] - 1)
    found, cache, done = [], None, 0
    for part in ids.split([length for length in (cut, ids.shape[1] - cut) if length], dim=1):
        kept = [at - done for at in positions if done <= at < done + part.shape[1]]
        outputs = model(input_ids=part, use_cache=True, logits_to_keep=torch.tensor(kept).long(), **{CACHE: cache})
        found.append(outputs.logits)
        cache, done = getattr(outputs, CACHE), done + part.shape[1]
    return torch.stack((whole.float(), torch.cat(found, dim=1).float()))


def in_another_process(directory: Path, probe: Probe, prelude: Sequence[str] = ()) -> Tensor:
    """`logits` of the model in `directory`, as a new process computes them.

    Args:
        directory: what `from_pretrained` takes.
        probe: what to compute.
        prelude: lines of Python that the process runs first, such as imports that register variants.

    Raises:
        RunError: the process failed; with the last line that it said.
    """
    code = "\n".join([*prelude, "from resformer.convert.check import main", "main()"])
    package = str(Path(__file__).resolve().parents[2])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory(prefix="resformer-check-") as place:
        given, got = Path(place, "probe.safetensors"), Path(place, "found.safetensors")
        save_file({"ids": probe.ids, "positions": torch.tensor(probe.positions)}, given)
        command = [sys.executable, "-c", code, str(directory), str(given), str(got)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode != 0 or not got.is_file():
            said = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
            last = said[-1] if said else f"exit code {done.returncode}"
            raise RunError(f"the model that was written could not be loaded in a new process: {last}")
        return load_file(got)["logits"]


def difference(got: Tensor, expected: Tensor) -> Tensor:
    """Largest difference by position, `[positions]`; infinite where a number is none."""
    gap = (got - expected).abs().amax(dim=(0, 1, 3))
    return torch.where(gap.isfinite(), gap, torch.inf)


def allowed(expected: Tensor) -> float:
    """The difference that rounding may make."""
    return TOLERANCE * max(1.0, float(expected.abs().max()))


def main() -> None:
    """What the other process does."""
    from transformers import AutoModelForCausalLM

    directory, given, got = sys.argv[1:4]
    probe = load_file(given)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, use_safetensors=True, output_loading_info=True
    )
    model, info = loaded
    strange = {kind: names for kind, names in info.items() if names}
    if strange:
        raise SystemExit(f"the weights do not fit the config: {strange}")
    model.eval()
    save_file({"logits": logits(model, probe["ids"], probe["positions"].tolist()).contiguous()}, got)


if __name__ == "__main__":
    main()
