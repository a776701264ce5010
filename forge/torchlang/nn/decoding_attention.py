"""The attention of few queries, as in decoding; forge/transforms/decoding_attention.py matches it."""

from forge.ir import Symbol, Tag, TensorProxy
from forge.prims.core import like
from forge.torchlang.nn.attention import scaled_dot_product_attention


def _decoding_attention(
    query: TensorProxy,
    key: TensorProxy,
    value: TensorProxy,
    attn_mask: TensorProxy | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> TensorProxy:
    """Return scaled_dot_product_attention of few queries and many keys. Shapes: those of
    scaled_dot_product_attention."""
    return scaled_dot_product_attention(query, key, value, attn_mask, scale=scale, enable_gqa=enable_gqa)


def _attend_to_cache(
    caches: tuple[TensorProxy, TensorProxy],
    position: TensorProxy,
    new_key: TensorProxy,
    new_value: TensorProxy,
    query: TensorProxy,
    attn_mask: TensorProxy | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> TensorProxy:
    """Return decoding_attention on caches of keys and values, after new ones are written at `position` (dim 2).

    Shapes: caches (B, H, S, E) each; position (L,); new_key and new_value (B, H, L, E); the others those of attention.
    """
    return like(query)


decoding_attention = Symbol("decoding_attention", "forge.decoding_attention", body=_decoding_attention)
attend_to_cache = Symbol(
    "attend_to_cache", "forge.attend_to_cache", meta=_attend_to_cache, tags=frozenset({Tag.IN_PLACE})
)
