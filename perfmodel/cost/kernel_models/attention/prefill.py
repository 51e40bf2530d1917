"""Flash attention of prompts: query tiles that visit key tiles, one thread block per query tile and head.

    t = launch + IO / (memory_fraction W) + write tokens min(K h, 512) / 512 / SM
        + max( (A + block N) / SM + tail (L + block), L + block ) cost

    n    = ceil(T / M) query tiles of M rows per sequence of T new tokens, N = sum(H n) blocks
    A    = sum over sequences and heads of the key tokens that their query tiles visit, whole tiles of `keys` tokens:
           n P + M n (n + 1) / 2 + padding for a causal chunk after P cached tokens, less under a window
    L    = key tokens of the longest block: causal blocks are unequal, the last ones run alone, and no kernel is
           shorter than its longest block
    cost = 2 M (h_k + h_v) / (tensor_fraction F / SM) + M softmax_ops / (128 clock)      seconds per key token of a tile
    IO   = Q, O and the new K and V once, + kv_weight x the K and V of all visible tokens

W, F, SM as declared; `block` is a block's fixed cost in key tokens. Packed kernels (GQA) make tiles of T g rows per KV
head. The memory term is added: loads and stores of a short block do not overlap with its own products, which looks like
a ramp with prompt length. Measured kernels include the KV cache write; in vLLM that is one thread block per token with
a thread per element, which costs threads, not bytes.
Source: Dao 2023 (FlashAttention-2), Shah et al. 2024 (FlashAttention-3); tile sizes from their sources."""

from collections import Counter
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import Field

from perfmodel.cost.kernel_models.device import CACHED_SHARE, DeviceFacts, OperatorTime
from perfmodel.cost.kernel_models.fits import SCALARS, Domain, KernelSeconds, Residuals
from perfmodel.files.base import Spec
from perfmodel.files.units import PositiveInt
from perfmodel.ops.formats import MMA_SYNC_RATE
from perfmodel.ops.problem_sizes import HeadShape, PrefillSize, Values
from perfmodel.ops.work import Work

_INPUT_BYTES = 2.0  # of an element of the new keys and values, as the projection leaves them
_WRITE_THREADS = 512.0  # of a block that writes one token into the cache: one per element, this many at most
_LANES = 128  # fp32 operations per clock and compute unit
# Packed tiles are used where they visit less than this of the unpacked ones' keys (FlashAttention-3,
# hopper/heuristics.h, should_pack_gqa).
_WORTH_PACKING = 0.9


class PrefillKernel(Spec):
    """How a prefill kernel cuts its work: facts of its code, not fitted.

    rows, keys:   of a query tile and of a key tile, tokens
    packs:        the g query heads of a KV head share tiles: never, for single queries only, or where it saves work
    window_overlap: key tokens visited beyond a sliding window, which starts within a tile"""

    rows: PositiveInt = 128
    keys: PositiveInt = 128
    packs: Literal["never", "single", "worthwhile"] = "worthwhile"
    window_overlap: float = Field(default=0.0, ge=0)


class FlashPrefillFit(Spec):
    """One prefill kernel. Times in seconds; fractions of the declared peaks."""

    form: Literal["flash_prefill"] = "flash_prefill"
    kernel: PrefillKernel = PrefillKernel()
    domain: Domain = Domain()
    rate: str | None = None  # the number format whose tensor peak it runs at; None: that of the work
    launch_s: float = Field(default=1e-5, ge=1e-6, le=1e-3)
    tensor_fraction: float = Field(default=0.6, ge=0.02, le=1.0)  # of a full tile, the softmax it does not hide within
    memory_fraction: float = Field(default=0.55, ge=0.02, le=1.0)
    block_tokens: float = Field(default=50.0, ge=0.01, le=3000.0)
    tail: float = Field(default=0.5, ge=0.01, le=3.0)  # the share of the longest block that runs alone
    kv_weight: float = Field(default=1.0, ge=0.05, le=30.0)  # paged gathers cost more than their bytes, L2 hits less
    softmax_ops: float = Field(default=0.01, ge=0.01, le=200.0)  # per score, beside the tensor cores
    write_s: float = Field(default=1e-9, ge=1e-9, le=1e-5)  # of a full block that writes a token's K and V
    cache_speedup: float = Field(default=1.0, ge=1.0, le=8.0)  # of inputs that still lie in L2, as just written
    residuals: Residuals = Residuals()


class PrefillSizes(NamedTuple):
    """One prompt, or equal ones, in one kernel; many kernels as columns.

    tokens, cached: T and P per prompt; count: of equal prompts
    io_bytes:       Q and O per new token; kv_bytes: K and V per visible token
    is_causal:      a token sees those before it; else all of its prompt, or the window around it"""

    heads: HeadShape
    tokens: Values
    cached: Values
    count: Values
    io_bytes: Values
    kv_bytes: Values
    is_causal: bool = True


# Key tokens visited, thread blocks, key tokens of the longest block.
_Tiles = tuple[Values, Values, Values]


def prefill_seconds(sizes: PrefillSizes, fit: FlashPrefillFit, device: DeviceFacts) -> KernelSeconds:
    """The formula of this module over columns of `sizes`; products in bf16, unless the fit has a rate of its own."""
    packed = _packed(sizes, fit.kernel, np) if sizes.is_causal else None
    tiles = _chosen(_plain(sizes, fit.kernel, np), packed, sizes, fit.kernel, np)
    return _seconds(tiles, _memory(sizes, fit, device, np), sizes, fit, device, "bf16", np)


def prefill_time(work: Work, fit: FlashPrefillFit, device: DeviceFacts) -> OperatorTime:
    """The time of one run of `work`: all prompts' tiles in one kernel. Work with a share of its prompts' FLOPs (a
    pipeline's microbatch, an indexer's keys) takes that share of the products' time; bytes are its own."""
    problem = work.problem_as(PrefillSize)
    kernel, prompts = fit.kernel, _sizes(work, problem)
    plain = _together([_plain(sizes, kernel, SCALARS) for sizes in prompts])
    packed = None
    can_pack = kernel.packs == "worthwhile" or (kernel.packs == "single" and all(size.tokens == 1 for size in prompts))
    if problem.is_causal and can_pack:
        packed = _together([_packed(sizes, kernel, SCALARS) for sizes in prompts])
    first = prompts[0]
    if problem.has_block_per_head:
        plain, packed = _together([_whole_heads(sizes, kernel, SCALARS) for sizes in prompts]), None
    tiles = _chosen(plain, packed, first, kernel, SCALARS)
    memory = sum(_memory(sizes, fit, device, SCALARS) for sizes in prompts)
    share = work.flops / (2.0 * problem.pairs * first.heads.num_heads * first.heads.head_size)
    compute = share * _seconds(tiles, memory, first, fit, device, work.rate, SCALARS).compute
    compute += work.vector_ops / device.vector_instructions  # cached integers are made into numbers first
    streamed_s = work.kv_bytes / device.bandwidth if work.kv_bytes > device.l2_bytes else 0.0  # no kernel beats it
    return OperatorTime.of(max(fit.launch_s + compute + memory, streamed_s), compute, memory, fit.launch_s)


def _sizes(work: Work, problem: PrefillSize) -> list[PrefillSizes]:
    io_bytes, kv_bytes = work.activation_bytes / problem.tokens, work.kv_bytes / problem.kv_tokens
    rest = io_bytes, kv_bytes, problem.is_causal
    equal = Counter(problem.prefills).items() if not problem.is_causal else ((one, 1) for one in problem.prefills)
    return [PrefillSizes(problem.heads, *one, float(count), *rest) for one, count in equal]


def _seconds(
    tiles: _Tiles, memory: Values, sizes: PrefillSizes, fit: FlashPrefillFit, device: DeviceFacts, rate: str, xp: Any
) -> KernelSeconds:
    visited, blocks, longest = tiles
    units, rows = device.compute_units, fit.kernel.rows
    instruction = MMA_SYNC_RATE if rate.endswith(MMA_SYNC_RATE) else ""
    peak = device.peak(fit.rate + instruction if fit.rate else rate)
    per_key = 2 * rows * sizes.heads.head_size / (fit.tensor_fraction * peak / units)
    per_key = per_key + rows * fit.softmax_ops / (_LANES * device.clock_hz * device.exponentials)
    alone = longest + fit.block_tokens
    shared = (visited + fit.block_tokens * blocks) / units
    compute = xp.maximum(shared + fit.tail * alone, alone) * per_key
    return KernelSeconds(fit.launch_s + memory + compute, compute, memory)


def _memory(sizes: PrefillSizes, fit: FlashPrefillFit, device: DeviceFacts, xp: Any) -> Values:
    """Seconds of Q, O, K, V and the cache write; at least the bytes at declared bandwidth."""
    window, kv_elements = sizes.heads.window, sizes.heads.num_kv_heads * sizes.heads.head_size
    cached = xp.where(window > 0, xp.minimum(sizes.cached, window), sizes.cached)
    visible = (cached + sizes.tokens) * sizes.kv_bytes
    queries = sizes.tokens * sizes.io_bytes
    inputs = sizes.tokens * sizes.heads.num_kv_heads * sizes.heads.head_size * _INPUT_BYTES
    least = (queries + visible) / device.bandwidth
    io = (queries + inputs + fit.kv_weight * visible) / (fit.memory_fraction * device.bandwidth)
    if fit.cache_speedup > 1.0:
        room = CACHED_SHARE * device.l2_bytes
        hit = xp.minimum(xp.maximum(2.0 - sizes.count * (queries + inputs + visible) / room, 0.0), 1.0)
        io, least = io * (1.0 - hit + hit / fit.cache_speedup), least * (1.0 - hit)
    threads = xp.minimum(kv_elements / 2, _WRITE_THREADS) / _WRITE_THREADS
    write = fit.write_s * threads * sizes.tokens / device.compute_units
    return sizes.count * (xp.maximum(io, least) + write)


def _plain(sizes: PrefillSizes, kernel: PrefillKernel, xp: Any) -> _Tiles:
    if not sizes.is_causal:
        tiles, end = xp.ceil(sizes.tokens / kernel.rows), xp.ceil(sizes.tokens / kernel.keys) * kernel.keys
        span = xp.ceil((kernel.rows + sizes.heads.window) / kernel.keys) * kernel.keys
        end = xp.where(sizes.heads.window > 0, xp.minimum(span, end), end)
        blocks = sizes.count * sizes.heads.num_heads * tiles
        return blocks * end, blocks, end
    per_head, tiles, longest = prompt_tiles(sizes.tokens, sizes.cached, sizes.heads.window, kernel, kernel.rows, xp)
    blocks = sizes.count * sizes.heads.num_heads
    return blocks * per_head, blocks * tiles, longest


def _whole_heads(sizes: PrefillSizes, kernel: PrefillKernel, xp: Any) -> _Tiles:
    """All query tiles of a head in one block (FlashAttention-1)."""
    per_head, _, _ = prompt_tiles(sizes.tokens, sizes.cached, sizes.heads.window, kernel, kernel.rows, xp)
    blocks = sizes.count * sizes.heads.num_heads
    return blocks * per_head, blocks, per_head


def _packed(sizes: PrefillSizes, kernel: PrefillKernel, xp: Any) -> _Tiles:
    group = sizes.heads.num_heads / sizes.heads.num_kv_heads
    per_head, tiles, longest = prompt_tiles(
        sizes.tokens, sizes.cached, sizes.heads.window, kernel, xp.maximum(1.0, kernel.rows / group), xp
    )
    rows = xp.ceil(sizes.tokens * group / kernel.rows)  # tiles of T g rows, whatever they hold of each head
    blocks = sizes.count * sizes.heads.num_kv_heads
    return blocks * per_head * rows / tiles, blocks * rows, longest


def _together(tiles: list[_Tiles]) -> _Tiles:
    visited, blocks, longest = zip(*tiles, strict=True)
    return sum(visited), sum(blocks), max(longest)


def _chosen(plain: _Tiles, packed: _Tiles | None, sizes: PrefillSizes, kernel: PrefillKernel, xp: Any) -> _Tiles:
    if kernel.packs == "never" or packed is None:
        return plain
    is_packed = sizes.tokens <= 1 if kernel.packs == "single" else packed[0] < _WORTH_PACKING * plain[0]
    visited, blocks, longest = (xp.where(is_packed, one, other) for one, other in zip(packed, plain, strict=True))
    return visited, blocks, longest


def prompt_tiles(
    tokens: Values, cached: Values, window: Values, kernel: PrefillKernel, rows: Values, xp: Any = np
) -> _Tiles:
    """(key tokens visited, tiles, key tokens of the longest) of tiles of `rows` queries of a head. Under a window the
    first tiles rise to its length, the rest stay there. tokens, cached: of a prompt; window: most keys per query, 0 for
    all; kernel: has the key tile; xp: numpy, or scalar functions"""
    keys = kernel.keys
    tiles = xp.ceil(tokens / rows)
    step = xp.minimum(rows, keys)
    start = xp.ceil(cached / step) * step
    end = xp.ceil((cached + tokens) / keys) * keys
    visited = tiles * (start + rows * (tiles + 1) / 2 + (keys - step) / 2)
    visited = visited - xp.maximum(0.0, start + tiles * rows - end)
    visited = xp.maximum(xp.minimum(visited, tiles * end), end * (rows < keys))
    span = xp.ceil((rows + window) / keys) * keys + kernel.window_overlap
    longest = xp.where(window > 0, xp.minimum(span, end), end)
    rising = xp.minimum(xp.maximum(xp.floor((longest - start) / rows), 0.0), tiles)
    within = rising * (start + rows * (rising + 1) / 2) + (tiles - rising) * longest
    within = xp.minimum(visited, xp.maximum(within, longest))
    return xp.where(window > 0, within, visited), tiles, longest
