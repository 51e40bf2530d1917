"""y = x W^T + b on tensor cores, accumulated in fp32: for many tokens (limited by the tensor cores) `many_tokens`, for
few (limited by reading W once) `swapped_product`, which has the roles swapped.
"""

from torch import Tensor

from perfmodel_executors.kernels.tiles import TileConfig
from perfmodel_executors.kernels.triton.many_tokens import many_tokens_product
from perfmodel_executors.kernels.triton.swapped_product import FEW_TOKENS, swapped_product
from perfmodel_executors.kernels.weight_formats.operand import operand_of


def linear(x_TC: Tensor, weight_DC: Tensor, bias_D: Tensor | None = None, config: TileConfig | None = None) -> Tensor:
    """The product in x's dtype; rows of x and of the weight may lie apart, their elements not."""
    x_TC = x_TC if x_TC.stride(1) == 1 else x_TC.contiguous()
    is_few = len(x_TC) <= FEW_TOKENS if config is None else "DESCRIPTORS" not in config.sizes
    product = swapped_product if is_few else many_tokens_product
    return product("linear", x_TC, operand_of(weight_DC), bias_D, config)
