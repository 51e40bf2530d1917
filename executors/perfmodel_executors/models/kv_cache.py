"""Paged keys and values: one pair of tensors per attention layer, indexed by the engine's block ids.

The pool grows with the block ids that plans mention: an engine on a machine with much memory counts millions of
blocks, of which a short run touches few. Growing writes the new pages, so no step pays for the first touch.
"""

__all__ = ["KVCache"]

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from perfmodel.models.architecture import Attention
from perfmodel.models.spec import ModelSpec
from perfmodel_executors.kernels.kv_pages import KVPages, Packing, empty_pages
from perfmodel_executors.models.support import CPU, check_memory


class KVCache:
    """Keys and values of all layers, in `dtype` (fp8 and int8: quantised) or packed: `pages[layer]`."""

    def __init__(
        self,
        model: ModelSpec,
        block_size: int,
        dtype: torch.dtype,
        num_blocks: int = 0,
        device: torch.device = CPU,
        packing: Packing | None = None,
    ) -> None:
        self.block_size = block_size
        self.device = device
        self.num_blocks = 0
        self.pages: list[KVPages] = []
        for layer in model.iter_layers():
            if isinstance(layer.mixer, Attention):
                dims = (layer.mixer.head_dim, layer.mixer.v_head_dim)
                self.pages.append(empty_pages(0, block_size, layer.mixer.num_kv_heads, dims, dtype, device, packing))
        self._allocate(num_blocks)

    def reserve(self, num_blocks: int) -> None:
        """Make room for block ids below `num_blocks`; contents are kept."""
        if num_blocks > self.num_blocks:
            self._allocate(max(num_blocks, self.num_blocks * 3 // 2, 64))

    def _allocate(self, num_blocks: int) -> None:
        per_block = sum(pages.block_bytes for pages in self.pages)
        check_memory(f"{num_blocks} KV blocks", num_blocks * per_block, self.device)
        self.num_blocks = num_blocks
        for layer, pages in enumerate(self.pages):  # one layer at a time: the old pages go as the new ones come
            self.pages[layer] = pages.grown(self.num_blocks)

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy the keys and values of slots: (from, to) each; all are read before any is written."""
        sources, targets = (torch.tensor(slots, device=self.device) for slots in zip(*moves, strict=True))
        for pages in self.pages:
            pages.move(sources, targets)

    @contextmanager
    def restored(self, blocks: Sequence[int]) -> Iterator[None]:
        """Afterwards these blocks hold again what they hold now."""
        index = torch.tensor(blocks, dtype=torch.int64, device=self.device)
        tensors = [tensor for pages in self.pages for tensor in pages.tensors]
        kept = [_bytes(tensor)[index] for tensor in tensors]
        yield
        for tensor, values in zip(tensors, kept, strict=True):
            _bytes(tensor)[index] = values

    def reserve_for(self, block_tables: Sequence[Sequence[int]]) -> None:
        """Make room for every block id in `block_tables`."""
        self.reserve(1 + max((max(table) for table in block_tables if table), default=-1))


def _bytes(tensor: Tensor) -> Tensor:
    """The same memory in a type that a CPU indexes, whatever the format."""
    return tensor.view(torch.uint8)
