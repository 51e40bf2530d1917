"""Paged keys and values: one pair of tensors per attention layer, indexed by the engine's block ids.

The pool grows with the block ids that plans mention: an engine on a machine with much memory counts millions of
blocks, of which a short run touches few. Growing writes the new pages, so no step pays for the first touch.
"""

__all__ = ["KVCache"]

from collections.abc import Sequence

import torch
from torch import Tensor

from perfmodel.specs.model.architecture import Attention
from perfmodel.specs.model.spec import ModelSpec
from perfmodel_executors.models.support import check_memory


class KVCache:
    """Keys and values of all layers: `pages[layer] = (k_BSKH, v_BSKH)`."""

    def __init__(self, model: ModelSpec, block_size: int, dtype: torch.dtype, num_blocks: int = 0) -> None:
        self.block_size = block_size
        self.num_blocks = 0
        self.pages: list[tuple[Tensor, Tensor]] = []
        for layer in model.iter_layers():
            if isinstance(layer.mixer, Attention):
                heads, mixer = layer.mixer.num_kv_heads, layer.mixer
                shape = (0, block_size, heads)
                k, v = (torch.empty(*shape, dim, dtype=dtype) for dim in (mixer.head_dim, mixer.v_head_dim))
                self.pages.append((k, v))
        self.reserve(num_blocks)

    def reserve(self, num_blocks: int) -> None:
        """Make room for block ids below `num_blocks`; contents are kept."""
        if num_blocks <= self.num_blocks:
            return
        self.num_blocks = max(num_blocks, self.num_blocks * 3 // 2, 64)
        per_block = sum((k.stride(0) + v.stride(0)) * k.element_size() for k, v in self.pages)
        check_memory(f"{self.num_blocks} KV blocks", self.num_blocks * per_block)
        for layer, (k, v) in enumerate(self.pages):  # one layer at a time: the old pages go as the new ones come
            self.pages[layer] = (_grown(k, self.num_blocks), _grown(v, self.num_blocks))

    def reserve_for(self, block_tables: Sequence[Sequence[int]]) -> None:
        """Make room for every block id in `block_tables`."""
        self.reserve(1 + max((max(table) for table in block_tables if table), default=-1))


def _grown(pages: Tensor, num_blocks: int) -> Tensor:
    grown = pages.new_zeros(num_blocks, *pages.shape[1:])
    grown[: pages.shape[0]] = pages
    return grown
