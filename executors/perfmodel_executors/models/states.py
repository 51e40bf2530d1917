"""States of recurrent layers, and what attention keeps beside blocks: a row for each sequence, which is known by the
first of its KV blocks. A sequence that begins, or that no step has seen, finds zeros."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from perfmodel.models.architecture import Attention, GatedDeltaNet, LinearAttention, Mamba
from perfmodel.models.spec import ModelSpec
from perfmodel_executors.kernels import Kernels
from perfmodel_executors.kernels.kv_pages import KVPages, empty_pages, grown
from perfmodel_executors.models.batch import StepBatch, on_device
from perfmodel_executors.models.kept import HeldTokens, Tier
from perfmodel_executors.models.rotations import Rotations
from perfmodel_executors.parallel.group import ALONE, TensorGroup

_FIRST_ROWS = 8
_FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class LayerState(NamedTuple):
    """What a layer keeps: the last inputs of its causal convolution [R, channels, taps - 1], none in linear attention,
    and states [R, heads, N, P] in the format that the engine keeps them in; sums are made in fp32."""

    conv: Tensor
    state: Tensor


RowTensors = LayerState | HeldTokens | tuple[KVPages, ...]


def _tensors(layer: RowTensors) -> list[Tensor]:
    """All have a row for each sequence."""
    return [tensor for part in layer for tensor in (part.tensors if isinstance(part, KVPages) else (part,))]


class StateRows(NamedTuple):
    decodes: Tensor
    chunks: Tensor


class MixerStep(NamedTuple):
    """A step of all layers. state_rows: of the step's sequences, in the states of all recurrent layers; norm_eps: added
    to the mean square in norms; is_standard: attention keeps its scores in memory; group: the ranks that step."""

    kernels: Kernels
    batch: StepBatch
    rotations: Rotations
    state_rows: StateRows
    norm_eps: float
    is_standard: bool = False
    group: TensorGroup = ALONE

    def rotated(self, mixer: Attention | LinearAttention, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys [T, heads, H] at the positions of their tokens, where the mixer rotates them."""
        if mixer.rope is None:
            return q, k
        rows = self.rotations.rows(mixer.rope, mixer.head_dim)
        return self.kernels.rope(q, rows), self.kernels.rope(k, rows)

    @property
    def chunk_rows(self) -> list[slice]:
        """Rows of each chunk's tokens in the batch."""
        starts = (self.batch.chunks.starts_G + self.batch.num_decodes).tolist()
        return [slice(begin, end) for begin, end in pairwise(starts)]


class StatePool:
    """The states of all layers of a model that keep some for each sequence. tiers: in which attention keeps its newest
    tokens; num_rows: for which there is memory; it grows with the sequences, and `layers` then have other tensors."""

    def __init__(self, model: ModelSpec, dtype: torch.dtype, device: torch.device, tiers: Sequence[Tier] = ()) -> None:
        self.layers: dict[int, RowTensors] = {}
        self._rows: dict[int, int] = {}  # first block of a sequence -> row
        self._free: list[int] = []
        self.num_rows = 0
        for index, layer in enumerate(model.iter_layers()):
            mixer = layer.mixer
            if isinstance(mixer, Mamba | GatedDeltaNet | LinearAttention):
                self.layers[index] = _empty(mixer, dtype, device)
            elif isinstance(mixer, Attention) and mixer.evicts_to is not None:
                zeros = partial(torch.zeros, 0, mixer.num_kv_heads, mixer.evicts_to, device=device)
                k, v = (zeros(size, dtype=dtype) for size in (mixer.head_dim, mixer.v_head_dim))
                self.layers[index] = HeldTokens(k, v, zeros(), zeros(dtype=torch.int64))
            elif isinstance(mixer, Attention) and tiers:
                heads, dims = mixer.num_kv_heads, (mixer.head_dim, mixer.v_head_dim)
                rings = (empty_pages(0, t.tokens, heads, dims, t.dtype, device, t.packing) for t in tiers)
                self.layers[index] = tuple(rings)

    def rows_of(self, batch: StepBatch, block_size: int) -> StateRows:
        """The rows of a step's sequences; of those that begin, they are zeroed."""
        if batch.state_rows_D is not None or not self.layers:
            none = batch.tokens_T[:0]
            return StateRows(none if batch.state_rows_D is None else batch.state_rows_D, none)
        computed = (batch.contexts_D - 1).tolist()
        decodes = self.rows_of_decodes(zip(batch.tables_DM.tolist(), computed, strict=True), block_size)
        tables_GM, starts_G, computed_G, *_ = batch.chunks
        prompts = zip(tables_GM.tolist(), computed_G.tolist(), starts_G.diff().tolist(), strict=True)
        chunks = [self._row(table, before, count, block_size) for table, before, count in prompts]
        return StateRows(**on_device(batch.tokens_T.device, decodes=decodes, chunks=chunks))

    def rows_of_decodes(self, sequences: Iterable[tuple[Sequence[int], int]], block_size: int) -> list[int]:
        return [self._row(table, before, 1, block_size) for table, before in sequences] if self.layers else []

    def take_row(self) -> int:
        if not self._free:
            self._grow(1)
        return self._free.pop()

    def reserve(self, num_rows: int) -> None:
        if self.layers and num_rows > self.num_rows:
            self._grow(num_rows - self.num_rows)

    def release(self, first_block: int) -> None:
        """The sequence that begins with this block has lost it; nothing is known of it any more."""
        row = self._rows.pop(first_block, None)
        if row is not None:
            self._free.append(row)

    @property
    def row_bytes(self) -> int:
        return sum(prod(x.shape[1:]) * x.element_size() for layer in self.layers.values() for x in _tensors(layer))

    @contextmanager
    def restored(self, first_blocks: Sequence[int]) -> Iterator[None]:
        """Afterwards the sequences that begin with these blocks have the states again that they have now."""
        rows = [self._rows[block] for block in first_blocks if block in self._rows]
        held = {i: [tensor[rows].clone() for tensor in _tensors(layer)] for i, layer in self.layers.items()}
        yield
        for index, tensors in held.items():
            for tensor, values in zip(_tensors(self.layers[index]), tensors, strict=True):
                tensor[rows] = values

    def _row(self, table: Sequence[int], num_computed: int, num_new: int, block_size: int) -> int:
        first = table[0]
        if num_computed and first in self._rows:
            return self._rows[first]
        for block in table[1 : -(-num_new // block_size)]:  # behind them the table is padded
            over = self._rows.pop(block, None)
            if over is not None:
                self._free.append(over)
        if first not in self._rows:
            if not self._free:
                self._grow(max(_FIRST_ROWS, self.num_rows))
            self._rows[first] = self._free.pop()
        row = self._rows[first]
        for layer in self.layers.values():
            for tensor in _tensors(layer):
                tensor[row] = 0
        return row

    def _grow(self, more: int) -> None:
        self._free += range(self.num_rows, self.num_rows + more)
        self.num_rows += more
        for index, layer in self.layers.items():
            if isinstance(layer, LayerState | HeldTokens):
                self.layers[index] = type(layer)(*(grown(tensor, self.num_rows) for tensor in layer))
            else:
                self.layers[index] = tuple(ring.grown(self.num_rows) for ring in layer)


def _empty(mixer: Mamba | GatedDeltaNet | LinearAttention, dtype: torch.dtype, device: torch.device) -> LayerState:
    if isinstance(mixer, LinearAttention):
        columns = mixer.v_head_dim + (1 if mixer.kind == "performer" else mixer.head_dim)
        state = torch.zeros(0, mixer.num_kv_heads, mixer.size, columns, device=device)
        return LayerState(torch.zeros(0, 0, 0, dtype=dtype, device=device), state)
    if isinstance(mixer, Mamba):
        channels = mixer.num_heads * mixer.head_dim + 2 * mixer.num_groups * mixer.state_size
        shape = (0, mixer.num_heads, mixer.state_size, mixer.head_dim)
    else:
        keys, values = mixer.num_key_heads * mixer.key_head_dim, mixer.num_value_heads * mixer.value_head_dim
        channels, shape = 2 * keys + values, (0, mixer.num_value_heads, mixer.key_head_dim, mixer.value_head_dim)
    conv = torch.zeros(0, channels, mixer.conv_kernel - 1, dtype=dtype, device=device)
    return LayerState(conv, torch.zeros(shape, dtype=_FORMATS[mixer.state_format], device=device))
