"""y = x W^T + b, weights in the layout [out, in]."""

__all__ = ["linear"]

from torch import Tensor
from torch.nn import functional


def linear(x_TC: Tensor, weight_DC: Tensor, bias_D: Tensor | None = None) -> Tensor:
    """The product, in x's dtype (accumulated in fp32 by the BLAS)."""
    return functional.linear(x_TC, weight_DC, bias_D)
