"""`stored_records`: a point's record from a store, else evaluated, maybe in another process, and then stored.

A point that was lost with its worker has no record, and nothing is stored for it.
"""

__all__ = ["StoredPoint", "stored_records"]

from dataclasses import dataclass
from pathlib import Path

from perfmodel.planning.sweeps.points import Point, Record, evaluate_timed
from perfmodel.planning.sweeps.store import Store, key_of_point
from perfmodel.planning.sweeps.workers import Stepwise


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
