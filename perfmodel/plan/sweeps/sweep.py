"""Many points, evaluated in processes of this machine or on Ray, answered in the order in which they were asked."""

__all__ = ["Progress", "num_workers", "sweep"]

from collections.abc import Sequence

from perfmodel.plan.sweeps.points import Point, Record, evaluate
from perfmodel.plan.sweeps.workers import Progress, num_workers, spread


def sweep(
    points: Sequence[Point], progress: Progress | None = None, workers: int | None = None, engine: str = "local"
) -> list[Record]:
    """A record for each point, in order; equal points are evaluated once. Equal on every engine.

    progress: called with (points done, points in all)
    workers:  processes; by default as many as this one may use cores, none for a few points
    engine:   local | ray | ray:ADDRESS, see perfmodel.plan.sweeps.workers

    A point whose worker is lost (memory runs out) is a record with that problem. Raises SpecError where overrides are
    wrong.
    """
    distinct = list(dict.fromkeys(points))
    records = spread(evaluate, distinct, _lost, progress, workers, engine)
    found = dict(zip(distinct, records, strict=True))
    return [found[point] for point in points]


def _lost(_: Point, reason: str) -> Record:
    return Record(problem=f"{reason}.")
