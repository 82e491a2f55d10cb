"""The paper's model sizes as config fields (arXiv 2410.17897v2, table 4: shapes follow Pythia, feed-forward 3.5 x
hidden, untied head).
"""

from __future__ import annotations

from typing import Any


def _size(layers: int, heads: int, hidden: int, inner: int) -> dict[str, Any]:
    return {
        "vocab_size": 50277,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }


SIZES: dict[str, dict[str, Any]] = {
    "2m": _size(4, 2, 16, 56),
    "82m": _size(8, 8, 512, 1792),
    "180m": _size(12, 12, 768, 2688),
    "468m": _size(24, 16, 1024, 3584),
    "1b6": _size(24, 16, 2048, 7168),  # the paper names the size only; this is Pythia-1.4B's shape
}
