"""Pages of latents: of each token one vector, the compressed keys and values beside the rotated part of the key."""

# ruff: noqa: N815 (fields carry the suffix of their shape, like the variables)

__all__ = ["LatentPages"]

import math
from typing import NamedTuple

import torch
from torch import Tensor


class LatentPages(NamedTuple):
    """Latents [B, S, R + r] of B blocks of S tokens: R elements of keys and values, then r of the rotated key."""

    latents_BSW: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that is stored."""
        return (self.latents_BSW,)

    @property
    def block_size(self) -> int:
        return self.latents_BSW.shape[1]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return math.prod(self.latents_BSW.shape[1:]) * self.latents_BSW.element_size()

    def grown(self, num_blocks: int) -> "LatentPages":
        """Room for `num_blocks`, with the same contents; new blocks are zero."""
        grown = self.latents_BSW.new_zeros(num_blocks, *self.latents_BSW.shape[1:])
        grown[: len(self.latents_BSW)] = self.latents_BSW
        return LatentPages(grown)

    def write(self, latents_TW: Tensor, slots_T: Tensor) -> None:
        """Row t goes to slot `slots[t] = block_id * block_size + offset`."""
        self.latents_BSW.flatten(0, 1).index_copy_(0, slots_T, latents_TW)

    def gathered(self, blocks_M: Tensor) -> Tensor:
        """Latents [M * S, R + r] of the named blocks."""
        return self.latents_BSW.index_select(0, blocks_M).flatten(0, 1)

    def move(self, sources_M: Tensor, targets_M: Tensor) -> None:
        """Copy the tokens in slots `sources` to slots `targets`; all are read before any is written."""
        rows = self.latents_BSW.flatten(0, 1)
        rows[targets_M] = rows[sources_M]

    def fill_normal(self, first_block: int) -> None:
        """Random contents for the blocks from `first_block` on: standard normal."""
        torch.nn.init.normal_(self.latents_BSW[first_block:])
