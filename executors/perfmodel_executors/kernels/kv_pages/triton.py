"""How Triton kernels read and write quantised pages.

FP8 is written by integer arithmetic on every device (a few operations per new element), so that it is the same
everywhere. It is read by the hardware's conversion where there is one (Ada and later), else by shifting its bits into
those of an fp16. What is read becomes fp16, which holds every value of both formats exactly: the products run in fp16
then, or in fp32 for fp32 queries.
"""

__all__ = ["encode_fp8", "encode_int8", "format_of", "raw", "widened"]

import torch
import triton
import triton.language as tl
from torch import Tensor

from perfmodel_executors.kernels.kv_pages.pages import FP8, FP8_MAX, INT8_MAX, LEAST_SCALE
from perfmodel_executors.kernels.tiles import capability_of

_FIRST_WITH_FP8 = 89  # compute capability
_FP8_MAX = tl.constexpr(FP8_MAX)
_INT8_MAX = tl.constexpr(INT8_MAX)
_LEAST_SCALE = tl.constexpr(LEAST_SCALE)


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
def widened(x, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """A tile of pages in the dtype of the products; scales are the caller's."""
    if FORMAT == "fp8_bits":
        bits = x.to(tl.uint16)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        return (half.to(tl.float16, bitcast=True) * 256.0).to(DTYPE)  # 2^(15 - 7): the exponents' biases
    else:
        return x.to(DTYPE)


def format_of(dtype: torch.dtype, device: torch.device) -> str:
    """How pages of `dtype` are read on `device`: plain, fp8, fp8_bits or int8."""
    if dtype == FP8:
        return "fp8" if (capability_of(device) or 0) >= _FIRST_WITH_FP8 else "fp8_bits"
    return "int8" if dtype == torch.int8 else "plain"


def raw(pages_BSKH: Tensor, reads: str) -> Tensor:
    """The pages as a kernel that reads them as `reads` (or writes fp8 bits) takes them."""
    return pages_BSKH.view(torch.uint8) if reads == "fp8_bits" else pages_BSKH
