"""y = x dequantised(W)^T + b for W in 8 or 4 bits, the activations as they are."""

__all__ = ["linear_w4a16", "linear_w8a16"]

from torch import Tensor

from perfmodel_executors.kernels.swapped_product.triton import swapped_product
from perfmodel_executors.kernels.tiles import TileConfig
from perfmodel_executors.kernels.weight_formats.containers import Fp4Weight, Fp8Weight, Int4Weight, Int8Weight
from perfmodel_executors.kernels.weight_formats.operand import operand_of
from perfmodel_executors.kernels.weight_formats.triton import check_format


def linear_w8a16(
    x_MK: Tensor, weight: Int8Weight | Fp8Weight, bias_N: Tensor | None = None, config: TileConfig | None = None
) -> Tensor:
    """The product [M, N] in x's dtype.

    Raises PerfmodelError for e4m3 on a device that knows no such numbers.
    """
    check_format(weight, x_MK.device)
    return swapped_product("linear_w8a16", x_MK, operand_of(weight), bias_N, config)


def linear_w4a16(
    x_MK: Tensor, weight: Int4Weight | Fp4Weight, bias_N: Tensor | None = None, config: TileConfig | None = None
) -> Tensor:
    """The product [M, N] in x's dtype."""
    return swapped_product("linear_w4a16", x_MK, operand_of(weight), bias_N, config)
