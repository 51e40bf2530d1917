"""y = x W^T + b, W in llama.cpp's blocks: some rows at a time are unpacked to x's dtype and multiplied.

So no more than those rows is ever held in full, and on a CPU they are still in its cache when they are multiplied. Each
call unpacks anew: a constant, whatever the number of tokens.
"""

__all__ = ["linear_gguf"]

import torch
from torch import Tensor
from torch.nn import functional

from perfmodel_executors.kernels.weight_formats.containers import GgufWeight
from perfmodel_executors.kernels.weight_formats.gguf_reading import unpack_blocks

_WEIGHTS_AT_ONCE = 2**19  # 2 MB in fp32; an eighth of that takes twice as long, for each operation has its own cost


def linear_gguf(x_MK: Tensor, weight: GgufWeight, bias_N: Tensor | None = None) -> Tensor:
    """The product [M, N] in x's dtype."""
    n, k = weight.shape
    rows = max(1, _WEIGHTS_AT_ONCE // k)
    product_MN = torch.empty(len(x_MK), n, dtype=x_MK.dtype, device=x_MK.device)
    for begin in range(0, n, rows):
        part = slice(begin, begin + rows)
        values_RK = unpack_blocks(weight.blocks_NJ[part], weight.form).to(x_MK.dtype)
        product_MN[:, part] = functional.linear(x_MK, values_RK, None if bias_N is None else bias_N[part])
    return product_MN
