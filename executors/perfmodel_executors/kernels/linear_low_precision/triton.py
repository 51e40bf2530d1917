"""y = (q(x) W^T) * token scale * output scale + b, on the 8-bit tensor cores: two kernels, or three.

The first quantises x, a token each program (one read of x, the row stays in registers between the largest magnitude and
the rounding). The others are `swapped_product`, which scales its sums. e4m3 needs sm_89; Hopper sums FP8 products with
fewer bits than fp32 has.
"""

__all__ = ["linear_fp8", "linear_w8a8", "quantize_tokens"]

import torch
import triton
import triton.language as tl
from torch import Tensor

from perfmodel_executors.kernels.launch import Options, launch
from perfmodel_executors.kernels.swapped_product.triton import swapped_product
from perfmodel_executors.kernels.tiles import TileConfig
from perfmodel_executors.kernels.weight_formats.containers import Fp8Weight, Int8Weight
from perfmodel_executors.kernels.weight_formats.operand import operand_of
from perfmodel_executors.kernels.weight_formats.quantize import FP8_MAX, INT8_MAX
from perfmodel_executors.kernels.weight_formats.triton import check_format

_ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it leaves fp32 no bits below one, rounded to nearest even


@triton.jit
def _quantize_tokens_kernel(
    x_ptr, values_ptr, scales_ptr, K, x_stride,
    LARGEST: tl.constexpr, IS_INTEGER: tl.constexpr, ROUNDS_FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + k, mask=k < K, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(x), axis=0), LARGEST), 1e-12)
    values = tl.div_rn(x, scale)
    if IS_INTEGER:
        codes = ((values + _ROUNDER) - _ROUNDER).to(tl.int8)
    else:
        values = tl.minimum(tl.maximum(values, -LARGEST), LARGEST)
        if (
            ROUNDS_FIRST
        ):  # to e4m3's four significant bits: the interpreter's own cast loses the carry into the exponent
            bits = values.to(tl.int32, bitcast=True)
            bits += 0x7FFFF + ((bits >> 20) & 1)
            values = (bits & -0x100000).to(tl.float32, bitcast=True)
        codes = values.to(values_ptr.dtype.element_ty, fp_downcast_rounding="rtne")
    tl.store(values_ptr + row * K + k, codes, mask=k < K)
    tl.store(scales_ptr + row, scale)


def linear_w8a8(
    x_MK: Tensor, weight: Int8Weight, bias_N: Tensor | None = None, config: TileConfig | None = None
) -> Tensor:
    """The product [M, N] in x's dtype."""
    return _product("linear_w8a8", x_MK, weight, bias_N, config)


def linear_fp8(
    x_MK: Tensor, weight: Fp8Weight, bias_N: Tensor | None = None, config: TileConfig | None = None
) -> Tensor:
    """The product [M, N] in x's dtype.

    Raises PerfmodelError on a device without FP8 tensor cores.
    """
    check_format(weight, x_MK.device)
    return _product("linear_fp8", x_MK, weight, bias_N, config)


def quantize_tokens(x_MK: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(x in `dtype` [M, K], fp32 scales [M])."""
    m, k = x_MK.shape
    values_MK = torch.empty(m, k, dtype=dtype, device=x_MK.device)
    scales_M = torch.empty(m, dtype=torch.float32, device=x_MK.device)
    block = triton.next_power_of_2(k)
    options = Options(num_warps=max(1, min(16, block // 512)), num_stages=1)
    is_integer = dtype == torch.int8
    constants = {"LARGEST": INT8_MAX if is_integer else FP8_MAX, "IS_INTEGER": is_integer}
    args = (x_MK, values_MK, scales_M, k, x_MK.stride(0))
    rounds_first = x_MK.device.type == "cpu"
    launch(_quantize_tokens_kernel, (m,), *args, options=options, ROUNDS_FIRST=rounds_first, BLOCK=block, **constants)
    return values_MK, scales_M


def _product(
    kernel: str, x_MK: Tensor, weight: Int8Weight | Fp8Weight, bias_N: Tensor | None, config: TileConfig | None
) -> Tensor:
    x_MK = x_MK if x_MK.stride(1) == 1 else x_MK.contiguous()
    codes = quantize_tokens(x_MK, weight.values_NK.dtype)
    return swapped_product(kernel, x_MK, operand_of(weight), bias_N, config, codes)
