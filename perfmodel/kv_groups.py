"""How many KV blocks layers of one kind keep of a sequence: those of all its tokens, of a window, or of a chunk.

Layers that keep different parts of a sequence cannot share a table of blocks, so they are put in groups of equally many
layers, each with a table of its own and all with blocks of one pool: a block has room for `block_size` tokens in the
layers of one group. *Row* r of a sequence stands for its tokens [r b, (r + 1) b); a group has a block for each row that
it keeps. With c tokens computed, the next query sees

    window W   from token max(0, c - W + 1) on      at most 1 + ceil((W - 1) / b) rows with the new token
    chunk C    from token C floor(c / C) on         at most ceil(C / b)

and what lies before is given up when the next tokens are granted, but for tokens that a step under way still reads.
Source: vllm-project/vllm, vllm/v1/core/single_type_kv_cache_manager.py and vllm/v1/kv_cache_interface.py."""

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

    def most_kept(self, block_size: int, num_new_tokens: int = 1) -> int:
        """The most rows of a long sequence that it keeps while `num_new_tokens` are computed; not for all tokens."""
        assert self.span is not None
        if self.is_chunk:
            return -(-(self.span + num_new_tokens - 1) // block_size) + (num_new_tokens > 1)
        return 1 + -(-(self.span - 2 + num_new_tokens) // block_size)

    def given_up_at(self, row: int, block_size: int) -> int:
        """How many tokens are computed when `row` is no longer seen."""
        assert self.span is not None
        end = (row + 1) * block_size
        return -(-end // self.span) * self.span if self.is_chunk else end + self.span - 1

    def most_reserved(self, num_in_flight: int, max_model_len: int, block_size: int) -> int | None:
        """The most rows that a request is checked for when it is admitted; None if it keeps all.

        num_in_flight: tokens that steps under way may compute of it: their rows are kept until the steps are done"""
        if self.span is None:
            return None
        num_tokens = self.span + num_in_flight - (not self.is_chunk)
        return -(-min(num_tokens, max_model_len) // block_size) + (not self.is_chunk)


def most_rows(groups: Iterable[KVGroup], num_rows: int, block_size: int, num_new_tokens: int = 1) -> int:
    """Blocks that a sequence holds at most on its way to `num_rows` rows, in all groups together.

    block_size: tokens of a block; num_new_tokens: that one step computes of it at most"""
    return sum(
        num_rows if group.span is None else min(num_rows, group.most_kept(block_size, num_new_tokens))
        for group in groups
    )
