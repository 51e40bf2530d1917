"""Decodes over pages of latents on Hopper, whose warps have roles: one group fetches latents, two multiply.

As FlashMLA does it: a program has 64 query heads, and tiles of 64 tokens go in pairs. Each group of warps makes the
scores of one tile of a pair and sums up one half of the columns of both: 128 registers of sums a thread, and no product
twice. They exchange the largest scores, then the weights, which go where the rotated keys were.

    SRAM: queries 64 (R + r), two tiles of as much; R = 512 and r = 64 in 16 bits take 216 KiB
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from perfmodel_executors.kernels.tiles import capability_of
from perfmodel_executors.kernels.triton.hopper_product import HOPPER

HEADS = 64  # of a program
_COPIED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # 128 bytes of each row
_LEAST = gl.constexpr(-1.0e30)  # finite, so that what sees nothing is no NaN
_SIZES = (512, 64)  # rank, rotated


def is_for_hopper(q_NDR: Tensor, rotated: int) -> bool:
    is_wide = q_NDR.dtype in (torch.bfloat16, torch.float16)
    return capability_of(q_NDR.device) == HOPPER and is_wide and (q_NDR.shape[2], rotated) == _SIZES


@gluon.jit
def _copy_columns(buffer, matrix_ptr, rows, is_seen, FIRST: gl.constexpr):
    """The columns from `FIRST` on; zero where nothing exists."""
    column = FIRST + gl.arange(0, buffer.shape[1], gl.SliceLayout(0, _COPIED))
    pointers = matrix_ptr + rows[:, None] + column[None, :]
    async_copy.async_copy_global_to_shared(buffer, pointers, mask=is_seen[:, None])


@gluon.jit
def _copy_latents(halves, rotated, full, empty, latents_ptr, table_ptr, begin, end, PAGE: gl.constexpr):
    TILE: gl.constexpr = rotated.shape[1]
    HALF: gl.constexpr = halves.shape[2]
    WIDTH: gl.constexpr = 2 * HALF + rotated.shape[2]
    phase = 1
    for start in range(begin, end, 2 * TILE):
        for tile in gl.static_range(2):
            position = start + tile * TILE + gl.arange(0, TILE, gl.SliceLayout(1, _COPIED))
            is_seen = position < end
            block = gl.load(table_ptr + position // PAGE, mask=is_seen, other=0).to(gl.int32)
            rows = (block * PAGE + position % PAGE).to(gl.int64) * WIDTH
            # The half that the tile's own group leaves and needs first; the other one, with the rotated keys.
            mbarrier.wait(empty.index(3 * tile), phase)
            _copy_columns(halves.index(3 * tile), latents_ptr, rows, is_seen, tile * HALF)
            async_copy.mbarrier_arrive(full.index(3 * tile), increment_count=False)
            mbarrier.wait(empty.index(1 + tile), phase)
            _copy_columns(halves.index(1 + tile), latents_ptr, rows, is_seen, (1 - tile) * HALF)
            _copy_columns(rotated.index(tile), latents_ptr, rows, is_seen, 2 * HALF)
            async_copy.mbarrier_arrive(full.index(1 + tile), increment_count=False)
        phase ^= 1


@gluon.jit
def _scores(WHO: gl.constexpr, queries, query_rotated, halves, rotated, full, phase, start, end, scale_log2):
    """Scores of the tile that group `WHO` has of the pair."""
    OTHER: gl.constexpr = 1 - WHO
    ROWS: gl.constexpr = query_rotated.shape[0]
    TILE: gl.constexpr = rotated.shape[1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    none = gl.zeros([ROWS, TILE], gl.float32, SCORES)
    # Always 0, which the compiler does not see: what it knew of these operands it would keep in registers, and spill.
    never = (end - start - 1) >> 31
    mbarrier.wait(full.index(3 * WHO), phase)
    fence_async_shared()
    keys = halves.index(3 * WHO + never).permute((1, 0))
    scores = warpgroup_mma(queries.index(WHO + never), keys, none, use_acc=False, is_async=True)
    mbarrier.wait(full.index(1 + WHO), phase)
    fence_async_shared()
    keys = halves.index(1 + WHO + never).permute((1, 0))
    scores = warpgroup_mma(queries.index(OTHER + never), keys, scores, is_async=True)
    scores = warpgroup_mma(query_rotated, rotated.index(WHO).permute((1, 0)), scores, is_async=True)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    position = start + WHO * TILE + gl.arange(0, TILE, gl.SliceLayout(0, SCORES))
    return gl.where((position < end)[None, :], scores * scale_log2, -float("inf"))


@gluon.jit
def _publish(WHO: gl.constexpr, scores, largest, rotated, maxima, ready):
    """Weights of a tile, where its rotated keys were, which nobody reads any more; (the largest score so far, sums)."""
    larger = gl.maximum(largest, gl.max(scores, axis=1))
    weights = gl.exp2(scores - larger[:, None])
    maxima.index(WHO).store(larger)
    rotated.index(WHO).store(weights.to(rotated.dtype))
    fence_async_shared()
    mbarrier.arrive(ready.index(WHO))
    return larger, gl.sum(weights, axis=1)


@gluon.jit
def _shrunk(acc, largest, larger):
    shrink = gl.exp2(largest - larger)
    return acc * gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout))[:, None], shrink


@gluon.jit
def _attend(WHO: gl.constexpr, read, written, begin, end, scale_log2):
    """Half `WHO` of the sums over all tiles, and the weights of every second tile. A tile's weights are relative to the
    largest score up to it, so that the groups follow one another: while one makes its weights, the other multiplies."""
    queries, query_rotated, halves, rotated, maxima, totals, full, empty, ready = read
    out_ptr, lse_ptr, first_row, num_splits, heads_left = written
    OTHER: gl.constexpr = 1 - WHO
    ROWS: gl.constexpr = query_rotated.shape[0]
    TILE: gl.constexpr = rotated.shape[1]
    HALF: gl.constexpr = halves.shape[2]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    largest = gl.full([ROWS], _LEAST, gl.float32, ROW)
    total = gl.zeros([ROWS], gl.float32, ROW)
    acc = gl.zeros([ROWS, HALF], gl.float32, SUMS)
    phase = 0
    for start in range(begin, end, 2 * TILE):
        scores = _scores(WHO, queries, query_rotated, halves, rotated, full, phase, start, end, scale_log2)
        if WHO == 0:
            larger, sums = _publish(WHO, scores, largest, rotated, maxima, ready)
            acc, shrink = _shrunk(acc, largest, larger)
            acc = warpgroup_mma(rotated.index(WHO), halves.index(3 * WHO), acc, is_async=True)
            total = total * shrink + sums
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(empty.index(3 * WHO))
        else:
            larger = largest
        mbarrier.wait(ready.index(OTHER), phase)
        fence_async_shared()
        largest = maxima.index(OTHER).load(ROW)
        acc, shrink = _shrunk(acc, larger, largest)
        total *= shrink
        acc = warpgroup_mma(rotated.index(OTHER), halves.index(2 * OTHER + WHO), acc, is_async=True)
        if WHO == 1:
            larger, sums = _publish(WHO, scores, largest, rotated, maxima, ready)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(2 * OTHER + WHO))
        if WHO == 1:
            acc, shrink = _shrunk(acc, largest, larger)
            acc = warpgroup_mma(rotated.index(WHO), halves.index(3 * WHO), acc, is_async=True)
            total = total * shrink + sums
            largest = larger
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(empty.index(3 * WHO))
        phase ^= 1
    totals.index(WHO).store(total)
    mbarrier.arrive(ready.index(2 + WHO))
    mbarrier.wait(ready.index(2 + OTHER), 0)
    total += totals.index(OTHER).load(ROW)
    divisor = gl.where(total > 0, total, 1.0)
    acc = acc / gl.convert_layout(divisor, gl.SliceLayout(1, SUMS))[:, None]
    row = gl.arange(0, ROWS, gl.SliceLayout(1, SUMS))
    column = WHO * HALF + gl.arange(0, HALF, gl.SliceLayout(0, SUMS))
    is_written = row < heads_left
    if lse_ptr is not None:
        is_written = is_written & (begin < end)
        if WHO == 0:
            lse = gl.where(total > 0, largest + gl.log2(divisor), -float("inf"))
            lse_row = gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
            gl.store(lse_ptr + first_row + lse_row * num_splits, lse, mask=lse_row < heads_left)
    out_ptrs = out_ptr + (first_row + row * num_splits)[:, None] * (2 * HALF) + column[None, :]
    gl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=is_written[:, None])


@gluon.jit(do_not_specialize=["table_stride", "num_splits"])
def hopper_latent_kernel(
    q_ptr, q_rotated_ptr, latents_ptr, tables_ptr, contexts_ptr, out_ptr, lse_ptr, table_stride, num_splits, scale_log2,
    N: gl.constexpr, WIDTH: gl.constexpr, RANK: gl.constexpr, ROTATED: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = 64
    TILE: gl.constexpr = 64
    HALF: gl.constexpr = RANK // 2
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    first_head = gl.program_id(0) * ROWS
    split = gl.program_id(1)
    seq = gl.program_id(2).to(gl.int64)
    context = gl.load(contexts_ptr + seq).to(gl.int32)
    share = gl.cdiv(gl.cdiv(context, 2 * TILE), num_splits) * 2 * TILE
    begin = split * share
    end = gl.minimum(begin + share, context)

    queries = gl.allocate_shared_memory(DTYPE, [2, ROWS, HALF], SHARED)
    query_rotated = gl.allocate_shared_memory(DTYPE, [ROWS, ROTATED], SHARED)
    halves = gl.allocate_shared_memory(DTYPE, [4, TILE, HALF], SHARED)
    rotated = gl.allocate_shared_memory(DTYPE, [2, TILE, ROTATED], SHARED)
    maxima = gl.allocate_shared_memory(gl.float32, [2, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    totals = gl.allocate_shared_memory(gl.float32, [2, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    for number in gl.static_range(4):
        mbarrier.init(full.index(number), 128)  # threads that fetch
        mbarrier.init(empty.index(number), 1)
        mbarrier.init(ready.index(number), 1)
    head = first_head + gl.arange(0, ROWS, gl.SliceLayout(1, _COPIED))
    for half in gl.static_range(2):
        _copy_columns(queries.index(half), q_ptr, (head * gl.num_programs(2) + seq) * RANK, head < N, half * HALF)
    _copy_columns(query_rotated, q_rotated_ptr, (seq * N + head) * WIDTH, head < N, 0)
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()
    first_row = (seq * N + first_head) * num_splits + split
    table_ptr = tables_ptr + seq * table_stride
    read = (queries, query_rotated, halves, rotated, maxima, totals, full, empty, ready)
    written = (out_ptr, lse_ptr, first_row, num_splits, N - first_head)
    gl.warp_specialize(
        [
            (_copy_latents, (halves, rotated, full, empty, latents_ptr, table_ptr, begin, end, PAGE)),
            (_attend, (0, read, written, begin, end, scale_log2)),
            (_attend, (1, read, written, begin, end, scale_log2)),
        ],
        [4, 4],
        [224, 224],
    )
