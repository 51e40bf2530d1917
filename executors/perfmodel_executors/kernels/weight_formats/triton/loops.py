"""Products with weights as they are stored, W on the left: codes are widened between SRAM and the tensor cores.

`tile_sums` is the one loop of linear layers and of experts, whatever the format; what becomes of its sums is theirs.

Plain weights are multiplied as they come. INT8 and e4m3 become the activations' dtype by a conversion (none where the
activations are in 8 bits, too), and the scale of each output multiplies the sum. Four bits are widened in `four_bits`.
"""

__all__ = ["add_values", "check_format", "scaled", "tile_sums"]

import torch
import triton
import triton.language as tl

from perfmodel.errors import PerfmodelError
from perfmodel_executors.kernels.tiles import limits_of
from perfmodel_executors.kernels.weight_formats.containers import BlockFp8Weight, Fp8Weight, MatrixWeight
from perfmodel_executors.kernels.weight_formats.triton.four_bits import add_fp4, add_int4

_LEAST_CAPABILITY_FP8 = 89


@triton.jit
def tile_sums(
    x_ptr, x_scales_ptr, num_x_rows, x_stride, x_row, values_ptr, group_scales_ptr, zeros_ptr, row_stride, row,
    num_rows, K, first, last,
    FORMAT: tl.constexpr, GROUP_SIZE: tl.constexpr, EVEN_K: tl.constexpr, BY_BITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """fp32 [BLOCK_N, BLOCK_M]: stored `row`s times rows `x_row` of x, over the blocks `first` .. `last` - 1 of K.

    Scales that are the same for all of K are left to `scaled`.

    x_row, row: among the `num_x_rows` and the `num_rows` that a group has scales for; FORMAT: of an `Operand`
    """
    DEPTH: tl.constexpr = GROUP_SIZE // 2 if FORMAT == "int4" else 32 if FORMAT == "fp4" else BLOCK_K
    k = tl.arange(0, DEPTH)
    x_ptrs = x_ptr + x_row.to(tl.int64)[None, :] * x_stride + k[:, None]
    values_ptrs = values_ptr + row.to(tl.int64)[:, None] * row_stride + k[None, :]
    if FORMAT == "int4":
        sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        sums = add_int4(
            sums, x_ptrs, values_ptrs, group_scales_ptr, zeros_ptr, row, num_rows, first, last, BLOCK_K // GROUP_SIZE,
            GROUP_SIZE, BY_BITS,
        )  # fmt: skip
    elif FORMAT == "fp4":
        sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        sums = add_fp4(
            sums, x_ptrs, values_ptrs, group_scales_ptr, row, num_rows, first, last, BLOCK_K // 64, 64, GROUP_SIZE,
            BY_BITS,
        )  # fmt: skip
    elif FORMAT == "blocks":
        sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        blocks = tl.cdiv(K, BLOCK_K)
        scales_ptrs, x_scales_ptrs = group_scales_ptr + row // BLOCK_K * blocks, x_scales_ptr + x_row
        sums = _add_blocks(
            sums, x_ptrs, x_scales_ptrs, num_x_rows, values_ptrs, scales_ptrs, K, first, last, BLOCK_K, EVEN_K
        )
    else:
        dtype: tl.constexpr = tl.int32 if x_ptr.dtype.element_ty == tl.int8 else tl.float32
        acc = tl.zeros((BLOCK_N, BLOCK_M), dtype)
        acc = add_values(acc, x_ptrs, values_ptrs, K, first, last, BLOCK_K, EVEN_K, FORMAT == "plain", BY_BITS)
        sums = acc.to(tl.float32)
    return sums


@triton.jit
def scaled(sums, x_scales_ptr, x_row, row_scales_ptr, row, FORMAT: tl.constexpr):
    """sums [N, M] times the scales of rows of x and of the weight, where there are any that are no blocks'."""
    if row_scales_ptr is not None:
        sums *= tl.load(row_scales_ptr + row)[:, None]
    if x_scales_ptr is not None and FORMAT != "blocks":
        sums *= tl.load(x_scales_ptr + x_row)[None, :]
    return sums


@triton.jit
def add_values(
    acc, x_ptrs, values_ptrs, K, first, last,
    BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, READ_ONCE: tl.constexpr, SETTLES: tl.constexpr,
):  # fmt: skip
    """acc [N, M] plus values [N, K] x [K, M] over the blocks `first` .. `last` - 1 of K.

    READ_ONCE: whether the cache had better make room for x than for the values
    SETTLES:   whether a block's products end before the next block's values are widened: Hopper's read them from
               registers, which the compiler otherwise overwrites meanwhile (seen on an H200 under Triton 3.6)
    """
    k = tl.arange(0, BLOCK_K)
    for block in range(first, last):
        if EVEN_K:
            values = tl.load(values_ptrs + block * BLOCK_K, eviction_policy="evict_first" if READ_ONCE else "")
            x = tl.load(x_ptrs + block * BLOCK_K, eviction_policy="evict_last" if READ_ONCE else "")
        else:
            inside = k < K - block * BLOCK_K
            values = tl.load(values_ptrs + block * BLOCK_K, mask=inside[None, :], other=0.0)
            x = tl.load(x_ptrs + block * BLOCK_K, mask=inside[:, None], other=0.0)
        acc = tl.dot(values.to(x.dtype), x, acc, input_precision="ieee", out_dtype=acc.dtype)
        if SETTLES:  # what reads the sums waits for them
            acc = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [acc], tl.float32, is_pure=True, pack=1)
    return acc


@triton.jit
def _add_blocks(
    acc, x_ptrs, x_scales_ptrs, num_x_rows, values_ptrs, scales_ptrs, K, first, last,
    BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """acc [N, M] plus the products of e4m3 blocks, each in a sum of its own that joins acc in fp32 with its scales.

    Hopper sums FP8 products with some 14 bits: over 128 inputs, instead of all, that is less than e4m3 rounds away.
    Scales are loaded one block ahead, so that no product waits for them.
    """
    k = tl.arange(0, BLOCK_K)
    begin = tl.minimum(first, last - 1)  # of a slice beyond the last block, which adds nothing
    row_scale, x_scale = tl.load(scales_ptrs + begin), tl.load(x_scales_ptrs + begin * num_x_rows)
    for block in range(first, last):
        if EVEN_K:
            values = tl.load(values_ptrs + block * BLOCK_K)
            x = tl.load(x_ptrs + block * BLOCK_K)
        else:
            inside = k < K - block * BLOCK_K
            values = tl.load(values_ptrs + block * BLOCK_K, mask=inside[None, :], other=0.0)
            x = tl.load(x_ptrs + block * BLOCK_K, mask=inside[:, None], other=0.0)
        ahead = tl.minimum(block + 1, last - 1)
        next_row_scale, next_x_scale = tl.load(scales_ptrs + ahead), tl.load(x_scales_ptrs + ahead * num_x_rows)
        acc += tl.dot(values, x) * (row_scale[:, None] * x_scale[None, :])
        row_scale, x_scale = next_row_scale, next_x_scale
    return acc


def check_format(weight: MatrixWeight, device: torch.device) -> None:
    """Raises PerfmodelError for e4m3 on a device that knows no such numbers."""
    limits = limits_of(device)
    if (
        isinstance(weight, Fp8Weight | BlockFp8Weight)
        and limits is not None
        and limits.capability < _LEAST_CAPABILITY_FP8
    ):
        raise PerfmodelError(
            f"e4m3 weights need sm_{_LEAST_CAPABILITY_FP8} or newer; {limits.name} is sm_{limits.capability}. Set "
            f"engine.quantization to int8, or to w8a16."
        )
