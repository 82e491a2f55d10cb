"""The block's second half: gated or plain feed-forward layers, or a mixture of experts.

Shapes: B batch, T new tokens, N = B * T, C hidden size, I intermediate size, E experts, k experts for each token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from ..core.mixing import upcast
from .configuration import ResFormerConfig
from .grouped import grouped_linear


class MLP(nn.Module):
    """down(act(gate(x)) * up(x)) (Shazeer 2020)."""

    def __init__(self, config: ResFormerConfig) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(hidden, inner, bias=bias)
        self.up_proj = nn.Linear(hidden, inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden, bias=bias)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class PlainMLP(nn.Module):
    """down(act(up(x))), as in GPT-2."""

    def __init__(self, config: ResFormerConfig) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.up_proj = nn.Linear(hidden, inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden, bias=bias)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.up_proj(x)))


class Experts(nn.Module):
    """E gated feed-forward layers in two stacked matrices. No token is dropped, whatever the router says.

    Tokens are sorted by expert, so each expert multiplies one matrix of just its tokens.
    """

    def __init__(self, config: ResFormerConfig) -> None:
        super().__init__()
        experts, hidden, inner = config.num_experts, config.hidden_size, config.intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, inner))
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x_NC: Tensor, chosen_Nk: Tensor, weights_Nk: Tensor) -> Tensor:
        """The weighted sum `[N, C]` of the chosen experts' outputs."""
        order = chosen_Nk.flatten().argsort(stable=True)
        sizes_E = F.one_hot(chosen_Nk.flatten(), len(self.down_proj)).sum(0)
        sorted_x = x_NC[order // chosen_Nk.shape[-1]]
        gate, up = grouped_linear(sorted_x, self.gate_up_proj, sizes_E).chunk(2, dim=-1)
        out = grouped_linear(self.act_fn(gate) * up, self.down_proj, sizes_E)
        out_NkC = out[order.argsort()].view(*chosen_Nk.shape, -1)
        return (out_NkC * weights_Nk.unsqueeze(-1)).sum(dim=1).to(x_NC.dtype)


class MixtureOfExperts(nn.Module):
    """Each token goes through the k experts that a linear router finds most probable, weighted by their probabilities
    scaled to sum 1 (Jiang et al., Mixtral, arXiv 2401.04088). The softmax is taken in at least fp32.
    """

    def __init__(self, config: ResFormerConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = Experts(config)
        self.experts_per_token = config.num_experts_per_tok

    def forward(self, x_BTC: Tensor) -> tuple[Tensor, Tensor]:
        """Output `[B, T, C]` and the router's logits `[B, T, E]`, at least fp32."""
        logits_BTE = upcast(self.gate(x_BTC))
        weights, chosen = logits_BTE.softmax(dim=-1).topk(self.experts_per_token, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        out = self.experts(x_BTC.flatten(0, 1), chosen.flatten(0, 1), weights.flatten(0, 1))
        return out.view_as(x_BTC), logits_BTE


def make_mlp(config: ResFormerConfig) -> nn.Module:
    """The feed-forward half that the config asks for."""
    if config.num_experts:
        return MixtureOfExperts(config)
    return {"gated": MLP, "plain": PlainMLP}[config.mlp](config)


def load_balancing_loss(
    router_logits: Sequence[Tensor], experts_per_token: int, token_mask_BT: Tensor | None = None
) -> Tensor:
    """E sum_e f_e P_e: f_e is how often expert e is chosen per token, P_e its mean probability, both over all layers
    and counted tokens; k when tokens are spread evenly (Fedus et al., Switch Transformers, arXiv 2101.03961, eq. 4-6,
    pooled over layers and with k choices as transformers does for Mixtral).

    Args:
        router_logits: `[B, T, E]` of each layer.
        experts_per_token: k.
        token_mask_BT: 0 or False for tokens that do not count (padding).
    """
    probabilities = torch.stack([logits.softmax(dim=-1) for logits in router_logits])
    chosen = probabilities.topk(experts_per_token, dim=-1).indices
    often = F.one_hot(chosen, probabilities.shape[-1]).sum(dim=-2).to(probabilities.dtype)
    if token_mask_BT is None:
        f_E, p_E = (x.flatten(0, -2).mean(dim=0) for x in (often, probabilities))
    else:
        counted = token_mask_BT.to(probabilities.dtype)[None, :, :, None]
        total = counted.sum() * len(router_logits)
        f_E, p_E = ((x * counted).flatten(0, -2).sum(dim=0) / total for x in (often, probabilities))
    return probabilities.shape[-1] * (f_E * p_E).sum()
