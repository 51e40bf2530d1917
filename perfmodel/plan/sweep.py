"""Many points, evaluated in processes of this machine, answered in the order in which they were asked."""

__all__ = ["Progress", "num_workers", "sweep"]

import gc
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

from perfmodel.plan.points import Point, Record, evaluate

Progress = Callable[[int, int | None], None]
_FEWEST = 8  # points for which starting processes (a second) may pay
_QUIET_GC = (100_000, 20, 20)  # simulations make few cycles: see perfmodel.cli.main


def sweep(points: Sequence[Point], progress: Progress | None = None, workers: int | None = None) -> list[Record]:
    """A record for each point, in order; equal points are evaluated once.

    progress: called with (points done, points in all)
    workers:  processes; by default as many as this one may use cores, none for a few points

    Raises SpecError where overrides are wrong.
    """
    distinct = list(dict.fromkeys(points))
    found: dict[Point, Record] = {}
    for done, (point, record) in enumerate(zip(distinct, _records(distinct, workers), strict=True), 1):
        found[point] = record
        if progress is not None:
            progress(done, len(distinct))
    return [found[point] for point in points]


def num_workers(num_points: int) -> int:
    """Processes worth starting for so many points."""
    return min(len(os.sched_getaffinity(0)), num_points) if num_points >= _FEWEST else 1


def _records(points: Sequence[Point], workers: int | None) -> Iterator[Record]:
    count = num_workers(len(points)) if workers is None else workers
    if count <= 1:
        yield from map(evaluate, points)
        return
    # Spawned, not forked: the parent may have threads (BLAS, torch) that a fork would leave in the middle of something.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, context, initializer=gc.set_threshold, initargs=_QUIET_GC) as pool:
        try:
            yield from pool.map(evaluate, points)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
