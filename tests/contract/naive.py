"""A naive model, written from the equations: loops over layers, heads and positions' masks, no cache, no plan, no
policy.

It shares nothing with the package but the state dict's keys. `FORMULAS` says for each variant what value layer n
attends to, given all raw values (`V[n]`, from 1) and the parameters; `OUTPUTS` what happens to the attention output. A
variant without an entry fails the contract.
"""

from __future__ import annotations

import torch

Values = dict[int, torch.Tensor]  # layer -> [B, T, H_kv, D]


def _fixed(first, own):
    def formula(n, V, options, get):
        return options.get("first", first) * V[1] + options.get("own", own) * V[n] if n > 1 else V[1]

    return formula


def _sparse(n, V, options, get):
    last = options.get("last", 3)
    N = get("layers")
    return 5.0 * V[1] + V[n] if n > 1 and n > N - last else V[n]


def _learnable(n, V, options, get):
    if n == 1:
        return V[1]
    prefix = f"model.layers.{n - 1}.self_attn.value_residual."
    return get(prefix + "first") * V[1] + get(prefix + "own") * V[n]


def _plus(n, V, options, get):
    if n == 1:
        return V[1]
    logits, scale = get("model.value_coefficients.logits"), get("model.value_coefficients.scale")
    weight = scale * torch.exp(logits[n - 2]) / torch.exp(logits).sum()
    return weight * V[1] + get(f"model.layers.{n - 1}.self_attn.value_residual.own") * V[n]


FORMULAS = {
    "transformer": lambda n, V, options, get: V[n],
    "identity": _fixed(0.5, 0.5),
    "constant": _fixed(2.0, 1.0),
    "sparse": _sparse,
    "learnable": _learnable,
    "learnable_plus": _plus,
    "svformer": lambda n, V, options, get: V[1],
}


def naive_logits(state: dict, config, ids: torch.Tensor) -> torch.Tensor:
    """Logits `[B, T, vocabulary]` in the dtype of the (float) state dict, by the book."""
    N, H, H_kv, D = config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads, config.head_dim
    B, T = ids.shape

    def get(name):
        return N if name == "layers" else state[name]

    def norm(x, weight):
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + config.rms_norm_eps) * weight

    dtype = state["model.norm.weight"].dtype
    theta = config.rope_parameters["rope_theta"]
    angle = torch.arange(T, dtype=dtype)[:, None] / theta ** (torch.arange(0, D, 2, dtype=dtype) / D)[None]
    cos, sin = angle.cos(), angle.sin()

    def rotated(x):  # [T, D]
        a, b = x[:, : D // 2], x[:, D // 2 :]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    x = state["model.embed_tokens.weight"][ids]
    V: Values = {}
    future = torch.triu(torch.ones(T, T, dtype=torch.bool), diagonal=1)
    for n in range(1, N + 1):
        p = f"model.layers.{n - 1}."
        h = norm(x, state[p + "input_layernorm.weight"])
        q = (h @ state[p + "self_attn.q_proj.weight"].T).view(B, T, H, D)
        k = (h @ state[p + "self_attn.k_proj.weight"].T).view(B, T, H_kv, D)
        if p + "self_attn.v_proj.weight" in state:
            V[n] = (h @ state[p + "self_attn.v_proj.weight"].T).view(B, T, H_kv, D)
        v = FORMULAS[config.variant](n, V, config.variant_options, get)
        out = torch.zeros(B, T, H, D, dtype=dtype)
        for b in range(B):
            for head in range(H):
                source = head // (H // H_kv)
                scores = rotated(q[b, :, head]) @ rotated(k[b, :, source]).T / D**0.5
                out[b, :, head] = torch.softmax(scores.masked_fill(future, -torch.inf), dim=-1) @ v[b, :, source]
        x = x + out.reshape(B, T, H * D) @ state[p + "self_attn.o_proj.weight"].T
        h = norm(x, state[p + "post_attention_layernorm.weight"])
        gate, up = h @ state[p + "mlp.gate_proj.weight"].T, h @ state[p + "mlp.up_proj.weight"].T
        x = x + (gate * torch.sigmoid(gate) * up) @ state[p + "mlp.down_proj.weight"].T
    head_weight = state.get("lm_head.weight", state["model.embed_tokens.weight"])
    return norm(x, state["model.norm.weight"]) @ head_weight.T
