"""Pure functions from tensors to numbers: the paper's measurements, on anybody's tensors. torch only.

from resformer import measures
measures.token_importance_entropy(attention)  # [B, H, T, T] -> [B]
measures.token_similarity(states)             # [B, T, D] -> [B]
"""

from resformer.measures.attention import (
    first_token_share,
    importance_entropy,
    token_importance,
    token_importance_entropy,
    top_share,
)
from resformer.measures.layers import (
    contribution,
    cosine,
    cross_layer_attention,
    identity_mapping,
    shared_attention,
    weight_by_head,
)
from resformer.measures.states import (
    components_for,
    effective_rank,
    first_token_ratio,
    joined_heads,
    layer_similarity,
    spectrum,
    state_norms,
    token_similarity,
)

__all__ = [
    "components_for",
    "contribution",
    "cosine",
    "cross_layer_attention",
    "effective_rank",
    "first_token_ratio",
    "first_token_share",
    "identity_mapping",
    "importance_entropy",
    "joined_heads",
    "layer_similarity",
    "shared_attention",
    "spectrum",
    "state_norms",
    "token_importance",
    "token_importance_entropy",
    "token_similarity",
    "top_share",
    "weight_by_head",
]
