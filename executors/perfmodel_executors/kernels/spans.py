"""Which keys a query sees: causal, limited by a sliding window or by a chunk; and trees, which have neither."""

import torch
from torch import Tensor

from perfmodel.errors import PerfmodelError


def check_tree(ancestors_T: Tensor | None, window: int | None, chunk: int | None) -> None:
    """Raises PerfmodelError for a tree in a layer with a span: a node's place in the text is not its slot."""
    if ancestors_T is not None and (window is not None or chunk is not None):
        raise PerfmodelError(
            f"a tree of drafted tokens is not verified with window={window}, chunk={chunk}; draft a chain instead."
        )


def first_visible(position: int, window: int | None, chunk: int | None) -> int:
    """The first key position that a query at `position` sees."""
    first = 0
    if window is not None:
        first = max(first, position - window + 1)
    if chunk is not None:
        first = max(first, position // chunk * chunk)
    return first


def visible(q_pos_T: Tensor, k_pos_L: Tensor, window: int | None, chunk: int | None) -> Tensor:
    """Which keys each query sees: bool [T, L], causal and within the span."""
    q_pos = q_pos_T[:, None]
    mask_TL = k_pos_L <= q_pos
    if window is not None:
        mask_TL &= k_pos_L > q_pos - window
    if chunk is not None:
        mask_TL &= k_pos_L >= torch.div(q_pos, chunk, rounding_mode="floor") * chunk
    return mask_TL
