"""A step as the decoder wants it: a flat batch of tokens of many sequences, with the tables that attention reads."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perfmodel.errors import PerfmodelError
from perfmodel_executors.kernels.attention_sinks import Ring
from perfmodel_executors.kernels.kv_pages import Chunks
from perfmodel_executors.kernels.weight_formats import AdapterRows
from perfmodel_executors.models.support import CPU

IndexArray: TypeAlias = NDArray[np.int64]


class TreeNodes(NamedTuple):
    """Which nodes of a tree of drafted tokens a segment computes. first: how many nodes before them are in the KV cache
    already; depths: of each node: its position is `num_computed` + depth, its slot that of `num_computed` + number;
    ancestors: for each node, bit j is set if it sees node j, itself included."""

    first: int
    depths: Sequence[int]
    ancestors: Sequence[int]


class TokenSegment(NamedTuple):
    """The new tokens of one sequence in one step, behind `num_computed` ones in the KV cache. is_sampled: whether the
    token after the last one is wanted; is_verified: those after all; nodes: for tokens of a tree, before which
    `num_computed` are; num_layers: of a single token, None: all; draws: 31 bits each, none: the likeliest tokens;
    adapter: that its request names."""

    tokens: Sequence[int]
    num_computed: int
    block_table: Sequence[int]
    is_sampled: bool = True
    is_verified: bool = False
    nodes: TreeNodes | None = None
    num_layers: int | None = None
    draws: Sequence[int] = ()
    adapter: int | None = None

    @property
    def num_wanted(self) -> int:
        return len(self.tokens) if self.is_verified else int(self.is_sampled)


@dataclass(frozen=True, slots=True)
class StepBatch:
    """T tokens: first those of D segments of one token, then those of G longer chunks, then those of trees.

    tokens_T, positions_T: ids and positions
    slots_T:        where each token's keys and values go, block_id * block_size + offset
    tables_DM, contexts_D: block table and context length (the new token included) of the one-token segments
    chunks:         of the longer segments; rows are those among their tokens
    sample_rows_S:  rows whose logits are wanted, in the order of the segments given to `build_batch`
    trees:          of the segments that are nodes of trees, None without
    ring:           how a rolling cache uses its blocks, where `slots` are places in it
    kept_W:         rows that are still in the ring when the step is over; None: all are written
    keeps_kv:       without, all segments are chunks that begin at the first token, nothing is written, and what
                    the chunks' tables name are rows of the step itself
    num_layers_D:   how many layers each of the one-token segments passes; None: all pass all
    draws_S:        random numbers of the tokens after `sample_rows`; None: the likeliest ones are wanted
    state_rows_D:   rows of the one-token segments' sequences among those with states; None: to be looked up
    adapter_rows:   the adapters that requests name, each with its tokens' rows
    """

    tokens_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    tables_DM: Tensor
    contexts_D: Tensor
    chunks: Chunks
    sample_rows_S: Tensor
    trees: Chunks | None = None
    ring: Ring | None = None
    kept_W: Tensor | None = None
    keeps_kv: bool = True
    num_layers_D: tuple[int, ...] | None = None
    draws_S: Tensor | None = None
    state_rows_D: Tensor | None = None
    adapter_rows: AdapterRows = ()

    @property
    def num_decodes(self) -> int:
        return len(self.contexts_D)

    @property
    def num_chunk_tokens(self) -> int:
        in_trees = 0 if self.trees is None or self.trees.ancestors_T is None else len(self.trees.ancestors_T)
        return len(self.tokens_T) - self.num_decodes - in_trees


def slot(block_table: Sequence[int], position: int, block_size: int) -> int:
    return block_table[position // block_size] * block_size + position % block_size


def build_batch(
    segments: Sequence[TokenSegment],
    block_size: int,
    device: torch.device = CPU,
    ring: Ring | None = None,
    keeps_kv: bool = True,
) -> StepBatch:
    """The flat batch of `segments`, whose wanted tokens come back in the order of the segments. ring: of a model whose
    layers all overwrite what left their window; keeps_kv: without, `segments` are whole sequences. Raises
    PerfmodelError for drafted tokens in a ring: those that are turned down have overwritten what is still seen."""
    if keeps_kv and ring is not None and any(segment.is_verified or segment.nodes for segment in segments):
        raise PerfmodelError(
            "drafted tokens are not verified in a rolling KV cache (model_changes.window), where one that is turned "
            "down has overwritten one that is still seen; leave out the window or engine.speculative_config."
        )
    decodes, chunks, trees = ([segments[i] for i in part] for part in _sorted(segments))
    ends = [first + len(segment.tokens) for first, segment in zip(first_rows(segments), segments, strict=True)]
    if not keeps_kv:  # whole sequences, whose keys and values are found where the step computes them
        starts = _starts(segments)
        pairs = zip(segments, map(range, starts, starts[1:]), strict=True)
        decodes, chunks, trees = [], [s._replace(num_computed=0, block_table=rows) for s, rows in pairs], []
        block_size, ends = 1, starts[1:]
    draws = [draw for segment in segments for draw in segment.draws[: segment.num_wanted]]
    assert not draws or len(draws) == sum(segment.num_wanted for segment in segments), "a wanted token has no number"
    tokens, positions, slots, is_kept = flatten(decodes, [*chunks, *trees], block_size, ring if keeps_kv else None)
    tensors = on_device(
        device,
        tokens_T=tokens,
        positions_T=positions,
        slots_T=slots if keeps_kv else [],
        tables_DM=_tables([segment.block_table for segment in decodes]),
        contexts_D=[segment.num_computed + 1 for segment in decodes],
        **_arrays_of_chunks(chunks),
        sample_rows_S=[end - n for end, s in zip(ends, segments, strict=True) for n in range(s.num_wanted, 0, -1)],
        kept_W=None if is_kept.all() else is_kept.nonzero()[0],
        draws_S=draws or None,
    )
    if trees:
        nodes = [segment.nodes or TreeNodes(0, (), ()) for segment in trees]
        num_nodes, bits = [n.first + len(n.depths) for n in nodes], [own for n in nodes for own in n.ancestors]
        tensors["trees"] = Chunks(**on_device(device, **_arrays_of_chunks(trees), nodes_G=num_nodes, ancestors_T=bits))
    passed = [segment.num_layers for segment in decodes]
    if any(count is not None for count in passed):
        tensors["num_layers_D"] = tuple(sys.maxsize if count is None else count for count in passed)
    if any(segment.adapter is not None for segment in segments):
        tensors["adapter_rows"] = _adapter_rows(segments, ends, device)
    parts = (tensors.pop(name) for name in ("tables_GM", "starts_G", "computed_G"))
    return StepBatch(chunks=Chunks(*parts), **tensors, ring=ring, keeps_kv=keeps_kv)


def _adapter_rows(segments: Sequence[TokenSegment], ends: Sequence[int], device: torch.device) -> AdapterRows:
    rows: dict[int, list[int]] = {}
    for segment, end in zip(segments, ends, strict=True):
        if segment.adapter is not None:
            rows.setdefault(segment.adapter, []).extend(range(end - len(segment.tokens), end))
    return [(adapter, torch.tensor(own, device=device)) for adapter, own in rows.items()]


def _arrays_of_chunks(segments: Sequence[TokenSegment]) -> dict[str, IndexArray | Sequence[int]]:
    tables = _tables([segment.block_table for segment in segments])
    computed = [segment.num_computed for segment in segments]
    return {"tables_GM": tables, "starts_G": _starts(segments), "computed_G": computed}


def flatten(
    singles: Sequence[TokenSegment], others: Sequence[TokenSegment], block_size: int, ring: Ring | None = None
) -> Sequence[IndexArray]:
    """Tokens, positions, slots, and whether a ring still has them when the step is over."""
    places = _integers([segment.num_computed for segment in singles])
    in_ring = places if ring is None else ring.places(places)
    slots = [slot(s.block_table, place, block_size) for s, place in zip(singles, in_ring.tolist(), strict=True)]
    tokens = _integers([segment.tokens[0] for segment in singles])
    parts = [(tokens, places, _integers(slots), np.ones(len(singles), dtype=np.int64))]
    for segment in others:
        base, nodes, count = segment.num_computed, segment.nodes, len(segment.tokens)
        first = base if nodes is None else base + nodes.first
        places = np.arange(first, first + count)
        positions = places if nodes is None else base + _integers(nodes.depths)
        is_kept = np.ones(count, dtype=np.int64)
        if ring is not None:
            is_kept = ring.holds(places, first + count).astype(np.int64)
            places = ring.places(places)
        own_slots = _integers(segment.block_table)[places // block_size] * block_size + places % block_size
        parts.append((_integers(segment.tokens), positions, own_slots, is_kept))
    return parts[0] if len(parts) == 1 else [np.concatenate(part) for part in zip(*parts, strict=True)]


def _sorted(segments: Sequence[TokenSegment]) -> tuple[list[int], list[int], list[int]]:
    """Segments of one token, longer ones, and those of trees, in the order of their rows."""
    decodes = [i for i, segment in enumerate(segments) if segment.nodes is None and len(segment.tokens) == 1]
    chunks = [i for i, segment in enumerate(segments) if segment.nodes is None and len(segment.tokens) > 1]
    return decodes, chunks, [i for i, segment in enumerate(segments) if segment.nodes is not None]


def first_rows(segments: Sequence[TokenSegment]) -> list[int]:
    order = [i for part in _sorted(segments) for i in part]
    starts = dict(zip(order, _starts([segments[i] for i in order]), strict=False))
    return [starts[i] for i in range(len(segments))]


def _starts(segments: Sequence[TokenSegment]) -> list[int]:
    return list(accumulate((len(segment.tokens) for segment in segments), initial=0))


def _tables(tables: Sequence[Sequence[int]]) -> IndexArray:
    padded = np.zeros((len(tables), max(map(len, tables), default=0)), dtype=np.int64)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    return padded


def _integers(values: Sequence[int]) -> IndexArray:
    return np.array(values, dtype=np.int64)


def on_device(device: torch.device, **values: IndexArray | Sequence[int] | None) -> dict[str, Any]:
    """int64 tensors by name, sent in one copy; None stays None. Each begins at a multiple of 16 bytes, as an allocation
    of its own would: else Triton compiles a kernel again."""
    arrays = {name: np.asarray(value, dtype=np.int64) for name, value in values.items() if value is not None}
    begins = list(accumulate((-(-array.size // 2) * 2 for array in arrays.values()), initial=0))  # two in 16 bytes
    flat = np.zeros(begins[-1] + 2, dtype=np.int64)  # an empty last one begins somewhere, too
    for begin, array in zip(begins, arrays.values(), strict=False):
        flat[begin : begin + array.size] = array.ravel()
    sent = torch.from_numpy(flat).to(device)
    tensors: dict[str, Tensor | None] = dict.fromkeys(values)
    for begin, (name, array) in zip(begins, arrays.items(), strict=False):
        tensors[name] = sent[begin : begin + array.size].view(array.shape)
    return tensors
