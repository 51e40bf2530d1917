"""What a model keeps of its sequences: paged keys and values or latents, indexed by the engine's block ids, and states.
The pool grows with the block ids that plans mention, of which a short run touches few."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from perfmodel.models.architecture import Attention, LatentAttention
from perfmodel.models.spec import ModelSpec
from perfmodel_executors.kernels.attention_latent import LatentPages
from perfmodel_executors.kernels.kv_pages import KVPages, empty_pages
from perfmodel_executors.models.kept import KVTiers
from perfmodel_executors.models.states import RowTensors, StatePool
from perfmodel_executors.models.support import CPU, check_memory, kv_dtype, kv_packing, kv_tiers


class KVCache:
    """Keys and values of all layers of a rank's part of `model`, in its formats; latents and convolutions' inputs in
    `dtype`, that of activations. block_size: tokens of a block, shared out over `num_stripes` ranks."""

    def __init__(
        self,
        model: ModelSpec,
        dtype: torch.dtype,
        block_size: int,
        num_blocks: int = 0,
        device: torch.device = CPU,
        num_stripes: int = 1,
    ) -> None:
        self.block_size, self.device, self.num_blocks = block_size, device, 0
        form, packing = kv_dtype(model, dtype), kv_packing(model)
        self.states = StatePool(model, dtype, device, kv_tiers(model, dtype))
        self._paged: dict[int, KVPages | LatentPages] = {}
        for index, layer in enumerate(model.iter_layers()):
            mixer = layer.mixer
            if isinstance(mixer, Attention) and mixer.evicts_to is None:
                own_size, dims = block_size // num_stripes, (mixer.head_dim, mixer.v_head_dim)
                self._paged[index] = empty_pages(0, own_size, mixer.num_kv_heads, dims, form, device, packing)
            elif isinstance(mixer, LatentAttention):
                width = mixer.kv_lora_rank + mixer.qk_rope_head_dim
                self._paged[index] = LatentPages(torch.zeros(0, block_size, width, dtype=dtype, device=device))
        self._allocate(num_blocks)

    @property
    def pages(self) -> list[KVPages | LatentPages]:
        return list(self._paged.values())

    def of_layer(self, index: int) -> KVPages | LatentPages | KVTiers | RowTensors | None:
        pages, own = self._paged.get(index), self.states.layers.get(index)
        if isinstance(pages, KVPages) and own is not None:
            return KVTiers([ring for ring in own if isinstance(ring, KVPages)], pages)
        return own if pages is None else pages

    def reserve(self, num_blocks: int) -> None:
        if num_blocks > self.num_blocks:
            self._allocate(max(num_blocks, self.num_blocks * 3 // 2, 64))

    def reserve_states(self, num_rows: int) -> None:
        more = max(0, num_rows - self.states.num_rows)
        check_memory(f"states of {num_rows} sequences", more * self.states.row_bytes, self.device)
        self.states.reserve(num_rows)

    @property
    def block_bytes(self) -> int:
        return sum(pages.block_bytes for pages in self.pages)

    def _allocate(self, num_blocks: int) -> None:
        check_memory(f"{num_blocks} KV blocks", num_blocks * self.block_bytes, self.device)
        self.num_blocks = num_blocks
        for index, pages in self._paged.items():  # one layer at a time: the old pages go as the new ones come
            self._paged[index] = pages.grown(self.num_blocks)

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy the keys and values of slots: (from, to) each; all are read before any is written."""
        sources, targets = (torch.tensor(slots, device=self.device) for slots in zip(*moves, strict=True))
        for pages in self.pages:
            pages.move(sources, targets)

    def packed(self, blocks: Sequence[int]) -> Tensor:
        """Bytes of these blocks in all layers, one tensor after another; a CPU indexes bytes, whatever the format."""
        index = torch.tensor(blocks, dtype=torch.int64, device=self.device)
        parts = [tensor.view(torch.uint8)[index].flatten() for tensor in self.tensors]
        return torch.cat(parts) if parts else index.to(torch.uint8)[:0]

    def unpack(self, blocks: Sequence[int], packed: Tensor) -> None:
        """Write what `packed` gave of another cache."""
        index, begin = torch.tensor(blocks, dtype=torch.int64, device=self.device), 0
        for tensor in self.tensors:
            stored = tensor.view(torch.uint8)
            end = begin + len(blocks) * stored[0].numel()
            stored[index] = packed[begin:end].view(len(blocks), *stored.shape[1:])
            begin = end

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for pages in self.pages for tensor in pages.tensors]

    @contextmanager
    def restored(self, block_tables: Sequence[Sequence[int]]) -> Iterator[None]:
        """Afterwards these sequences have again what they have now: in their blocks, and as states."""
        blocks = [block for table in block_tables for block in table]
        kept = self.packed(blocks)
        with self.states.restored([table[0] for table in block_tables if table]):
            yield
        self.unpack(blocks, kept)

    def reserve_for(self, block_tables: Sequence[Sequence[int]]) -> None:
        self.reserve(1 + max((max(table) for table in block_tables if table), default=-1))


_FIRST_SLOTS = 64


class HostPages:
    """Slots for blocks of `cache`; it grows with the slots that plans name. num_bytes: copied both ways so far"""

    def __init__(self, cache: KVCache) -> None:
        self.num_bytes = 0
        self._cache = cache
        self._num_slots = 0
        self._slots: list[Tensor] = []  # of each tensor of each layer

    def copy(self, out: Sequence[tuple[int, int]], back: Sequence[tuple[int, int]]) -> None:
        """Copies (block, slot) of `out`, then (slot, block) of `back`."""
        tensors = self._cache.tensors
        num_slots, block_bytes = 1 + max((slot for _, slot in out), default=-1), self._cache.block_bytes
        if num_slots > self._num_slots:  # contents are kept; new slots are written, so no copy pays for the first touch
            before, size = self._num_slots, max(num_slots, 2 * self._num_slots, _FIRST_SLOTS)
            check_memory(f"{size} KV blocks of the second tier", size * block_bytes)
            shared: Any = {"device": "cpu", "pin_memory": self._cache.device.type == "cuda"}
            self._num_slots, grown = size, [tensor.new_zeros(size, *tensor.shape[1:], **shared) for tensor in tensors]
            for new, old in zip(grown, self._slots, strict=False):
                new[:before] = old
            self._slots = grown
        for device, host in zip(tensors, self._slots, strict=True):
            for block, slot in out:
                host[slot].copy_(device[block], non_blocking=True)
            for slot, block in back:
                device[block].copy_(host[slot], non_blocking=True)
        self.num_bytes += (len(out) + len(back)) * block_bytes
