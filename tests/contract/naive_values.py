"""References of the variants that change values: the ResFormer forms, gates, sharing, token tables, NeuTRENO."""

from __future__ import annotations

import torch
from naive_base import SOURCE, Layers, Plain, Start
from torch import Tensor


class Residual(Plain):
    """V_n <- l1 V_m + l2 V_n in the chosen layers."""

    forms = {**SOURCE, "granularity": "scalar", "tie": "free"}  # noqa: RUF012

    def size(self) -> tuple[int, ...]:
        return {"scalar": (1,), "head": (self.H_kv, 1), "channel": (self.H_kv, self.D)}[self.o["granularity"]]

    def tied(self, l1: Tensor, l2: Tensor | None) -> Tensor:
        return {"free": l2, "lerp": 1 - l1, "own_one": torch.ones_like(l1)}[self.o["tie"]]

    def weights(self, n: int) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def value(self, n: int, V: Layers, h: Tensor, ids: Tensor) -> Tensor:
        if n not in self.chosen():
            return V[n]
        l1, l2 = self.weights(n)
        return l1 * V[self.source(n)] + l2 * V[n]


class Identity(Residual):
    defaults = {**Residual.forms, "first": 0.5, "own": 0.5}  # noqa: RUF012

    def weights(self, n: int) -> tuple[Tensor, Tensor]:
        l1, l2 = (
            torch.tensor(self.o[name], dtype=torch.float64).reshape(
                self.size() if isinstance(self.o[name], list) else (1,)
            )
            for name in ("first", "own")
        )
        return l1, self.tied(l1, l2)


class Constant(Identity):
    defaults = {**Residual.forms, "first": 2.0, "own": 1.0}  # noqa: RUF012


class Sparse(Identity):
    defaults = {**Residual.forms, "first": 5.0, "own": 1.0, "layers": "last:3"}  # noqa: RUF012


class Learnable(Residual):
    defaults = {**Residual.forms, "init_first": 0.5, "init_own": 0.5}  # noqa: RUF012

    def weights(self, n: int) -> tuple[Tensor, Tensor]:
        l1 = self.own(n, "first")
        return l1, self.tied(l1, self.own(n, "own") if self.o["tie"] == "free" else None)

    def starts(self) -> dict[str, Start]:
        starts = {self.own_key(n, "first"): self.o["init_first"] for n in self.chosen()}
        if self.o["tie"] == "free":
            starts |= {self.own_key(n, "own"): self.o["init_own"] for n in self.chosen()}
        return starts


class Plus(Residual):
    """l1_n = s exp(z_n) / sum_i exp(z_i), the sum over the mixing layers."""

    defaults = {**Residual.forms, "logit_init": "linear", "scale_init": None, "init_own": 0.5}  # noqa: RUF012

    def weights(self, n: int) -> tuple[Tensor, Tensor]:
        z, s = self.state["model.value_coefficients.logits"], self.state["model.value_coefficients.scale"]
        total = sum(torch.exp(z[i]) for i in range(len(self.chosen())))
        l1 = s * torch.exp(z[self.chosen().index(n)]) / total
        return l1, self.tied(l1, self.own(n, "own") if self.o["tie"] == "free" else None)

    def starts(self) -> dict[str, Start]:
        logits = torch.tensor([float(n if self.o["logit_init"] == "linear" else 0) for n in self.chosen()])
        if self.size() != (1,):
            logits = logits[:, None, None] * torch.ones(self.size())
        starts: dict[str, Start] = {
            "model.value_coefficients.logits": logits.tolist(),
            "model.value_coefficients.scale": self.o["scale_init"] or float(self.N),
        }
        if self.o["tie"] == "free":
            starts |= {self.own_key(n, "own"): self.o["init_own"] for n in self.chosen()}
        return starts


class Dense(Residual):
    """V_n <- l_nn V_n + sum_{m<=i<n} l_ni V_i with raw values; or all weights 1/k."""

    defaults = {**Residual.forms, "mode": "learnable", "init_first": 0.5, "init_own": 0.5}  # noqa: RUF012

    def value(self, n: int, V: Layers, h: Tensor, ids: Tensor) -> Tensor:
        if n not in self.chosen():
            return V[n]
        sources = range(self.first_source(), n)
        if self.o["mode"] == "mean":
            return (V[n] + sum(V[i] for i in sources)) / (len(sources) + 1)
        weights = self.own(n, "weights")
        earlier = sum(weights[k] * V[i] for k, i in enumerate(sources))
        own = {"free": weights[-1], "lerp": 1 - sum(weights[k] for k in range(len(sources))), "own_one": 1.0}
        return earlier + own[self.o["tie"]] * V[n]

    def starts(self) -> dict[str, Start]:
        if self.o["mode"] == "mean":
            return {}
        starts: dict[str, Start] = {}
        for n in self.chosen():
            column = [self.o["init_first"]] + [0.0] * (n - self.first_source() - 1)
            column += [self.o["init_own"]] * (self.o["tie"] == "free")
            column = torch.tensor(column).reshape(-1, *[1] * len(self.size())) * torch.ones(self.size())
            starts[self.own_key(n, "weights")] = column.tolist()
        return starts


class SVFormer(Plain):
    """U_n = g_n A_n V_m, m the nearest anchor before n; keys shared in groups."""

    defaults = {"layers": "all", "anchors": [1], "gamma": False, "key_group": 1}  # noqa: RUF012

    def sharing(self) -> list[int]:
        return [n for n in self.chosen() if n not in self.o["anchors"]]

    def key(self, n: int, K: Layers) -> Tensor:
        while (n - 1) % self.o["key_group"]:
            n -= 1
        return K[n]

    def value(self, n: int, V: Layers, h: Tensor, ids: Tensor) -> Tensor:
        return V[[a for a in sorted(self.o["anchors"]) if a < n][-1]] if n in self.sharing() else V[n]

    def output(self, n: int, U: Tensor, M: Tensor, V: Layers) -> Tensor:
        return self.own(n, "gamma") * U if self.o["gamma"] and n in self.sharing() else U

    def starts(self) -> dict[str, Start]:
        return {self.own_key(n, "gamma"): 1.0 for n in self.sharing()} if self.o["gamma"] else {}


class Neutreno(Plain):
    """U_n = A_n V_n + strength (V_m - V_n), without attention weights on the correction."""

    defaults = {**SOURCE, "strength": 0.4}  # noqa: RUF012

    def output(self, n: int, U: Tensor, M: Tensor, V: Layers) -> Tensor:
        if n not in self.chosen():
            return U
        return U + self.o["strength"] * (self.heads(V[self.source(n)]) - self.heads(M))


class NeutrenoResFormer(Neutreno):
    defaults = {**SOURCE, "strength": 0.2, "first": 0.5, "own": 0.5}  # noqa: RUF012

    def value(self, n: int, V: Layers, h: Tensor, ids: Tensor) -> Tensor:
        return self.o["first"] * V[self.source(n)] + self.o["own"] * V[n] if n in self.chosen() else V[n]


class Gated(Plain):
    """V_n + g(W h) V_m, one gate per token and KV head."""

    defaults = {**SOURCE, "activation": "tanh"}  # noqa: RUF012

    def value(self, n: int, V: Layers, h: Tensor, ids: Tensor) -> Tensor:
        if n not in self.chosen():
            return V[n]
        out = []
        for head in range(self.H_kv):
            z = h @ self.own(n, "weight")[head]
            if self.o["activation"] == "sigmoid":
                gate = 1 / (1 + torch.exp(-z - self.own(n, "bias")[head]))
            elif self.o["activation"] == "relu":
                gate = torch.where(z > 0, z, torch.zeros_like(z))
            else:
                gate = 1 - 2 / (torch.exp(2 * z) + 1)
            out.append(V[n][:, :, head] + gate[..., None] * V[self.source(n)][:, :, head])
        return torch.stack(out, dim=2)

    def starts(self) -> dict[str, Start]:
        weight = _normal(0.02) if self.o["activation"] == "relu" else 0.0
        starts: dict[str, Start] = {self.own_key(n, "weight"): weight for n in self.chosen()}
        if self.o["activation"] == "sigmoid":
            starts |= {self.own_key(n, "bias"): -4.0 for n in self.chosen()}
        return starts


class RWKV(Plain):
    """V_n + (V_m - V_n) sigmoid(v0 + (h v1) v2), per channel."""

    defaults = {**SOURCE, "rank": None}  # noqa: RUF012

    def value(self, n: int, V: Layers, h: Tensor, ids: Tensor) -> Tensor:
        if n not in self.chosen():
            return V[n]
        logits = self.own(n, "base") + (h @ self.own(n, "down")) @ self.own(n, "up")
        own, first = V[n].flatten(2), V[self.source(n)].flatten(2)
        return (own + (first - own) / (1 + torch.exp(-logits))).reshape(V[n].shape)

    def starts(self) -> dict[str, Start]:
        width = self.H_kv * self.D
        rank = self.o["rank"] or max(32, round(1.7 * self.C**0.5 / 32) * 32)
        base = [0.73 - 0.4 * (c / (width - 1) - 0.5) for c in range(width)]

        def down(x: Tensor) -> bool:
            return x.shape == (self.C, rank) and not x.any()

        def up(x: Tensor) -> bool:
            """Orthogonal; RWKV's gain is sqrt(rows / columns) when there are more rows than columns."""
            gram = x @ x.T if rank <= width else x.T @ x
            scale = 0.01 * max(1.0, rank / width)
            return x.shape == (rank, width) and torch.allclose(gram, scale * torch.eye(len(gram)), atol=1e-6)

        layers = self.chosen()
        return {self.own_key(n, name): v for n in layers for name, v in (("base", base), ("down", down), ("up", up))}


class SkipV1(Plain):
    """The last `share` of the value heads are the source's; V_n has the other heads only."""

    defaults = {**SOURCE, "share": 0.5}  # noqa: RUF012

    def value(self, n: int, V: Layers, h: Tensor, ids: Tensor) -> Tensor:
        if n not in self.chosen():
            return V[n]
        kept = self.H_kv - round(self.o["share"] * self.H_kv)
        assert V[n].shape[2] == kept
        return torch.stack([V[n if k < kept else self.source(n)][:, :, k] for k in range(self.H_kv)], dim=2)


class ValueEmbeddings(Plain):
    """V_n + c sigmoid(W x) E_n[token], one gate per token and KV head."""

    defaults = {"style": "nanochat", "layers": None, "tied": False}  # noqa: RUF012

    def reading(self) -> list[int]:
        everything = range(1, self.N + 1)
        spec = self.o["layers"] or {"nanochat": "alternating", "modded_nanogpt": "ends:3"}[self.o["style"]]
        if isinstance(spec, list):
            return spec
        if spec == "alternating":  # the last layer is among them
            return sorted(range(self.N, 0, -2))
        count = self.N if spec == "all" else int(spec.split(":")[1])
        first = count if spec.startswith("ends:") else 0
        return [n for n in everything if n <= first or n > self.N - count]

    def table(self, n: int) -> str:
        mirror = self.N + 1 - n
        shared = self.o["tied"] and mirror in self.reading()
        return f"model.value_tables.table_{min(n, mirror) if shared else n}"

    def value(self, n: int, V: Layers, h: Tensor, ids: Tensor) -> Tensor:
        if n not in self.reading():
            return V[n]
        entry = self.state[self.table(n)][ids]
        nanochat = self.o["style"] == "nanochat"
        x = h[..., :12] if nanochat else torch.cat((h[..., :6], entry[..., :6]), dim=-1)
        gate = (3 if nanochat else 2) / (1 + torch.exp(-x @ self.own(n, "weight").T))
        return V[n] + gate[..., None] * entry.reshape(*ids.shape, self.H_kv, self.D)

    def starts(self) -> dict[str, Start]:
        nanochat = self.o["style"] == "nanochat"
        table = _uniform(-((3 / self.C) ** 0.5), (3 / self.C) ** 0.5) if nanochat else _normal(0.01)
        gate: Start = _uniform(0.0, 0.02) if nanochat else 0.0
        starts = {self.table(n): table for n in self.reading()}
        return {**starts, **{self.own_key(n, "weight"): gate for n in self.reading()}}


def _uniform(low: float, high: float):
    def check(x: Tensor) -> bool:
        inside = low * 1.005 <= x.min() and x.max() <= high * 1.005  # bf16 may round the bounds up
        return inside and abs(x.mean() - (low + high) / 2) < (high - low) / 5 and x.std() > (high - low) / 6

    return check


def _normal(std: float):
    return lambda x: bool(abs(x.std() / std - 1) < 0.25 and abs(x.mean()) < std / 3)
