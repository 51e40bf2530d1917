"""Tiles of products with the weight on the left, and the SRAM they take: of linear layers, and of experts in few bits.

Up to eight tokens a tile with codes has eight columns, and Hopper runs the instructions of Ampere, which let a thread
read its codes as words; its own instructions want them two by two.

y^T = W x^T: W is the left operand, so that it fills the 64 to 128 rows that a tensor-core instruction has and the
tokens its columns, of which 8 are enough. Nothing of W is read twice while the tokens are few.

Tensor cores take fragments of the left operand from registers, where codes are widened on their way from SRAM: how is
the format's (`weight_formats`). With few tiles K is cut into slices, which a second kernel adds up.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from perfmodel_executors.kernels.launch import Options, launch
from perfmodel_executors.kernels.tiles import TileConfig, pick
from perfmodel_executors.kernels.triton.operand import Operand
from perfmodel_executors.kernels.triton.split_k import (
    add_slices,
    grouped_tile,
    num_slices,
    own_blocks,
    slice_buffer,
)
from perfmodel_executors.kernels.triton.stored_weights import scaled, tile_sums
from perfmodel_executors.kernels.weight_formats import FP4_SPAN

FEW_TOKENS = 64


class _Tiles(NamedTuple):
    """few: outputs, depth, warps, stages; many: tokens, then as few (none where
    another kernel takes over). blocks: wanted of a compute unit with few tokens;
    least: columns of a tile; with fewer than 16, Hopper and Blackwell fall back to the instructions of Ampere"""

    few: tuple[tuple[int, int, int, int], ...]
    many: tuple[tuple[int, int, int, int, int], ...]
    blocks: int
    least: int


# 32 to 64 KB of plain weights under way in each block, two or three blocks to a unit.
_PLAIN = _Tiles(
    few=(
        (64, 128, 4, 4),
        (128, 64, 4, 4),
        (128, 128, 4, 3),
        (64, 256, 4, 3),
        (64, 128, 4, 3),
        (32, 256, 4, 4),
    ),
    many=(),
    blocks=2,
    least=16,
)
_FEW_CODES = ((64, 256, 4, 4), (64, 128, 4, 5), (128, 128, 4, 4), (32, 256, 2, 4), (64, 128, 4, 3))
_WEIGHT_ONLY = _Tiles(
    few=_FEW_CODES,
    # Not 256 tokens: there Triton 3.6 lets widened codes change while Hopper's products still read them.
    many=((128, 128, 64, 8, 4), (64, 128, 64, 4, 4), (64, 64, 64, 4, 3)),
    blocks=3,
    least=8,
)
_INT4 = _Tiles(
    few=_FEW_CODES,
    many=((128, 128, 128, 8, 3), (64, 128, 128, 8, 3), (64, 64, 128, 4, 3)),
    blocks=4,
    least=8,
)
_8_BITS = _Tiles(
    few=((64, 256, 4, 4), (128, 128, 4, 4), (64, 128, 4, 5), (128, 256, 4, 3), (64, 128, 4, 3)),
    many=(),
    blocks=2,
    least=16,
)
_BLOCKS = _Tiles(
    few=((64, 128, 4, 5), (128, 128, 4, 4), (64, 128, 4, 4), (64, 128, 4, 3)),
    many=(),
    blocks=2,
    least=16,
)
_TILES: Mapping[tuple[str, bool], _Tiles] = MappingProxyType(
    {
        ("plain", False): _PLAIN,
        ("rows", False): _WEIGHT_ONLY,
        ("rows", True): _8_BITS,
        ("blocks", True): _BLOCKS,
        ("int4", False): _INT4,
        ("fp4", False): _INT4,
    }
)


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
    """Shared memory of a thread block.

    Operands of asynchronous products (Hopper; Blackwell, whose tensor memory takes no integers) must outlive their
    issue, and there is one stage more; codes have left theirs for registers by then. Barriers of tensor memory take 16
    bytes, or 8 where the next group waits for the sums of the last. Scales of INT4 pass through SRAM in a block with a
    thread for each output; so do, at most, those of blocks.

    element_bytes: of the activations before they are quantised
    """
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
    pipeline = values * values_stages + x * (stages - (not is_ahead)) + _beside(operand, element_bytes, config)
    return pipeline + (16 if is_ahead and capability >= 100 else 0)


def _beside(operand: Operand, element_bytes: int, config: TileConfig) -> int:
    """Bytes that scales pass through."""
    rows, columns = config.sizes["BLOCK_N"], config.sizes["BLOCK_M"]
    if operand.form == "int4":
        return element_bytes * rows if rows == 32 * config.options.num_warps else 0
    return 4 * rows + 8 * columns if operand.form == "blocks" else 0


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


def swapped_product(
    kernel: str,
    x_MK: Tensor,
    operand: Operand,
    bias_N: Tensor | None = None,
    config: TileConfig | None = None,
    codes: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The product [M, N] in x's dtype.

    kernel:  the operator, under whose name tiles are tuned
    x_MK:    the activations; their rows may lie apart, their elements not
    operand: the weight
    bias_N:  added to each row, if there is one
    config:  the tile, instead of the one that fits the problem
    codes:   x in the weight's format, and the scales of its rows, where activations are quantised
    """
    x_MK = x_MK if x_MK.stride(1) == 1 else x_MK.contiguous()
    m, (n, k) = len(x_MK), operand.shape
    y_MN = torch.empty(m, n, dtype=x_MK.dtype, device=x_MK.device)
    run = partial(_run, x_MK, operand, bias_N, codes, y_MN)
    if config is None:
        problem = (triton.next_power_of_2(m), n, k, x_MK.dtype, *operand.problem)
        law = partial(shared_bytes, operand, x_MK.element_size())
        config = pick(kernel, problem, partial(candidates, operand, m, x_MK.device), law, run, x_MK.device)
    run(config)
    return y_MN


def _run(
    x_MK: Tensor,
    operand: Operand,
    bias_N: Tensor | None,
    codes: tuple[Tensor, Tensor] | None,
    y_MN: Tensor,
    config: TileConfig,
) -> None:
    (m, k), n, sizes = x_MK.shape, y_MN.shape[1], config.sizes
    values_MK, scales_M = codes or (x_MK, None)
    out = slice_buffer(y_MN, sizes["SPLIT_K"])
    launch(
        _swapped_product_kernel,
        (triton.cdiv(n, sizes["BLOCK_N"]) * triton.cdiv(m, sizes["BLOCK_M"]), sizes["SPLIT_K"]),
        *(values_MK, scales_M, values_MK.stride(0), *operand.arguments, bias_N, out, m, n, k, m * n),
        options=config.options,
        MANY=m > sizes["BLOCK_M"],
        **operand.constants(x_MK, sizes["BLOCK_K"]),
        **sizes,
    )
    if sizes["SPLIT_K"] > 1:
        add_slices(out, bias_N, y_MN)
