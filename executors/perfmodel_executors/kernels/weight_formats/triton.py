"""Products with weights as they are stored, W on the left: codes are widened between SRAM and the tensor cores.

`tile_sums` is the one loop of linear layers and of experts, whatever the format; what becomes of its sums is theirs.

Plain weights are multiplied as they come. INT8 and e4m3 become the activations' dtype by a conversion (none where the
activations are in 8 bits, too), and the scale of each output multiplies the sum. INT4 becomes it by bits: a code below
the mantissa of 128 (bf16; 1024 in fp16) is 128 + code, exactly, without a conversion: with the zero point taken off
that is 1.4 instructions a weight. The scale of each group multiplies the group's sums.
"""

__all__ = ["check_format", "scaled", "tile_sums"]

import torch
import triton
import triton.language as tl

from perfmodel.errors import PerfmodelError
from perfmodel_executors.kernels.tiles import limits_of
from perfmodel_executors.kernels.weight_formats.containers import Fp8Weight, Int4Weight, Int8Weight

_LEAST_CAPABILITY_FP8 = 89

# Four bytes of two codes each -> (low codes, high codes), each as four values 128 + code (1024 + code in fp16).
_WIDEN_BF16 = tl.constexpr(
    """{
    .reg .b32 low, high;
    and.b32 low, $4, 0x0F0F0F0F;
    shr.u32 high, $4, 4;
    and.b32 high, high, 0x0F0F0F0F;
    prmt.b32 $0, low, 0x43434343, 0x5140;
    prmt.b32 $1, low, 0x43434343, 0x7362;
    prmt.b32 $2, high, 0x43434343, 0x5140;
    prmt.b32 $3, high, 0x43434343, 0x7362;
    }"""
)
_WIDEN_FP16 = tl.constexpr(_WIDEN_BF16.value.replace("0x43434343", "0x64646464"))
_WIDEN_REGISTERS = tl.constexpr("=r,=r,=r,=r,r")


@triton.jit
def tile_sums(
    x_ptr, x_stride, x_row, values_ptr, group_scales_ptr, zeros_ptr, row_stride, row, num_rows, K, first, last,
    FORMAT: tl.constexpr, GROUP_SIZE: tl.constexpr, EVEN_K: tl.constexpr, BY_BITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """fp32 [BLOCK_N, BLOCK_M]: stored `row`s times rows `x_row` of x, over the blocks `first` .. `last` - 1 of K.

    Scales that are the same for all of K are left to `scaled`.

    row: among the `num_rows` that a group has scales for; FORMAT: of an `Operand`
    """
    k = tl.arange(0, GROUP_SIZE // 2 if FORMAT == "int4" else BLOCK_K)
    x_ptrs = x_ptr + x_row.to(tl.int64)[None, :] * x_stride + k[:, None]
    values_ptrs = values_ptr + row.to(tl.int64)[:, None] * row_stride + k[None, :]
    if FORMAT == "int4":
        sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        sums = _add_int4(
            sums, x_ptrs, values_ptrs, group_scales_ptr, zeros_ptr, row, num_rows, first, last, BLOCK_K // GROUP_SIZE,
            GROUP_SIZE, BY_BITS,
        )  # fmt: skip
    else:
        dtype: tl.constexpr = tl.int32 if x_ptr.dtype.element_ty == tl.int8 else tl.float32
        acc = tl.zeros((BLOCK_N, BLOCK_M), dtype)
        acc = _add_values(acc, x_ptrs, values_ptrs, K, first, last, BLOCK_K, EVEN_K, FORMAT == "plain")
        sums = acc.to(tl.float32)
    return sums


@triton.jit
def scaled(sums, x_scales_ptr, x_row, row_scales_ptr, row):
    """sums [N, M] times the scales of rows of x and of the weight, where there are any."""
    if row_scales_ptr is not None:
        sums *= tl.load(row_scales_ptr + row)[:, None]
    if x_scales_ptr is not None:
        sums *= tl.load(x_scales_ptr + x_row)[None, :]
    return sums


@triton.jit
def _add_values(
    acc, x_ptrs, values_ptrs, K, first, last, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, READ_ONCE: tl.constexpr
):
    """acc [N, M] plus values [N, K] x [K, M] over the blocks `first` .. `last` - 1 of K.

    READ_ONCE: whether the cache had better make room for x than for the values
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
    return acc


@triton.jit
def _add_int4(
    acc, x_ptrs, packed_ptrs, scales_ptr, zeros_ptr, row, num_rows, first, last,
    GROUPS: tl.constexpr, GROUP_SIZE: tl.constexpr, BY_BITS: tl.constexpr,
):  # fmt: skip
    """acc [N, M] plus dequantised [N, K] x [K, M], `GROUPS` groups of K a step from `first` to `last` - 1."""
    HALF: tl.constexpr = GROUP_SIZE // 2
    dtype: tl.constexpr = x_ptrs.dtype.element_ty
    BIAS: tl.constexpr = (128.0 if dtype == tl.bfloat16 else 1024.0) if BY_BITS else 0.0
    for block in range(first, last):
        for step in tl.static_range(GROUPS):
            group = block * GROUPS + step
            packed = tl.load(packed_ptrs + group * HALF)
            x_low = tl.load(x_ptrs + group * GROUP_SIZE)
            x_high = tl.load(x_ptrs + group * GROUP_SIZE + HALF)
            scale = tl.load(scales_ptr + group * num_rows + row).to(tl.float32)
            if BY_BITS and dtype == tl.bfloat16:
                low, high = tl.inline_asm_elementwise(
                    _WIDEN_BF16, _WIDEN_REGISTERS, [packed], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
                )
            elif BY_BITS:
                low, high = tl.inline_asm_elementwise(
                    _WIDEN_FP16, _WIDEN_REGISTERS, [packed], (tl.float16, tl.float16), is_pure=True, pack=4
                )
            else:
                low, high = (packed & 15).to(dtype), (packed >> 4).to(dtype)
            if zeros_ptr is not None:
                zero = (tl.load(zeros_ptr + group * num_rows + row).to(tl.float32) + BIAS).to(dtype)
                low, high = low - zero[:, None], high - zero[:, None]
            else:
                zero = tl.full((1, 1), BIAS + 8.0, dtype)
                low, high = low - zero, high - zero
            sums = tl.dot(low, x_low, input_precision="ieee")
            sums = tl.dot(high, x_high, sums, input_precision="ieee")
            acc += sums * scale[:, None]
    return acc


def check_format(weight: Int8Weight | Fp8Weight | Int4Weight, device: torch.device) -> None:
    """Raises PerfmodelError for e4m3 on a device that knows no such numbers."""
    limits = limits_of(device)
    if isinstance(weight, Fp8Weight) and limits is not None and limits.capability < _LEAST_CAPABILITY_FP8:
        raise PerfmodelError(
            f"e4m3 weights need sm_{_LEAST_CAPABILITY_FP8} or newer; {limits.name} is sm_{limits.capability}. Set "
            f"engine.quantization to int8, or to w8a16."
        )
