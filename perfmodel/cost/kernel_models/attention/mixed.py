"""Prompts and decodes in one varlen kernel (FlashAttention-2 in vLLM): not the sum of the two apart.

    t = launch + max( [ H (A + block n) + H B (decode_tile S' + block) ] / SM cost + tail max(L, 0.85 S') cost
                      + H E empty / SM,   KV bytes / (memory_fraction W) )

    A, n, L, cost   of the prompts, as in `attention_prefill`; B decodes of S tokens each, S' whole key tiles
    E               blocks that find nothing to do: the grid has the longest prompt's query tiles for every sequence
    KV bytes        K (h_k + h_v) e (P + T + B S m),
                    m = 1 + (clip(reread B g / SM, 1, g) - 1) clip(B S (h_k + h_v) e / L2 - 1/2, 0, 1)

With several queries in any sequence of the batch, decodes lose packed query heads and KV splits: each is H blocks of a
mostly empty query tile, the longest runs alone at the end, and the g heads of a KV head are B blocks apart, so they
read the KV again once the batch's KV of one head exceeds L2.
Source of the form: kernel times of vLLM 0.19 over (chunk, cached, decodes, context) on two consumer-class GPUs."""

from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import Field

from perfmodel.cost.kernel_models.attention.prefill import PrefillKernel, prompt_tiles
from perfmodel.cost.kernel_models.device import DeviceFacts, OperatorTime
from perfmodel.cost.kernel_models.fits import SCALARS, Domain, KernelSeconds, Residuals
from perfmodel.files.base import Spec
from perfmodel.ops.problem_sizes import HeadShape, MixedSize, Values
from perfmodel.ops.work import Work

_LANES = 128  # fp32 operations per clock and compute unit
_OVERLAPPED = 0.15  # of a decode's only block, started before the last wave of the others [assumed]


class MixedAttentionFit(Spec):
    """One varlen kernel. Times in seconds; fractions of the declared peaks."""

    form: Literal["mixed_attention"] = "mixed_attention"
    kernel: PrefillKernel = PrefillKernel(rows=64, keys=128, packs="never")
    domain: Domain = Domain()
    rate: str | None = None
    launch_s: float = Field(default=8e-6, ge=1e-6, le=1e-4)
    tensor_fraction: float = Field(default=0.6, ge=0.1, le=1.0)
    memory_fraction: float = Field(default=0.8, ge=0.3, le=1.0)
    block_tokens: float = Field(default=30.0, ge=0.01, le=1000.0)
    tail: float = Field(default=0.6, ge=0.02, le=3.0)
    decode_tile: float = Field(default=0.6, ge=0.05, le=3.0)  # a key tile of a decode, of one of a full query tile
    empty_s: float = Field(default=1e-7, ge=1e-9, le=1e-5)  # of a block without work, times the compute units
    reread: float = Field(default=1.2, ge=0.3, le=4.0)
    softmax_ops: float = Field(default=0.01, ge=0.01, le=200.0)  # per score, beside the tensor cores
    residuals: Residuals = Residuals()


class MixedSizes(NamedTuple):
    """One prompt of `tokens` new and `cached` tokens beside `decodes` sequences of `length` tokens; or columns of them.
    heads: without a window; kv_token_bytes: K and V, all KV heads; longest: longest decode over `length`"""

    heads: HeadShape
    tokens: Values
    cached: Values
    decodes: Values
    length: Values
    kv_token_bytes: Values
    longest: Values


def mixed_seconds(sizes: MixedSizes, fit: MixedAttentionFit, device: DeviceFacts) -> KernelSeconds:
    """The formula of this module over columns of `sizes`, one prompt per batch; in bf16, unless the fit has a rate."""
    kernel = fit.kernel
    tiles = prompt_tiles(sizes.tokens, sizes.cached, 0.0 * sizes.tokens, kernel, kernel.rows, np)
    empty = sizes.decodes * (tiles[1] - 1)
    return _seconds(tiles, empty, sizes.tokens + sizes.cached, sizes, fit, device, "bf16", np)


def mixed_time(work: Work, fit: MixedAttentionFit, device: DeviceFacts) -> OperatorTime:
    problem = work.problem_as(MixedSize)
    kernel, heads, prompts = fit.kernel, problem.prompts.heads, problem.prompts.prefills
    tiles = [prompt_tiles(new, cached, 0, kernel, kernel.rows, SCALARS) for new, cached in prompts]
    visited, numbers, longest = zip(*tiles, strict=True)
    most = max(numbers)
    decodes, context = problem.decodes.num_seqs, problem.decodes.kv_tokens
    sizes = MixedSizes(
        heads,
        tokens=0,
        cached=0,
        decodes=decodes,
        length=context / decodes if decodes else 0.0,
        kv_token_bytes=heads.num_kv_heads * heads.head_size * heads.kv_element_bytes,
        longest=problem.decodes.longest * decodes / context,
    )
    empty = sum(most - number for number in numbers) + decodes * (most - 1)
    keys = sum(new + cached for new, cached in prompts)
    together = sum(visited), sum(numbers), max(longest)
    parts = _seconds(together, empty, keys, sizes, fit, device, work.rate, SCALARS)
    return OperatorTime.of(parts.duration, parts.compute, parts.memory, fit.launch_s)


def _seconds(
    tiles: tuple[Values, Values, Values],
    empty: Values,
    prompt_keys: Values,
    sizes: MixedSizes,
    fit: MixedAttentionFit,
    device: DeviceFacts,
    rate: str,
    xp: Any,
) -> KernelSeconds:
    """tiles: of one head, all prompts; empty: idle blocks per head; prompt_keys: tokens visible to prompts."""
    per_head, number, longest = tiles
    kernel, units = fit.kernel, device.compute_units
    padded = xp.ceil(sizes.length / kernel.keys) * kernel.keys * (sizes.decodes > 0)
    per_key = 2 * kernel.rows * sizes.heads.head_size / (fit.tensor_fraction * device.peak(fit.rate or rate) / units)
    per_key = per_key + kernel.rows * fit.softmax_ops / (_LANES * device.clock_hz)
    of_decodes = sizes.decodes * (fit.decode_tile * padded + fit.block_tokens)
    num_heads = sizes.heads.num_heads
    shared = num_heads * (per_head + fit.block_tokens * number + of_decodes) / units
    alone = xp.maximum(longest, (1 - _OVERLAPPED) * padded * sizes.longest) + fit.block_tokens
    compute = xp.maximum(shared + fit.tail * alone, alone) * per_key + num_heads * empty * fit.empty_s / units
    num_bytes = prompt_keys * sizes.kv_token_bytes + _decode_bytes(sizes, fit, device, xp)
    memory = num_bytes / (fit.memory_fraction * device.bandwidth)
    return KernelSeconds(fit.launch_s + xp.maximum(compute, memory), compute, memory)


def _decode_bytes(sizes: MixedSizes, fit: MixedAttentionFit, device: DeviceFacts, xp: Any) -> Values:
    """K and V bytes of decodes, read again per head of a group where L2 does not hold them."""
    kv_heads = sizes.heads.num_kv_heads
    group = sizes.heads.num_heads / kv_heads
    one_head = sizes.decodes * sizes.length * sizes.kv_token_bytes / kv_heads
    missed = xp.minimum(xp.maximum(one_head / device.l2_bytes - 0.5, 0.0), 1.0)
    reads = xp.minimum(xp.maximum(fit.reread * sizes.decodes * group / device.compute_units, 1.0), group)
    return sizes.decodes * sizes.length * (1 + (reads - 1) * missed) * sizes.kv_token_bytes
