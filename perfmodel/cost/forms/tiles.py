"""What tiled matrix multiplications share: a thread block's k step, waves of thread blocks, the knee, tile rules."""

__all__ = ["TileStep", "k_step_s", "knee_of", "tile_allowed", "waves"]

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]


class TileStep(NamedTuple):
    """One line of a tile rule: problems of up to `most_rows` rows (0: any) use tiles of `rows` x `columns`."""

    most_rows: float
    rows: int
    columns: int


def k_step_s(
    rows: Values,
    columns: Values,
    peak_per_unit: float,
    compute_fraction: float,
    feed_edge: float,
    input_bytes: float,
    weight_bytes: float,
    speedup: float = 1.0,
) -> Values:
    """Seconds that one thread block needs per element of k: multiplying, or loading what it multiplies.

        2 tm tn / P1 * max( 1 / (c u), e (tm a + tn w) / (tm tn max(a, w)) )

    with P1 the tensor rate of one compute unit, c the achieved fraction, a and w the bytes of an input and a weight.
    e is the edge of the square tile whose operands take as long to load as to multiply at peak; it is the same on
    Ampere and Hopper, which doubled both rates (in bytes per clock the feed does not carry over). u is the `speedup` of
    sparse tensor cores, which skip multiplications and load inputs as ever.

    rows tm, columns tn: of the tile; peak_per_unit P1: FLOP/s of one compute unit
    compute_fraction c, feed_edge e: of the fit, the second in elements; input_bytes a, weight_bytes w: of an element
    """
    tile = rows * columns
    feed = feed_edge * (rows * input_bytes + columns * weight_bytes) / (tile * max(input_bytes, weight_bytes))
    step: Values = 2.0 * tile / peak_per_unit * np.maximum(1.0 / (compute_fraction * speedup), feed)
    return step


def waves(blocks_per_unit: Values, quantization: float) -> Values:
    """How often the device is filled: between max(1, r) (persistent kernels balance) and ceil(r) (whole waves)."""
    filled = np.maximum(blocks_per_unit, 1.0)
    partial = np.ceil(blocks_per_unit)
    partial -= filled
    partial *= quantization
    filled += partial
    return filled


def knee_of(a: Any, b: Any, p: float) -> Values:
    """(a**p + b**p) ** (1/p), element by element, without overflow; a or b positive."""
    high = np.maximum(a, b)
    ratio = np.minimum(a, b)
    ratio /= high
    ratio **= p
    ratio += 1.0
    ratio **= 1.0 / p
    ratio *= high
    result: Values = ratio
    return result


def tile_allowed(rule: tuple[TileStep, ...], rows: Values) -> NDArray[np.bool_]:
    """(problems, lines of the rule): which line each problem of so many rows falls under."""
    ends = np.array([step.most_rows or np.inf for step in rule])
    line = np.searchsorted(ends, rows)
    allowed: NDArray[np.bool_] = line[:, None] == np.arange(len(rule))
    return allowed
