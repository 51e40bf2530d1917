"""Decode steps as CUDA graphs: captured once per batch size, replayed with the inputs at fixed addresses.

A step of n sequences runs the graph of the next captured size. The rows that pad it belong to nobody: they read a
context of one token and write to a scratch block that no sequence owns. What captures is passed in, so all but the
capture itself runs on any device.
"""

__all__ = ["Capture", "CudaCapture", "DecodeGraphs", "DecodeInputs", "no_capture"]

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from perfmodel.engine import capture_sizes, padded_size
from perfmodel_executors.kernels.tiles import tuning
from perfmodel_executors.models.batch import Segment, StepBatch, slot
from perfmodel_executors.models.decoder import Decoder
from perfmodel_executors.models.kv_cache import KVCache

Compute = Callable[[], Tensor]
Capture = Callable[[Compute], Compute]  # from what computes on fixed inputs to what computes it again, the same tensor

_WARM_UPS = 2  # before a capture: libraries choose algorithms and allocate workspaces at their first calls


def no_capture(compute: Compute) -> Compute:
    """The replay is a plain call."""
    return compute


class CudaCapture:
    """Captures CUDA graphs that share one memory pool. Kernels choose their tiles before."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Compute) -> Compute:
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream), tuning():
            for _ in range(_WARM_UPS):
                compute()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = compute()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


class DecodeInputs:
    """The inputs of a decode step at fixed addresses, filled with one copy from the host."""

    def __init__(self, max_batch: int, table_width: int, block_size: int, scratch: int, device: torch.device) -> None:
        self.table_width = table_width
        self._block_size = block_size
        self._scratch = scratch
        zeros = partial(torch.zeros, dtype=torch.int64, device=device)
        self._rows = zeros(4, max_batch)  # tokens, positions, slots, contexts
        self._tables = zeros(max_batch, table_width).fill_(scratch)
        self._sampled = torch.arange(max_batch, device=device)
        self._none = zeros(1)
        size = max_batch * (4 + table_width)
        self._host = torch.zeros(size, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._staged = zeros(size)

    def batch(self, size: int) -> StepBatch:
        """The inputs of `size` rows: views whose contents `fill` changes."""
        tokens, positions, slots, contexts = self._rows[:, :size].unbind()
        return StepBatch(
            tokens_T=tokens,
            positions_T=positions,
            slots_T=slots,
            tables_DM=self._tables[:size],
            contexts_D=contexts,
            tables_GM=self._tables[:0],
            starts_G=self._none,
            computed_G=self._none[:0],
            sample_rows_S=self._sampled[:size],
        )

    def fill(self, segments: Sequence[Segment], size: int) -> None:
        """One-token `segments` in the first rows, padding up to `size`."""
        padding = Segment((0,), 0, (self._scratch,))
        rows = [*segments, *[padding] * (size - len(segments))]
        width = max(len(row.block_table) for row in rows)
        used = size * (4 + width)
        # The last step's copy from here is done: its sampled tokens have been read.
        host = self._host[:used].numpy()
        fields, tables = host[: 4 * size].reshape(4, size), host[4 * size :].reshape(size, width)
        positions = [row.num_computed for row in rows]
        fields[0] = [row.tokens[0] for row in rows]
        fields[1] = positions
        fields[2] = [slot(row.block_table, row.num_computed, self._block_size) for row in rows]
        fields[3] = np.add(positions, 1)
        for row, target in zip(rows, tables, strict=True):
            target[: len(row.block_table)] = row.block_table
            target[len(row.block_table) :] = self._scratch
        staged = self._staged[:used]
        staged.copy_(self._host[:used], non_blocking=True)
        self._rows[:, :size].copy_(staged[: 4 * size].view(4, size))
        self._tables[:size, :width].copy_(staged[4 * size :].view(size, width))


class DecodeGraphs:
    """Runs steps of decodes only, each by the graph of its padded size; a size is captured when first needed.

    cache:       a pool that does not move, with the block `scratch` beside those that the engine hands out
    max_context: tokens of the longest sequence
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        scratch: int,
        max_num_seqs: int,
        max_context: int,
        capture: Capture = no_capture,
    ) -> None:
        self.sizes = capture_sizes(max_num_seqs)
        self._decoder = decoder
        self._cache = cache
        self._capture = capture
        width = -(-max_context // cache.block_size)
        self._inputs = DecodeInputs(self.sizes[-1], width, cache.block_size, scratch, decoder.device)
        self._replays: dict[int, Compute] = {}

    def can_run(self, segments: Sequence[Segment]) -> bool:
        """Whether the step is of decodes only, all sampled, and not larger than the largest graph."""
        return 0 < len(segments) <= self.sizes[-1] and all(
            len(segment.tokens) == 1 and segment.is_sampled and len(segment.block_table) <= self._inputs.table_width
            for segment in segments
        )

    def run(self, segments: Sequence[Segment]) -> list[int]:
        """The next token of each segment."""
        size = padded_size(len(segments), self.sizes)
        assert size is not None, f"{len(segments)} sequences and graphs of up to {self.sizes[-1]}"
        self._inputs.fill(segments, size)
        if size not in self._replays:
            batch = self._inputs.batch(size)
            self._replays[size] = self._capture(lambda: self._decoder.next_tokens(batch, self._cache))
        tokens: list[int] = self._replays[size]()[: len(segments)].tolist()
        return tokens
