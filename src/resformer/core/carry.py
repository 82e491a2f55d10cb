"""Hands tensors from layer to layer in a host's layer loop, and drops them after their last reader.

It lives in the loop, outside every block: blocks get tensors as positional arguments and return tensors. (A list or
dict passed *into* a block loses gradients under reentrant checkpointing and its identity under FSDP2; tensors do
neither.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from .plan import Plan, Sent, last_reader


class Carry:
    """Tensors on their way from the layers that send them to the layers that read them. One per forward call.

    Example:
        carry = Carry(plan)
        for row, layer in zip(plan, layers):
            hidden, *sent = layer(hidden, *carry.received(row.layer))
            carry.keep(row.layer, sent)

    A host whose plans average hidden states also calls `keep_hidden` (first with the embeddings as layer 0) and
    `averaged`.
    """

    def __init__(
        self, plan: Plan, tables: Sequence[Tensor | None] = (), last: Mapping[Sent, int] | None = None
    ) -> None:
        """Args: the plan, per layer what a token table says for it (None where nothing), and `last_reader(plan)` if it
        is at hand.
        """
        self.plan, self.tables = plan, tables
        self.last_reader = last_reader(plan) if last is None else last
        # Hidden states are read after the block that reads them has sent its own tensors.
        self.drops = {reader + (what == "hidden") for (_, what, _), reader in self.last_reader.items()}
        self.held: dict[Sent, Tensor] = {}

    def received(self, layer: int) -> tuple[Tensor, ...]:
        """The tensors that go into block `layer` (from 1), in the order of its row."""
        return tuple(
            self._table(layer) if read.what == "table" else self.held[read.layer, read.what, read.state]
            for read in self.plan[layer - 1].received
        )

    def averaged(self, layer: int) -> tuple[Tensor, ...]:
        """The hidden states that are averaged with the output of block `layer`, in the order of its row."""
        return tuple(self.held[read.layer, "hidden", "raw"] for read in self.plan[layer - 1].averaged)

    def keep(self, layer: int, sent: Sequence[Tensor]) -> None:
        """Take what `layer` sent, and drop what nobody reads any more."""
        sends = self.plan[layer - 1].sends
        assert len(sent) == len(sends), f"layer {layer} sent {len(sent)} tensors, its row says {len(sends)}"
        for (what, state), tensor in zip(sends, sent, strict=True):
            self.held[layer, what, state] = tensor
        if layer in self.drops:
            self.held = {key: x for key, x in self.held.items() if self.last_reader[key] + (key[1] == "hidden") > layer}

    def keep_hidden(self, layer: int, hidden: Tensor) -> None:
        """Take the output of block `layer` (0: the embeddings), if anybody averages it."""
        if (layer, "hidden", "raw") in self.last_reader:
            self.held[layer, "hidden", "raw"] = hidden

    def _table(self, layer: int) -> Tensor:
        tensor = self.tables[layer - 1]
        assert tensor is not None, f"layer {layer} reads a token table, but none says anything for it"
        return tensor
