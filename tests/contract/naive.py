"""A naive model, written from the equations: loops over layers, heads and positions' masks, no cache, no plan, no
policy.

It shares nothing with the package but the state dict's keys and the options' names. `REFERENCES` says for each variant
what it changes in plain attention. A variant without an entry fails the contract.
"""

from __future__ import annotations

import naive_others as others
import naive_values as values
import torch
from naive_base import Plain
from torch import Tensor

REFERENCES: dict[str, type[Plain]] = {
    "transformer": Plain,
    "identity": values.Identity,
    "constant": values.Constant,
    "sparse": values.Sparse,
    "learnable": values.Learnable,
    "learnable_plus": values.Plus,
    "dense": values.Dense,
    "svformer": values.SVFormer,
    "cla": others.CrossLayer,
    "neutreno": values.Neutreno,
    "neutreno_resformer": values.NeutrenoResFormer,
    "denseformer": others.DenseFormer,
    "hidden_residual": others.HiddenResidual,
    "query_residual": others.QueryResidual,
    "key_residual": others.KeyResidual,
    "attention_residual": others.AttentionResidual,
    "cross_attention": others.CrossAttention,
    "identity_mapping": others.IdentityMapping,
    "gated": values.Gated,
    "rwkv": values.RWKV,
    "skipv1": values.SkipV1,
    "value_embeddings": values.ValueEmbeddings,
}


def naive_logits(state: dict[str, Tensor], config, ids: Tensor) -> Tensor:
    """Logits `[B, T, vocabulary]` in the dtype of the (float) state dict, by the book."""
    reference = REFERENCES[config.variant](config, state)
    T, D = ids.shape[1], config.head_dim
    dtype = state["model.norm.weight"].dtype

    def norm(x: Tensor, name: str) -> Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + config.rms_norm_eps) * state[name]

    theta = config.rope_parameters["rope_theta"]
    angle = torch.arange(T, dtype=dtype)[:, None] / theta ** (torch.arange(0, D, 2, dtype=dtype) / D)[None]
    cos, sin = angle.cos(), angle.sin()

    def rotated(x: Tensor) -> Tensor:  # [B, T, D]
        a, b = x[..., : D // 2], x[..., D // 2 :]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    x = state["model.embed_tokens.weight"][ids]
    Q, K, V, A, X = {}, {}, {}, {}, {0: x}
    for n in range(1, config.num_hidden_layers + 1):
        p = f"model.layers.{n - 1}."
        h = norm(x, p + "input_layernorm.weight")
        for tensors, letter in ((Q, "q"), (K, "k"), (V, "v")):
            weight = state.get(f"{p}self_attn.{letter}_proj.weight")
            if weight is not None:
                tensors[n] = (h @ weight.T).reshape(*ids.shape, -1, D)
        v = reference.value(n, V, h, ids)
        q, keys, attended = reference.query(n, Q), [reference.key(n, K)], [v]
        beside = reference.beside(n)
        if beside is not None:
            keys, attended = [*keys, K[beside]], [*attended, V[beside]]
        A[n] = _weights(q, keys, rotated)
        U = _attend(reference.attention(n, A), attended)
        U = reference.output(n, U, v, V)
        x = x + U.flatten(2) @ state[p + "self_attn.o_proj.weight"].T
        h = norm(x, p + "post_attention_layernorm.weight")
        gate, up = h @ state[p + "mlp.gate_proj.weight"].T, h @ state[p + "mlp.up_proj.weight"].T
        X[n] = x + (gate * torch.sigmoid(gate) * up) @ state[p + "mlp.down_proj.weight"].T
        x = reference.hidden(n, X)
    return norm(x, "model.norm.weight") @ state.get("lm_head.weight", state["model.embed_tokens.weight"]).T


def _weights(q: Tensor, keys: list[Tensor], rotated) -> Tensor:
    """Attention weights `[B, H, T, T]` (T more columns for each further set of keys), causal in every set."""
    T, H, D = q.shape[1:]
    future = torch.triu(torch.ones(T, T, dtype=torch.bool), diagonal=1)
    weights = []
    for head in range(H):
        sets = []
        for k in keys:
            scores = rotated(q[:, :, head]) @ rotated(k[:, :, head // (H // k.shape[2])]).transpose(1, 2) / D**0.5
            sets.append(scores.masked_fill(future, -torch.inf))
        weights.append(torch.softmax(torch.cat(sets, dim=-1), dim=-1))
    return torch.stack(weights, dim=1)


def _attend(A: Tensor, values: list[Tensor]) -> Tensor:
    """`[B, T, H, D]`: each head's weights times its values, set after set."""
    H = A.shape[1]
    return torch.stack(
        [A[:, h] @ torch.cat([v[:, :, h // (H // v.shape[2])] for v in values], dim=1) for h in range(H)], dim=2
    )
