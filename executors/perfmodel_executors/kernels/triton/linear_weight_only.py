"""y = x dequantised(W)^T + b for W in 8 or 4 bits, the activations as they are.

Few tokens meet the codes as they are stored, which is what they are limited by. Many meet the weight written out, as
vLLM does for AWQ from 256 tokens on: one more pass over it, and products at the rate of plain weights.
"""

import torch
from torch import Tensor

from perfmodel_executors.kernels.tiles import TileConfig
from perfmodel_executors.kernels.triton.many_tokens import many_tokens_product
from perfmodel_executors.kernels.triton.stored_weights import check_format, expand_weight
from perfmodel_executors.kernels.triton.swapped_product import swapped_product
from perfmodel_executors.kernels.weight_formats.containers import Fp4Weight, Fp8Weight, Int4Weight, Int8Weight
from perfmodel_executors.kernels.weight_formats.operand import Operand, operand_of

_MOST_WITH_CODES = 256  # tokens


def linear_w8a16(
    x_MK: Tensor, weight: Int8Weight | Fp8Weight, bias_N: Tensor | None = None, config: TileConfig | None = None
) -> Tensor:
    """The product [M, N] in x's dtype.

    Raises PerfmodelError for e4m3 on a device that knows no such numbers.
    """
    check_format(weight, x_MK.device)
    return _product("linear_w8a16", x_MK, operand_of(weight), bias_N, config)


def linear_w4a16(
    x_MK: Tensor, weight: Int4Weight | Fp4Weight, bias_N: Tensor | None = None, config: TileConfig | None = None
) -> Tensor:
    """The product [M, N] in x's dtype."""
    return _product("linear_w4a16", x_MK, operand_of(weight), bias_N, config)


def _product(kernel: str, x_MK: Tensor, operand: Operand, bias_N: Tensor | None, config: TileConfig | None) -> Tensor:
    is_few = len(x_MK) <= _MOST_WITH_CODES if config is None else "DESCRIPTORS" not in config.sizes
    if is_few:
        return swapped_product(kernel, x_MK, operand, bias_N, config)
    x_MK = x_MK if x_MK.stride(1) == 1 else x_MK.contiguous()
    parts = []
    for first, plain in expand_weight(operand, x_MK.dtype):
        bias = None if bias_N is None else bias_N[first : first + plain.shape[0]]
        parts.append(many_tokens_product("linear", x_MK, plain, bias, config))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
