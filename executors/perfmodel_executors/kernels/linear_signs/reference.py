"""y = (q(x) S^T) * token scale * scale + b, S ternary or binary, q(x) in INT8 for each token by its largest.

Codes are 0, 1, 2 (or 0, 1) and stand for codes - 1 (or 2 codes - 1), so that a field of a byte is multiplied as it is
and what the offset adds is the sum of the token's codes. Few tokens: a product for each field, whose codes take two
passes over the bytes; many: all fields laid side by side for one product.

Source: Wang et al. 2023 (BitNet), Ma et al. 2024 (BitNet b1.58); 2 bits a weight as in bitnet.cpp's I2_S.
"""

__all__ = ["linear_signs"]

import torch
from torch import Tensor

from perfmodel_executors.kernels.linear_low_precision.reference import int8_product, quantize_tokens_int8
from perfmodel_executors.kernels.weight_formats.containers import SignsWeight
from perfmodel_executors.kernels.weight_formats.dequantize import sign_fields

_MOST_TOKENS_BY_FIELD = 32


def linear_signs(x_MK: Tensor, weight: SignsWeight, bias_N: Tensor | None = None) -> Tensor:
    """The product [M, N] in x's dtype."""
    codes_MK, scales_M = quantize_tokens_int8(x_MK)
    if len(x_MK) <= _MOST_TOKENS_BY_FIELD:
        width = weight.bytes_NJ.shape[1]
        parts = (codes_MK[:, i * width : (i + 1) * width].contiguous() for i in range(weight.per_byte))
        product_MN = None
        for part_MJ, field_NJ in zip(parts, sign_fields(weight), strict=True):
            own_MN = int8_product(part_MJ, field_NJ)
            product_MN = own_MN if product_MN is None else product_MN.add_(own_MN)
    else:
        product_MN = int8_product(codes_MK, torch.cat(list(sign_fields(weight)), dim=1))
    assert product_MN is not None
    sums_M1 = codes_MK.sum(dim=1, keepdim=True, dtype=torch.int32)
    signed_MN = product_MN - sums_M1 if weight.bits == 2 else 2 * product_MN - sums_M1
    scaled_MN = signed_MN.float() * (scales_M[:, None] * weight.scale)
    return (scaled_MN if bias_N is None else scaled_MN + bias_N).to(x_MK.dtype)
