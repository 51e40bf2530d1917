"""Steps as CUDA graphs: captured once per size, replayed with the inputs at fixed addresses. A decode of n sequences
runs the graph of the next captured size. Rows that pad it read a context of one token and write to a scratch block, and
to a row of states, that no sequence owns. Should rows of states have moved, because there are more, graphs are captured
anew.

Drafts that are verified, and prompts where the engine's rules say so, are steps of chunks, captured by how many tokens,
chunks, single tokens and wanted tokens they have, each padded; where chunks begin, and what their sequences have, are
inputs. One more chunk, of a sequence that lies in the scratch block, pads the tokens.

What captures is passed in, so all but the capture itself runs on any device."""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from perfmodel.specs.engine.description import describe_engine
from perfmodel_executors.kernels.attention_sinks import Ring
from perfmodel_executors.kernels.kv_pages import Chunks
from perfmodel_executors.kernels.tiles import tuning
from perfmodel_executors.models.batch import StepBatch, TokenSegment, flatten, slot
from perfmodel_executors.models.decoder import Decoder
from perfmodel_executors.models.kv_cache import KVCache

Compute = Callable[[], Tensor]
TUNED_CONTEXT = 2048  # tokens; the middle, on a scale of factors, of the contexts that the suite's steps have
Capture = Callable[[Compute], Compute]  # from what computes on fixed inputs to what computes it again, the same tensor

_NUM_FIELDS = 6  # of a row of inputs: token, position, slot, context, random number, row of states
_STRIDE = 7919  # between ids of stand-ins: a prime
_WARM_UPS = 2  # before a capture: libraries choose algorithms and allocate workspaces at their first calls


def no_capture(compute: Compute) -> Compute:
    return compute


class CudaCapture:
    """Captures CUDA graphs that share one memory pool. Kernels choose their tiles before, unless `tunes` is false."""

    def __init__(self, device: torch.device, tunes: bool = True) -> None:
        self._device, self._tunes = device, tunes
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Compute) -> Compute:
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream), tuning() if self._tunes else nullcontext():
            for _ in range(_WARM_UPS):
                compute()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Thread-local: a watchdog thread of NCCL may ask the driver something meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = compute()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


class DecodeInputs:
    """The inputs of a decode step at fixed addresses, filled with one copy from the host; of block tables only those
    that differ from the step before. is_drawn: with random numbers; scratch_row: of states, for rows that pad; ring:
    how a rolling cache uses its blocks."""

    def __init__(
        self,
        max_batch: int,
        table_width: int,
        block_size: int,
        scratch: int,
        device: torch.device,
        is_drawn: bool = False,
        scratch_row: int | None = None,
        ring: Ring | None = None,
    ) -> None:
        self.table_width, self._block_size, self._ring = table_width, block_size, ring
        self._is_drawn, self._scratch_row = is_drawn, scratch_row
        self._padding = TokenSegment((0,), 0, (scratch,))
        zeros = partial(torch.zeros, dtype=torch.int64, device=device)
        self._rows = zeros(_NUM_FIELDS, max_batch)
        self._tables = zeros(max_batch, table_width).fill_(scratch)
        self._known: list[Sequence[int]] = [()] * max_batch  # what `_tables` holds
        self._sampled = torch.arange(max_batch, device=device)
        self._none = zeros(1)
        size = max_batch * (_NUM_FIELDS + 1 + table_width)
        self._host = torch.zeros(size, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._staged = zeros(size)

    def batch(self, size: int) -> StepBatch:
        tokens, positions, slots, contexts, draws, state_rows = self._rows[:, :size].unbind()
        chunks = Chunks(self._tables[:0], self._none, self._none[:0])
        own = (tokens, positions, slots, self._tables[:size], contexts, chunks, self._sampled[:size])
        draws_S, state_rows_D = draws if self._is_drawn else None, None if self._scratch_row is None else state_rows
        return StepBatch(*own, draws_S=draws_S, state_rows_D=state_rows_D, ring=self._ring)

    def fill(self, segments: Sequence[TokenSegment], size: int, state_rows: Sequence[int] = ()) -> int:
        """One-token `segments` in the first rows, padding up to `size`; returns how many block tables were sent."""
        rows = [*segments, *[self._padding] * (size - len(segments))]
        changed = [index for index, row in enumerate(rows) if row.block_table != self._known[index]]
        width = max((len(rows[index].block_table) for index in changed), default=0)
        fields_end = _NUM_FIELDS * size
        ids_end = fields_end + len(changed)
        used = ids_end + len(changed) * width
        host = self._host[:used].numpy()  # the copy of the step before is done: its tokens have been read
        positions = [row.num_computed for row in rows]
        places = positions if self._ring is None else self._ring.places(np.array(positions)).tolist()
        columns = host[:fields_end].reshape(_NUM_FIELDS, size)
        columns[0] = [row.tokens[0] for row in rows]
        columns[1] = positions
        columns[2] = [slot(row.block_table, place, self._block_size) for row, place in zip(rows, places, strict=True)]
        columns[3] = np.add(positions, 1)
        columns[4] = [row.draws[0] if row.draws else 0 for row in rows]
        columns[5] = [*state_rows, *[self._scratch_row or 0] * (size - len(state_rows))]
        host[fields_end:ids_end] = changed
        for index, target in zip(changed, host[ids_end:].reshape(len(changed), width), strict=True):
            table = rows[index].block_table
            target[: len(table)] = table
            target[len(table) :] = self._padding.block_table[0]
            self._known[index] = table[:]
        staged = self._staged[:used]
        staged.copy_(self._host[:used], non_blocking=True)
        self._rows[:, :size].copy_(staged[:fields_end].view(_NUM_FIELDS, size))
        if changed:
            new_tables = staged[ids_end:].view(len(changed), width)
            self._tables[:, :width].index_copy_(0, staged[fields_end:ids_end], new_tables)
        return len(changed)


def stand_ins(size: int, vocab_size: int, block_size: int, scratch: int, max_context: int) -> list[TokenSegment]:
    """`size` sequences to capture with, since kernels choose their tiles by how long these take: of `TUNED_CONTEXT`
    tokens where that fits, each with a token of its own, so that experts are chosen as differently as in a run."""
    context = max(1, min(TUNED_CONTEXT, max_context, scratch // size * block_size))
    last = (context - 1) // block_size
    return [
        TokenSegment([row * _STRIDE % vocab_size], context - 1, [*table, scratch])
        for row in range(size)
        for table in [[(row * last + i) % scratch for i in range(last)]]
    ]


def capture_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Batch sizes of the graphs, ascending, by the rule in hardware_specs/engines/perfmodel.yaml."""
    rules = describe_engine("perfmodel").facts.graphs
    sizes = rules.sizes_up_to(rules.most_tokens)
    return sizes[: bisect_left(sizes, max_num_seqs) + 1]


def padded_size(num_seqs: int, sizes: Sequence[int]) -> int | None:
    index = bisect_left(sizes, num_seqs)
    return sizes[index] if index < len(sizes) else None


class ChunkSizes(NamedTuple):
    """What a step of chunks is padded to: chunks, their tokens, sequences of one token, wanted tokens, and entries of a
    block table."""

    chunks: int
    tokens: int
    decodes: int
    wanted: int
    table_width: int


class ChunkInputs:
    """The inputs of a step of chunks at fixed addresses, filled with one copy from the host. is_drawn: with random
    numbers."""

    def __init__(self, sizes: ChunkSizes, block_size: int, scratch: int, device: torch.device, is_drawn: bool) -> None:
        self._sizes, self._block_size, self._scratch = sizes, block_size, scratch
        shapes = {
            **dict.fromkeys(("tokens", "positions", "slots"), (sizes.decodes + sizes.tokens,)),
            **dict.fromkeys(("wanted", "draws"), (sizes.wanted,)),
            "tables": (sizes.decodes + sizes.chunks, sizes.table_width),
            **{"contexts": (sizes.decodes,), "starts": (sizes.chunks + 1,), "computed": (sizes.chunks,)},
        }
        # Each begins at a multiple of 16 bytes, as an allocation of its own would.
        places = {name: math.prod(shape) + math.prod(shape) % 2 for name, shape in shapes.items()}
        ends = np.cumsum(list(places.values()))
        self._host = torch.zeros(int(ends[-1]), dtype=torch.int64, pin_memory=device.type == "cuda")
        self._own = self._host.to(device, copy=True)
        self._columns, self._views = (
            {
                name: flat[end - places[name] :][: math.prod(shape)].view(shape)
                for end, (name, shape) in zip(ends, shapes.items(), strict=True)
            }
            for flat in (self._host, self._own)
        )
        view, decodes = self._views, sizes.decodes
        chunks = Chunks(view["tables"][decodes:], view["starts"], view["computed"])
        rows = (view["tokens"], view["positions"], view["slots"], view["tables"][:decodes], view["contexts"])
        self.batch = StepBatch(*rows, chunks, view["wanted"], draws_S=view["draws"] if is_drawn else None)

    def fill(self, segments: Sequence[TokenSegment]) -> None:
        """`segments` and what pads them: single tokens, and behind the chunks one of an empty sequence, whose keys and
        values all lie in the scratch block."""
        sizes, host = self._sizes, {name: column.numpy() for name, column in self._columns.items()}
        singles = [segment for segment in segments if len(segment.tokens) == 1]
        chunks = [segment for segment in segments if len(segment.tokens) > 1]
        idle = {"tokens": 0, "positions": 0, "slots": self._scratch * self._block_size}
        for name, values in zip(idle, flatten(singles, chunks, self._block_size), strict=False):
            host[name][:] = idle[name]
            host[name][: len(singles)] = values[: len(singles)]
            host[name][sizes.decodes :][: len(values) - len(singles)] = values[len(singles) :]
        host["tables"][:] = self._scratch
        places = [*range(len(singles)), *range(sizes.decodes, sizes.decodes + len(chunks))]
        for row, segment in zip(places, (*singles, *chunks), strict=True):
            host["tables"][row, : len(segment.block_table)] = segment.block_table
        host["contexts"][:] = 1
        host["contexts"][: len(singles)] = [segment.num_computed + 1 for segment in singles]
        host["starts"][1:] = sizes.tokens
        host["starts"][1 : len(chunks) + 1] = np.cumsum([len(segment.tokens) for segment in chunks])
        host["computed"][:] = 0
        host["computed"][: len(chunks)] = [segment.num_computed for segment in chunks]
        firsts = iter(range(len(singles))), iter((host["starts"] + sizes.decodes).tolist())
        ends = [next(firsts[len(segment.tokens) > 1]) + len(segment.tokens) for segment in segments]
        wanted = [end - n for end, s in zip(ends, segments, strict=True) for n in range(s.num_wanted, 0, -1)]
        host["wanted"][: len(wanted)] = wanted
        draws = [draw for segment in segments for draw in segment.draws[: segment.num_wanted]]
        host["draws"][: len(draws)] = draws
        self._own.copy_(self._host, non_blocking=True)


class DecodeGraphs:
    """Runs steps by the graph of their padded size, captured when first needed: decodes, and steps of chunks of up to
    `sizes` tokens: drafts that are verified, and others of up to `most_with_prompts`. cache: a pool that does not move,
    with the block `scratch` beside those that the engine hands out; max_context: tokens of the longest sequence."""

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        scratch: int,
        max_num_seqs: int,
        max_context: int,
        capture: Capture = no_capture,
        most_with_prompts: int = 0,
    ) -> None:
        self.sizes, self._most_with_prompts = capture_sizes(max_num_seqs), most_with_prompts
        rules = describe_engine("perfmodel").facts.graphs
        self._chunk_sizes = rules.sizes_up_to(rules.most_tokens)
        self._chunks: dict[ChunkSizes, tuple[ChunkInputs, Compute]] = {}
        self._decoder, self._cache, self._capture = decoder, cache, capture
        self._stand_ins = (decoder.model.vocab_size, cache.block_size, scratch, max_context)
        self._limits = (scratch, max_num_seqs, max_context)
        width = -(-max_context // cache.block_size)
        cache.reserve_states(max_num_seqs + 1)
        self._scratch_row = cache.states.take_row() if cache.states.layers else None
        self._num_rows = cache.states.num_rows
        is_drawn = decoder.chooser.settings is not None
        limits = (self.sizes[-1], width, cache.block_size, scratch)
        self._inputs = DecodeInputs(*limits, decoder.device, is_drawn, self._scratch_row, decoder.ring)
        self._replays: dict[int, Compute] = {}

    def of(self, decoder: Decoder, cache: KVCache) -> "DecodeGraphs":
        """Graphs of a decoder that drafts under the same limits, what it catches up with included; `cache` has as many
        blocks, or is the same."""
        return DecodeGraphs(decoder, cache, *self._limits, self._capture, self._chunk_sizes[-1])

    def can_run(self, segments: Sequence[TokenSegment]) -> bool:
        if any(len(segment.tokens) > 1 for segment in segments):
            return self._padded_chunks(segments) is not None
        return 0 < len(segments) <= self.sizes[-1] and all(
            segment.is_sampled and len(segment.block_table) <= self._inputs.table_width for segment in segments
        )

    def run(self, segments: Sequence[TokenSegment]) -> list[int]:
        sizes = self._padded_chunks(segments)
        return self._run_decodes(segments) if sizes is None else self._run_chunks(segments, sizes)

    def _padded_chunks(self, segments: Sequence[TokenSegment]) -> ChunkSizes | None:
        """None for decodes, and where a step has more than is captured, wants nothing, or has what no graph holds."""
        chunks = [segment for segment in segments if len(segment.tokens) > 1]
        num_tokens, num_singles = sum(len(segment.tokens) for segment in chunks), len(segments) - len(chunks)
        limit = self._chunk_sizes[-1] if all(s.is_verified for s in chunks) else self._most_with_prompts
        num_wanted, width = sum(s.num_wanted for s in segments), max((len(s.block_table) for s in segments), default=0)
        is_odd = any(segment.nodes is not None or segment.num_layers is not None for segment in segments)
        is_wide = width > self._inputs.table_width or num_tokens + num_singles > limit
        if not chunks or not num_wanted or is_odd or is_wide or self._decoder.ring or self._cache.states.layers:
            return None
        counts = (num_tokens, num_singles, num_wanted)
        tokens, singles, wanted = (padded_size(n, self._chunk_sizes) or 0 if n else 0 for n in counts)
        width = max(width, -(-tokens // self._cache.block_size))
        return ChunkSizes(1 << len(chunks).bit_length(), tokens, singles, wanted, 1 << (width - 1).bit_length())

    def _run_chunks(self, segments: Sequence[TokenSegment], sizes: ChunkSizes) -> list[int]:
        if sizes not in self._chunks:
            decoder, cache = self._decoder, self._cache
            scratch, is_drawn = self._limits[0], decoder.chooser.settings is not None
            inputs = ChunkInputs(sizes, cache.block_size, scratch, decoder.device, is_drawn)
            inputs.fill(segments)
            self._chunks[sizes] = inputs, self._capture(lambda: decoder.next_tokens(inputs.batch, cache))
        inputs, replay = self._chunks[sizes]
        inputs.fill(segments)
        return list(replay()[: sum(segment.num_wanted for segment in segments)].tolist())

    def _run_decodes(self, segments: Sequence[TokenSegment]) -> list[int]:
        size = padded_size(len(segments), self.sizes)
        assert size is not None, f"{len(segments)} sequences and graphs of up to {self.sizes[-1]}"
        states = self._cache.states
        sequences = ((segment.block_table, segment.num_computed) for segment in segments)
        rows = states.rows_of_decodes(sequences, self._cache.block_size)
        if states.num_rows != self._num_rows:
            self._replays.clear()
            self._num_rows = states.num_rows
        if size not in self._replays:
            self._inputs.fill(stand_ins(size, *self._stand_ins), size)
            batch = self._inputs.batch(size)
            self._replays[size] = self._capture(lambda: self._decoder.next_tokens(batch, self._cache))
        self._inputs.fill(segments, size, rows)
        return list(self._replays[size]()[: len(segments)].tolist())
