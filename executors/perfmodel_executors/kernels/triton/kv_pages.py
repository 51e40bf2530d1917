"""How Triton kernels read and write quantised pages. FP8 is written by integer arithmetic on every device (a few
operations per new element), so that it is the same everywhere. It is read by the hardware's conversion where there
is one (Ada and later), else by shifting its bits into those of an fp16. What is read becomes fp16, which holds every
value of both formats exactly: the products run in fp16 then, or in fp32 for fp32 queries."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from perfmodel_executors.kernels.kv_pages import FP8, FP8_MAX, KVPages
from perfmodel_executors.kernels.tiles import capability_of

_FIRST_WITH_FP8 = 89  # compute capability
_FP8_MAX = tl.constexpr(FP8_MAX)

# Two tokens' pairs of codes -> (the first elements, the second ones) of both tokens.
_FP8_PAIRS = tl.constexpr(
    """{
    .reg .b32 codes;
    .reg .b16 first, second;
    prmt.b32 codes, $2, 0, 0x3120;
    mov.b32 {first, second}, codes;
    cvt.rn.f16x2.e4m3x2 $0, first;
    cvt.rn.f16x2.e4m3x2 $1, second;
    }"""
)
# As above: a code less its bias of 128 below the exponent of 1024, in fp16, and both taken off.
_INT8_PAIRS = tl.constexpr(
    """{
    .reg .b32 codes, bias;
    xor.b32 codes, $2, 0x80808080;
    mov.b32 bias, 0x64806480;
    prmt.b32 $0, codes, 0x64646464, 0x4240;
    prmt.b32 $1, codes, 0x64646464, 0x4341;
    sub.rn.f16x2 $0, $0, bias;
    sub.rn.f16x2 $1, $1, bias;
    }"""
)


@triton.jit
def encode_fp8(x):
    """fp32 -> the bits of e4m3, rounded to nearest even and saturating."""
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    magnitude = tl.minimum(tl.abs(x), _FP8_MAX)
    bits = magnitude.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # Below 2^-6 the steps are 2^-9: those of an fp32 at 2^14, whose mantissa then counts them.
    subnormal = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    return (tl.where(magnitude < 0.015625, subnormal, normal) | sign).to(tl.uint8)


@triton.jit
def encode_int8(x, scale):
    """fp32 -> x / scale, rounded to nearest even; divided once per scale."""
    magic = 12582912.0  # 1.5 * 2^23: adding it leaves no bits for a fraction
    return ((x * tl.math.div_rn(1.0, scale) + magic) - magic).to(tl.int8)


@triton.jit
def token_rows(table_ptr, position, is_inside, PAGE: tl.constexpr, MASKED: tl.constexpr):
    """Rows of the flattened pages [B * S] that hold the tokens at `position`, in 32 bits. Positions are never negative:
    a page and a place in it are a shift and a mask, written as one: from a remainder Triton 3.6 concludes that rows
    begin at multiples of the page, and reads rows of odd sizes 16 bytes at a time."""
    token = position.to(tl.uint32)
    place = token & (PAGE - 1) if PAGE & (PAGE - 1) == 0 else token % PAGE
    if MASKED:
        block = tl.load(table_ptr + token // PAGE, mask=is_inside, other=0)
    else:
        block = tl.load(table_ptr + token // PAGE)
    return block.to(tl.int32) * PAGE + place.to(tl.int32)


@triton.jit
def load_pages(
    pages_ptr, rows, head, is_inside, K: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, FORMAT: tl.constexpr,
    DTYPE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One head's keys or values [tokens, D_PAD] in the dtype of the products; zero outside."""
    column = tl.arange(0, D_PAD)
    pointers = pages_ptr + head * D + (rows.to(tl.int64) * (K * D))[:, None] + column[None, :]
    if MASKED:
        if D_PAD == D:
            x = tl.load(pointers, mask=is_inside[:, None], other=0.0)
        else:
            x = tl.load(pointers, mask=is_inside[:, None] & (column < D)[None, :], other=0.0)
    elif D_PAD == D:
        x = tl.load(pointers)
    else:
        x = tl.load(pointers, mask=(column < D)[None, :], other=0.0)
    return _widened(x, FORMAT, DTYPE)


@triton.jit
def load_pairs(
    pairs_ptr, rows, head, is_inside, K: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, FORMAT: tl.constexpr,
    DTYPE: tl.constexpr, BY_BITS: tl.constexpr,
):  # fmt: skip
    """One head's quantised values (even, odd elements), [tokens, D_PAD / 2] both, of pages seen as 16-bit integers."""
    pair = tl.arange(0, D_PAD // 2)
    pointers = pairs_ptr + head * (D // 2) + (rows.to(tl.int64) * (K * D // 2))[:, None] + pair[None, :]
    if D_PAD == D:
        codes = tl.load(pointers, mask=is_inside[:, None], other=0)
    else:
        codes = tl.load(pointers, mask=is_inside[:, None] & (pair < D // 2)[None, :], other=0)
    if BY_BITS:
        ASM: tl.constexpr = _INT8_PAIRS if FORMAT == "int8" else _FP8_PAIRS
        even, odd = tl.inline_asm_elementwise(ASM, "=r,=r,r", [codes], (tl.float16, tl.float16), is_pure=True, pack=2)
        even, odd = even.to(DTYPE), odd.to(DTYPE)
    else:
        even = _widened_code((codes & 0xFF).to(tl.uint8), FORMAT, DTYPE)
        odd = _widened_code(((codes >> 8) & 0xFF).to(tl.uint8), FORMAT, DTYPE)
    return even, odd


@triton.jit
def _widened_code(code, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    if FORMAT == "int8":
        return _widened(code.to(tl.int8, bitcast=True), FORMAT, DTYPE)
    else:
        return _widened(code, "fp8_bits", DTYPE)


@triton.jit
def _widened(x, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """A tile of pages in the dtype of the products; scales are the caller's."""
    if FORMAT == "fp8_bits":
        bits = x.to(tl.uint16)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        return (half.to(tl.float16, bitcast=True) * 256.0).to(DTYPE)  # 2^(15 - 7): the exponents' biases
    elif FORMAT == "int8":
        # 1024 + n has n in the low bits of an fp16: a logical operation and a subtraction, where the hardware's
        # conversion of integers runs at an eighth of that rate.
        biased = (x.to(tl.uint8, bitcast=True) ^ 0x80).to(tl.uint16) | 0x6400
        return (biased.to(tl.float16, bitcast=True) - 1152.0).to(DTYPE)
    else:
        return x.to(DTYPE)


def page_buffers(num_stages: int) -> int:
    """Buffers of keys and values in a software pipeline of `num_stages`, whose loads wait for the block table's load.
    Triton spreads the stages between the two: ceil((stages - 2) / 2) lie between a load and what waits for it."""
    return max(1, -(-(num_stages - 2) // 2))


def product_dtype(q: Tensor, pages: KVPages) -> torch.dtype:
    """The dtype of the products of `q` with keys, and of weights with values."""
    return torch.float16 if pages.is_quantized and q.dtype != torch.float32 else q.dtype


def format_of(dtype: torch.dtype, device: torch.device) -> str:
    """How pages of `dtype` are read on `device`: plain, fp8, fp8_bits or int8."""
    if dtype == FP8:
        return "fp8" if (capability_of(device) or 0) >= _FIRST_WITH_FP8 else "fp8_bits"
    return "int8" if dtype == torch.int8 else "plain"


def raw(pages_BSKH: Tensor, reads: str) -> Tensor:
    """The pages as a kernel that reads them as `reads` (or writes fp8 bits) takes them."""
    return pages_BSKH.view(torch.uint8) if reads == "fp8_bits" else pages_BSKH
