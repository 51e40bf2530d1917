"""How many KV blocks layers of one kind keep of a sequence: those of all its tokens, of a window, or of a chunk.

Layers that keep different parts of a sequence cannot share a table of blocks, so they are put in groups of equally many
layers, each with a table of its own and all with blocks of one pool: a block has room for `block_size` tokens in the
layers of one group. *Row* r of a sequence stands for its tokens [r b, (r + 1) b); a group has a block for each row that
it keeps. With c tokens computed, the next query sees

    window W   from token max(0, c - W + 1) on      at most 1 + ceil((W - 1) / b) rows with the new token
    chunk C    from token C floor(c / C) on         at most ceil(C / b)

and what lies before is given up when the next tokens are granted. While a sequence decodes, the block that leaves a
window is counted until the next is needed, so that the one replaces the other: that is at most one step too long.
Source: vllm-project/vllm, vllm/v1/core/single_type_kv_cache_manager.py and vllm/v1/kv_cache_interface.py.
"""

__all__ = ["KVGroup", "most_rows"]

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that keep the same part of a sequence, under one table of blocks.

    num_layers: of the model, among them; span: tokens that a query sees at most, None if it sees all
    is_chunk:   what is seen begins with the chunk of `span` tokens that a query is in; else the last `span` tokens are
    """

    num_layers: int
    span: int | None = None
    is_chunk: bool = False

    def first_row(self, num_computed: int, block_size: int) -> int:
        """The first row that is still seen once `num_computed` tokens are computed; blocks of `block_size` tokens."""
        span = self.span
        if span is None:
            return 0
        first = num_computed // span * span if self.is_chunk else max(0, num_computed - span + 1)
        return first // block_size

    def first_kept(self, num_rows: int, block_size: int) -> int:
        """The first row that is kept of a sequence that decodes and has come to `num_rows` rows of `block_size`."""
        span = self.span
        if span is None or not num_rows:
            return 0
        if self.is_chunk:
            return (num_rows - 1) * block_size // span * span // block_size
        return max(0, num_rows - self.most_kept(block_size))

    def most_kept(self, block_size: int, num_new_tokens: int = 1) -> int:
        """The most rows of a long sequence that it keeps while `num_new_tokens` are computed; not for all tokens."""
        assert self.span is not None
        if self.is_chunk:
            return -(-(self.span + num_new_tokens - 1) // block_size) + (num_new_tokens > 1)
        return 1 + -(-(self.span - 2 + num_new_tokens) // block_size)

    def takes_another(self, num_rows: int, block_size: int) -> bool:
        """Whether the next row needs a block more; else it gets that of a row that is given up for it."""
        return self.span is None or self.is_chunk or num_rows < self.most_kept(block_size)

    def next_change(self, num_rows: int, block_size: int) -> int | None:
        """The next count of rows at which that changes, or rows are given up; None: never."""
        span = self.span
        if span is None:
            return None
        if self.is_chunk:
            next_chunk = ((num_rows - 1) * block_size // span + 1) * span if num_rows else span
            return -(-next_chunk // block_size) + 1
        most = self.most_kept(block_size)
        return most if num_rows < most else None


def most_rows(groups: Iterable[KVGroup], num_rows: int, block_size: int, num_new_tokens: int = 1) -> int:
    """Blocks that a sequence holds at most on its way to `num_rows` rows, in all groups together.

    block_size: tokens of a block; num_new_tokens: that one step computes of it at most
    """
    return sum(
        num_rows if group.span is None else min(num_rows, group.most_kept(block_size, num_new_tokens))
        for group in groups
    )
