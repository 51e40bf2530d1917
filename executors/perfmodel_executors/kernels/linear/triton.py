"""y = x W^T + b on tensor cores, accumulated in fp32: a kernel for many tokens, that of stored weights for few.

Many tokens (limited by the tensor cores): tiles of x times tiles of W, walked in groups that share rows of W in the L2
cache; operands come through `cp.async`, or through the copy engine of sm_90 and newer (tensor descriptors).

Few tokens (limited by reading W once): the roles are swapped, as in `swapped_product`.

Where there are fewer tiles than the device runs at once, K is cut into slices. Each slice writes its sums to a
workspace, a second kernel adds them up in order: no atomics, so equal inputs give equal bits, and nothing that a CUDA
graph could not capture.
"""

__all__ = ["linear", "many_tokens_shared_bytes"]

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from perfmodel_executors.kernels.launch import Options, launch
from perfmodel_executors.kernels.row_tiles.triton import has_copy_engine, provide_scratch
from perfmodel_executors.kernels.split_k.triton import add_slices, num_slices, own_blocks, slice_buffer
from perfmodel_executors.kernels.swapped_product.tiling import FEW_TOKENS
from perfmodel_executors.kernels.swapped_product.triton import swapped_product
from perfmodel_executors.kernels.tiles import TileConfig, compute_units, pick
from perfmodel_executors.kernels.weight_formats.operand import operand_of
from perfmodel_executors.kernels.weight_formats.triton import add_values

_GROUP = 8  # tiles of tokens that are walked together
_NOWHERE = 1 << 30  # bytes that no device has


class _Tile(NamedTuple):
    """rate:  of the products, relative to the largest tile's, once every unit has one (larger tiles re-read less)
    waits: where the assembler of Triton 3.6 makes Hopper's products wait for each other, as its binaries say: with K in
           slices, with K as a whole, never. Tuning may find such a tile the fastest; untuned, no call begins with it
    """

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    rate: float
    waits: str = "never"  # cut | whole | never


_MANY_TOKENS_TILES = (
    _Tile(256, 128, 64, 8, 3, 1.0, "cut"),
    _Tile(128, 256, 64, 8, 3, 1.0, "whole"),
    _Tile(128, 128, 64, 8, 3, 0.85, "cut"),
    _Tile(128, 128, 64, 4, 4, 0.8),
    _Tile(64, 128, 64, 4, 4, 0.65),
    _Tile(64, 64, 128, 4, 3, 0.5),
)


@triton.jit(do_not_specialize=["M"])
def _many_tokens_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, M, N, K, x_stride, weight_stride, slice_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr, GROUP: tl.constexpr,
    EVEN_K: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    group = tile // (GROUP * tiles_n)
    group_rows = tl.minimum(tiles_m - group * GROUP, GROUP)
    tile_m = group * GROUP + tile % (GROUP * tiles_n) % group_rows
    tile_n = tile % (GROUP * tiles_n) // group_rows
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    first, last = own_blocks(tl.cdiv(K, BLOCK_K), SPLIT_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    if DESCRIPTORS:
        x_tiles = tl.make_tensor_descriptor(x_ptr, [M, K], [x_stride, 1], [BLOCK_M, BLOCK_K])
        weight_tiles = tl.make_tensor_descriptor(weight_ptr, [N, K], [weight_stride, 1], [BLOCK_N, BLOCK_K])
        for block in range(first, last):
            x = x_tiles.load([tile_m * BLOCK_M, block * BLOCK_K])
            weight = weight_tiles.load([tile_n * BLOCK_N, block * BLOCK_K])
            acc = tl.dot(x, weight.T, acc, input_precision="ieee")
    else:
        # Rows beyond the end wrap around: they are computed and not stored, which is cheaper than a mask in the loop.
        x_ptrs = x_ptr + (m % M).to(tl.int64)[:, None] * x_stride + k[None, :]
        weight_ptrs = weight_ptr + (n % N).to(tl.int64)[None, :] * weight_stride + k[:, None]
        acc = add_values(acc, weight_ptrs, x_ptrs, K, first, last, BLOCK_K, EVEN_K, READ_ONCE=False)
    if SPLIT_K > 1:
        out_ptr += tl.program_id(1).to(tl.int64) * slice_stride
    elif bias_ptr is not None:
        acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    out_ptrs = out_ptr + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))


def linear(x_TC: Tensor, weight_DC: Tensor, bias_D: Tensor | None = None, config: TileConfig | None = None) -> Tensor:
    """The product in x's dtype; rows of x and of the weight may lie apart, their elements not."""
    x_TC = x_TC if x_TC.stride(1) == 1 else x_TC.contiguous()
    (m, k), n = x_TC.shape, weight_DC.shape[0]
    if m <= FEW_TOKENS if config is None else "DESCRIPTORS" not in config.sizes:
        return swapped_product("linear", x_TC, operand_of(weight_DC), bias_D, config)
    y_TD = torch.empty(m, n, dtype=x_TC.dtype, device=x_TC.device)
    run = partial(_run, x_TC, weight_DC, bias_D, y_TD)
    if config is None:
        problem = (triton.next_power_of_2(m), n, k, x_TC.dtype)
        law = partial(many_tokens_shared_bytes, element_bytes=x_TC.element_size())
        config = pick("linear", problem, partial(_candidates, x_TC, weight_DC), law, run, x_TC.device)
    run(config)
    return y_TD


def many_tokens_shared_bytes(config: TileConfig, capability: int, element_bytes: int) -> int:
    """Shared memory of a thread block: its pipeline's operands, and barriers for the copy engine and tensor memory.

    More than any device has for descriptors where there is no copy engine.
    """
    sizes, stages = config.sizes, config.options.num_stages
    operands = (sizes["BLOCK_M"] + sizes["BLOCK_N"]) * sizes["BLOCK_K"] * element_bytes
    if not has_copy_engine(capability):  # instructions that wait for their operands
        return _NOWHERE if sizes["DESCRIPTORS"] else operands * max(1, stages - 1)
    barriers = 8 * stages if sizes["DESCRIPTORS"] else 0
    if capability >= 100:
        barriers = 16 + -(-barriers // 16) * 16
    return operands * stages + barriers


def _run(x_TC: Tensor, weight_DC: Tensor, bias_D: Tensor | None, y_TD: Tensor, config: TileConfig) -> None:
    (m, k), n, sizes = x_TC.shape, y_TD.shape[1], config.sizes
    slices = sizes["SPLIT_K"]
    out = slice_buffer(y_TD, slices)
    args = (x_TC, weight_DC, bias_D, out, m, n, k, x_TC.stride(0), weight_DC.stride(0), m * n)
    grid = (triton.cdiv(m, sizes["BLOCK_M"]) * triton.cdiv(n, sizes["BLOCK_N"]), slices)
    if sizes["DESCRIPTORS"]:
        provide_scratch(x_TC.device)
    even = k % sizes["BLOCK_K"] == 0
    launch(_many_tokens_kernel, grid, *args, options=config.options, GROUP=_GROUP, EVEN_K=even, **sizes)
    if slices > 1:
        add_slices(out, bias_D, y_TD)


def _candidates(x_TC: Tensor, weight_DC: Tensor) -> Iterator[TileConfig]:
    """The tile with the least estimated time first, those that wait last; without descriptors before with, of which no
    pipeline is sure."""
    (m, k), n = x_TC.shape, weight_DC.shape[0]
    is_aligned = all(tensor.stride(0) * tensor.element_size() % 16 == 0 for tensor in (x_TC, weight_DC))
    units = compute_units(x_TC.device)

    def slices_of(tile: _Tile) -> int:
        tiles = triton.cdiv(m, tile.block_m) * triton.cdiv(n, tile.block_n)
        return num_slices(tiles, triton.cdiv(k, tile.block_k), x_TC.device, blocks_per_unit=1)

    def rank(tile: _Tile) -> tuple[bool, float]:
        return tile.waits == ("cut" if slices_of(tile) > 1 else "whole"), _relative_time(m, n, tile, units)

    for tile in sorted(_MANY_TOKENS_TILES, key=rank):
        slices = slices_of(tile)
        sizes = {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k, "SPLIT_K": slices}
        for descriptors in (0, 1) if is_aligned else (0,):
            yield TileConfig({**sizes, "DESCRIPTORS": descriptors}, Options(tile.warps, tile.stages))


def _relative_time(m: int, n: int, tile: _Tile, units: int) -> float:
    """Waves of tiles over the device's units, times what a tile takes; fewer tiles than units share K."""
    tiles = triton.cdiv(m, tile.block_m) * triton.cdiv(n, tile.block_n)
    waves = triton.cdiv(tiles, units) if tiles >= units else 1 / (units // tiles)
    return float(waves * tile.block_m * tile.block_n / tile.rate)
