"""Rotary position embedding in the half-rotation layout (pairs are elements i and i + H/2 of a head)."""

__all__ = ["rope", "rope_table"]

import torch
from torch import Tensor


def rope_table(num_positions: int, head_dim: int, theta: float, dtype: torch.dtype) -> Tensor:
    """cos and sin of position * theta^(-2i/head_dim), concatenated: [num_positions, head_dim]."""
    inverse = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angle = torch.outer(torch.arange(num_positions, dtype=torch.float32), inverse)
    return torch.cat((angle.cos(), angle.sin()), dim=-1).to(dtype)


def rope(x_TNH: Tensor, cos_sin_TH: Tensor) -> Tensor:
    """x rotated; `cos_sin_TH` holds the table's row of each token's position."""
    cos, sin = cos_sin_TH[:, None].chunk(2, dim=-1)
    first, second = x_TNH.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
