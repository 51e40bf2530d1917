"""A step as the decoder wants it: a flat batch of tokens of many sequences, with the tables that attention reads."""

# ruff: noqa: N815 (fields carry the suffix of their shape, like the variables)

__all__ = ["Segment", "StepBatch", "build_batch", "slot"]

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from perfmodel_executors.models.support import CPU


class Segment(NamedTuple):
    """The new tokens of one sequence in one step.

    tokens:       ids of the new tokens, following `num_computed` ones already in the KV cache
    block_table:  the sequence's KV blocks, in order, the new tokens' included
    is_sampled:   whether the token after the last one is wanted
    """

    tokens: Sequence[int]
    num_computed: int
    block_table: Sequence[int]
    is_sampled: bool = True


@dataclass(frozen=True, slots=True)
class StepBatch:
    """T tokens: first those of D segments of one token, then those of G longer chunks.

    tokens_T, positions_T: ids and positions
    slots_T:        where each token's keys and values go, block_id * block_size + offset
    tables_DM, contexts_D: block table and context length (the new token included) of the one-token segments
    tables_GM, starts_G, computed_G: block tables, first rows among the chunks' tokens (G + 1), tokens computed before
    sample_rows_S:  rows whose logits are wanted, in the order of the segments given to `build_batch`
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

    @property
    def num_decodes(self) -> int:
        return len(self.contexts_D)


def slot(block_table: Sequence[int], position: int, block_size: int) -> int:
    """Where the keys and values of a sequence's token at `position` go."""
    return block_table[position // block_size] * block_size + position % block_size


def build_batch(segments: Sequence[Segment], block_size: int, device: torch.device = CPU) -> StepBatch:
    """The flat batch of `segments`, whose sampled tokens come back in the order of the segments."""
    decodes = [i for i, segment in enumerate(segments) if len(segment.tokens) == 1]
    chunks = [i for i, segment in enumerate(segments) if len(segment.tokens) > 1]
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    last_row: dict[int, int] = {}
    for i in decodes + chunks:
        segment = segments[i]
        span = range(segment.num_computed, segment.num_computed + len(segment.tokens))
        tokens += segment.tokens
        positions += span
        slots += [slot(segment.block_table, p, block_size) for p in span]
        last_row[i] = len(tokens) - 1
    starts = [0]
    for i in chunks:
        starts.append(starts[-1] + len(segments[i].tokens))
    return StepBatch(
        tokens_T=torch.tensor(tokens, dtype=torch.int64, device=device),
        positions_T=torch.tensor(positions, dtype=torch.int64, device=device),
        slots_T=torch.tensor(slots, dtype=torch.int64, device=device),
        tables_DM=_tables([segments[i].block_table for i in decodes], device),
        contexts_D=torch.tensor([segments[i].num_computed + 1 for i in decodes], dtype=torch.int64, device=device),
        tables_GM=_tables([segments[i].block_table for i in chunks], device),
        starts_G=torch.tensor(starts, dtype=torch.int64, device=device),
        computed_G=torch.tensor([segments[i].num_computed for i in chunks], dtype=torch.int64, device=device),
        sample_rows_S=torch.tensor(
            [last_row[i] for i, segment in enumerate(segments) if segment.is_sampled], dtype=torch.int64, device=device
        ),
    )


def _tables(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Rows padded with block 0 to the longest."""
    width = max(map(len, rows), default=0)
    padded = [[*row, *[0] * (width - len(row))] for row in rows]
    return torch.tensor(padded, dtype=torch.int64, device=device).view(len(rows), width)
