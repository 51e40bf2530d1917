"""Visible pairs and keys against counting them one by one."""

from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.ops.attention.prefill import tile_pairs, visible_keys, visible_pairs

TOKENS = st.integers(1, 60)
CACHED = st.integers(0, 60)
SPANS = st.one_of(
    st.just((None, None)),
    st.integers(1, 40).map(lambda w: (w, None)),
    st.integers(1, 40).map(lambda c: (None, c)),
)


def seen_by(position, window, chunk):
    """The keys that the query at `position` sees, listed."""
    first = 0
    if window is not None:
        first = max(0, position + 1 - window)
    if chunk is not None:
        first = position - position % chunk
    return range(first, position + 1)


@given(TOKENS, CACHED, SPANS)
def test_pairs_and_keys_are_those_that_are_counted_one_by_one(tokens, cached, span):
    queries = range(cached, cached + tokens)
    pairs = sum(len(seen_by(q, *span)) for q in queries)
    keys = {k for q in queries for k in seen_by(q, *span)}
    assert visible_pairs(tokens, cached, *span) == pairs
    assert visible_keys(tokens, cached, *span) == len(keys)


@given(TOKENS, CACHED, SPANS, st.integers(1, 16))
def test_tiles_are_those_that_are_counted_one_by_one(tokens, cached, span, tile):
    width = span[0] or span[1]
    total = 0
    for start in range(0, tokens, tile):
        end = cached + min(start + tile, tokens)
        most = ceil(end / tile) if width is None else ceil((width + tile) / tile)
        total += min(ceil(end / tile), most) * tile
    assert tile_pairs(tokens, cached, *span, tile=tile) == total


@given(TOKENS, CACHED)
def test_causal_tiles_cover_all_pairs(tokens, cached):
    assert tile_pairs(tokens, cached, tile=8) * 8 >= visible_pairs(tokens, cached)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), CACHED, SPANS)
def test_chunks_add_up_to_the_whole(chunks, cached, span):
    position, total = cached, 0
    for chunk in chunks:
        total += visible_pairs(chunk, position, *span)
        position += chunk
    assert total == visible_pairs(sum(chunks), cached, *span)


@pytest.mark.parametrize(("tokens", "pairs"), [(1, 1), (2, 3), (2048, 2048 * 2049 // 2)])
def test_causal_closed_form(tokens, pairs):
    assert visible_pairs(tokens, 0) == pairs
