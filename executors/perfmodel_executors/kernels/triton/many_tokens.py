"""y = x W^T on tensor cores for many tokens, of plain weights and of 8-bit codes with quantised activations. Tiles are
walked in groups that share W in the L2; operands come by `cp.async`, or sm_90's copy engine (tensor descriptors)."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from perfmodel_executors.kernels.launch import Options, launch
from perfmodel_executors.kernels.tiles import TileConfig, capability_of, compute_units, has_copy_engine, pick
from perfmodel_executors.kernels.triton import swapped_product
from perfmodel_executors.kernels.triton.hopper_product import HOPPER, hopper_product, hopper_shared_bytes
from perfmodel_executors.kernels.triton.operand import Operand
from perfmodel_executors.kernels.triton.swapped_product import Codes, grouped_tile, own_blocks

_NOWHERE = 1 << 30  # bytes that no device has
_MIN_SUMS = 64 * 128  # of a unit, for warps with roles: with fewer, slices of K fill the device better


class _Tile(NamedTuple):
    """rate: of the products, relative to the largest tile's, once every unit has one (larger tiles re-read less)"""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    rate: float


_PLAIN = (
    _Tile(256, 128, 64, 8, 3, 1.0),
    _Tile(128, 256, 64, 8, 3, 1.0),
    _Tile(128, 128, 64, 8, 3, 0.85),
    _Tile(128, 128, 64, 4, 4, 0.8),
    _Tile(64, 128, 64, 4, 4, 0.65),
    _Tile(64, 64, 128, 4, 3, 0.5),
)
_ROWS = (
    _Tile(128, 256, 128, 8, 3, 1.0),
    _Tile(256, 128, 128, 8, 3, 1.0),
    _Tile(128, 128, 128, 8, 3, 0.8),
    _Tile(128, 128, 128, 4, 4, 0.8),
    _Tile(64, 128, 128, 4, 4, 0.6),
)
_BLOCKS = (  # a tile has one block's columns, so that its weights have one scale at a time
    _Tile(128, 128, 128, 8, 4, 1.0),
    _Tile(128, 128, 128, 8, 3, 1.0),
    _Tile(64, 128, 128, 4, 3, 0.7),
    _Tile(64, 64, 128, 4, 4, 0.5),
)
_TILES: Mapping[str, tuple[_Tile, ...]] = {"plain": _PLAIN, "rows": _ROWS, "blocks": _BLOCKS}
_HOPPER = (  # where warps have roles: those that fetch, stages of the ring, depths of 16 bits
    _Tile(128, 256, 64, 4, 4, 1.0),
    _Tile(192, 128, 64, 4, 5, 0.95),
    _Tile(128, 128, 64, 4, 6, 0.8),
)


@triton.jit(do_not_specialize=["M"])
def _many_tokens_kernel(
    x_ptr, x_scales_ptr, weight_ptr, row_scales_ptr, block_scales_ptr, bias_ptr, out_ptr, M, N, K, x_stride,
    weight_stride, slice_stride,
    FORMAT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
    EVEN_K: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = grouped_tile(tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N))
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    blocks = tl.cdiv(K, BLOCK_K)
    first, last = own_blocks(blocks, SPLIT_K)
    ACC: tl.constexpr = tl.int32 if x_ptr.dtype.element_ty == tl.int8 else tl.float32
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)
    # Rows beyond the end wrap around: they are computed and not stored, which is cheaper than a mask in the loop.
    x_ptrs = x_ptr + (m % M).to(tl.int64)[:, None] * x_stride + k[None, :]
    weight_ptrs = weight_ptr + (n % N).to(tl.int64)[None, :] * weight_stride + k[:, None]
    if DESCRIPTORS:
        x_tiles = tl.make_tensor_descriptor(x_ptr, [M, K], [x_stride, 1], [BLOCK_M, BLOCK_K])
        weight_tiles = tl.make_tensor_descriptor(weight_ptr, [N, K], [weight_stride, 1], [BLOCK_N, BLOCK_K])
    if FORMAT == "blocks":
        x_scales_ptrs = x_scales_ptr + m % M
        weight_scales_ptr = block_scales_ptr + tile_n * BLOCK_N // BLOCK_K * blocks
        scale = tl.load(x_scales_ptrs + first * M) * tl.load(weight_scales_ptr + first)
    for block in range(first, last):
        if DESCRIPTORS:
            x = x_tiles.load([tile_m * BLOCK_M, block * BLOCK_K])
            weight = weight_tiles.load([tile_n * BLOCK_N, block * BLOCK_K]).T
        elif EVEN_K:
            x = tl.load(x_ptrs + block * BLOCK_K)
            weight = tl.load(weight_ptrs + block * BLOCK_K)
        else:
            inside = k < K - block * BLOCK_K
            x = tl.load(x_ptrs + block * BLOCK_K, mask=inside[None, :], other=0.0)
            weight = tl.load(weight_ptrs + block * BLOCK_K, mask=inside[:, None], other=0.0)
        if FORMAT == "blocks":
            ahead = tl.minimum(block + 1, last - 1)
            next_scale = tl.load(x_scales_ptrs + ahead * M) * tl.load(weight_scales_ptr + ahead)
            acc += tl.dot(x, weight) * scale[:, None]
            scale = next_scale
        else:
            acc = tl.dot(x, weight, acc, input_precision="ieee", out_dtype=ACC)
    sums = acc.to(tl.float32)
    if row_scales_ptr is not None:
        sums *= tl.load(row_scales_ptr + tl.minimum(n, N - 1))[None, :]
    if x_scales_ptr is not None and FORMAT != "blocks":
        sums *= tl.load(x_scales_ptr + tl.minimum(m, M - 1))[:, None]
    if SPLIT_K > 1:
        out_ptr += tl.program_id(1).to(tl.int64) * slice_stride
    elif bias_ptr is not None:
        sums += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    out_ptrs = out_ptr + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out_ptrs, sums.to(out_ptr.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))


def many_tokens_product(
    kernel: str, x_MK: Tensor, operand: Operand, bias_N: Tensor | None, config: TileConfig | None, codes: Codes | None
) -> Tensor:
    """The product [M, N] in x's dtype, of a weight that is plain, or whose codes meet codes; as `swapped_product`."""
    (m, k), n = x_MK.shape, operand.shape[0]
    values_MK, scales = codes or (x_MK, None)
    y_MN = torch.empty(m, n, dtype=x_MK.dtype, device=x_MK.device)
    shape = (m, n, k, values_MK.stride(0), operand.values.stride(0))

    def run(config: TileConfig) -> None:
        sizes = config.sizes
        if sizes["DESCRIPTORS"]:
            provide_scratch(x_MK.device)
        out = swapped_product.slice_buffer(y_MN, sizes["SPLIT_K"])
        tensors = (values_MK, scales, operand.values, operand.row_scales, operand.group_scales, bias_N, out)
        tiles = triton.cdiv(m, sizes["BLOCK_M"]) * triton.cdiv(n, sizes["BLOCK_N"])
        if "STAGES" in sizes:
            hopper_product(tensors, shape, min(tiles, compute_units(x_MK.device)), operand.form, config)
            return
        constants = {"FORMAT": operand.form, "EVEN_K": k % sizes["BLOCK_K"] == 0, **sizes}
        grid = (tiles, sizes["SPLIT_K"])
        launch(_many_tokens_kernel, grid, *tensors, *shape, m * n, options=config.options, **constants)
        if sizes["SPLIT_K"] > 1:
            swapped_product.add_slices(out, bias_N, y_MN)

    problem = (triton.next_power_of_2(m), n, k, x_MK.dtype, *operand.problem)
    law = partial(many_tokens_shared_bytes, operand)
    run(config or pick(kernel, problem, partial(_candidates, values_MK, operand), law, run, x_MK.device))
    return y_MN


def provide_scratch(device: torch.device) -> None:
    """Before a launch: global memory in which a kernel writes its descriptors."""
    if device.type == "cuda":
        triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device="cuda"))


def many_tokens_shared_bytes(operand: Operand, config: TileConfig, capability: int) -> int:
    """Shared memory of a thread block: its pipeline's operands, and barriers for the copy engine and tensor memory.
    More than any device has for descriptors where there is no copy engine, and for Hopper's kernel elsewhere.
    Blackwell's tensor memory takes no integers: their instructions wait for their operands, as all do before Hopper."""
    sizes, stages = config.sizes, config.options.num_stages
    if "STAGES" in sizes:
        return hopper_shared_bytes(operand.values.element_size(), config) if capability == HOPPER else _NOWHERE
    operands = (sizes["BLOCK_M"] + sizes["BLOCK_N"]) * sizes["BLOCK_K"] * operand.values.element_size()
    if not has_copy_engine(capability):
        return _NOWHERE if sizes["DESCRIPTORS"] else operands * max(1, stages - 1)
    if capability >= 100 and operand.values.dtype == torch.int8:
        return (operands + 8 * sizes["DESCRIPTORS"]) * max(1, stages - 1)
    barriers = 8 * stages if sizes["DESCRIPTORS"] else 0
    if capability >= 100:
        barriers = 16 + -(-barriers // 16) * 16
    return operands * stages + barriers


def _candidates(values_MK: Tensor, operand: Operand) -> Iterator[TileConfig]:
    """The tile with the least estimated time first; without descriptors before with, of which no pipeline is sure."""
    (m, k), n = values_MK.shape, operand.shape[0]
    element_bytes = operand.values.element_size()
    is_aligned = all(part.stride(0) * element_bytes % 16 == 0 for part in (values_MK, operand.values))
    is_hopper, units = capability_of(values_MK.device) == HOPPER, compute_units(values_MK.device)
    if is_hopper and is_aligned and element_bytes <= 2 and m * n >= units * _MIN_SUMS:
        # Blocks have 128 columns, and the compiler has no product of integers with more.
        most = 128 if operand.form == "blocks" or operand.values.dtype == torch.int8 else 256
        for tile in sorted(_HOPPER, key=lambda tile: _relative_time(m, n, tile, units, shares_k=False)):
            sizes = {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": 2 * tile.block_k // element_bytes}
            if tile.block_n <= most:
                ring = {"SPLIT_K": 1, "DESCRIPTORS": 1, "STAGES": tile.stages}
                yield TileConfig({**sizes, **ring}, Options(tile.warps, 1))
    for tile in sorted(_TILES[operand.form], key=lambda tile: _relative_time(m, n, tile, units, shares_k=True)):
        if is_hopper and tile.warps > 4:
            continue  # the assembler of Triton 3.6 makes such products wait for each other
        tiles = triton.cdiv(m, tile.block_m) * triton.cdiv(n, tile.block_n)
        slices = swapped_product.num_slices(tiles, triton.cdiv(k, tile.block_k), values_MK.device, blocks_per_unit=1)
        sizes = {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k, "SPLIT_K": slices}
        for descriptors in (0, 1) if is_aligned and not is_hopper else (0,):
            yield TileConfig({**sizes, "DESCRIPTORS": descriptors}, Options(tile.warps, tile.stages))


def _relative_time(m: int, n: int, tile: _Tile, units: int, shares_k: bool) -> float:
    """Waves of tiles over the device's units, times what a tile takes; fewer tiles than units may share K."""
    tiles = triton.cdiv(m, tile.block_m) * triton.cdiv(n, tile.block_n)
    waves = 1 / (units // tiles) if shares_k and tiles < units else triton.cdiv(tiles, units)
    return float(waves * tile.block_m * tile.block_n / tile.rate)
