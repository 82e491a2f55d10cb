"""Hands tensors from layer to layer in a host's layer loop, and drops them after their last reader.

It lives in the loop, outside every block: blocks get tensors as positional arguments and return tensors. (A list or
dict passed *into* a block loses gradients under reentrant checkpointing and its identity under FSDP2; tensors do
neither.)
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .plan import Plan, What, last_reader


class Carry:
    """Tensors on their way from the layers that send them to the layers that read them. One per forward call.

    Example:
        carry = Carry(plan)
        for row, layer in zip(plan, layers):
            hidden, *sent = layer(hidden, *carry.received(row.layer))
            carry.keep(row.layer, sent)
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.last_reader = last_reader(plan)
        self.held: dict[tuple[int, What, str], Tensor] = {}

    def received(self, layer: int) -> tuple[Tensor, ...]:
        """The tensors that `layer` (from 1) reads, in the order of its row."""
        return tuple(self.held[read.layer, read.what, read.state] for read in self.plan[layer - 1].reads)

    def keep(self, layer: int, sent: Sequence[Tensor]) -> None:
        """Take what `layer` sent, and drop what nobody reads any more."""
        sends = self.plan[layer - 1].sends
        assert len(sent) == len(sends), f"layer {layer} sent {len(sent)} tensors, its row says {len(sends)}"
        for (what, state), tensor in zip(sends, sent, strict=True):
            self.held[layer, what, state] = tensor
        for source in {key[0] for key in self.held if self.last_reader[key[0]] <= layer}:
            self.held = {key: tensor for key, tensor in self.held.items() if key[0] != source}
