"""For which batch sizes an engine captures CUDA graphs: a decode step runs the graph of the next larger size, padded.

The rule is vLLM's (`cudagraph_capture_sizes`): 1, 2, 4, every 8 below 256, every 16 up to 512; larger steps launch
their kernels one by one.
"""

__all__ = ["MOST_CAPTURED_TOKENS", "capture_sizes", "padded_size"]

from bisect import bisect_left
from collections.abc import Sequence

MOST_CAPTURED_TOKENS = 512
_SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, MOST_CAPTURED_TOKENS + 1, 16))


def capture_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """The sizes up to the first that holds `max_num_seqs` sequences, ascending."""
    return _SIZES[: bisect_left(_SIZES, max_num_seqs) + 1]


def padded_size(num_seqs: int, sizes: Sequence[int]) -> int | None:
    """The smallest of `sizes` that holds `num_seqs`; None if none does."""
    index = bisect_left(sizes, num_seqs)
    return sizes[index] if index < len(sizes) else None
