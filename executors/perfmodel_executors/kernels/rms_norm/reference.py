"""RMSNorm: y = x / sqrt(mean(x^2) + eps) * weight, over the last dimension, accumulated in fp32."""

__all__ = ["add_rms_norm", "rms_norm"]

import torch
from torch import Tensor


def rms_norm(x_TC: Tensor, weight_C: Tensor, eps: float) -> Tensor:
    """Normalised x, in x's dtype."""
    return torch.nn.functional.rms_norm(x_TC, weight_C.shape, weight_C, eps)


def add_rms_norm(x_TC: Tensor, residual_TC: Tensor, weight_C: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(RMSNorm(x + residual), x + residual): the pre-norm of the next block with its residual stream."""
    residual_TC = residual_TC + x_TC
    return rms_norm(residual_TC, weight_C, eps), residual_TC
