"""How many keys the queries of a prefill see: causal, sliding-window and chunked attention, exactly.

A query at position p (0-based) sees min(p + 1, window) keys under a window and p mod chunk + 1 under chunks; all
counts are differences of prefix sums, so that chunked prefills add up to the whole one exactly.
"""

__all__ = ["tile_pairs", "visible_keys", "visible_pairs"]

from math import ceil


def _pairs_below(position: int, window: int | None, chunk: int | None) -> int:
    """Query-key pairs of all queries before `position`."""
    if chunk is not None:
        whole, rest = divmod(position, chunk)
        return whole * (chunk * (chunk + 1) // 2) + rest * (rest + 1) // 2
    if window is not None and position > window:
        return window * (window + 1) // 2 + (position - window) * window
    return position * (position + 1) // 2


def visible_pairs(num_tokens: int, num_cached: int, window: int | None = None, chunk: int | None = None) -> int:
    """Query-key pairs of `num_tokens` new tokens after `num_cached` cached ones; causal T P + T (T+1)/2."""
    return _pairs_below(num_cached + num_tokens, window, chunk) - _pairs_below(num_cached, window, chunk)


def visible_keys(num_tokens: int, num_cached: int, window: int | None = None, chunk: int | None = None) -> int:
    """Distinct keys that at least one of the new tokens sees."""
    if chunk is not None:
        return num_cached % chunk + num_tokens
    if window is not None:
        return num_tokens + min(num_cached, window - 1)
    return num_cached + num_tokens


def tile_pairs(
    num_tokens: int, num_cached: int, window: int | None = None, chunk: int | None = None, tile: int = 128
) -> int:
    """Key tokens visited by all query tiles of `tile` rows, each padded to whole key tiles of `tile` tokens.

    Causal: tile i of ceil(T / tile) ends at key P + min((i + 1) tile, T) and visits ceil of that / tile key tiles,
    or at most those that its window (or chunk) spans.
    """
    num_tiles = ceil(num_tokens / tile)
    first = ceil((num_cached + min(tile, num_tokens)) / tile)
    last = ceil((num_cached + num_tokens) / tile)
    span = window if window is not None else chunk
    cap = last if span is None else min(last, ceil((span + tile) / tile))
    # `first`, `first` + 1, ... rise by one per tile until `cap`; the last tile may be ragged and end at `last`.
    rising = max(0, min(num_tiles - 1, cap - first + 1))
    total = rising * first + rising * (rising - 1) // 2 + (num_tiles - 1 - rising) * cap + min(last, cap)
    return total * tile
