"""Products of many tokens on Hopper, whose warps have roles: one group fills a ring of buffers through the copy engine,
far ahead, also for the next tile; two or three groups multiply, 64 rows of x each, and give buffers back."""

from collections.abc import Sequence

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from perfmodel_executors.kernels.launch import launch
from perfmodel_executors.kernels.tiles import TileConfig

HOPPER = 90  # compute capability
_ROWS = gl.constexpr(64)  # of an instruction
_GROUP = gl.constexpr(8)  # tiles of tokens that are walked together


@gluon.jit
def _tile_at(tile, tiles_m, tiles_n):
    """(row, column) of the tile that comes at this place, in groups of rows."""
    group = tile // (_GROUP * tiles_n)
    rows = gl.minimum(tiles_m - group * _GROUP, _GROUP)
    return group * _GROUP + tile % (_GROUP * tiles_n) % rows, tile % (_GROUP * tiles_n) // rows


@gluon.jit
def _copy_tiles(x_tiles, weight_tiles, buffers, sizes):
    x_buffers, weight_buffers, full, empty = buffers
    _, _, tiles_m, tiles_n, blocks = sizes
    STAGES: gl.constexpr = weight_buffers.shape[0]
    ADDING: gl.constexpr = x_buffers.shape[0] // STAGES
    BLOCK_N: gl.constexpr = weight_buffers.shape[1]
    BLOCK_K: gl.constexpr = weight_buffers.shape[2]
    STAGE_BYTES: gl.constexpr = (ADDING * _ROWS + BLOCK_N) * BLOCK_K * weight_tiles.dtype.primitive_bitwidth // 8
    step = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = _tile_at(tile, tiles_m, tiles_n)
        for block in range(blocks):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
            bar = full.index(stage)
            mbarrier.expect(bar, STAGE_BYTES)
            k = block * BLOCK_K
            for part in gl.static_range(ADDING):
                row = (tile_m * ADDING + part) * _ROWS
                tma.async_copy_global_to_shared(x_tiles, [row, k], bar, x_buffers.index(stage * ADDING + part))
            tma.async_copy_global_to_shared(weight_tiles, [tile_n * BLOCK_N, k], bar, weight_buffers.index(stage))
            step += 1


@gluon.jit
def _write_rows(acc, pointers, row, column, M, N, FORMAT: gl.constexpr):
    x_scales_ptr, row_scales_ptr, _, bias_ptr, out_ptr = pointers
    BLOCK_N: gl.constexpr = acc.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_N, BLOCK_N // 8], [4, 1], [1, 0])
    SUMS: gl.constexpr = acc.type.layout
    sums = acc.to(gl.float32)
    n = column + gl.arange(0, BLOCK_N, gl.SliceLayout(0, SUMS))
    if row_scales_ptr is not None:
        sums *= gl.load(row_scales_ptr + gl.minimum(n, N - 1))[None, :]
    if FORMAT == "rows":
        m = row + gl.arange(0, _ROWS, gl.SliceLayout(1, SUMS))
        sums *= gl.load(x_scales_ptr + gl.minimum(m, M - 1))[:, None]
    if bias_ptr is not None:
        sums += gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32)[None, :]
    out = gl.convert_layout(sums.to(out_ptr.dtype.element_ty), LAYOUT)
    m = row + gl.arange(0, _ROWS, gl.SliceLayout(1, LAYOUT))
    n = column + gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT))
    out_ptrs = out_ptr + m.to(gl.int64)[:, None] * N + n[None, :]
    gl.store(out_ptrs, out, mask=(m < M)[:, None] & (n < N)[None, :])


@gluon.jit
def _add_up(WHO: gl.constexpr, buffers, pointers, sizes, FORMAT: gl.constexpr):
    x_buffers, weight_buffers, full, empty = buffers
    M, N, tiles_m, tiles_n, blocks = sizes
    x_scales_ptr, _, block_scales_ptr, _, _ = pointers
    STAGES: gl.constexpr = weight_buffers.shape[0]
    ADDING: gl.constexpr = x_buffers.shape[0] // STAGES
    BLOCK_N: gl.constexpr = weight_buffers.shape[1]
    ACC: gl.constexpr = gl.int32 if x_buffers.dtype == gl.int8 else gl.float32
    DEPTH: gl.constexpr = 256 // x_buffers.dtype.primitive_bitwidth
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, DEPTH])
    step = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = _tile_at(tile, tiles_m, tiles_n)
        row = (tile_m * ADDING + WHO) * _ROWS
        m = gl.minimum(row + gl.arange(0, _ROWS, gl.SliceLayout(1, SUMS)), M - 1)
        none = gl.zeros([_ROWS, BLOCK_N], ACC, SUMS)
        acc = none
        for block in range(blocks):
            if FORMAT == "blocks":
                scale = gl.load(x_scales_ptr + m + block * M) * gl.load(block_scales_ptr + tile_n * blocks + block)
            stage = step % STAGES
            mbarrier.wait(full.index(stage), step // STAGES & 1)
            x, weight = x_buffers.index(stage * ADDING + WHO), weight_buffers.index(stage).permute((1, 0))
            if FORMAT == "blocks":
                product = warpgroup_mma(x, weight, none, use_acc=False, is_async=True)
                product = warpgroup_mma_wait(0, deps=(product,))
                mbarrier.arrive(empty.index(stage))
                acc += product * scale[:, None]
            else:  # the next product is issued before the last one's buffer is given back
                acc = warpgroup_mma(x, weight, acc, use_acc=block > 0, is_async=True)
                acc = warpgroup_mma_wait(1, deps=(acc,))
                mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=block > 0)
            step += 1
        if FORMAT != "blocks":
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES))
        _write_rows(acc, pointers, row, tile_n * BLOCK_N, M, N, FORMAT)


@gluon.jit(do_not_specialize=["M"])
def _hopper_product_kernel(
    x_ptr, x_scales_ptr, weight_ptr, row_scales_ptr, block_scales_ptr, bias_ptr, out_ptr, M, N, K, x_stride,
    weight_stride,
    FORMAT: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    ADDING: gl.constexpr = BLOCK_M // _ROWS
    DTYPE: gl.constexpr = x_ptr.dtype.element_ty
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, DTYPE.primitive_bitwidth, 2)
    x_tiles = tma.make_tensor_descriptor(x_ptr, [M, K], [x_stride, 1], [_ROWS, BLOCK_K], SHARED)
    weight_tiles = tma.make_tensor_descriptor(weight_ptr, [N, K], [weight_stride, 1], [BLOCK_N, BLOCK_K], SHARED)
    x_buffers = gl.allocate_shared_memory(DTYPE, [STAGES * ADDING, _ROWS, BLOCK_K], SHARED)
    weight_buffers = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, BLOCK_K], SHARED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), 1)
        mbarrier.init(empty.index(stage), ADDING)
    buffers = (x_buffers, weight_buffers, full, empty)
    pointers = (x_scales_ptr, row_scales_ptr, block_scales_ptr, bias_ptr, out_ptr)
    sizes = (M, N, gl.cdiv(M, BLOCK_M), gl.cdiv(N, BLOCK_N), gl.cdiv(K, BLOCK_K))
    copied = (x_tiles, weight_tiles, buffers, sizes)
    # Registers are those that a unit's 64 K leave, all groups having 128 threads.
    if ADDING == 3:
        gl.warp_specialize(
            [
                (_copy_tiles, copied),
                (_add_up, (0, buffers, pointers, sizes, FORMAT)),
                (_add_up, (1, buffers, pointers, sizes, FORMAT)),
                (_add_up, (2, buffers, pointers, sizes, FORMAT)),
            ],
            [4, 4, 4],
            [152, 152, 152],
        )
    else:
        gl.warp_specialize(
            [
                (_copy_tiles, copied),
                (_add_up, (0, buffers, pointers, sizes, FORMAT)),
                (_add_up, (1, buffers, pointers, sizes, FORMAT)),
            ],
            [4, 4],
            [232, 232],
        )


def hopper_product(
    tensors: Sequence[Tensor | None], sizes: Sequence[int], programs: int, form: str, config: TileConfig
) -> None:
    """Writes the product; tensors: x, its scales, weight, scales of rows and of blocks, bias, y; sizes: from M on."""
    constants = {name: config.sizes[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "STAGES")}
    launch(_hopper_product_kernel, (programs,), *tensors, *sizes, options=config.options, FORMAT=form, **constants)


def hopper_shared_bytes(element_bytes: int, config: TileConfig) -> int:
    """Shared memory of a program: the ring, its barriers, and half of each group's tile on its way out."""
    rows, columns, stages = (config.sizes[name] for name in ("BLOCK_M", "BLOCK_N", "STAGES"))
    stage = (rows + columns) * config.sizes["BLOCK_K"] * element_bytes
    return (stage + 16) * stages + rows * columns + 32
