"""References of the variants that change queries, keys, attention weights or hidden states."""

from __future__ import annotations

from naive_base import SOURCE, Layers, Plain, Start
from torch import Tensor


class _Half(Plain):
    """first X_m + own X_n on something else than values."""

    defaults = {**SOURCE, "first": 0.5, "own": 0.5}  # noqa: RUF012

    def halves(self, n: int, X: Layers) -> Tensor:
        return self.o["first"] * X[self.source(n)] + self.o["own"] * X[n] if n in self.chosen() else X[n]


class QueryResidual(_Half):
    def query(self, n: int, Q: Layers) -> Tensor:
        return self.halves(n, Q)


class KeyResidual(_Half):
    def key(self, n: int, K: Layers) -> Tensor:
        return self.halves(n, K)


class AttentionResidual(_Half):
    def attention(self, n: int, A: Layers) -> Tensor:
        return self.halves(n, A)


class HiddenResidual(Plain):
    """Input of block n: first H_0 + own H_{n-1}."""

    defaults = {"first": 0.5, "own": 0.5, "layers": "all"}  # noqa: RUF012

    def hidden(self, n: int, X: Layers) -> Tensor:
        return self.o["first"] * X[0] + self.o["own"] * X[n] if n + 1 in self.chosen() else X[n]


class DenseFormer(Plain):
    """Y_i = sum_j alpha_ij X_j, j = i (mod dilation), after the blocks that the period divides."""

    defaults = {"dilation": 1, "period": 1}  # noqa: RUF012

    def terms(self, i: int) -> list[int]:
        return [j for j in range(i + 1) if (i - j) % self.o["dilation"] == 0]

    def hidden(self, n: int, X: Layers) -> Tensor:
        if n % self.o["period"]:
            return X[n]
        alpha = self.state[f"model.depth_average.{n - 1}.alpha"]
        return sum(alpha[k] * X[j] for k, j in enumerate(self.terms(n)))

    def starts(self) -> dict[str, Start]:
        return {
            f"model.depth_average.{i - 1}.alpha": [float(j == i) for j in self.terms(i)]
            for i in range(1, self.N + 1)
            if i % self.o["period"] == 0
        }


class CrossLayer(Plain):
    """Groups of adjacent layers use the first one's keys, values or queries."""

    defaults = {"group": 2, "share": "kv"}  # noqa: RUF012

    def pick(self, letter: str, n: int, X: Layers) -> Tensor:
        leader = (n - 1) // self.o["group"] * self.o["group"] + 1
        return X[leader if letter in self.o["share"] else n]

    def query(self, n: int, Q: Layers) -> Tensor:
        return self.pick("q", n, Q)

    def key(self, n: int, K: Layers) -> Tensor:
        return self.pick("k", n, K)

    def value(self, n: int, V: Layers, h: Tensor, ids: Tensor) -> Tensor:
        return self.pick("v", n, V)


class CrossAttention(Plain):
    """U_n = softmax(Q_n [K_n; K_m]^T / sqrt(d)) [V_n; V_m]."""

    defaults = SOURCE

    def beside(self, n: int) -> int | None:
        return self.source(n) if n in self.chosen() else None


class IdentityMapping(Plain):
    """U_n = A_n V_n + 1/(n-1) sum_{i<n} V_i."""

    def output(self, n: int, U: Tensor, M: Tensor, V: Layers) -> Tensor:
        return U + sum(self.heads(V[i]) for i in range(1, n)) / (n - 1) if n > 1 else U
