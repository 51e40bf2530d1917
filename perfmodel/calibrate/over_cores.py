"""`over_cores`: a prediction for each of many recorded rows, over the cores of this machine."""

__all__ = ["over_cores"]

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

from perfmodel.cores import num_processes

RowT = TypeVar("RowT")
PairT = TypeVar("PairT")

_LONGEST_CHUNK = 48


def over_cores(
    work: Callable[[RowT], PairT],
    rows: Sequence[RowT],
    alike: Callable[[RowT], Any],
    progress: Callable[[int, int], None] | None = None,
) -> list[PairT]:
    """`work` of each row, in order; it must be picklable.

    alike: a key; rows of one key run the same steps as often as can be, and share what these cost as neighbours
    """
    order = sorted(range(len(rows)), key=lambda i: alike(rows[i]))
    found: dict[int, PairT] = {}
    with ProcessPoolExecutor(num_processes(len(rows))) as pool:
        chunk = min(_LONGEST_CHUNK, max(len(rows) // 32, 1))
        pairs = pool.map(work, [rows[i] for i in order], chunksize=chunk)
        for done, (i, pair) in enumerate(zip(order, pairs, strict=True), 1):
            found[i] = pair
            if progress is not None:
                progress(done, len(rows))
    return [found[i] for i in range(len(rows))]
