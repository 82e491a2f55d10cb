"""A model's stream over calibration windows, one block at a time for all of them.

The forward pass of a model goes through all blocks with some windows; a fit goes through all windows with one block,
changes its weights, and only then to the next. Shapes: b windows at a time, T tokens, C hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..core.carry import Carry
from ..errors import UserError
from ..models.masks import spans
from ..models.modeling import ResFormerForCausalLM

BATCH = 4
"""Windows that go through a block together."""


class Course:
    """What goes into the next block: the stream `[b, T, C]` of each batch, and what layers before sent."""

    def __init__(self, model: ResFormerForCausalLM, streams: list[Tensor]) -> None:
        """Args: a model, and the stream of each batch before a block after which nothing sent before it is read.

        Raises:
            UserError: blocks get more than that, token tables or averages over depth.
        """
        self.inner, self.streams = model.model, streams
        if self.inner.value_tables is not None or self.inner.depth_average:
            raise UserError("--calibration fits no models with token tables or averages over depth")
        self.carries = [Carry(self.inner.plan, (), self.inner.last_reader) for _ in streams]

    @classmethod
    @torch.no_grad()
    def of(cls, model: ResFormerForCausalLM, ids: Tensor) -> Course:
        """From the embeddings of windows `[B, T]` on."""
        course = cls(model, [model.model.embed_tokens(part) for part in ids.split(BATCH)])
        learned = course.inner.embed_positions
        if learned is not None:
            course.streams = [x + learned(course.inner.positions(x, None, None, None)) for x in course.streams]
        return course

    def __len__(self) -> int:
        return len(self.streams)

    @torch.no_grad()
    def out(self, index: int, part: int) -> list[Tensor]:
        """What block `index` (from 0) makes of a batch: the stream, then what it sends."""
        stream, layer = self.streams[part], self.inner.layers[index]
        out = layer(stream, *self._received(index, part), **self._kwargs(index, stream))
        return list(out[:-1] if layer.routes else out)

    @torch.no_grad()
    def attend(self, index: int, part: int) -> Tensor:
        """The stream after the attention of block `index`, of one with norms before its halves."""
        stream, layer = self.streams[part], self.inner.layers[index]
        received = self._received(index, part)
        return stream + layer.self_attn(layer.input_layernorm(stream), *received, **self._kwargs(index, stream))[0]

    def step(self, index: int, part: int) -> None:
        """A batch goes through block `index`."""
        self.streams[part], *sent = self.out(index, part)
        self.carries[part].keep(index + 1, sent)

    def _received(self, index: int, part: int) -> tuple[Tensor, ...]:
        return (*self.carries[part].received(index + 1), *self.inner.layer_coefficients()[index])

    def _kwargs(self, index: int, stream: Tensor) -> dict[str, Any]:
        positions = self.inner.positions(stream, None, None, None)
        rotary = self.inner.rotary_emb
        return {
            "attention_mask": self.inner.masks(stream, None, None, None)[self.inner.mask_names[index]],
            "cache": None,
            "span": spans(self.inner.views, None, stream.shape[1])[index],
            "position_ids": positions,
            "position_embeddings": None if rotary is None else rotary(stream, positions),
        }


@contextmanager
def watched(projection: nn.Linear) -> Iterator[dict[str, Tensor]]:
    """Within: what last went into a projection ("given") and what came out ("made"), rows `[b * T, features]`."""
    seen: dict[str, Tensor] = {}

    def look(_module: Any, args: tuple[Tensor, ...], output: Tensor) -> None:
        seen["given"], seen["made"] = args[0].flatten(0, -2), output.flatten(0, -2)

    handle = projection.register_forward_hook(look)
    try:
        yield seen
    finally:
        handle.remove()
