"""Products with weights as they are stored, W on the left: codes are widened between SRAM and the tensor cores.

`tile_sums` is the one loop of linear layers and of experts, whatever the format; what becomes of its sums is theirs.
Plain weights are multiplied as they come. INT8 and e4m3 become the activations' dtype by a conversion (none where the
activations are in 8 bits, too), and the scale of each output multiplies the sum. Four bits are widened by their bits:

INT4  a code below the mantissa of 128 (bf16; 1024 in fp16) is 128 + code, exactly; with the zero point taken off that
      is 1.4 instructions a weight. The scale of each group multiplies the group's sums.
E2M1  exponent and mantissa go where bf16 (fp16) has the lowest bits of its exponent and the highest of its mantissa:
      the number times 2^-126 (2^-14), subnormals included, so that the group's scale times 2^126 (2^14) makes it what
      it stands for. To stay within the range of both, the scale is 2^8 smaller, and the sums larger.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from perfmodel.errors import PerfmodelError
from perfmodel_executors.kernels.launch import Options, launch
from perfmodel_executors.kernels.tiles import limits_of
from perfmodel_executors.kernels.triton.operand import Operand
from perfmodel_executors.kernels.weight_formats import FP4_SPAN, BlockFp8Weight, Fp8Weight, MatrixWeight

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

# Four bytes of two codes each -> (low codes, high codes) as above: sign to bit 15, the rest to bits 8 to 6 (11 to 9).
_E2M1_BF16 = tl.constexpr(
    """{
    .reg .b32 code, bits;
    prmt.b32 code, $4, 0, 0x1404;
    shr.u32 bits, code, 6;
    and.b32 bits, bits, 0x01C001C0;
    lop3.b32 $2, code, 0x80008000, bits, 0xEA;
    shl.b32 code, code, 4;
    shr.u32 bits, code, 6;
    and.b32 bits, bits, 0x01C001C0;
    lop3.b32 $0, code, 0x80008000, bits, 0xEA;
    prmt.b32 code, $4, 0, 0x3424;
    shr.u32 bits, code, 6;
    and.b32 bits, bits, 0x01C001C0;
    lop3.b32 $3, code, 0x80008000, bits, 0xEA;
    shl.b32 code, code, 4;
    shr.u32 bits, code, 6;
    and.b32 bits, bits, 0x01C001C0;
    lop3.b32 $1, code, 0x80008000, bits, 0xEA;
    }"""
)
_E2M1_FP16 = tl.constexpr(_E2M1_BF16.value.replace("code, 6;", "code, 3;").replace("0x01C001C0", "0x0E000E00"))
# What the numbers and their scales are multiplied by, in fp32, whose range two factors stay in.
_LIFT_BF16 = tl.constexpr(2.0**126)
_LIFT_FP16 = tl.constexpr(2.0**14)
_SPARE = tl.constexpr(2.0**8)


@triton.jit
def add_int4(
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
            if BY_BITS:
                low, high = _by_bits(packed, dtype, _WIDEN_BF16, _WIDEN_FP16)
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


@triton.jit
def add_fp4(
    acc, x_ptrs, packed_ptrs, scales_ptr, row, num_rows, first, last,
    SPANS: tl.constexpr, SPAN: tl.constexpr, GROUP_SIZE: tl.constexpr, BY_BITS: tl.constexpr,
):  # fmt: skip
    """acc [N, M] plus dequantised [N, K] x [K, M], `SPANS` spans of K a step. Where a half of a span has two groups, it
    meets the inputs of one, then those of the other, and scales multiply sums."""
    HALF: tl.constexpr = SPAN // 2
    GROUPS: tl.constexpr = HALF // GROUP_SIZE  # of a half
    dtype: tl.constexpr = x_ptrs.dtype.element_ty
    LIFT: tl.constexpr = (_LIFT_BF16 if dtype == tl.bfloat16 else _LIFT_FP16) if BY_BITS else 1.0
    group_of_input = tl.arange(0, HALF) // GROUP_SIZE
    for block in range(first, last):
        for step in tl.static_range(SPANS):
            span = block * SPANS + step
            packed = tl.load(packed_ptrs + span * HALF)
            if BY_BITS:  # smaller by the lift of their dtype
                low, high = _by_bits(packed, dtype, _E2M1_BF16, _E2M1_FP16)
            else:
                low, high = _e2m1(packed & 15).to(dtype), _e2m1(packed >> 4).to(dtype)
            group_ptrs = scales_ptr + span * (2 * GROUPS) * num_rows + row
            if GROUPS == 1:
                x_low, x_high = tl.load(x_ptrs + span * SPAN), tl.load(x_ptrs + span * SPAN + HALF)
                low_scale = _scale(tl.load(group_ptrs), GROUP_SIZE) * (LIFT / _SPARE)
                high_scale = _scale(tl.load(group_ptrs + num_rows), GROUP_SIZE) * (LIFT / _SPARE)
                sums = tl.dot(low * low_scale.to(dtype)[:, None], x_low, input_precision="ieee")
                acc += tl.dot(high * high_scale.to(dtype)[:, None], x_high, sums, input_precision="ieee")
            else:
                lift = tl.full((1, 1), LIFT, tl.float32).to(dtype)
                low, high = low * lift, high * lift
                for group in tl.static_range(GROUPS):
                    is_own = (group_of_input == group)[:, None]
                    x_low = tl.load(x_ptrs + span * SPAN, mask=is_own, other=0.0)
                    x_high = tl.load(x_ptrs + span * SPAN + HALF, mask=is_own, other=0.0)
                    low_scale = _scale(tl.load(group_ptrs + group * num_rows), GROUP_SIZE)
                    high_scale = _scale(tl.load(group_ptrs + (GROUPS + group) * num_rows), GROUP_SIZE)
                    acc += tl.dot(low, x_low, input_precision="ieee") * low_scale[:, None]
                    acc += tl.dot(high, x_high, input_precision="ieee") * high_scale[:, None]
    return acc * _SPARE if GROUPS == 1 else acc


@triton.jit
def _by_bits(packed, dtype: tl.constexpr, TO_BF16: tl.constexpr, TO_FP16: tl.constexpr):
    """(low, high) codes of four bytes at a time, by the instructions for their dtype."""
    if dtype == tl.bfloat16:
        low, high = tl.inline_asm_elementwise(
            TO_BF16, _WIDEN_REGISTERS, [packed], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    else:
        low, high = tl.inline_asm_elementwise(
            TO_FP16, _WIDEN_REGISTERS, [packed], (tl.float16, tl.float16), is_pure=True, pack=4
        )
    return low, high


@triton.jit
def _e2m1(code):
    """fp32 of a code, by the bits of fp32 and its lift."""
    wide = code.to(tl.int32)
    return (((wide & 8) << 28) | ((wide & 7) << 22)).to(tl.float32, bitcast=True) * _LIFT_BF16


@triton.jit
def _scale(bits, GROUP_SIZE: tl.constexpr):
    """fp32: E8M0 has its exponent; E4M3 has the lowest bits of its exponent, and the highest of its mantissa."""
    if GROUP_SIZE == 32:
        scale = (bits.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    else:
        scale = (bits.to(tl.int32) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    return scale


_MIN_CAPABILITY_FP8 = 89


@triton.jit
def tile_sums(
    x_ptr, x_scales_ptr, num_x_rows, x_stride, x_row, values_ptr, group_scales_ptr, zeros_ptr, row_stride, row,
    num_rows, K, first, last,
    FORMAT: tl.constexpr, GROUP_SIZE: tl.constexpr, EVEN_K: tl.constexpr, BY_BITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """fp32 [BLOCK_N, BLOCK_M]: stored `row`s times rows `x_row` of x, over the blocks `first` .. `last` - 1 of K.
    Scales that are the same for all of K are left to `scaled`. x_row, row: among the `num_x_rows` and the `num_rows`
    that a group has scales for; FORMAT: of an `Operand`."""
    DEPTH: tl.constexpr = GROUP_SIZE // 2 if FORMAT == "int4" else 32 if FORMAT == "fp4" else BLOCK_K
    k = tl.arange(0, DEPTH)
    x_ptrs = x_ptr + x_row.to(tl.int64)[None, :] * x_stride + k[:, None]
    values_ptrs = values_ptr + row.to(tl.int64)[:, None] * row_stride + k[None, :]
    sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if FORMAT == "int4":
        sums = add_int4(
            sums, x_ptrs, values_ptrs, group_scales_ptr, zeros_ptr, row, num_rows, first, last, BLOCK_K // GROUP_SIZE,
            GROUP_SIZE, BY_BITS,
        )  # fmt: skip
    elif FORMAT == "fp4":
        sums = add_fp4(
            sums, x_ptrs, values_ptrs, group_scales_ptr, row, num_rows, first, last, BLOCK_K // 64, 64, GROUP_SIZE,
            BY_BITS,
        )  # fmt: skip
    elif FORMAT == "blocks":
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
    """acc [N, M] plus values [N, K] x [K, M] over the blocks `first` .. `last` - 1 of K. READ_ONCE: whether the cache
    had better make room for x than for the values; SETTLES: a block's products end before the next block's values are
    widened: Hopper's read them from registers, which the compiler else overwrites (seen on an H200, Triton 3.6)."""
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
    """acc [N, M] plus products of e4m3 blocks, each in a sum of its own: Hopper sums FP8 products with some 14 bits.
    Scales are loaded one block ahead, so that no product waits for them."""
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
    limits = limits_of(device) if isinstance(weight, Fp8Weight | BlockFp8Weight) else None
    if limits is not None and limits.capability < _MIN_CAPABILITY_FP8:
        raise PerfmodelError(
            f"e4m3 weights need sm_{_MIN_CAPABILITY_FP8} or newer; {limits.name} is sm_{limits.capability}. Set "
            f"engine.quantization to int8, or to w8a16."
        )


_MAX_ELEMENTS = 1 << 26  # written out at a time: 128 MB in 16 bits
_ROWS = 32
_DEPTH = 128  # inputs of a program where they have no groups


@triton.jit
def _expand_kernel(
    values_ptr, scales_ptr, zeros_ptr, row_stride, out_ptr, N, first, rows, K,
    FORMAT: tl.constexpr, GROUP_SIZE: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    own = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = (own < rows)[:, None]
    row = first + tl.minimum(own, rows - 1)
    unit = tl.program_id(1)
    HALF: tl.constexpr = UNIT // 2
    k = tl.arange(0, UNIT if FORMAT == "rows" else HALF)
    out_ptrs = out_ptr + own.to(tl.int64)[:, None] * K + unit * UNIT + k[None, :]
    value_ptrs = values_ptr + row.to(tl.int64)[:, None] * row_stride + k[None, :]
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if FORMAT == "rows":
        mask = is_row & (unit * UNIT + k < K)[None, :]
        values = tl.load(value_ptrs + unit * UNIT, mask=mask, other=0.0)
        tl.store(out_ptrs, values.to(dtype), mask=mask)
    else:
        mask = is_row & (k >= 0)[None, :]
        packed = tl.load(value_ptrs + unit * HALF)
        if FORMAT == "int4":
            scale = tl.load(scales_ptr + unit * N + row).to(tl.float32)[:, None]
            zero = 8.0
            if zeros_ptr is not None:
                zero = tl.load(zeros_ptr + unit * N + row).to(tl.float32)[:, None]
            low, high = ((packed & 15).to(tl.float32) - zero) * scale, ((packed >> 4).to(tl.float32) - zero) * scale
        else:
            group_ptrs = scales_ptr + (unit * (UNIT // GROUP_SIZE) + k // GROUP_SIZE)[None, :] * N + row[:, None]
            low = _e2m1(packed & 15) * _scale(tl.load(group_ptrs), GROUP_SIZE)
            high = _e2m1(packed >> 4) * _scale(tl.load(group_ptrs + HALF // GROUP_SIZE * N), GROUP_SIZE)
        tl.store(out_ptrs, low.to(dtype), mask=mask)
        tl.store(out_ptrs + HALF, high.to(dtype), mask=mask)


def expand_weight(operand: Operand, dtype: torch.dtype) -> Iterator[tuple[int, Operand]]:
    """(the first output, the plain weight) of parts that are written one after the other into one buffer. What has a
    scale for each output keeps it: the product is scaled, not the weight."""
    n, k = operand.shape
    most = min(n, max(_ROWS, _MAX_ELEMENTS // k // _ROWS * _ROWS))
    unit = FP4_SPAN if operand.form == "fp4" else operand.group_size or _DEPTH
    buffer_NK = torch.empty(most, k, dtype=dtype, device=operand.values.device)
    for first in range(0, n, most):
        rows = min(most, n - first)
        matrix = (operand.values, operand.group_scales, operand.zeros, operand.values.stride(0))
        grid, sizes = (triton.cdiv(rows, _ROWS), triton.cdiv(k, unit)), {"UNIT": unit, "ROWS": _ROWS}
        constants = {"FORMAT": operand.form, "GROUP_SIZE": operand.group_size, **sizes}
        args = (*matrix, buffer_NK, n, first, rows, k)
        launch(_expand_kernel, grid, *args, options=Options(num_warps=4, num_stages=1), **constants)
        scales_N = operand.row_scales if operand.row_scales is None else operand.row_scales[first : first + rows]
        yield first, Operand("plain", 8 * dtype.itemsize, (rows, k), buffer_NK[:rows], scales_N)
