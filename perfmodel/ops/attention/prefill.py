"""Softmax attention of prompts: flash (tiled through SRAM) and standard (scores in HBM).

Softmax arithmetic and masked positions of a tile are not counted as FLOPs; calibrated fractions include them.
A query at position p (0-based) sees min(p + 1, window) keys, or p mod chunk + 1 under chunks. Counts are differences
of prefix sums, so chunked prefills add up exactly."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from perfmodel.models.number_formats import Surplus
from perfmodel.ops.elementwise import FP32_BYTES
from perfmodel.ops.formats import MMA_SYNC_RATE
from perfmodel.ops.problem_sizes import HeadShape, PrefillSize
from perfmodel.ops.work import Work

SCORE_SUM_BYTES = 4.0  # of the scores that eviction accumulates for each cached token and query head
_TILE = 128  # rows of a query tile and of a key tile (FlashAttention-2 and -3 use 64 to 192)


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention heads on one device, element sizes, and the visible span of a query."""

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
    surplus: tuple[Surplus, ...] = ()  # of the newest tokens, whose elements take more than `kv_element_bytes`
    unpack_ops: float = 0.0  # vector operations per cached element of the oldest tokens
    flash_version: int | None = None  # generation of FlashAttention; None: the calibrated kernels'
    evicts_to: int | None = None  # tokens that eviction by accumulated scores leaves of a sequence
    is_causal: bool = True  # else a query sees all of its prompt, or the window around it

    def cached_bytes(self, num_tokens: float, num_seqs: float) -> float:
        """Bytes of K and V of `num_tokens` cached tokens of `num_seqs` equally long sequences."""
        if not self.surplus:
            return num_tokens * self.kv_elements * self.kv_element_bytes
        more = sum(min(num_tokens, num_seqs * tier.tokens) * tier.num_bytes for tier in self.surplus)
        return (num_tokens * self.kv_element_bytes + more) * self.kv_elements

    def cached_ops(self, num_tokens: float, num_seqs: float) -> float:
        """Vector operations that dequantize them."""
        more = sum(min(num_tokens, num_seqs * tier.tokens) * tier.operations for tier in self.surplus)
        return (num_tokens * self.unpack_ops + more) * self.kv_elements

    @property
    def written_bytes(self) -> float:
        """Bytes per element of a new token, conversions between the age tiers of the cache included: each tier is read
        and the next written, one token for each that enters."""
        total = size = self.kv_element_bytes
        for tier in reversed(self.surplus):
            size += tier.num_bytes
            total += 2 * size
        return total

    @property
    def copies_kv(self) -> bool:
        """Whether unfused attention must repeat KV heads per query head."""
        return self.num_heads > self.num_kv_heads

    def copy_bytes(self, num_tokens: float) -> float:
        """Bytes to write K and V of `num_tokens` tokens per query head, and to read them again."""
        return 2.0 * num_tokens * self.query_elements * self.element_bytes

    @property
    def module_scores(self) -> tuple[int, float]:
        """Kernels, and bytes per score, of Hugging Face's eager attention: product, scale, mask, cast to fp32, softmax,
        cast back, product. In fp16 the softmax casts while it reads (ATen's SoftMax.cpp)."""
        num_casts = {"fp32": 0, "fp16": 1}.get(self.dtype, 2)
        return 5 + num_casts, 8.0 * self.element_bytes + 2.0 * FP32_BYTES * num_casts

    @property
    def is_plain(self) -> bool:
        """Whether cached elements are multiplied as read: floating point, one format."""
        return not (self.surplus or self.unpack_ops)

    @property
    def kernel_element_bytes(self) -> float:
        """Bytes of a cached element as multiplied; calibrations choose the kernel by it."""
        return self.kv_element_bytes if self.is_plain else self.element_bytes

    def visible(self, num_keys: float, num_queries: float) -> float:
        """Keys seen by `num_queries` queries under block sparsity, of `num_keys` under full attention.

        f x rounded up to whole blocks, half a block more on average, at most all."""
        if self.fraction == 1.0:
            return num_keys
        return min(num_keys, self.fraction * num_keys + num_queries * self.block / 2)

    @property
    def problem(self) -> HeadShape:
        """The sizes that select and time the kernel."""
        num_bytes, limit = self.kernel_element_bytes, self.window or self.chunk or 0
        return HeadShape(self.num_heads, self.num_kv_heads, self.head_dim, self.v_head_dim, num_bytes, limit)

    @property
    def query_elements(self) -> int:
        """Elements of Q and O per token."""
        return self.num_heads * (self.head_dim + self.v_head_dim)

    @property
    def kv_elements(self) -> int:
        """Elements of K and V per token."""
        return self.num_kv_heads * (self.head_dim + self.v_head_dim)


def _problem(prefills: Sequence[tuple[int, int]], heads: Heads, *, has_block_per_head: bool = False) -> PrefillSize:
    tokens = sum(t for t, _ in prefills)
    near = None if heads.keeps_all else heads.window
    blocks = len(prefills) if has_block_per_head else sum(ceil(t / _TILE) for t, _ in prefills)
    if heads.is_causal:
        pairs = heads.visible(sum(visible_pairs(t, p, heads.window, heads.chunk) for t, p in prefills), tokens)
    else:
        pairs = sum(pairs_around(t, heads.window) for t, _ in prefills)
    return PrefillSize(
        heads.problem,
        tuple(prefills),
        tokens,
        kv_tokens=sum(visible_keys(t, p, near, heads.chunk) for t, p in prefills),
        pairs=pairs,
        thread_blocks=heads.num_heads * blocks,
        has_block_per_head=has_block_per_head,
        is_causal=heads.is_causal,
    )


def flash_prefill(prefills: Sequence[tuple[int, int]], heads: Heads) -> Work:
    """Flash attention of `prefills`, (new tokens T, cached tokens P) each, in one kernel.

        FLOPs = 2 (h_k + h_v) H sum(pairs)          pairs = visible query-key pairs, T P + T (T+1)/2 if causal, else T^2
        HBM   = b H (h_k + h_v) sum(T)              Q read and O written once
              + b_kv K (h_k + h_v) sum(keys)        each visible K and V once
        SRAM  = the same Q and O + b_kv H (h_k + h_v) x keys visited by every query tile of 128 rows

    Re-reads of K and V by later query tiles hit L2 and count as `sram_bytes` only. FlashAttention-1 gives each head of
    a prompt one thread block, keys outside and queries inside: per key tile Q is read, O read and written, b H (h_k + 2
    h_v) x the rows visited. Versions before 3 use mma.sync, not Hopper's fastest instruction.
    Source: Dao 2023 (FlashAttention-2), algorithm 1 and section 3.2; Dao et al. 2022, algorithm 1 and theorem 2."""
    if not prefills:
        return Work("attention_prefill", "attention_prefill", rate=heads.dtype, num_kernels=0)
    problem = _problem(prefills, heads, has_block_per_head=heads.flash_version == 1)
    num_old = problem.kv_tokens - problem.tokens
    query_bytes = problem.tokens * heads.query_elements * heads.element_bytes
    if heads.is_causal:
        tile_kv = heads.fraction * sum(tile_pairs(t, p, heads.window, heads.chunk, _TILE) for t, p in prefills)
    else:
        tile_kv = sum(ceil(t / _TILE) * _TILE * ceil(min(t, _TILE + (heads.window or t)) / _TILE) for t, _ in prefills)
    if problem.has_block_per_head:
        visited = heads.num_heads * (heads.head_dim + 2 * heads.v_head_dim)
        query_bytes = max(query_bytes, tile_kv * visited * heads.element_bytes)
    return Work(
        "attention_prefill",
        "attention_prefill",
        flops=2.0 * problem.pairs * heads.query_elements,
        rate=heads.dtype + (MMA_SYNC_RATE if heads.flash_version in (1, 2) else ""),
        activation_bytes=query_bytes,
        kv_bytes=heads.cached_bytes(problem.kv_tokens, len(prefills)),
        sram_bytes=query_bytes + tile_kv * heads.query_elements * heads.kernel_element_bytes,
        vector_ops=0.0 if heads.is_plain else heads.cached_ops(num_old, len(prefills)),
        problem=problem,
    )


def standard_prefill(
    prefills: Sequence[tuple[int, int]], heads: Heads, *, is_fused: bool = True, is_module: bool = False
) -> Work:
    """Attention that materialises the score matrix: S = Q K^T, P = softmax(S), O = P V, one kernel each per prompt.

        FLOPs = 2 (h_k + h_v) H sum(T (P + T))      the masked half is computed and thrown away
        HBM   = Q, K, V, O once + 4 b H sum(T (P + T)): S written and read, P written and read

    Windows and blocks only mask: they save nothing. Unfused, as a framework runs it, the mask is a kernel of its own
    (2 b H sum(T (P + T)) more) and KV heads are copied per query head. `is_module`: as `Heads.module_scores`; the
    output is transposed to token-major. Under eviction each key's scores are summed in fp32, and a chunk of a prompt
    sees `evicts_to` earlier tokens. prefills: (new tokens T, cached tokens P) per prompt; is_fused: no kernel for the
    mask. Source: Dao et al. 2022, algorithm 0; Zhang et al. 2023 (H2O); Hugging Face's eager_attention_forward."""
    if not prefills:
        return Work("attention_prefill", "attention_prefill", rate=heads.dtype, num_kernels=0)
    if heads.evicts_to is not None:
        prefills = tuple((tokens, min(cached, heads.evicts_to)) for tokens, cached in prefills)
    scores = sum(t * (t + p) for t, p in prefills)
    tokens = sum(t for t, _ in prefills)
    score_bytes = 4.0 * heads.num_heads * scores * heads.element_bytes
    keys, num_kernels = sum(t + p for t, p in prefills), 3
    if is_module:
        num_kernels, bytes_each = heads.module_scores
        num_kernels += 1
        score_bytes = heads.num_heads * (bytes_each * scores + 2.0 * tokens * heads.v_head_dim * heads.element_bytes)
    elif not is_fused:
        score_bytes *= 1.5
        num_kernels += 1
    if not is_fused and heads.copies_kv:
        score_bytes += heads.copy_bytes(keys)
        num_kernels += 2
    if heads.evicts_to is not None:
        num_kernels += 1
        score_bytes += heads.num_heads * (scores * heads.element_bytes + 2 * SCORE_SUM_BYTES * keys)
    return Work(
        "attention_prefill",
        "attention_prefill",
        flops=2.0 * scores * heads.query_elements,
        rate=heads.dtype,
        activation_bytes=tokens * heads.query_elements * heads.element_bytes + score_bytes,
        kv_bytes=heads.cached_bytes(keys, len(prefills)),
        num_kernels=num_kernels * len(prefills),
        vector_ops=0.0 if heads.is_plain else heads.cached_ops(sum(p for _, p in prefills), len(prefills)),
        problem=_problem(prefills, heads),
    )


def _pairs_below(position: int, window: int | None, chunk: int | None) -> int:
    if chunk is not None:
        whole, rest = divmod(position, chunk)
        return whole * (chunk * (chunk + 1) // 2) + rest * (rest + 1) // 2
    if window is not None and position > window:
        return window * (window + 1) // 2 + (position - window) * window
    return position * (position + 1) // 2


def visible_pairs(num_tokens: int, num_cached: int, window: int | None = None, chunk: int | None = None) -> int:
    """Query-key pairs of `num_tokens` new tokens after `num_cached` cached ones; causal T P + T (T+1)/2.

    window, chunk: most keys per query, in tokens; None: all"""
    return _pairs_below(num_cached + num_tokens, window, chunk) - _pairs_below(num_cached, window, chunk)


def pairs_around(num_tokens: int, window: int | None = None) -> int:
    """Query-key pairs of a prompt of T = `num_tokens` whose tokens see both ways, k = (window - 1) / 2 or at most T - 1
    of them on each side: T (2k + 1) - k (k + 1), which is T^2 without a window (None)."""
    side = num_tokens - 1 if window is None else min((window - 1) // 2, num_tokens - 1)
    return num_tokens * (2 * side + 1) - side * (side + 1)


def visible_keys(num_tokens: int, num_cached: int, window: int | None = None, chunk: int | None = None) -> int:
    """Distinct keys that the `num_tokens` new tokens see, after `num_cached` cached ones.

    window, chunk: most keys per query, in tokens; None: all"""
    if chunk is not None:
        return num_cached % chunk + num_tokens
    return num_tokens + min(num_cached, window - 1) if window is not None else num_cached + num_tokens


def tile_pairs(
    num_tokens: int, num_cached: int, window: int | None = None, chunk: int | None = None, tile: int = 128
) -> int:
    """Key tokens visited by all query tiles of `tile` rows, each padded to whole key tiles of `tile` tokens.

    Causal: tile i of ceil(T / tile) ends at key P + min((i + 1) tile, T) and visits ceil of that / tile key tiles, or
    at most its window or chunk. num_tokens T: new; num_cached P: cached"""
    num_tiles = ceil(num_tokens / tile)
    first = ceil((num_cached + min(tile, num_tokens)) / tile)
    last = ceil((num_cached + num_tokens) / tile)
    span = window if window is not None else chunk
    cap = last if span is None else min(last, ceil((span + tile) / tile))
    # `first`, `first` + 1, ... rise by one per tile until `cap`; the last tile may be ragged and end at `last`.
    rising = max(0, min(num_tiles - 1, cap - first + 1))
    total = rising * first + rising * (rising - 1) // 2 + (num_tiles - 1 - rising) * cap + min(last, cap)
    return total * tile
