"""Peak memory of output head and loss, forward and backward: ours, which never holds the logits of a whole batch,
against the losses of other libraries.
"""

from __future__ import annotations

import statistics
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peers
import turns

from resformer.errors import UserError

MOST_RATIO = 0.6
Loss = Callable[[Any, Any, Any], Any]


def ours(hidden_BTC: Any, head: Any, targets_BT: Any) -> Any:
    """Our training loss on hidden states that are there already."""
    import torch

    from resformer.train.loss import batch_losses

    model = types.SimpleNamespace(
        base_model=lambda **_: types.SimpleNamespace(last_hidden_state=hidden_BTC), get_output_embeddings=lambda: head
    )
    tokens_BT1 = torch.cat((targets_BT[:, :1], targets_BT), dim=1)
    return batch_losses(model, tokens_BT1)[0] / targets_BT.numel()


def hf_trainer(hidden_BTC: Any, head: Any, targets_BT: Any) -> Any:
    """What LlamaForCausalLM does with labels under the Trainer."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    return ForCausalLMLoss(
        head(hidden_BTC),
        targets_BT,
        vocab_size=head.out_features,
        shift_labels=targets_BT,
        num_items_in_batch=targets_BT.numel(),
    )


def plain(hidden_BTC: Any, head: Any, targets_BT: Any) -> Any:
    """Whole logits and F.cross_entropy, as x-transformers does."""
    import torch.nn.functional as F

    return F.cross_entropy(head(hidden_BTC).flatten(0, 1), targets_BT.flatten())


def litgpt(hidden_BTC: Any, head: Any, targets_BT: Any) -> Any:
    """Whole logits and litgpt's chunked cross-entropy."""
    peers.needs("litgpt", "litgpt", "lightning", "jsonargparse")
    from litgpt.utils import chunked_cross_entropy

    return chunked_cross_entropy(head(hidden_BTC), targets_BT)


LOSSES: dict[str, Loss] = {"ours": ours, "hf-trainer": hf_trainer, "plain": plain, "litgpt": litgpt}


def measure(
    loss: Loss, hidden_BTC: Any, head: Any, targets_BT: Any, repeats: int, clock: turns.Clock
) -> dict[str, Any]:
    """Loss, peak bytes beyond hidden states and weights, and the median seconds of forward and backward."""
    values = []

    def work() -> None:
        hidden_BTC.grad = head.weight.grad = None
        value = loss(hidden_BTC, head, targets_BT)
        value.backward()
        values.append(float(value.detach()))

    work()
    hidden_BTC.grad = head.weight.grad = None
    peak = turns.peak_allocated(work)
    seconds = statistics.median(turns.timed(work, clock) for _ in range(repeats))
    gradients = sum(x.grad.numel() * x.grad.element_size() for x in (hidden_BTC, head.weight))
    return {"loss": values[0], "peak_bytes": peak, "gradient_bytes": gradients, "seconds": seconds}


def main(
    *,
    vocab_size: int = 50277,
    hidden_size: int = 512,
    batch_size: int = 4,
    sequence_length: int = 512,
    repeats: int = 2,
    threads: int = 1,
    seed: int = 0,
    json_file: Path | None = None,
    strict: bool = False,
) -> int:
    """Compare the peak memory of output head and loss, forward and backward, in fp32 on the CPU.

    The peak counts every tensor beyond hidden states and weights, the gradients of both included.

    Args:
        vocab_size: Entries of the vocabulary.
        hidden_size: Width.
        batch_size: Sequences.
        sequence_length: Tokens per sequence.
        repeats: How often the time is taken.
        threads: Threads of torch.
        seed: Seed of weights and tokens.
        json_file: Write everything measured to this file.
        strict: Exit with 1 if our peak is above 0.6 times the lowest of the others.
    """
    turns.prepare_process(threads)
    import torch

    torch.manual_seed(seed)
    hidden_BTC = torch.randn(batch_size, sequence_length, hidden_size, requires_grad=True)
    head = torch.nn.Linear(hidden_size, vocab_size, bias=False)
    targets_BT = torch.randint(0, vocab_size, (batch_size, sequence_length))
    logits_bytes = 4 * targets_BT.numel() * vocab_size
    print(
        f"head {hidden_size} -> {vocab_size}, {batch_size} x {sequence_length} tokens, fp32; "
        f"logits {logits_bytes / 1e6:,.0f} MB"
    )
    results: dict[str, dict[str, Any]] = {}
    for name, loss in LOSSES.items():
        try:
            found = measure(
                loss, hidden_BTC, head, targets_BT, repeats, turns.CLOCKS["cpu" if threads == 1 else "wall"]
            )
        except UserError as error:
            print(f"{name}: left out: {error}")
            continue
        results[name] = found
        of_ours = results["ours"]["peak_bytes"] / found["peak_bytes"]
        print(
            f"{name:12} peak {found['peak_bytes'] / 1e6:8,.0f} MB, {found['gradient_bytes'] / 1e6:,.0f} gradients; "
            f"{found['seconds']:.2f} s, loss {found['loss']:.4f}; ours takes {of_ours:.2f} of it",
            flush=True,
        )
    lowest = min(found["peak_bytes"] for name, found in results.items() if name != "ours")
    ratio = results["ours"]["peak_bytes"] / lowest
    verdict = f"ours / lowest of the others: {ratio:.3f}: {'reaches' if ratio <= MOST_RATIO else 'MISSES'} {MOST_RATIO}"
    print(verdict)
    if json_file is not None:
        shape = {"vocab_size": vocab_size, "hidden_size": hidden_size, "tokens": targets_BT.numel()}
        about = turns.about() | peers.versions()
        turns.write(json_file, {"about": about, "shape": shape, "results": results, "verdict": verdict})
    return int(strict and ratio > MOST_RATIO)
