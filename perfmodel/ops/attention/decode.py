"""Softmax attention of decodes over the KV cache, alone or with prompts in one varlen kernel."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from math import ceil
from typing import NamedTuple

import numpy as np

from perfmodel.ops.attention.prefill import SCORE_SUM_BYTES, Heads, flash_prefill
from perfmodel.ops.problem_sizes import DecodeSize, MixedSize, PrefillSize
from perfmodel.ops.work import Work

VERIFYING = "verify"  # `Work.format` of decodes with several queries each
_SPLIT_TOKENS = 256  # the least KV tokens that are worth a split of their own
_MAX_GROUP = 64  # query heads of one KV head that share a thread block


class ContextSpread(NamedTuple):
    """Quantiles of the context of decoding sequences over its mean, in even steps of probability."""

    quantiles: tuple[float, ...]

    @classmethod
    def of(cls, lengths: Iterable[tuple[int, int]]) -> "ContextSpread | None":
        """The spread for requests with these (prompt, answer) lengths in tokens; None without any.

        A request is sampled in proportion to its answer's length, at a uniformly random point of its decode."""
        pairs = np.array([(prompt, answer) for prompt, answer in lengths if answer > 1], dtype=np.float64)
        if not len(pairs):
            return None
        places = (np.arange(_POSITIONS) + 0.5) / _POSITIONS
        contexts = (pairs[:, :1] + pairs[:, 1:] * places).ravel()
        weights = np.repeat(pairs[:, 1], _POSITIONS)
        order = np.argsort(contexts)
        below = np.cumsum(weights[order]) / weights.sum()
        levels = (np.arange(_QUANTILES) + 0.5) / _QUANTILES
        at_levels = contexts[order][np.searchsorted(below, levels)]
        return cls(tuple((at_levels / at_levels.mean()).tolist()))

    def longest(self, num_seqs: int) -> float:
        """Expected longest context of `num_seqs` sequences, over their mean.

            E max = sum over i of q_i ((i / Q)^n - ((i - 1) / Q)^n)

        Source: distribution of the largest of n independent draws."""
        return _expected_largest(self.quantiles, num_seqs)


@lru_cache(maxsize=2048)
def _expected_largest(quantiles: tuple[float, ...], count: int) -> float:
    below = np.arange(len(quantiles) + 1) / len(quantiles)
    return float(max(1.0, np.dot(quantiles, np.diff(below**count))))


def attention_decode(
    num_seqs: int,
    context: float,
    heads: Heads,
    *,
    splits_kv: bool = True,
    is_flash: bool = True,
    is_fused: bool = True,
    is_module: bool = False,
    queries: float = 1.0,
    spread: ContextSpread | None = None,
) -> Work:
    """`num_seqs` sequences of `queries` new tokens each; `context` is the visible KV tokens summed over sequences
    (block-sparse heads see a share).

        FLOPs = 2 (h_k + h_v) H q C    HBM = b_kv K (h_k + h_v) C + b H (h_k + h_v) q B

    The q queries of a sequence (drafted tokens or tree nodes to verify) share a tile with those of the group's heads,
    g q rows in all. Masked scores are computed all the same. A window grows by the distance to its last query.

    Flash-decoding launches B K ceil(g / 64) thread blocks, g = H / K, and splits the KV length, at most one split per
    256 tokens. The device decides how many splits run, so the problem counts all as `thread_blocks`. The combine kernel
    is always launched: a CUDA graph cannot leave it out for short contexts. Without splits (`splits_kv=False`) the
    prefill kernel serves: B H blocks, each over the whole context with q valid rows of its tile. Few sequences leave
    most of the device idle; the group's other reads of the same KV hit L2.
    `spread`: of contexts (default: equal lengths). `is_flash=False` writes and reads the scores (4 b H C bytes,
    3 kernels). Without `is_fused`, KV heads are first copied per query head (`Heads.copy_bytes`, 2 kernels).
    `is_module`: score operators as in `Heads.module_scores`. Score-based eviction reads and writes the sums (8 H C
    bytes in fp32) in one more kernel, which also finds the lowest.
    Source: Dao et al. 2023, "Flash-Decoding for long-context inference"."""
    if num_seqs == 0:
        return Work("attention_decode", "attention_decode", rate=heads.dtype, num_kernels=0)
    context = heads.visible(context, num_seqs)
    group = queries * heads.num_heads / heads.num_kv_heads
    spreads = splits_kv or not is_flash  # products of matrices spread over the keys by themselves
    max_splits = max(1.0, context / num_seqs / _SPLIT_TOKENS) if spreads else 1.0
    span = heads.window or heads.chunk or 0
    read = context + (queries - 1.0) * num_seqs if span and context >= num_seqs * span else context
    blocks = num_seqs * (heads.num_kv_heads * ceil(group / _MAX_GROUP) if spreads else heads.num_heads)
    num_kernels, bytes_each = heads.module_scores if is_module else (3, 4.0 * heads.element_bytes)
    score_bytes = 0.0 if is_flash else bytes_each * heads.num_heads * queries * context
    if is_flash:
        num_kernels = 2 if splits_kv else 1
    if not (is_flash or is_fused) and heads.copies_kv:
        score_bytes += heads.copy_bytes(read)
        num_kernels += 2
    if heads.evicts_to is not None:
        score_bytes += 2.0 * SCORE_SUM_BYTES * heads.num_heads * context
        num_kernels += 1
    return Work(
        "attention_decode",
        "attention_decode",
        flops=2.0 * queries * context * heads.query_elements,
        rate=heads.dtype,
        activation_bytes=queries * num_seqs * heads.query_elements * heads.element_bytes + score_bytes,
        kv_bytes=heads.cached_bytes(read, num_seqs),
        num_kernels=num_kernels,
        vector_ops=0.0 if heads.is_plain else heads.cached_ops(read, num_seqs),
        format=VERIFYING if queries > 1.0 else "",
        problem=DecodeSize(
            heads.problem,
            num_seqs,
            context,
            queries,
            longest=context / num_seqs * (spread.longest(num_seqs) if spread else 1.0),
            splits_kv=spreads,
            thread_blocks=blocks * max_splits,
        ),
    )


def mixed_attention(
    prefills: Sequence[tuple[int, int]],
    num_decodes: int,
    context: float,
    heads: Heads,
    *,
    queries: float = 1.0,
    spread: ContextSpread | None = None,
) -> Work:
    """The work of `flash_prefill(prefills)` and `attention_decode(num_decodes, context)` in one launch.

    No work unless the batch has both. queries: new tokens per decode; heads: on one device; spread: of the decodes'
    contexts"""
    if not prefills or not num_decodes:
        return Work("attention_mixed", "attention_mixed", rate=heads.dtype, num_kernels=0)
    prompts = flash_prefill(prefills, heads)
    decodes = attention_decode(num_decodes, context, heads, queries=queries, spread=spread)
    return replace(
        prompts,
        name="attention_mixed",
        family="attention_mixed",
        flops=prompts.flops + decodes.flops,
        activation_bytes=prompts.activation_bytes + decodes.activation_bytes,
        kv_bytes=prompts.kv_bytes + decodes.kv_bytes,
        problem=MixedSize(prompts.problem_as(PrefillSize), decodes.problem_as(DecodeSize)),
    )


_QUANTILES = 128
_POSITIONS = 8  # in its answer, at which a request may be met
