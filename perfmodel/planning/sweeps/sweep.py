"""Many points, evaluated in processes of this machine or on Ray, answered in the order in which they were asked."""

__all__ = ["Progress", "SweepResult", "num_workers", "sweep"]

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.planning.sweeps.points import Point, Record, evaluate
from perfmodel.planning.sweeps.workers import Progress, num_workers, spread
from perfmodel.printable import Printable


@dataclass(frozen=True, repr=False)
class SweepResult(Printable):
    """Records of all combinations of some values, the last path varying fastest."""

    paths: tuple[str, ...]
    values: tuple[tuple[Any, ...], ...]
    metrics: tuple[str, ...]
    records: tuple[Record, ...]

    def columns(self) -> dict[str, NDArray[Any]]:
        """The varied values by path, the metrics (nan without a value), and `problem`: why there is none."""
        found: dict[str, NDArray[Any]] = {
            path: np.array([row[number] for row in self.values]) for number, path in enumerate(self.paths)
        }
        for name in self.metrics:
            values = [record.values.get(name) for record in self.records]
            found[name] = np.array([np.nan if value is None else value for value in values], dtype=np.float64)
        found["problem"] = np.array([record.problem for record in self.records])
        return found


def sweep(
    points: Sequence[Point], progress: Progress | None = None, workers: int | None = None, engine: str = "local"
) -> list[Record]:
    """A record for each point, in order; equal points are evaluated once. Equal on every engine.

    progress: called with (points done, points in all)
    workers:  processes; by default as many as this one may use cores, none for a few points
    engine:   local | ray | ray:ADDRESS, see perfmodel.planning.sweeps.workers

    A point whose worker is lost (memory runs out) is a record with that problem. Raises SpecError where overrides are
    wrong.
    """
    distinct = list(dict.fromkeys(points))
    records = spread(evaluate, distinct, _lost, progress, workers, engine)
    found = dict(zip(distinct, records, strict=True))
    return [found[point] for point in points]


def _lost(_: Point, reason: str) -> Record:
    return Record(problem=f"{reason}.")
