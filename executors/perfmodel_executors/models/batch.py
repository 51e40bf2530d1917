"""A step as the decoder wants it: a flat batch of tokens of many sequences, with the tables that attention reads."""

# ruff: noqa: N815 (fields carry the suffix of their shape, like the variables)

__all__ = ["StepBatch", "TokenSegment", "TreeNodes", "Trees", "build_batch", "first_rows", "slot"]

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from perfmodel.errors import PerfmodelError
from perfmodel_executors.kernels.attention_sinks.ring import Ring
from perfmodel_executors.models.support import CPU


class TreeNodes(NamedTuple):
    """Which nodes of a tree of drafted tokens a segment computes.

    first:     how many nodes before them are in the KV cache already
    depths:    of each node: its position is `num_computed` + depth, its slot that of `num_computed` + number
    ancestors: for each node, bit j is set if it sees node j, itself included
    """

    first: int
    depths: Sequence[int]
    ancestors: Sequence[int]


class TokenSegment(NamedTuple):
    """The new tokens of one sequence in one step.

    tokens:       ids of the new tokens, following `num_computed` ones already in the KV cache
    block_table:  the sequence's KV blocks, in order, the new tokens' included
    is_sampled:   whether the token after the last one is wanted
    is_verified:  whether the tokens after all of them are
    nodes:        for tokens that are nodes of a tree and not a text; `num_computed` are those before the tree
    num_layers:   how many layers a single token passes; None: all
    """

    tokens: Sequence[int]
    num_computed: int
    block_table: Sequence[int]
    is_sampled: bool = True
    is_verified: bool = False
    nodes: TreeNodes | None = None
    num_layers: int | None = None

    @property
    def num_wanted(self) -> int:
        """Tokens that come of it."""
        return len(self.tokens) if self.is_verified else int(self.is_sampled)


@dataclass(frozen=True, slots=True)
class Trees:
    """Segments that are nodes of trees, as `attention_prefill` wants them.

    tables_GM, starts_G, computed_G: block tables, first rows among their tokens (G + 1), tokens before each tree
    nodes_G:     nodes of each tree in the KV cache, those of the segment last
    ancestors_T: bits of what each node sees
    """

    tables_GM: Tensor
    starts_G: Tensor
    computed_G: Tensor
    nodes_G: Tensor
    ancestors_T: Tensor


@dataclass(frozen=True, slots=True)
class StepBatch:
    """T tokens: first those of D segments of one token, then those of G longer chunks, then those of trees.

    tokens_T, positions_T: ids and positions
    slots_T:        where each token's keys and values go, block_id * block_size + offset
    tables_DM, contexts_D: block table and context length (the new token included) of the one-token segments
    tables_GM, starts_G, computed_G: block tables, first rows among the chunks' tokens (G + 1), tokens computed before
    sample_rows_S:  rows whose logits are wanted, in the order of the segments given to `build_batch`
    trees:          of the segments that are nodes of trees, None without
    ring:           how a rolling cache uses its blocks, where `slots` are places in it
    kept_W:         rows that are still in the ring when the step is over; None: all are written
    keeps_kv:       without, all segments are chunks that begin at the first token, nothing is written, and what
                    `tables_GM` names are rows of the step itself
    num_layers_D:   how many layers each of the one-token segments passes; None: all pass all
    """

    tokens_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    tables_DM: Tensor
    contexts_D: Tensor
    tables_GM: Tensor
    starts_G: Tensor
    computed_G: Tensor
    sample_rows_S: Tensor
    trees: Trees | None = None
    ring: Ring | None = None
    kept_W: Tensor | None = None
    keeps_kv: bool = True
    num_layers_D: tuple[int, ...] | None = None

    @property
    def num_decodes(self) -> int:
        return len(self.contexts_D)

    @property
    def num_chunk_tokens(self) -> int:
        """Tokens of the chunks."""
        in_trees = 0 if self.trees is None else len(self.trees.ancestors_T)
        return len(self.tokens_T) - self.num_decodes - in_trees


def slot(block_table: Sequence[int], position: int, block_size: int) -> int:
    """Where the keys and values of a sequence's token at `position` go."""
    return block_table[position // block_size] * block_size + position % block_size


def build_batch(
    segments: Sequence[TokenSegment],
    block_size: int,
    device: torch.device = CPU,
    ring: Ring | None = None,
    keeps_kv: bool = True,
) -> StepBatch:
    """The flat batch of `segments`, whose wanted tokens come back in the order of the segments.

    ring: of a model whose layers all overwrite what left their window
    keeps_kv: without, `segments` are whole sequences

    Raises PerfmodelError for drafted tokens in a ring: those that are turned down have overwritten what is still seen.
    """
    if not keeps_kv:
        return _whole_sequences(segments, device, ring)
    if ring is not None and any(segment.is_verified or segment.nodes for segment in segments):
        raise PerfmodelError(
            "drafted tokens are not verified in a rolling KV cache (model_changes.window), where one that is turned "
            "down has overwritten one that is still seen; leave out the window or engine.speculative_config."
        )
    decodes, chunks, trees = _sorted(segments)
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    kept: list[int] = []
    end_row: dict[int, int] = {}
    for i in decodes + chunks + trees:
        segment = segments[i]
        base, count = segment.num_computed, len(segment.tokens)
        first = base if segment.nodes is None else base + segment.nodes.first
        tokens += segment.tokens
        positions += range(base, base + count) if segment.nodes is None else [base + d for d in segment.nodes.depths]
        places: Iterable[int] = range(first, first + count)
        if ring is not None:
            kept += [len(slots) + row for row, p in enumerate(places) if ring.holds(p, first + count)]
            places = map(ring.place, places)
        slots += [slot(segment.block_table, place, block_size) for place in places]
        end_row[i] = len(tokens)
    rows = [row for i, segment in enumerate(segments) for row in range(end_row[i] - segment.num_wanted, end_row[i])]

    def integers(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return StepBatch(
        tokens_T=integers(tokens),
        positions_T=integers(positions),
        slots_T=integers(slots),
        tables_DM=_tables([segments[i].block_table for i in decodes], device),
        contexts_D=integers([segments[i].num_computed + 1 for i in decodes]),
        tables_GM=_tables([segments[i].block_table for i in chunks], device),
        starts_G=integers(_starts(segments, chunks)),
        computed_G=integers([segments[i].num_computed for i in chunks]),
        sample_rows_S=integers(rows),
        trees=_trees(segments, trees, device) if trees else None,
        ring=ring,
        kept_W=integers(kept) if ring is not None and len(kept) < len(tokens) else None,
        num_layers_D=_layers_passed([segments[i].num_layers for i in decodes]),
    )


def _whole_sequences(segments: Sequence[TokenSegment], device: torch.device, ring: Ring | None) -> StepBatch:
    """All tokens of each sequence, whose keys and values are found where the step computes them."""
    starts = list(accumulate((len(segment.tokens) for segment in segments), initial=0))
    rows = [range(begin, end) for begin, end in pairwise(starts)]

    def integers(values: Iterable[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int64, device=device)

    return StepBatch(
        tokens_T=integers(token for segment in segments for token in segment.tokens),
        positions_T=integers(position for each in rows for position in range(len(each))),
        slots_T=integers(()),
        tables_DM=_tables([], device),
        contexts_D=integers(()),
        tables_GM=_tables(rows, device),
        starts_G=integers(starts),
        computed_G=integers([0] * len(segments)),
        sample_rows_S=integers(each[-1] for each, segment in zip(rows, segments, strict=True) if segment.is_sampled),
        ring=ring,
        keeps_kv=False,
    )


def _sorted(segments: Sequence[TokenSegment]) -> tuple[list[int], list[int], list[int]]:
    """Segments of one token, longer ones, and those of trees, in the order of their rows."""
    decodes = [i for i, segment in enumerate(segments) if segment.nodes is None and len(segment.tokens) == 1]
    chunks = [i for i, segment in enumerate(segments) if segment.nodes is None and len(segment.tokens) > 1]
    return decodes, chunks, [i for i, segment in enumerate(segments) if segment.nodes is not None]


def first_rows(segments: Sequence[TokenSegment]) -> list[int]:
    """The row of the batch at which each segment begins."""
    order = [i for part in _sorted(segments) for i in part]
    starts = dict(zip(order, _starts(segments, order), strict=False))
    return [starts[i] for i in range(len(segments))]


def _starts(segments: Sequence[TokenSegment], chosen: Sequence[int]) -> list[int]:
    """First rows of the chosen segments among their tokens, and the end."""
    return list(accumulate((len(segments[i].tokens) for i in chosen), initial=0))


def _trees(segments: Sequence[TokenSegment], chosen: Sequence[int], device: torch.device) -> Trees:
    nodes = [segments[i].nodes or TreeNodes(0, (), ()) for i in chosen]

    def integers(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return Trees(
        tables_GM=_tables([segments[i].block_table for i in chosen], device),
        starts_G=integers(_starts(segments, chosen)),
        computed_G=integers([segments[i].num_computed for i in chosen]),
        nodes_G=integers([each.first + len(each.depths) for each in nodes]),
        ancestors_T=integers([bits for each in nodes for bits in each.ancestors]),
    )


def _layers_passed(counts: Sequence[int | None]) -> tuple[int, ...] | None:
    """Counts, where a sequence has one; `sys.maxsize` for the others."""
    if all(count is None for count in counts):
        return None
    return tuple(sys.maxsize if count is None else count for count in counts)


def _tables(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Rows padded with block 0 to the longest."""
    width = max(map(len, rows), default=0)
    padded = [[*row, *[0] * (width - len(row))] for row in rows]
    return torch.tensor(padded, dtype=torch.int64, device=device).view(len(rows), width)
