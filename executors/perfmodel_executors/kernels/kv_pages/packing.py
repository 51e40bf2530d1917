"""Keys and values as integers of 2, 4 or 8 bits, several to a byte, with a scale and a zero point for each group.

A group is `group_size` neighbouring elements of one token's head; asymmetric, q = round((x - least) / step) (the
quantiser of Liu et al. 2024, KIVI, along each token, so that a token is stored when it comes). Element i of a head
shares its byte with i + H / n, i + 2 H / n, ...: unpacked halves or quarters follow each other.
"""

__all__ = ["Packing", "packed", "unpacked"]

from typing import NamedTuple

import torch
from torch import Tensor

_LEAST_STEP = 2.0**-24  # the smallest fp16: of groups of equal elements


class Packing(NamedTuple):
    """bits: of an element; group_size: elements that share a scale and a zero point, in fp16."""

    bits: int
    group_size: int

    @property
    def per_byte(self) -> int:
        return 8 // self.bits

    def fits(self, head_dim: int) -> bool:
        """Whether heads of this size are whole groups and whole bytes."""
        return head_dim % self.group_size == 0 and head_dim % self.per_byte == 0


def packed(x_TKH: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
    """Bytes [..., K, H / n], and (step, least element) of each group, [..., K, G, 2]."""
    groups = x_TKH.float().reshape(*x_TKH.shape[:-1], -1, packing.group_size)
    least, largest = groups.aminmax(dim=-1)
    most = 2**packing.bits - 1
    scales = torch.stack((((largest - least) / most).clamp_(min=_LEAST_STEP), least), dim=-1).half()
    step, zero = scales.float().unbind(-1)
    numbers = ((groups - zero[..., None]) / step[..., None]).round_().clamp_(0, most).to(torch.uint8).flatten(-2)
    parts = numbers.chunk(packing.per_byte, dim=-1)
    result = parts[0]
    for index, part in enumerate(parts[1:], start=1):
        result = result | part << index * packing.bits
    return result, scales


def unpacked(bytes_TKP: Tensor, scales_TKG2: Tensor, packing: Packing, dtype: torch.dtype) -> Tensor:
    """Numbers again, [..., K, H] in `dtype`."""
    mask = 2**packing.bits - 1
    parts = [bytes_TKP >> index * packing.bits & mask for index in range(packing.per_byte)]
    numbers = (parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)).to(dtype)
    step, zero = scales_TKG2.to(dtype).unbind(-1)
    groups = numbers.view(*numbers.shape[:-1], -1, packing.group_size)
    return torch.addcmul(zero[..., None], groups, step[..., None]).flatten(-2)
