"""y^T = W x^T: W is the left operand, so that it fills the 64 to 128 rows that a tensor-core instruction has and the
tokens its columns, of which 8 are enough. Nothing of W is read twice while the tokens are few. Tensor cores take
fragments of the left operand from registers, where codes are widened on their way from SRAM."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from perfmodel_executors.kernels.launch import Options, launch
from perfmodel_executors.kernels.tiles import TileConfig, compute_units, pick
from perfmodel_executors.kernels.triton.operand import Operand
from perfmodel_executors.kernels.triton.stored_weights import scaled, tile_sums
from perfmodel_executors.kernels.weight_formats import FP4_SPAN

FEW_TOKENS = 64
_MIN_BLOCKS = 4  # of K in a slice: a pipeline of fewer never fills
_MAX_SLICES = 32
GROUP = 8  # tiles of tokens that are walked together, so that the L2 cache gives them their rows of W
_GROUP = tl.constexpr(GROUP)


@triton.jit
def grouped_tile(tiles_m, tiles_n):
    """(row, column) of this program's tile, in groups of rows."""
    tile = tl.program_id(0)
    group = tile // (_GROUP * tiles_n)
    rows = tl.minimum(tiles_m - group * _GROUP, _GROUP)
    return group * _GROUP + tile % (_GROUP * tiles_n) % rows, tile % (_GROUP * tiles_n) // rows


@triton.jit
def own_blocks(num_blocks, SPLIT_K: tl.constexpr):
    """(first, last + 1) of the blocks of K in this program's slice."""
    blocks = tl.cdiv(num_blocks, SPLIT_K)
    first = tl.program_id(1) * blocks
    return first, tl.minimum(first + blocks, num_blocks)


@triton.jit
def _add_slices_kernel(sums_ptr, bias_ptr, y_ptr, elements, N, SLICES: tl.constexpr, BLOCK: tl.constexpr):
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = element < elements
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for piece in tl.static_range(SLICES):
        total += tl.load(sums_ptr + piece * elements + element, mask=mask, other=0.0)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + element % N, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + element, total.to(y_ptr.dtype.element_ty), mask=mask)


def num_slices(tiles: int, blocks_of_k: int, device: torch.device, blocks_per_unit: int) -> int:
    """How many slices make `tiles` output tiles fill the device; each has four blocks of K or more, none is empty.
    blocks_per_unit: how many thread blocks a compute unit should have."""
    wanted = blocks_per_unit * compute_units(device) // max(1, tiles)
    slices = max(1, min(wanted, blocks_of_k // _MIN_BLOCKS, _MAX_SLICES))
    return -(-blocks_of_k // -(-blocks_of_k // slices))


def slice_buffer(y_MN: Tensor, slices: int) -> Tensor:
    """Where the product goes: y itself, or fp32 [slices, M, N]."""
    if slices == 1:
        return y_MN
    return torch.empty(slices, *y_MN.shape, dtype=torch.float32, device=y_MN.device)


def add_slices(sums_SMN: Tensor, bias_N: Tensor | None, y_MN: Tensor) -> None:
    elements, block = y_MN.numel(), 512
    grid = (triton.cdiv(elements, block),)
    args = (sums_SMN, bias_N, y_MN, elements, y_MN.shape[1])
    launch(_add_slices_kernel, grid, *args, options=Options(num_warps=4), SLICES=sums_SMN.shape[0], BLOCK=block)


class _Tiles(NamedTuple):
    """few: outputs, depth, warps, stages; many: tokens, then as few (none where another kernel takes over)
    blocks: wanted of a compute unit with few tokens
    least:  columns of a tile; with fewer than 16, Hopper and Blackwell fall back to the instructions of Ampere"""

    few: tuple[tuple[int, int, int, int], ...]
    many: tuple[tuple[int, int, int, int, int], ...]
    blocks: int
    least: int


_FEW_CODES = ((64, 256, 4, 4), (64, 128, 4, 5), (128, 128, 4, 4), (32, 256, 2, 4), (64, 128, 4, 3))
# 32 to 64 KB of plain weights under way in each block, two or three blocks to a unit.
_FEW_PLAIN = ((64, 128, 4, 4), (128, 64, 4, 4), (128, 128, 4, 3), (64, 256, 4, 3), (64, 128, 4, 3), (32, 256, 4, 4))
_FEW_8_BITS = ((64, 256, 4, 4), (128, 128, 4, 4), (64, 128, 4, 5), (128, 256, 4, 3), (64, 128, 4, 3))
_FEW_BLOCKS = ((64, 128, 4, 5), (128, 128, 4, 4), (64, 128, 4, 4), (64, 128, 4, 3))
# Not 256 tokens: there Triton 3.6 lets widened codes change while Hopper's products still read them.
_MANY_ROWS = ((128, 128, 64, 8, 4), (64, 128, 64, 4, 4), (64, 64, 64, 4, 3))
_INT4 = _Tiles(_FEW_CODES, ((128, 128, 128, 8, 3), (64, 128, 128, 8, 3), (64, 64, 128, 4, 3)), blocks=4, least=8)
_TILES: Mapping[tuple[str, bool], _Tiles] = {
    ("plain", False): _Tiles(_FEW_PLAIN, (), blocks=2, least=16),
    ("rows", False): _Tiles(_FEW_CODES, _MANY_ROWS, blocks=3, least=8),
    ("rows", True): _Tiles(_FEW_8_BITS, (), blocks=2, least=16),
    ("blocks", True): _Tiles(_FEW_BLOCKS, (), blocks=2, least=16),
    ("int4", False): _INT4,
    ("fp4", False): _INT4,
}


def candidates(operand: Operand, m: int, device: torch.device) -> Iterator[TileConfig]:
    """Tiles for m tokens, the one to trust without measuring first."""
    tiles, (n, k) = _TILES[operand.form, operand.meets_codes], operand.shape
    is_few, block_m = m <= FEW_TOKENS, max(tiles.least, 1 << (m - 1).bit_length())
    listed = [(block_m, *tile) for tile in tiles.few] if is_few else tiles.many
    for block_m, block_n, depth, warps, stages in listed:
        block_k = operand.depth(depth)
        programs = -(-m // block_m) * -(-n // block_n)
        slices = num_slices(programs, -(-k // block_k), device, blocks_per_unit=tiles.blocks if is_few else 1)
        sizes = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "SPLIT_K": slices}
        yield TileConfig(sizes, Options(warps, stages))


def shared_bytes(operand: Operand, element_bytes: int, config: TileConfig, capability: int) -> int:
    """Shared memory of a thread block. Operands of asynchronous products (Hopper; Blackwell, whose tensor memory takes
    no integers) must outlive their issue: one stage more, but for codes, which have left theirs by then. Barriers of
    tensor memory take 16 bytes, or 8 where the next group waits; scales of INT4 and, at most, of blocks pass through
    SRAM."""
    sizes, stages = config.sizes, config.options.num_stages
    is_integer = operand.meets_codes and operand.values.dtype == torch.int8
    is_ahead = 90 <= capability < (100 if is_integer else 120) and sizes["BLOCK_N"] >= 64 and sizes["BLOCK_M"] >= 16
    values = sizes["BLOCK_N"] * sizes["BLOCK_K"] * operand.bits // 8
    x = sizes["BLOCK_M"] * sizes["BLOCK_K"] * (1 if operand.meets_codes else element_bytes)
    if operand.form == "fp4":  # inputs are loaded for one group of a half at a time
        x *= FP4_SPAN // 2 // operand.group_size
    if operand.is_widened and is_ahead and capability >= 100:
        return (values + x) * (stages - 1) + 8
    values_stages = stages - (operand.is_widened or not is_ahead)
    rows, columns, extra_bytes = sizes["BLOCK_N"], sizes["BLOCK_M"], 0
    if operand.form == "blocks":
        extra_bytes = 4 * rows + 8 * columns
    elif operand.form == "int4" and rows == 32 * config.options.num_warps:
        extra_bytes = element_bytes * rows
    pipeline = values * values_stages + x * (stages - (not is_ahead)) + extra_bytes
    return pipeline + (16 if is_ahead and capability >= 100 else 0)


@triton.jit(do_not_specialize=["M"])
def _swapped_product_kernel(
    x_ptr, x_scales_ptr, x_stride, values_ptr, row_scales_ptr, group_scales_ptr, zeros_ptr, row_stride, bias_ptr,
    out_ptr, M, N, K, slice_stride,
    FORMAT: tl.constexpr, GROUP_SIZE: tl.constexpr, EVEN_K: tl.constexpr, BY_BITS: tl.constexpr, MANY: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = 0, tl.program_id(0)
    if MANY:
        tile_m, tile_n = grouped_tile(tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N))
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    first, last = own_blocks(tl.cdiv(K, BLOCK_K), SPLIT_K)
    # Rows beyond the end wrap around: they are computed and not stored, which is cheaper than a mask in the loop.
    sums = tile_sums(
        x_ptr, x_scales_ptr, M, x_stride, m % M, values_ptr, group_scales_ptr, zeros_ptr, row_stride, n % N, N, K,
        first, last, FORMAT, GROUP_SIZE, EVEN_K, BY_BITS, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    sums = scaled(sums, x_scales_ptr, tl.minimum(m, M - 1), row_scales_ptr, tl.minimum(n, N - 1), FORMAT)
    if SPLIT_K > 1:
        out_ptr += tl.program_id(1).to(tl.int64) * slice_stride
    elif bias_ptr is not None:
        sums += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    out_ptrs = out_ptr + m.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(out_ptrs, sums.to(out_ptr.dtype.element_ty), mask=(m[None, :] < M) & (n[:, None] < N))


Codes = tuple[Tensor, Tensor]  # activations in a weight's format, and their scales


def swapped_product(
    kernel: str, x_MK: Tensor, operand: Operand, bias_N: Tensor | None, config: TileConfig | None, codes: Codes | None
) -> Tensor:
    """The product [M, N] in x's dtype. kernel: the operator, under whose name tiles are tuned; x_MK: rows may lie
    apart, elements not; config: the tile, instead of the one that fits; codes: x in the weight's format."""
    m, (n, k) = len(x_MK), operand.shape
    y_MN = torch.empty(m, n, dtype=x_MK.dtype, device=x_MK.device)
    values_MK, scales_M = codes or (x_MK, None)

    def run(config: TileConfig) -> None:
        sizes = config.sizes
        out = slice_buffer(y_MN, sizes["SPLIT_K"])
        grid = (triton.cdiv(n, sizes["BLOCK_N"]) * triton.cdiv(m, sizes["BLOCK_M"]), sizes["SPLIT_K"])
        args = (values_MK, scales_M, values_MK.stride(0), *operand.arguments, bias_N, out, m, n, k, m * n)
        constants = {**operand.constants(x_MK, sizes["BLOCK_K"]), "MANY": m > sizes["BLOCK_M"], **sizes}
        launch(_swapped_product_kernel, grid, *args, options=config.options, **constants)
        if sizes["SPLIT_K"] > 1:
            add_slices(out, bias_N, y_MN)

    problem = (triton.next_power_of_2(m), n, k, x_MK.dtype, *operand.problem)
    law = partial(shared_bytes, operand, x_MK.element_size())
    run(config or pick(kernel, problem, partial(candidates, operand, m, x_MK.device), law, run, x_MK.device))
    return y_MN
