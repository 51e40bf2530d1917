"""Loops over weights in four bits, which become the activations' dtype by their bits, without a conversion.

INT4: a code below the mantissa of 128 (bf16; 1024 in fp16) is 128 + code, exactly; with the zero point taken off that
is 1.4 instructions a weight. The scale of each group multiplies the group's sums.

E2M1: exponent and mantissa go where bf16 (fp16) has the lowest bits of its exponent and the highest of its mantissa.
That is the number times 2^-126 (2^-14), subnormals included, so that the group's scale times 2^126 (2^14) makes it what
it stands for, in one multiplication. To stay within the range of both, the scale is 2^8 smaller, and the sums larger.

A matrix that many tokens meet is written out once, by `expand_int4` or `expand_fp4`, in place of once a tile.
"""

__all__ = ["add_fp4", "add_int4", "expand_fp4", "expand_int4"]

import triton
import triton.language as tl

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
    """acc [N, M] plus dequantised [N, K] x [K, M], `SPANS` spans of K a step from `first` to `last` - 1.

    Where a half of a span is one group, its scale is part of what lifts its numbers. Where it has two, it meets the
    inputs of one, then those of the other, and scales multiply sums: what tensor cores multiply by zero costs less than
    two scales in a row of an operand, which would pass through SRAM.
    """
    HALF: tl.constexpr = SPAN // 2
    GROUPS: tl.constexpr = HALF // GROUP_SIZE  # of a half
    dtype: tl.constexpr = x_ptrs.dtype.element_ty
    LIFT: tl.constexpr = (_LIFT_BF16 if dtype == tl.bfloat16 else _LIFT_FP16) if BY_BITS else 1.0
    group_of_input = tl.arange(0, HALF) // GROUP_SIZE
    for block in range(first, last):
        for step in tl.static_range(SPANS):
            span = block * SPANS + step
            low, high = _widen_e2m1(tl.load(packed_ptrs + span * HALF), dtype, BY_BITS)
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
def expand_int4(packed_ptrs, scales_ptr, zeros_ptr, row, num_rows, out_ptrs, mask, group, GROUP_SIZE: tl.constexpr):
    """Writes a group's inputs [N, GROUP_SIZE / 2] twice: `packed_ptrs` and `out_ptrs` begin at the group."""
    packed = tl.load(packed_ptrs)
    scale = tl.load(scales_ptr + group * num_rows + row).to(tl.float32)[:, None]
    zero = 8.0
    if zeros_ptr is not None:
        zero = tl.load(zeros_ptr + group * num_rows + row).to(tl.float32)[:, None]
    low, high = ((packed & 15).to(tl.float32) - zero) * scale, ((packed >> 4).to(tl.float32) - zero) * scale
    tl.store(out_ptrs, low.to(out_ptrs.dtype.element_ty), mask=mask)
    tl.store(out_ptrs + GROUP_SIZE // 2, high.to(out_ptrs.dtype.element_ty), mask=mask)


@triton.jit
def expand_fp4(
    packed_ptrs, scales_ptr, row, num_rows, out_ptrs, mask, span, SPAN: tl.constexpr, GROUP_SIZE: tl.constexpr
):
    """Writes a span's inputs [N, SPAN / 2] twice: `packed_ptrs` and `out_ptrs` begin at the span."""
    HALF: tl.constexpr = SPAN // 2
    packed = tl.load(packed_ptrs)
    group = span * (SPAN // GROUP_SIZE) + tl.arange(0, HALF) // GROUP_SIZE
    group_ptrs = scales_ptr + group[None, :] * num_rows + row[:, None]
    low = _e2m1(packed & 15) * _scale(tl.load(group_ptrs), GROUP_SIZE)
    high = _e2m1(packed >> 4) * _scale(tl.load(group_ptrs + HALF // GROUP_SIZE * num_rows), GROUP_SIZE)
    tl.store(out_ptrs, low.to(out_ptrs.dtype.element_ty), mask=mask)
    tl.store(out_ptrs + HALF, high.to(out_ptrs.dtype.element_ty), mask=mask)


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
def _widen_e2m1(packed, dtype: tl.constexpr, BY_BITS: tl.constexpr):
    """(low, high) numbers: by their bits, smaller by the lift of their dtype, else as they are."""
    if BY_BITS:
        low, high = _by_bits(packed, dtype, _E2M1_BF16, _E2M1_FP16)
    else:
        low, high = _e2m1(packed & 15).to(dtype), _e2m1(packed >> 4).to(dtype)
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
