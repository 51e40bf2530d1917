"""`NewestStates`: what the model's last layer gave for the newest tokens, for drafters that build on it.

Kept for the newest token of each KV block: a block that other sequences find in the prefix cache is full, so what lies
behind its end is there for them, too. Nothing has to be known of a sequence.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from perfmodel_executors.models.batch import TokenSegment, first_rows
from perfmodel_executors.models.support import check_memory


class NewestStates:
    """States [C] in `dtype` of the newest token of each block of `block_size` tokens; grows with the block ids."""

    def __init__(self, hidden_size: int, block_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._block_size = block_size
        self._states_BC = torch.zeros(0, hidden_size, dtype=dtype, device=device)

    def reserve(self, num_blocks: int) -> None:
        """Make room for block ids below `num_blocks`."""
        more = num_blocks - len(self._states_BC)
        if more > 0:
            width, bytes_each = self._states_BC.shape[1], self._states_BC.element_size()
            check_memory(f"states of {num_blocks} KV blocks", num_blocks * width * bytes_each, self._states_BC.device)
            self._states_BC = torch.cat((self._states_BC, self._states_BC.new_zeros(more, width)))

    def keep(self, tables: Sequence[Sequence[int]], starts: Sequence[int], states: Sequence[Tensor]) -> None:
        """The tokens of each sequence from position `starts` on have the states [T, C]."""
        size, blocks, rows = self._block_size, list[int](), list[Tensor]()
        for table, start, x_TC in zip(tables, starts, states, strict=True):
            end = start + len(x_TC)
            for block in range(start // size, -(-end // size)):
                blocks.append(table[block])
                rows.append(x_TC[min((block + 1) * size, end) - 1 - start])
        if blocks:
            index = torch.tensor(blocks, device=self._states_BC.device)
            self._states_BC.index_copy_(0, index, torch.stack(rows))

    def before(self, tables: Sequence[Sequence[int]], positions: Sequence[int]) -> Tensor:
        """[R, C]: of the token before each position, the newest of its block; zeros before the first."""
        last = [table[(position - 1) // self._block_size] for table, position in zip(tables, positions, strict=True)]
        x_RC = self._states_BC[torch.tensor(last, device=self._states_BC.device)]
        if 0 in positions:
            x_RC[[row for row, position in enumerate(positions) if not position]] = 0
        return x_RC


def states_of(segments: Sequence[TokenSegment], x_TC: Tensor) -> list[Tensor]:
    """The rows of each segment in what a step gave for all of them."""
    return [x_TC[row : row + len(each.tokens)] for row, each in zip(first_rows(segments), segments, strict=True)]
