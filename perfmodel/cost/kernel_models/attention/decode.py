"""Flash decoding: one new token per sequence over its KV cache, the KV length split over thread blocks.

    t = launch + (tc^knee + tm^knee)^(1/knee) + doubling * log2(max(1, S / 64)) [+ swap]

    C  = B K ceil(g / q) s                   thread blocks: B sequences, K KV heads, g query rows each (its query heads
                                             times the new tokens of a sequence), q of them per block, s splits of the
                                             KV length (see `DecodeKernel`)
    tc = block (1 + group_block g / 8) max(1, C / SM)              what a block costs before and after it streams
    tm = max( KV bytes ceil(g / q) (1 + group_traffic (g - 1) / 8) / (memory_fraction W f),
              padded FLOPs / (tensor_fraction F f) ) + (Q, O, new K and V bytes) / (memory_fraction W)
    f  = min(1, block_bandwidth C / SM)                            few blocks cannot fill the memory system

W and F are the declared bandwidth and tensor rate, SM the compute units, S the KV tokens of a sequence. Short batches
are slow because they have few blocks, not few bytes. `swap` applies to libraries that fold the query heads of a group
into the query length: a copy, unless B, K or g is 1. Measured kernels include the KV cache write. Serving reads KV from
HBM; a benchmark that repeats one shape may hit L2 (`is_warm`). Measured batches have equal contexts. If contexts are
unequal and the kernel does not balance them, the longest block, of duration a, outlasts the T that all take together.
Two blocks fit a compute unit; those of the first wave begin at 0, any other at a random time up to f T, f = 1 - 2 SM /
C, and outlasts T by o(a) on average:

    t += o(longest) - o(mean),    a = tokens / splits * 2 rows (h_k + h_v) (1 / (tensor_fraction F) + softmax) SM
    o(a) = 0 if a < (1 - f) T,  (a - (1 - f) T)^2 / 2 f T if a < T,  else a - T + f T / 2

Such a kernel splits contexts until the second wave is well filled, and not at all from 1.6 SM blocks on. A persistent
kernel cuts contexts to at most `split_share` of a unit's mean load L; its parts of length x_i are taken by units one
after another: with more parts than units it lasts L + max x - E x^2 / (2 E x), else max x.
Source: Dao et al. 2023 (Flash-Decoding); FlashAttention-2/3, TensorRT-LLM XQA and MMHA sources for the splits;
flash_prepare_scheduler.cu of FlashAttention-3 (1.1 of a unit's share); renewal theory (mean residual of a part).

Without flash-decoding the prefill kernel serves (FlashAttention-2 before 2.2): a block per sequence and query head,
whose tile of `rows` holds only the new tokens, visits all keys alone. The unit with most blocks ends last, and the
compute of its blocks does not overlap:

    tc = ceil(B H / SM) (block + ceil(queries / rows) rows S c),    c = 2 (h_k + h_v) SM / (tensor_fraction F) + softmax
    tm = KV bytes / (memory_fraction W min(1, block_bandwidth B H / SM))   the other heads of a group read from L2"""

from math import ceil
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from pydantic import Field

from perfmodel.cost.kernel_models.device import CACHED_SHARE, DeviceFacts, OperatorTime
from perfmodel.cost.kernel_models.fits import SCALARS, Domain, KernelSeconds, Residuals
from perfmodel.cost.kernel_models.overheads import load_overheads
from perfmodel.files.base import Spec
from perfmodel.files.units import PositiveFloat, PositiveInt
from perfmodel.ops.problem_sizes import DecodeSize, Values
from perfmodel.ops.work import Work

Fit = TypeVar("Fit")
_MAX_SPEEDUP = 6.0
_NEVER_ZERO_S = 1e-12
_SHORT = 64.0  # KV tokens up to which the context does not show
_MIN_PART = 128.0  # KV tokens of a persistent kernel's tile
_PLACES = 16  # contexts that stand for a batch of unequal ones
_RESIDENT = 2  # blocks on a compute unit at once
# Blocks per compute unit from which on a kernel that does not balance contexts splits none: 0.8 of two on each
# (FlashAttention-2, csrc/flash_attn/flash_api.cpp, num_splits_heuristic).
_FULL = 0.8 * 2
_LANES = 128  # fp32 operations per clock and compute unit


class DecodeKernel(Spec):
    """How a decode kernel cuts its work: facts of its code, chosen by reading it, not fitted.

    heads_per_block: query heads of one KV head that share a thread block and its reads of the KV
    rows:            rows of a tensor-core tile that those heads are padded to
    split_tokens:    least KV tokens of a split
    split_waves:     splits are made until so many blocks per compute unit are launched
    most_splits:     of a context, whatever its length
    whole_splits:    the number of splits is rounded down (else the scheduler balances fractions)
    splits_mha:      KV heads with a single query head are split, too
    splits_window:   splits are counted before a sliding window cuts the context
    pays_splits:     every split costs a block (else splits of a context share one persistent block's cost)
    split_share:     persistent kernels: a part of a context is at most so many times a unit's mean share
    is_balanced:     the scheduler shares long contexts out evenly; else one block, or split, sees a context to its end
    window_overlap:  KV tokens read beyond a sliding window, which starts within a tile
    window_unpacks:  under a sliding window each query head has its own block (FlashAttention-2, csrc/flash_attn/
                     flash_api.cpp, seqlenq_ngroups_swapped)"""

    heads_per_block: PositiveInt = 64
    rows: PositiveInt = 64
    split_tokens: PositiveFloat = 256.0
    split_waves: PositiveFloat = 1.0
    most_splits: PositiveFloat | None = None
    whole_splits: bool = False
    splits_mha: bool = True
    splits_window: bool = False
    pays_splits: bool = False
    split_share: PositiveFloat | None = None
    is_balanced: bool = True
    window_overlap: float = Field(default=0.0, ge=0)
    window_unpacks: bool = False


class FlashDecodeFit(Spec):
    """One decode kernel. Seconds at the device's clock; fractions of the declared peaks."""

    form: Literal["flash_decode"] = "flash_decode"
    kernel: DecodeKernel = DecodeKernel()
    domain: Domain = Domain()
    rate: str | None = None  # the number format whose tensor peak it runs at; None: that of the work
    launch_s: float = Field(default=8e-6, ge=1e-6, le=1e-4)
    memory_fraction: float = Field(default=0.85, ge=0.1, le=1.0)
    tensor_fraction: float = Field(default=0.9, ge=0.02, le=1.0)
    block_s: float = Field(default=3e-6, ge=1e-8, le=3e-5)
    block_bandwidth: float = Field(default=1.0, ge=0.05, le=10.0)  # one block's share of the bandwidth / (1 / SM)
    knee: float = Field(default=2.0, ge=1.0, le=20.0)  # how well fixed costs of blocks hide behind others' streaming
    doubling_s: float = Field(default=3e-7, ge=1e-9, le=1e-5)  # per doubling of the context: splits, their scheduling
    group_traffic: float = Field(default=0.01, ge=1e-5, le=3.0)
    group_block: float = Field(default=0.01, ge=1e-4, le=5.0)
    swap_s: float = Field(default=1e-9, ge=1e-9, le=3e-5)
    cache_speedup: float = Field(default=1.0, ge=1.0, le=_MAX_SPEEDUP)  # of KV that a benchmark finds in L2
    residuals: Residuals = Residuals()


class DecodeSizes(NamedTuple):
    """One decode batch, or many as columns. `length`: KV tokens per sequence before a window cuts them. kv_token_bytes:
    K and V per token, all KV heads; io_bytes: Q, O and the new K and V of the batch; flops_per_token: per query head
    and KV token, 2 (h_k + h_v)"""

    problem: DecodeSize
    length: Values
    kv_token_bytes: Values
    io_bytes: Values
    flops_per_token: Values


def decode_seconds(
    sizes: DecodeSizes,
    fit: FlashDecodeFit,
    device: DeviceFacts,
    rate: str = "bf16",
    *,
    is_warm: bool = False,
    unpack_ops: Values = 0.0,
    xp: Any = np,
) -> KernelSeconds:
    """The formula of this module. `is_warm`: KV may be in L2 from the last repetition. `unpack_ops`: vector
    instructions that dequantize cached elements, per read; they overlap with other warps, so they show only where they
    bind. sizes, fit: numbers or columns, and parameters; rate: format of the products, unless the fit has one; xp:
    numpy, or scalar functions; device: that runs it"""
    kernel, units = fit.kernel, device.compute_units
    seqs, kv_heads, window = sizes.problem.num_seqs, sizes.problem.heads.num_kv_heads, sizes.problem.heads.window
    group = sizes.problem.query_rows / kv_heads
    if kernel.window_unpacks:
        kv_heads, group = xp.where(window > 0, kv_heads * group, kv_heads), xp.where(window > 0, 1.0, group)
    shared = kv_heads / sizes.problem.heads.num_kv_heads  # blocks that read the same KV head
    reads = xp.ceil(group / kernel.heads_per_block)
    first = seqs * kv_heads * reads
    limit = xp.where(window > 0, window + kernel.window_overlap, np.inf)
    visible = xp.minimum(sizes.length, limit)
    length = sizes.length if kernel.splits_window else visible
    splits = _splits(length, first, group, kernel, units, xp)
    blocks = first * splits
    fill = xp.minimum(1.0, fit.block_bandwidth * blocks / units)

    bandwidth = device.bandwidth * fit.memory_fraction
    kv_bytes = seqs * visible * sizes.kv_token_bytes
    memory = kv_bytes * shared * reads * (1 + fit.group_traffic / 8 * (group - 1)) / (bandwidth * fill)
    if is_warm:
        hit = xp.minimum(1.0, xp.maximum(0.0, 2 - kv_bytes / (CACHED_SHARE * device.l2_bytes)))
        memory = memory * (1 - hit + hit / fit.cache_speedup)
    padded = xp.ceil(group / kernel.rows) * kernel.rows * kv_heads
    flops = seqs * visible * padded * sizes.flops_per_token
    compute = flops / (device.peak(fit.rate or rate) * fit.tensor_fraction * fill)
    memory = memory + sizes.io_bytes / bandwidth
    compute = xp.maximum(compute, unpack_ops * reads / (device.vector_instructions * fill))
    stream = xp.maximum(memory, compute)

    paid = blocks if kernel.pays_splits else first
    block = fit.block_s * (1 + fit.group_block / 8 * group) * xp.maximum(1.0, paid / units)
    high, low = xp.maximum(block, stream), xp.minimum(block, stream)
    duration = fit.launch_s + high * (1 + (low / xp.maximum(high, _NEVER_ZERO_S)) ** fit.knee) ** (1 / fit.knee)
    duration = duration + fit.doubling_s * xp.log2(xp.maximum(1.0, visible / _SHORT))
    swaps = (group > 1) & (seqs > 1) & (kv_heads > 1)
    return KernelSeconds(duration + fit.swap_s * swaps, compute, memory)


def with_cache_of(fit: Fit, source: DeviceFacts, target: DeviceFacts) -> Fit:
    """`fit`, made on `source`, for a device of the same chip: L2 follows units and clock, whatever the memory."""
    if not isinstance(fit, FlashDecodeFit) or fit.cache_speedup == 1.0:
        return fit
    cache = target.compute_units * target.clock_hz / (source.compute_units * source.clock_hz)
    speedup = fit.cache_speedup * cache * source.bandwidth / target.bandwidth
    return fit.model_copy(update={"cache_speedup": min(max(speedup, 1.0), _MAX_SPEEDUP)})


def _splits(length: Values, first: Values, group: Values, kernel: DecodeKernel, units: int, xp: Any) -> Values:
    most = xp.maximum(1.0, length / kernel.split_tokens)
    if kernel.most_splits is not None:
        most = xp.minimum(most, kernel.most_splits)
    splits = xp.minimum(kernel.split_waves * units / first, most)
    if kernel.whole_splits:
        splits = xp.floor(splits)
    if not kernel.splits_mha:
        splits = xp.where(group == 1, 1.0, splits)
    return xp.maximum(1.0, splits)


def decode_time(work: Work, fit: FlashDecodeFit, device: DeviceFacts) -> OperatorTime:
    """The time of one run of `work`, KV from HBM."""
    problem = work.problem_as(DecodeSize)
    sizes = _sizes(work, problem, fit.kernel)
    if not problem.splits_kv:
        return _unsplit_time(work, sizes, fit, device)
    parts = decode_seconds(sizes, fit, device, work.rate, unpack_ops=work.vector_ops, xp=SCALARS)
    duration, compute, memory = float(parts.duration), float(parts.compute), float(parts.memory)
    longest = float(problem.longest or sizes.length)
    if longest > sizes.length and not 0 < problem.heads.window < sizes.length:
        if fit.kernel.split_share is not None:
            duration += _outlasting(longest, sizes, fit.kernel, device.compute_units) * max(memory, compute)
        elif not fit.kernel.is_balanced:
            duration += _ragged_seconds(longest, work, sizes, fit, device, duration - fit.launch_s)
    return OperatorTime.of(duration, compute, memory)


def _unsplit_time(work: Work, sizes: DecodeSizes, fit: FlashDecodeFit, device: DeviceFacts) -> OperatorTime:
    """A block per sequence and query head, without splits; the longest context ends last."""
    problem, heads, units = sizes.problem, sizes.problem.heads, device.compute_units
    blocks, rows = problem.num_seqs * heads.num_heads, fit.kernel.rows
    longest = float(problem.longest or sizes.length)
    visible, longest = (min(length, heads.window or length) for length in (sizes.length, longest))
    per_row = _seconds_per_score(sizes, work, fit, device) * units * ceil(problem.queries / rows) * rows
    waves = ceil(blocks / units)
    compute = waves * (fit.block_s + visible * per_row) + (longest - visible) * per_row
    compute = max(compute, work.vector_ops * heads.num_heads / heads.num_kv_heads / device.vector_instructions)
    bandwidth = device.bandwidth * fit.memory_fraction
    memory = work.kv_bytes / (bandwidth * min(1.0, fit.block_bandwidth * blocks / units)) + sizes.io_bytes / bandwidth
    high, low = max(compute, memory), min(compute, memory)
    duration = fit.launch_s + high * (1 + (low / max(high, _NEVER_ZERO_S)) ** fit.knee) ** (1 / fit.knee)
    return OperatorTime.of(duration, compute, memory)


def _seconds_per_score(sizes: DecodeSizes, work: Work, fit: FlashDecodeFit, device: DeviceFacts) -> float:
    """Whole-device seconds per tile row and key: products and softmax."""
    seconds = sizes.flops_per_token / (device.peak(fit.rate or work.rate) * fit.tensor_fraction)
    return float(seconds + load_overheads().softmax_ops / (device.compute_units * _LANES * device.clock_hz))


def _outlasting(longest: float, sizes: DecodeSizes, kernel: DecodeKernel, units: int) -> float:
    """Extra time of a persistent kernel over its streaming; contexts lie evenly around the mean, up to `longest`."""
    problem, kv_heads = sizes.problem, sizes.problem.heads.num_kv_heads
    blocks = problem.num_seqs * kv_heads * ceil(problem.query_rows / kv_heads / kernel.heads_per_block)
    share = blocks * sizes.length / units
    most = max((kernel.split_share or 1.0) * share, _MIN_PART)
    reach = min(longest - sizes.length, sizes.length)
    unequal = [sizes.length + reach * (2 * i + 1 - _PLACES) / _PLACES for i in range(_PLACES)]
    lasts = [_tokens_of_slowest(lengths, most, blocks, share, units) for lengths in (unequal, [sizes.length])]
    return float(max(lasts[0] - lasts[1], 0.0) / share)


def _tokens_of_slowest(lengths: list[float], most: float, blocks: float, share: float, units: int) -> float:
    """Tokens through one unit until the last part of `blocks` contexts, spread over `lengths`, is done."""
    parts = [ceil(length / most) for length in lengths]
    tiles = [length / n for length, n in zip(lengths, parts, strict=True)]
    if blocks * sum(parts) / len(lengths) <= units:
        return max(tiles)
    residual = sum(n * tile**2 for n, tile in zip(parts, tiles, strict=True)) / (2 * sum(lengths))
    return share + max(tiles) - residual


def _ragged_seconds(
    longest: float, work: Work, sizes: DecodeSizes, fit: FlashDecodeFit, device: DeviceFacts, together: float
) -> float:
    """Seconds that the longest context adds to a batch that takes `together` with equal ones."""
    kernel = fit.kernel
    kv_heads, units = sizes.problem.heads.num_kv_heads, device.compute_units
    group = sizes.problem.query_rows / kv_heads
    first = sizes.problem.num_seqs * kv_heads * ceil(group / kernel.heads_per_block)
    most = max(1.0, sizes.length / kernel.split_tokens)
    splits = min(most, 2 * _RESIDENT * units / first) if first < _FULL * units else 1.0
    waiting = max(0.0, 1.0 - _RESIDENT * units / (first * splits))
    per_token = kernel.rows * _seconds_per_score(sizes, work, fit, device) * device.compute_units / splits
    own, more = (_overshoot(length * per_token, together, waiting) for length in (sizes.length, longest))
    return more - own


def _overshoot(alone: float, together: float, waiting: float) -> float:
    """Expected seconds by which a block outlasts `together`, if it begins at random within its share `waiting`."""
    if alone >= together:
        return alone - together + waiting * together / 2
    beyond = alone - (1 - waiting) * together
    return beyond * beyond / (2 * waiting * together) if beyond > 0 else 0.0


def _sizes(work: Work, problem: DecodeSize, kernel: DecodeKernel) -> DecodeSizes:
    """Sizes of a work. The window's overlap phases in as the mean context nears the window."""
    kv_tokens, window = problem.kv_tokens, problem.heads.window
    length = kv_tokens / problem.num_seqs
    if window:
        length += kernel.window_overlap * max(0.0, 2 * length / window - 1)
    new_bytes = problem.queries * problem.num_seqs * work.kv_bytes / kv_tokens if kv_tokens else 0.0
    return DecodeSizes(
        problem,
        length,
        kv_token_bytes=work.kv_bytes / max(kv_tokens, 1.0),
        io_bytes=work.activation_bytes + 2 * new_bytes,
        flops_per_token=work.flops / max(problem.query_rows * kv_tokens, 1.0),
    )
