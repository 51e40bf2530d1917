"""Tiles of segments: sequences lie behind one another in a flat batch, each in tiles of its own. Segment s has its
tiles from starts[s] // TILE + s on, and there are at most `T // TILE + segments` of them: a grid that follows from
shapes, in which a few programs find nothing to do."""

import triton
import triton.language as tl


@triton.jit
def tile_of_segment(starts_ptr, num_segments, tile, TILE: tl.constexpr):
    """(segment of a tile, its first token in the batch, its number of tokens), found by bisection."""
    segment = 0
    beyond = num_segments
    while beyond - segment > 1:
        middle = (segment + beyond) // 2
        if tl.load(starts_ptr + middle).to(tl.int32) // TILE + middle <= tile:
            segment = middle
        else:
            beyond = middle
    begin = tl.load(starts_ptr + segment).to(tl.int32)
    return segment, begin, tl.load(starts_ptr + segment + 1).to(tl.int32) - begin


def num_tiles(num_tokens: int, num_segments: int, tile: int) -> int:
    return num_tokens // tile + num_segments
