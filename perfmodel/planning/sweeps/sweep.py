"""Many points, evaluated in processes of this machine or on Ray, answered in the order in which they were asked.

With a store, points whose records it has are not evaluated again (`stored_records`). One that was lost with its worker
has no record, and nothing is stored for it.
"""

__all__ = ["Progress", "StoredPoint", "SweepResult", "num_workers", "stored_records", "sweep"]

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.planning.sweeps.points import Point, Record, evaluate, evaluate_timed
from perfmodel.planning.sweeps.store import Store, key_of_point
from perfmodel.planning.sweeps.workers import Progress, Stepwise, num_workers, spread
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


@dataclass(frozen=True)
class StoredPoint:
    """A point, and the file of the store that has its record, or will have it."""

    point: Point
    store: str


class _Chain:
    """One evaluation, or none where the record is known."""

    def __init__(self, stored: StoredPoint) -> None:
        self._stored, self._key = stored, key_of_point(stored.point)
        store = Store(Path(stored.store))
        self._record = store.get(self._key)
        store.close()

    def wanted(self) -> tuple[Point, ...]:
        return () if self._record is not None else (self._stored.point,)

    def take(self, answer: tuple[Record, float]) -> None:
        store = Store(Path(self._stored.store))
        store.put(self._key, *answer)
        store.close()
        self._record = answer[0]

    def result(self) -> Record:
        assert self._record is not None  # nothing is wanted any more
        return self._record


# Raises SpecError for overrides that are wrong.
stored_records: Stepwise[StoredPoint, Record] = Stepwise(_Chain, evaluate_timed)
