"""y = x W^T + b on tensor cores, accumulated in fp32; plain weights, or in 8 or 4 bits. Few tokens are limited by
reading W, as it is stored, once (`swapped_product`); many by the tensor cores (`many_tokens`). Weights alone in few
bits are then written out once, as vLLM does for AWQ from 256 tokens on: one more pass, and the rate of plain weights.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from perfmodel_executors.kernels.launch import Options, launch
from perfmodel_executors.kernels.tiles import TileConfig
from perfmodel_executors.kernels.triton.many_tokens import many_tokens_product
from perfmodel_executors.kernels.triton.operand import Operand, operand_of
from perfmodel_executors.kernels.triton.stored_weights import check_format, expand_weight
from perfmodel_executors.kernels.triton.swapped_product import FEW_TOKENS, swapped_product
from perfmodel_executors.kernels.weight_formats import FP8_MAX, INT8_MAX, MatrixWeight

_MAX_WITH_CODES = 256  # tokens
_ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it leaves fp32 no bits below one, rounded to nearest even


@triton.jit(do_not_specialize=["M"])
def _quantize_tokens_kernel(
    x_ptr, values_ptr, scales_ptr, known_scale_ptr, M, K, x_stride,
    LARGEST: tl.constexpr, IS_INTEGER: tl.constexpr, ROUNDS_FIRST: tl.constexpr, BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, BLOCK // GROUP)
    k = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(x_ptr + row * x_stride + k, mask=k < K, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(x), axis=1), LARGEST), 1e-12)
    if known_scale_ptr is not None:
        scale = tl.zeros_like(scale) + tl.load(known_scale_ptr)
    values = tl.div_rn(x, scale[:, None])
    if IS_INTEGER:
        values = (values + _ROUNDER) - _ROUNDER
        codes = tl.minimum(tl.maximum(values, -LARGEST), LARGEST).to(tl.int8)
    else:
        values = tl.minimum(tl.maximum(values, -LARGEST), LARGEST)
        if ROUNDS_FIRST:  # to e4m3's bits: the interpreter's own cast loses the carry into the exponent
            bits = values.to(tl.int32, bitcast=True)
            bits += 0x7FFFF + ((bits >> 20) & 1)
            values = (bits & -0x100000).to(tl.float32, bitcast=True)
        codes = values.to(values_ptr.dtype.element_ty, fp_downcast_rounding="rtne")
    tl.store(values_ptr + row * K + k, codes, mask=k < K)
    tl.store(scales_ptr + group * M + row, scale, mask=group < tl.cdiv(K, GROUP))


def quantize_tokens(x_MK: Tensor, operand: Operand) -> tuple[Tensor, Tensor]:
    """(x as the operand's values are [M, K], fp32 scales [1, M]; [ceil(K / group), M] where the operand has groups)."""
    (m, k), dtype = x_MK.shape, operand.values.dtype
    block = max(operand.group_size, triton.next_power_of_2(k))
    group = operand.group_size or block
    values_MK = torch.empty(m, k, dtype=dtype, device=x_MK.device)
    scales_GM = torch.empty(triton.cdiv(k, group), m, dtype=torch.float32, device=x_MK.device)
    is_integer = dtype == torch.int8
    launch(
        _quantize_tokens_kernel, (m,), x_MK, values_MK, scales_GM, operand.input_scale, m, k, x_MK.stride(0),
        options=Options(num_warps=max(1, min(16, block // 512)), num_stages=1),
        LARGEST=INT8_MAX if is_integer else FP8_MAX, IS_INTEGER=is_integer, ROUNDS_FIRST=x_MK.device.type == "cpu",
        BLOCK=block, GROUP=group,
    )  # fmt: skip
    return values_MK, scales_GM


def _product(
    kernel: str, x_MK: Tensor, weight: MatrixWeight, bias_N: Tensor | None = None, config: TileConfig | None = None
) -> Tensor:
    """[M, N] in x's dtype; rows of x and of a plain weight may lie apart. Raises PerfmodelError as `check_format`."""
    check_format(weight, x_MK.device)
    x_MK, operand = x_MK if x_MK.stride(1) == 1 else x_MK.contiguous(), operand_of(weight)
    codes = quantize_tokens(x_MK, operand) if operand.meets_codes else None
    most = _MAX_WITH_CODES if operand.is_widened else FEW_TOKENS
    if len(x_MK) <= most if config is None else "DESCRIPTORS" not in config.sizes:
        return swapped_product(kernel, x_MK, operand, bias_N, config, codes)
    if not operand.is_widened:
        return many_tokens_product(kernel, x_MK, operand, bias_N, config, codes)
    parts = []
    for first, plain in expand_weight(operand, x_MK.dtype):
        bias = None if bias_N is None else bias_N[first : first + plain.shape[0]]
        parts.append(many_tokens_product("linear", x_MK, plain, bias, config, None))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


linear = partial(_product, "linear")
linear_fp8 = partial(_product, "linear_fp8")
linear_fp8_block = partial(_product, "linear_fp8_block")
linear_w4a16 = partial(_product, "linear_w4a16")
linear_w8a16 = partial(_product, "linear_w8a16")
linear_w8a8 = partial(_product, "linear_w8a8")
linear_w8a8_static = partial(_product, "linear_w8a8_static")
