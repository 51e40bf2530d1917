"""`HostPages`: the second tier of a KV cache, in memory of the host, and the copies that plans ask for.

A block is copied layer by layer, as engines do whose caches are a tensor for each layer: keys, values, scales. Beside
a GPU the host's memory is pinned, and the copies lie in its current stream, before the step that follows. On a CPU
both tiers are its memory; the copy is work of the thread that computes.
"""

__all__ = ["HostPages"]

from collections.abc import Sequence

import torch
from torch import Tensor

from perfmodel_executors.models.kv_cache import KVCache
from perfmodel_executors.models.support import check_memory

_FIRST_SLOTS = 64


class HostPages:
    """Slots for blocks of `cache`; it grows with the slots that plans name. num_bytes: copied both ways so far"""

    def __init__(self, cache: KVCache) -> None:
        self.num_bytes = 0
        self._cache = cache
        self._pins = cache.device.type == "cuda"
        self._num_slots = 0
        self._slots: list[Tensor] = []  # of each tensor of each layer

    def copy(self, out: Sequence[tuple[int, int]], back: Sequence[tuple[int, int]]) -> None:
        """Copies (block, slot) of `out`, then (slot, block) of `back`."""
        tensors = [tensor for pages in self._cache.pages for tensor in pages.tensors]
        self._reserve(tensors, 1 + max((slot for _, slot in out), default=-1))
        for device, host in zip(tensors, self._slots, strict=True):
            for block, slot in out:
                host[slot].copy_(device[block], non_blocking=True)
            for slot, block in back:
                device[block].copy_(host[slot], non_blocking=True)
        self.num_bytes += (len(out) + len(back)) * sum(pages.block_bytes for pages in self._cache.pages)

    def _reserve(self, tensors: Sequence[Tensor], num_slots: int) -> None:
        """Room for `num_slots`; contents are kept. New slots are written, so no copy pays for the first touch."""
        if num_slots <= self._num_slots:
            return
        before, self._num_slots = self._num_slots, max(num_slots, 2 * self._num_slots, _FIRST_SLOTS)
        per_slot = sum(pages.block_bytes for pages in self._cache.pages)
        check_memory(f"{self._num_slots} KV blocks of the second tier", self._num_slots * per_slot)
        grown = [
            torch.zeros(self._num_slots, *tensor.shape[1:], dtype=tensor.dtype, pin_memory=self._pins)
            for tensor in tensors
        ]
        for new, old in zip(grown, self._slots, strict=False):
            new[:before] = old
        self._slots = grown
