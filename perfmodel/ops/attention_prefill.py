"""Softmax attention of prompts: flash (tiled through SRAM) and standard (scores in HBM).

Softmax arithmetic (an exponential and a few operations per score) is not counted as FLOPs; calibrated fractions of
the tensor rate contain it. Masked positions inside a tile are counted as `tile_kv` in the extent, not as FLOPs.
"""

__all__ = ["Heads", "flash_prefill", "standard_prefill"]

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from perfmodel.ops.spans import tile_pairs, visible_keys, visible_pairs
from perfmodel.ops.work import Work

_TILE = 128  # rows of a query tile and of a key tile (FlashAttention-2 and -3 use 64 to 192)


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention heads on one device, the element sizes, and how far a query sees."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: str
    element_bytes: float
    kv_element_bytes: float
    window: int | None = None  # with its sinks
    chunk: int | None = None
    keeps_all: bool = False  # a query sees `window` keys, but not the nearest ones only: together they see all
    fraction: float = 1.0  # of the keys before it that a query sees, in blocks of `block`
    block: int = 1

    def visible(self, num_keys: float, num_queries: float) -> float:
        """Of `num_keys` that `num_queries` queries see together under full attention, those they see in blocks.

        f x rounded up to whole blocks, half a block more on average, but never more than all.
        """
        if self.fraction == 1.0:
            return num_keys
        return min(num_keys, self.fraction * num_keys + num_queries * self.block / 2)

    @property
    def query_elements(self) -> int:
        """Elements of Q and O per token."""
        return self.num_heads * (self.head_dim + self.v_head_dim)

    @property
    def kv_elements(self) -> int:
        """Elements of K and V per token."""
        return self.num_kv_heads * (self.head_dim + self.v_head_dim)


def _extent(prefills: Sequence[tuple[int, int]], heads: Heads) -> dict[str, float]:
    tokens = sum(t for t, _ in prefills)
    near = None if heads.keeps_all else heads.window
    return {
        "seqs": len(prefills),
        "tokens": tokens,
        "kv_tokens": sum(visible_keys(t, p, near, heads.chunk) for t, p in prefills),
        "longest": max((t + p for t, p in prefills), default=0),
        "heads": heads.num_heads,
        "kv_heads": heads.num_kv_heads,
        "head_dim": heads.head_dim,
        "v_head_dim": heads.v_head_dim,
        "kv_element_bytes": heads.kv_element_bytes,
        "window": heads.window or heads.chunk or 0,
        "pairs": heads.visible(sum(visible_pairs(t, p, heads.window, heads.chunk) for t, p in prefills), tokens),
        "ctas": heads.num_heads * sum(ceil(t / _TILE) for t, _ in prefills),
        "tile_kv": heads.fraction * sum(tile_pairs(t, p, heads.window, heads.chunk, _TILE) for t, p in prefills),
    }


def flash_prefill(prefills: Sequence[tuple[int, int]], heads: Heads, name: str = "attention_prefill") -> Work:
    """Flash attention of `prefills`, (new tokens T, cached tokens P) each, in one kernel.

        FLOPs = 2 (h_k + h_v) H sum(pairs)          pairs = visible query-key pairs, T P + T (T+1)/2 if causal
        HBM   = b H (h_k + h_v) sum(T)              Q read and O written once
              + b_kv K (h_k + h_v) sum(keys)        each visible K and V once
        SRAM  = the same Q and O + b_kv H (h_k + h_v) x keys visited by every query tile of 128 rows

    The re-reads of K and V by later query tiles hit L2 and are counted as `sram_bytes` only.
    Source: Dao 2023 (FlashAttention-2), algorithm 1; Dao et al. 2022, theorem 2.
    """
    if not prefills:
        return Work(name, "attention_prefill", rate=heads.dtype, num_kernels=0)
    extent = _extent(prefills, heads)
    query_bytes = extent["tokens"] * heads.query_elements * heads.element_bytes
    return Work(
        name,
        "attention_prefill",
        flops=2.0 * extent["pairs"] * heads.query_elements,
        rate=heads.dtype,
        activation_bytes=query_bytes,
        kv_bytes=extent["kv_tokens"] * heads.kv_elements * heads.kv_element_bytes,
        sram_bytes=query_bytes + extent["tile_kv"] * heads.query_elements * heads.kv_element_bytes,
        extent=extent,
        prefills=tuple(prefills),
    )


def standard_prefill(prefills: Sequence[tuple[int, int]], heads: Heads, name: str = "attention_prefill") -> Work:
    """Attention that materialises the score matrix: S = Q K^T, P = softmax(S), O = P V, one kernel each per prompt.

        FLOPs = 2 (h_k + h_v) H sum(T (P + T))      the masked half is computed and thrown away
        HBM   = Q, K, V, O once + 4 b H sum(T (P + T)): S written and read, P written and read

    Windows and blocks only mask: they save nothing. Source: Dao et al. 2022, algorithm 0.
    """
    if not prefills:
        return Work(name, "attention_prefill", rate=heads.dtype, num_kernels=0)
    scores = sum(t * (t + p) for t, p in prefills)
    tokens = sum(t for t, _ in prefills)
    score_bytes = 4.0 * heads.num_heads * scores * heads.element_bytes
    return Work(
        name,
        "attention_prefill",
        flops=2.0 * scores * heads.query_elements,
        rate=heads.dtype,
        activation_bytes=tokens * heads.query_elements * heads.element_bytes + score_bytes,
        kv_bytes=sum(t + p for t, p in prefills) * heads.kv_elements * heads.kv_element_bytes,
        num_kernels=3 * len(prefills),
        extent=_extent(prefills, heads),
        prefills=tuple(prefills),
    )
