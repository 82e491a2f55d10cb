"""The host's block: attention and a feed-forward layer, by default with norms before them as in Llama.

Shapes: B batch, T new tokens, C hidden size.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ..core.plan import Row
from ..core.policy import Policy
from .attention import Attention
from .configuration import ResFormerConfig
from .mlp import make_mlp
from .norm import make_norm


class DecoderLayer(GradientCheckpointingLayer):
    """One block: `hidden, *sent = layer(hidden, *received)`. Tensors in, tensors out, so checkpointing and FSDP2 keep
    every gradient. With experts the router's logits `[B, T, E]` come last.

    Without `first_block_residual` block 1 does not add its input to what attention returns: H_1 = f_1(H_0), where the
    feed-forward half keeps its own residual. It is the paper's control for "why V_1 and not V_2": V_2 is a projection
    of H_1, which the residual stream carries to later layers anyway, so a shortcut from V_2 gains nothing; without the
    link from H_0 to H_1 it does gain.

    With `norm_placement` "post" the norms stand after attention and feed-forward layer, before their outputs are added,
    and attention and its values see the stream as it is.
    """

    def __init__(self, config: ResFormerConfig, row: Row, policy: Policy | None) -> None:
        super().__init__()
        self.self_attn = Attention(config, row, policy)
        self.mlp = make_mlp(config)
        self.norms_outputs = config.norm_placement == "post"
        self.input_layernorm = nn.Identity() if self.norms_outputs else make_norm(config)
        self.post_attention_layernorm = make_norm(config)
        if self.norms_outputs:
            self.post_feedforward_layernorm = make_norm(config)
        self.keeps_input = config.first_block_residual or row.layer > 1
        self.routes = config.num_experts > 0

    def forward(self, hidden: Tensor, *received: Tensor, **kwargs: Any) -> tuple[Tensor, ...]:
        out, _, *sent = self.self_attn(self.input_layernorm(hidden), *received, **kwargs)
        if self.norms_outputs:
            out = self.post_attention_layernorm(out)
        hidden = hidden + out if self.keeps_input else out
        update = self.mlp(hidden if self.norms_outputs else self.post_attention_layernorm(hidden))
        if self.routes:
            update, router_logits = update
            sent.append(router_logits)
        if self.norms_outputs:
            update = self.post_feedforward_layernorm(update)
        return hidden + update, *sent
